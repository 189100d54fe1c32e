"""The values of blobs: given ones as a net reads them, static ones, and gradients that are sparse."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import NetError
from jrnn.jaxprs.queries import is_floating
from jrnn.nets.gradient_maker import GradientSlice
from jrnn.nets.ir import Blobs


def widened(x: Any) -> Any:
    """A floating-point array as float64."""
    is_float = isinstance(x, (jax.Array, np.ndarray)) and is_floating(x)
    return x.astype(np.float64) if is_float else x


def is_static(x: Any) -> bool:
    """Whether a value is known when a net is traced: numpy's integers, booleans and strings."""
    return isinstance(x, np.ndarray) and x.dtype.kind in "iubOS"


def as_static(x: Any) -> Any:
    """JAX's integers as numpy's."""
    if isinstance(x, jax.Array) and x.dtype.kind in "iub":
        return np.asarray(x)
    return x


def as_blob(name: str, value: Any) -> Any:
    """A given value as a blob. Integers and strings are numpy arrays (static), floats are JAX arrays of the same width."""
    if not isinstance(name, str):
        raise NetError(f"a blob is named {name!r}, which is no str; give a dict of arrays by name")
    if value is None:
        raise NetError(f"blob {name!r} is None; give an array, or leave it out")
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, (bool, int, float, list)):
        value = np.asarray(value)
        if value.dtype == np.float64:
            value = value.astype(np.float32)  # as Caffe2 treats a Python float
    if isinstance(value, (str, bytes)):
        value = np.asarray(value, dtype=object)
    if not isinstance(value, np.ndarray) or value.dtype.kind in "iubOSU":
        return value
    if value.dtype == np.float64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined, unused-ignore]
        raise NetError(
            f"blob {name!r} is float64, but JAX's 64-bit types are disabled; pass float32, or set jax_enable_x64"
        )
    return jnp.asarray(value)


def as_numpy(value: Any) -> Any:
    """An array of JAX as one of numpy; random keys stay."""
    is_numbers = isinstance(value, jax.Array) and not jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    )
    return np.asarray(value) if is_numbers else value


def dense(gradient: str | GradientSlice, blobs: Blobs, like: Any) -> Any:
    """The blob of a gradient with respect to `like`; a sparse gradient becomes dense."""
    if not isinstance(gradient, GradientSlice):
        return blobs[gradient]
    rows = jnp.reshape(blobs[gradient.values], (-1, *like.shape[1:]))
    return jnp.zeros_like(like).at[jnp.reshape(blobs[gradient.indices], -1)].add(rows)
