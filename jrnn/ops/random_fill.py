"""Random fills, mostly initializers of parameters. Each is a function of the run's key.

The same key, operator and outputs give the same numbers. They are JAX's numbers, not Caffe2's.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.fill import takes_shape
from jrnn.ops.values import check_size, dtype_of, need_key
from jrnn.registry import op


def _fan(shape: tuple[int, ...], axis: int) -> int:
    """The number of elements for each index of `axis`."""
    if len(shape) <= axis or 0 in shape:
        raise OpError(f"shape {list(shape)} has no fan; it must have at least {axis + 1} dimensions, none of them 0")
    return int(np.prod(shape)) // shape[axis]


@op("XavierFill", gradient="stops", random=True)
@takes_shape
def xavier_fill(sized, *, key):
    made = sized()
    bound = (3 / _fan(made, 0)) ** 0.5
    return jax.random.uniform(need_key(key), made, jnp.float32, -bound, bound)


@op("MSRAFill", gradient="stops", random=True)
@takes_shape
def msra_fill(sized, *, key):
    made = sized()
    return jax.random.normal(need_key(key), made, jnp.float32) * (2 / _fan(made, 1)) ** 0.5


@op("GaussianFill", gradient="stops", random=True)
@takes_shape
def gaussian_fill(sized, *, mean: float = 0.0, std: float = 1.0, key):
    if std < 0:
        raise OpError(f"std is {std}; it must not be negative")
    made = sized()
    return jax.random.normal(need_key(key), made, jnp.float32) * std + mean


def _bounds(low: Any, high: Any, low_blob: Any, high_blob: Any, defaults: tuple[Any, Any]) -> tuple[Any, Any]:
    """The limits of a uniform distribution, from arguments or from two scalar blobs."""
    if low_blob is None:
        low = defaults[0] if low is None else low
        high = defaults[1] if high is None else high
        if low >= high:
            raise OpError(f"min {low} must be below max {high}")
        return low, high
    if low is not None or high is not None:
        raise OpError("min and max come as blobs and as arguments; give them once")
    if high_blob is None or low_blob.size != 1 or high_blob.size != 1:
        raise OpError("the blobs for min and max must both be given and have 1 element each")
    return jnp.reshape(low_blob, ()), jnp.reshape(high_blob, ())


@op("UniformFill", gradient="stops", random=True)
@takes_shape
def uniform_fill(sized, min_blob=None, max_blob=None, *, min: float | None = None, max: float | None = None, key):
    low, high = _bounds(min, max, min_blob, max_blob, (0.0, 1.0))
    made = sized()
    return jax.random.uniform(need_key(key), made, jnp.float32, low, high)


@op("UniformIntFill", gradient="stops", random=True)
@takes_shape
def uniform_int_fill(sized, min_blob=None, max_blob=None, *, min: int | None = None, max: int | None = None, key):
    low, high = _bounds(min, max, min_blob, max_blob, (0, 1))
    made = sized()
    return jax.random.randint(need_key(key), made, low, high + 1, jnp.int32)  # max is among the numbers drawn


@op("UniqueUniformFill", gradient="stops", random=True)
@takes_shape
def unique_uniform_fill(sized, avoid=None, *, min: int, max: int, dtype: int = 2, key):
    if dtype not in (2, 10):
        raise OpError(f"dtype is {dtype}; it must be 2 (INT32) or 10 (INT64)")
    filled = dtype_of(dtype)
    made = sized(filled)
    count = int(np.prod(made))
    if min > max:
        raise OpError(f"min {min} must not be above max {max}")
    check_size((max - min + 1,), filled)
    free = np.arange(min, max + 1, dtype=np.int64)
    if avoid is not None:
        free = np.setdiff1d(free, np.asarray(avoid))
    if count > free.size:
        raise OpError(f"{count} different numbers are asked for, and [{min}, {max}] has {free.size} to give")
    return jax.random.choice(need_key(key), jnp.asarray(free, filled), made, replace=False)
