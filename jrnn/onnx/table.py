"""The table of ONNX operators: each is a function `(node, *inputs) -> output or tuple of outputs`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

OPERATORS: dict[str, Callable[..., Any]] = {}


def op(*names: str) -> Callable[[Callable], Callable]:
    """Registers a function as one operator, or as several that differ in `node.type` alone."""

    def register(function: Callable) -> Callable:
        for name in names:
            assert name not in OPERATORS, name
            OPERATORS[name] = function
        return function

    return register


def known(*values: Any) -> bool:
    """Whether all values are known while the graph is traced."""
    return all(isinstance(v, (np.ndarray, np.generic)) for v in values)


def xp(*values: Any) -> Any:
    """numpy where all values are known, so that 64-bit integers and shapes stay exact; else jax.numpy."""
    return np if known(*values) else jnp


def spread(*values: Any) -> list[Any]:
    """Values of one rank, by leading axes of size 1: ONNX broadcasts as numpy does."""
    rank = max(np.ndim(v) for v in values)
    return [v if np.ndim(v) == rank else v.reshape((1,) * (rank - np.ndim(v)) + np.shape(v)) for v in values]


def cast(x: Any, dtype: Any) -> Any:
    """`x` in a type; a JAX array only takes 64 bits where `jax_enable_x64` is set."""
    if known(x):
        with np.errstate(all="ignore"):
            return np.asarray(x).astype(dtype)
    return x.astype(jax.dtypes.canonicalize_dtype(dtype))
