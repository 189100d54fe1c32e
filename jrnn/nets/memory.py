"""The bound on what an operator may make. It is checked before the operator runs, because too large arrays end the process.

XLA aborts the process for some arrays that do not fit, and Linux kills a process that uses more memory than there is. No
program can catch either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jrnn.errors import OpError

LARGEST_FILL = 2**31  # bytes; a mistyped shape should be an error, not use up the memory
_LARGEST_OF_XLA = 2**63 - 1  # bytes


def size_of(x: Any) -> int:
    """Returns the bytes of an array, or of the shape and type of one; 0 for anything else.

    An array with a dimension of size 0 counts as if it were 1, because XLA multiplies the others too.

    >>> size_of(np.zeros((2, 3), np.float32)), size_of(jax.ShapeDtypeStruct((2**40, 0), np.int8)) == 2**40
    (24, True)
    """
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        return 0
    size: int = getattr(x.dtype, "itemsize", 8)
    for dimension in x.shape:
        if isinstance(dimension, (int, np.integer)):  # others are JAX's symbolic sizes
            size *= max(int(dimension), 1)
    return size


def check_size(shape: Iterable[int], dtype: Any) -> tuple[int, ...]:
    """Returns `shape` as a tuple of ints; raises OpError for a negative dimension or more than `LARGEST_FILL` bytes.

    >>> check_size(np.array([2, 3]), np.float32)
    (2, 3)
    """
    shape = tuple(map(int, shape))
    if min(shape, default=0) < 0:
        raise OpError(f"shape {list(shape)} has a negative dimension")
    size = size_of(jax.ShapeDtypeStruct(shape, np.dtype(dtype)))
    limit = LARGEST_FILL if math.prod(shape) else _LARGEST_OF_XLA
    if size > limit:
        raise OpError(
            f"shape {list(shape)} takes {size} bytes; an operator fills at most {LARGEST_FILL}"
        )
    return shape


def check_results(
    results: Iterable[Any], names: Iterable[str], limit: int, used_bytes: int = 0
) -> None:
    """Raises OpError if results do not fit.

    Args:
        results: arrays, or their shapes and types.
        names: the blobs that they are for.
        limit: how many bytes there are.
        used_bytes: how many of these are in use.
    """
    total = used_bytes
    for name, x in zip(names, results):
        size = size_of(x)
        if 0 < size <= _LARGEST_OF_XLA and not math.prod(x.shape):
            continue  # nothing is stored
        total += size
        if total > min(limit, _LARGEST_OF_XLA):
            others = f", next to {total - size:,} of other blobs" if total > size else ""
            raise OpError(
                f"blob {name!r} would be {x.dtype}[{','.join(map(str, x.shape))}], which needs {size:,} bytes{others}; "
                f"{limit:,} are available; correct the shape or argument, or raise max_bytes"
            )


def check_call(fn: Callable[[], Any], names: Iterable[str], limit: int, used_bytes: int = 0) -> int:
    """Checks what a function of no arguments would return and make on the way, without computing it.

    Returns:
        The bytes of its largest array, 0 if the function cannot be traced; then, calling it says why.

    Raises:
        OpError: if an array does not fit; see `check_results`.
    """
    try:
        traced = jax.make_jaxpr(fn)().jaxpr
    except Exception:  # the call itself raises it, or needs values and not only shapes
        return 0
    names = list(names)
    check_results([v.aval for v in traced.outvars], names, limit, used_bytes)
    name = names[0] if names else "(no output)"
    largest = 0
    for eqn in traced.eqns:
        for var in eqn.outvars:
            check_results([var.aval], [name], limit, used_bytes)
            largest = max(largest, size_of(var.aval))
    return largest
