"""The object with the kernel, which an installation of jrnn builds where there is a C++ compiler."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from jrnn.errors import ScanError
from jrnn.files import read_text
from jrnn.jaxprs.jax_internals import mesh_axes_type
from jrnn.loops.ir import Unsupported, observers
from jrnn.loops.kernels.native.encoder import FORMAT

# custom calls
TARGET = "jrnn_loop"
SUM = "jrnn_sum"
AFFINE = "jrnn_affine"
LANES = "jrnn_lanes"
_BUILT = Path(__file__).parent / (
    "libjrnn_loops." + ("dylib" if sys.platform == "darwin" else "so")
)
PATH = Path(os.environ.get("JRNN_KERNEL", _BUILT))  # scripts/sanitize.sh gives another one


@dataclass(frozen=True)
class Library:
    """The object: the instruction sets that it can use here, the best one first; or the reason why there is none."""

    instruction_sets: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        return (
            self.reason or f"it uses {', '.join(self.instruction_sets)}, the first one by default"
        )


@functools.cache
def loaded() -> Library:
    """Loads the object and registers its custom call with JAX."""
    if not PATH.exists():
        return Library(
            reason=f"it was not built when jrnn was installed ({PATH} is missing); that needs GCC or clang"
        )
    try:
        library = ctypes.CDLL(str(PATH))
        for name in ("jrnn_format", "jrnn_api"):
            getattr(library, name).restype = ctypes.c_int64
        library.jrnn_instruction_sets.restype = ctypes.c_char_p
        if library.jrnn_format() != FORMAT:
            return Library(reason=f"{PATH} is of another version of jrnn; install jrnn again")
        # JAX's CPU backend does not start with a custom call that is newer than its interface.
        built = library.jrnn_api()
        ours = _interface()
        if built // 1000 != ours // 1000 or built > ours:
            return Library(reason=f"{PATH} was built for a newer jaxlib; install jrnn again")
        names = tuple(library.jrnn_instruction_sets().decode().split(","))
        for name in (TARGET, SUM, AFFINE, LANES):
            jax.ffi.register_ffi_target(
                name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu"
            )
    except Exception as error:
        reason = f"{PATH} cannot be loaded: {error}"
        observers.warn_once(PATH, reason)
        return Library(reason=reason)
    return Library(names)


def call(
    target: str,
    operands: Sequence[Array],
    results: Sequence[tuple[Sequence[int], Any]],
    level: int,
    **attributes: Any,
) -> list[Array]:
    """Calls a function of the kernel.

    Args:
        target: its name.
        operands: its operands.
        results: the shapes and dtypes of its results.
        level: the place of the instructions to use in `loaded()`.
        attributes: what else it reads.
    """
    # Inside `jax.shard_map`, types have the mesh axes over which a value varies. The results vary as the operands do.
    axes = mesh_axes_type(*operands)
    types = []
    for shape, dtype in results:
        types.append(jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes))
    return jax.ffi.ffi_call(target, types)(*operands, **attributes, level=np.int64(level))


def require() -> None:
    """Raises `Unsupported` if the kernel is not there."""
    reason = loaded().reason
    if reason:
        raise Unsupported(f"the kernel for CPUs is not there: {reason}")


def _interface() -> int:
    """Returns the version of the interface of custom calls of the installed jaxlib, 1000 * major + minor."""
    header = read_text(Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h", ScanError)
    major, minor = (
        re.search(rf"define XLA_FFI_API_{name} (\d+)", header) for name in ("MAJOR", "MINOR")
    )
    assert major is not None and minor is not None
    return 1000 * int(major[1]) + int(minor[1])
