"""The mark on a loop: XLA metadata that JAX carries through every transformation of the equation.

`jrnn.scan` and `optimize_scans` put it on, `lowering` reads it. It holds what the caller asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from jax.experimental.xla_metadata import set_xla_metadata

_KEY = "jrnn_scan"


@dataclass(frozen=True)
class Options:
    """What the caller of a scan asked for.

    Attributes:
        executor: "auto", "scan", "associative" or "persistent".
        recompute: None, "contractions", or the names of values that the reverse pass computes again.
        strict: raise where the loop would be left as `jax.lax.scan` lowers it.
    """

    executor: str = "auto"
    recompute: str | tuple[str, ...] | None = None
    strict: bool = False


def marked(options: Options) -> AbstractContextManager[None]:
    """Marks every scan that is traced in this context."""
    return set_xla_metadata(**{_KEY: json.dumps(asdict(options))})


def unmarked() -> AbstractContextManager[None]:
    """Takes the mark off again, for what is traced in this context."""
    return set_xla_metadata(**{_KEY: None})


def options_in(metadata: Mapping[str, Any] | None) -> Options | None:
    """What the mark in an equation's metadata says, or None without a mark."""
    text = (metadata or {}).get(_KEY)
    if text is None:
        return None
    found = json.loads(text)
    recompute = found["recompute"]
    return Options(**{**found, "recompute": tuple(recompute) if isinstance(recompute, list) else recompute})
