"""The files of other programs that trained models are written to, by the ending of a file's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jrnn.errors import ConfigError, ConversionError, needs_extra
from jrnn.files import write_whole


def _write_onnx(fn: Callable[..., Any], examples: tuple[Any, ...], dims: str, path: Path) -> None:
    try:
        from jrnn.onnx import to_onnx
    except ImportError:
        raise ConfigError(needs_extra(f"{path}: ONNX", "onnx")) from None
    to_onnx(fn, *examples, dims=dims, path=path)


def _write_jax(fn: Callable[..., Any], examples: tuple[Any, ...], dims: str, path: Path) -> None:
    specs = jax.export.symbolic_args_specs(examples, dims)
    exported = jax.export.export(jax.jit(fn), platforms=("cpu", "cuda", "tpu"))(*specs)
    write_whole(path, bytes(exported.serialize()), ConversionError)


EXPORTS = {".onnx": _write_onnx, ".jax": _write_jax}
