"""Checks of the arguments of recurrent layers. `where` is the caller's name in the error messages.

Shapes: T time, N batch.
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jrnn.errors import LayerError, near
from jrnn.jaxprs.jax_internals import is_traced
from jrnn.jaxprs.queries import is_floating

Shape = tuple[int, ...]


def concrete(array: Any) -> np.ndarray | None:
    """The values of an array, or None if it is a tracer."""
    return None if is_traced(array) else np.asarray(array)


def check_array(where: str, name: str, value: Any, shape: str = "") -> Array:
    """`value` as an array; `shape` is for the message.

    >>> check_array("lstm", "x", None)
    Traceback (most recent call last):
    jrnn.errors.LayerError: lstm: x is of type NoneType; it must be an array
    """
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise LayerError(
            f"{where}: {name} is {_described(value)}; it must be an array{shape}"
        ) from error


def check_key(where: str, key: Any) -> None:
    """`key` must be a key of `jax.random`, new or old style, or None.

    >>> check_key("lstm", 0)
    Traceback (most recent call last):
    jrnn.errors.LayerError: lstm: key is of type int; it must be one that jax.random.key makes
    """
    dtype = getattr(key, "dtype", None)
    if key is not None and (
        dtype is None or not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == jnp.uint32)
    ):
        raise LayerError(
            f"{where}: key is {_described(key)}; it must be one that jax.random.key makes"
        )


def check_integer(what: str, value: Any, least: int) -> int:
    """An integer of Python, numpy or (outside jit) JAX as Python's, at least `least`.

    >>> check_integer("bucket: length", -1, 0)
    Traceback (most recent call last):
    jrnn.errors.LayerError: bucket: length is -1; it must be an integer of at least 0
    """
    try:
        integer = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        integer = None
    if integer is None or integer < least:
        raise LayerError(f"{what} is {value!r}; it must be an integer of at least {least}")
    return integer


def check_lengths(where: str, lengths: Any, steps: int, batch: int) -> Array:
    """Lengths as [N] int32, each from 0 to T. Inside jit, only type and shape are checked.

    >>> check_lengths("lstm", [5, 2], steps=4, batch=2)
    Traceback (most recent call last):
    jrnn.errors.LayerError: lstm: lengths[0] is 5, but the sequences have 4 steps; lengths must lie between 0 and 4
    """
    if not isinstance(lengths, Array):
        # not jnp.asarray, which wraps 64-bit integers before they are checked
        lengths = np.asarray(lengths)
    if lengths.size and not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise LayerError(f"{where}: lengths are {lengths.dtype}; they must be integers")
    if lengths.shape != (batch,):
        raise LayerError(
            f"{where}: lengths are {list(lengths.shape)}; they must be [{batch}], one for each sequence"
        )
    known = concrete(lengths)
    if known is not None:
        for n, length in enumerate(known):
            if not 0 <= length <= steps:
                raise LayerError(
                    f"{where}: lengths[{n}] is {length}, but the sequences have {steps} steps; "
                    f"lengths must lie between 0 and {steps}"
                )
    return jnp.asarray(lengths, jnp.int32)


def check_flags(where: str, name: str, flags: Any, shape: Shape) -> Array:
    """Booleans, one for each step, as an array of this shape.

    >>> check_flags("gru", "mask", jnp.zeros((4, 2)), (4, 2))
    Traceback (most recent call last):
    jrnn.errors.LayerError: gru: mask is float32; it must be booleans; give mask.astype(bool)
    """
    flags = check_array(where, name, flags)
    if flags.dtype != jnp.bool_:
        raise LayerError(
            f"{where}: {name} is {flags.dtype}; it must be booleans; give {name}.astype(bool)"
        )
    if flags.shape != shape:
        raise LayerError(
            f"{where}: {name} is {list(flags.shape)}; it must be {list(shape)}, one for each step"
        )
    return flags


def check_masks(
    where: str, resets: Any, mask: Any, shape: Shape
) -> tuple[Array | None, Array | None]:
    """Resets and a mask as `check_flags` returns them, each None if it is None."""
    given = (("resets", resets), ("mask", mask))
    resets, mask = (
        None if flags is None else check_flags(where, name, flags, shape) for name, flags in given
    )
    return resets, mask


def check_dt(where: str, dt: Any, shape: Shape, mask: Any = None) -> Array:
    """Times between steps as an array of this shape; outside jit, none below 0 where the mask, of this shape, is True.

    >>> check_dt("S5", [0.5, -1.0], (2,))
    Traceback (most recent call last):
    jrnn.errors.LayerError: S5: dt has a value of -1.0; the time since the last step is at least 0
    """
    dt = check_array(where, "dt", dt)
    if dt.shape != shape or not (is_floating(dt) or jnp.issubdtype(dt.dtype, jnp.integer)):
        given = f"{dt.dtype}{list(dt.shape)}"
        raise LayerError(
            f"{where}: dt is {given}; it must be numbers {list(shape)}, one for each step"
        )
    known = concrete(dt)
    live = True if mask is None else concrete(mask)
    if known is not None and live is not None and (below := known[(known < 0) & live]).size:
        raise LayerError(
            f"{where}: dt has a value of {below[0]}; the time since the last step is at least 0"
        )
    return dt


def check_features(where: str, x: Array, size: int, ranks: dict[int, str]) -> None:
    """`x` must be real and have `size` features and one of these ranks; `ranks` maps each to its shape for messages.

    >>> check_features("lstm", jnp.zeros((5, 2, 3)), 4, {2: "[T, 4]", 3: "[T, N, 4]"})
    Traceback (most recent call last):
    jrnn.errors.LayerError: lstm: x is [5, 2, 3] but must be [T, 4] or [T, N, 4]
    """
    if x.ndim not in ranks or x.shape[-1] != size:
        raise LayerError(f"{where}: x is {list(x.shape)} but must be {' or '.join(ranks.values())}")
    _check_real(f"{where}: x", x)


def check_state(
    where: str, hx: Any, shapes: tuple[Shape, ...], dtype: DTypeLike, name: str = "hx"
) -> tuple[Array, ...]:
    """The state h, or the pair (h, c), as a tuple of arrays of these shapes and this type; zeros for None.

    >>> check_state("lstm", jnp.zeros((1, 2, 4)), ((1, 2, 4), (1, 2, 4)), jnp.float32)
    Traceback (most recent call last):
    jrnn.errors.LayerError: lstm: hx must be a pair (h, c) of arrays [1, 2, 4] and [1, 2, 4], but is an array [1, 2, 4]
    """
    if hx is None:
        return tuple(jnp.zeros(shape, dtype) for shape in shapes)
    is_sequence = isinstance(hx, (tuple, list))
    given = f"{len(hx)} values" if is_sequence else _described(hx)
    wanted = " and ".join(str(list(shape)) for shape in shapes)
    if len(shapes) == 2 and not (is_sequence and len(hx) == 2):
        raise LayerError(
            f"{where}: {name} must be a pair (h, c) of arrays {wanted}, but is {given}"
        )
    if len(shapes) == 1 and is_sequence:
        raise LayerError(f"{where}: {name} must be one array {wanted}, but is {given}")
    states = []
    for letter, state, shape in zip("hc", hx if is_sequence else (hx,), shapes):
        what = f"the state {letter} of {name}"
        array = check_array(where, what, state, f" {list(shape)}")
        if array.shape != shape:
            raise LayerError(f"{where}: {what} is {list(array.shape)} but must be {list(shape)}")
        _check_real(f"{where}: {what}", array)
        states.append(array.astype(dtype))
    return tuple(states)


def check_bools(where: str, values: Any, *names: str) -> None:
    """Raises a LayerError unless these attributes are True or False."""
    for name in names:
        if not isinstance(value := getattr(values, name), (bool, np.bool_)):
            raise LayerError(f"{where}{name} is {value!r}; it must be True or False")


def check_choice(where: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises a LayerError unless `value` is one of `choices`.

    >>> check_choice("lstm: ", "return_states", "al", ("last", "all"))
    Traceback (most recent call last):
    jrnn.errors.LayerError: lstm: return_states is 'al'; it must be 'last' or 'all'; did you mean 'all'?
    """
    if value not in choices:
        raise LayerError(
            f"{where}{name} is {value!r}; it must be {' or '.join(map(repr, choices))}{near(str(value), choices)}"
        )


def check_floating(name: str, dtype: DTypeLike) -> None:
    """Raises a LayerError unless `dtype` names a floating type of 16 bits or more.

    >>> check_floating("param_dtype", "bf16")
    Traceback (most recent call last):
    jrnn.errors.LayerError: param_dtype is 'bf16'; it must be a floating type such as 'float32' or 'bfloat16'
    """
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = None
    if known is None or not jnp.issubdtype(known, jnp.floating) or known.itemsize < 2:
        raise LayerError(
            f"{name} is {dtype!r}; it must be a floating type such as 'float32' or 'bfloat16'"
        )


def _check_real(what: str, array: Array) -> None:
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise LayerError(f"{what} is {array.dtype}; it must be real")


def _described(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"an array {list(value.shape)}"
    return f"of type {type(value).__name__}"
