"""Checks of what users pass to recurrent layers: each says what was given and what fits.

Shapes: T time, N batch, D input, H hidden, P output of a step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import LayerError
from jrnn.jax_names import is_traced
from jrnn.nn.units import State, Unit


def concrete(array: Any) -> np.ndarray | None:
    """The values of an array, or None while it is being traced and has none."""
    return None if is_traced(array) else np.asarray(array)


def check_array(where: str, name: str, value: Any) -> jax.Array:
    """`value` as an array.

    >>> check_array("lstm", "x", None)
    Traceback (most recent call last):
    jrnn.errors.LayerError: lstm: x is of type NoneType; it must be an array
    """
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise LayerError(f"{where}: {name} is {_described(value)}; it must be an array") from error


def check_key(where: str, key: Any) -> None:
    """`key` must be one of `jax.random`, new or old style, or None.

    >>> check_key("lstm", 0)
    Traceback (most recent call last):
    jrnn.errors.LayerError: lstm: key is of type int; it must be one that jax.random.key makes
    """
    dtype = getattr(key, "dtype", None)
    if key is not None and (dtype is None or not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == jnp.uint32)):
        raise LayerError(f"{where}: key is {_described(key)}; it must be one that jax.random.key makes")


def check_lengths(where: str, lengths: Any, steps: int, batch: int) -> jax.Array:
    """Lengths as [N] int32, each from 0 to T. Inside jit, where they have no values, only type and shape are checked.

    >>> check_lengths("lstm", [5, 2], steps=4, batch=2)
    Traceback (most recent call last):
    jrnn.errors.LayerError: lstm: lengths[0] is 5, but the sequences have 4 steps; lengths must lie between 0 and 4
    """
    if not isinstance(lengths, jax.Array):
        lengths = np.asarray(lengths)  # not jnp's, which would wrap integers of 64 bits before they are checked
    if lengths.size and not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise LayerError(f"{where}: lengths are {lengths.dtype}; they must be integers")
    if lengths.shape != (batch,):
        raise LayerError(f"{where}: lengths are {list(lengths.shape)}; they must be [{batch}], one for each sequence")
    known = concrete(lengths)
    if known is not None:
        for n, length in enumerate(known):
            if not 0 <= length <= steps:
                raise LayerError(
                    f"{where}: lengths[{n}] is {length}, but the sequences have {steps} steps; "
                    f"lengths must lie between 0 and {steps}"
                )
    return jnp.asarray(lengths, jnp.int32)


def check_resets(where: str, resets: Any, shape: tuple[int, ...]) -> jax.Array:
    """Resets as an array of this shape.

    >>> check_resets("gru", jnp.zeros((4, 2)), (4, 2))
    Traceback (most recent call last):
    jrnn.errors.LayerError: gru: resets are float32; they must be booleans
    """
    resets = check_array(where, "resets", resets)
    if resets.dtype != jnp.bool_:
        raise LayerError(f"{where}: resets are {resets.dtype}; they must be booleans")
    if resets.shape != shape:
        raise LayerError(f"{where}: resets are {list(resets.shape)}; they must be {list(shape)}, one for each step")
    return resets


def check_features(where: str, x: jax.Array, size: int, ranks: dict[int, str]) -> None:
    """`x` must have one of these ranks, `size` features, and real numbers.

    >>> check_features("lstm", jnp.zeros((5, 2, 3)), 4, {2: "[T, 4]", 3: "[T, N, 4]"})
    Traceback (most recent call last):
    jrnn.errors.LayerError: lstm: x is [5, 2, 3] but must be [T, 4] or [T, N, 4]
    """
    if x.ndim not in ranks or x.shape[-1] != size:
        raise LayerError(f"{where}: x is {list(x.shape)} but must be {' or '.join(ranks.values())}")
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise LayerError(f"{where}: x is {x.dtype}; it must be real")


def check_state(
    where: str, unit: Unit, hx: Any, shapes: tuple[tuple[int, ...], ...], dtype: Any, name: str = "hx"
) -> State:
    """The state that is called `name`, as a tuple of arrays of these shapes and this type; None is zeros.

    >>> from jrnn.nn.units import LSTM
    >>> check_state("lstm", LSTM, jnp.zeros((1, 2, 4)), ((1, 2, 4), (1, 2, 4)), jnp.float32)
    Traceback (most recent call last):
    jrnn.errors.LayerError: lstm: hx must be a pair (h, c) of arrays [1, 2, 4] and [1, 2, 4], but is an array [1, 2, 4]
    """
    if hx is None:
        return tuple(jnp.zeros(shape, dtype) for shape in shapes)
    wanted = " and ".join(str(list(shape)) for shape in shapes)
    if unit.states == 2:
        if not isinstance(hx, (tuple, list)) or len(hx) != 2:
            given = f"{len(hx)} values" if isinstance(hx, (tuple, list)) else _described(hx)
            raise LayerError(f"{where}: {name} must be a pair (h, c) of arrays {wanted}, but is {given}")
        states = tuple(hx)
    elif isinstance(hx, (tuple, list)):
        raise LayerError(f"{where}: {name} must be one array {wanted}, but is {len(hx)} values")
    else:
        states = (hx,)
    return tuple(
        _check_one_state(where, f"{letter} of {name}", state, shape).astype(dtype)
        for letter, state, shape in zip("hc", states, shapes, strict=False)
    )


def _check_one_state(where: str, name: str, state: Any, shape: tuple[int, ...]) -> jax.Array:
    try:
        array = jnp.asarray(state)
    except (TypeError, ValueError) as error:
        raise LayerError(
            f"{where}: the state {name} is {_described(state)}; it must be an array {list(shape)}"
        ) from error
    if array.shape != shape:
        raise LayerError(f"{where}: the state {name} is {list(array.shape)} but must be {list(shape)}")
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise LayerError(f"{where}: the state {name} is {array.dtype}; it must be real")
    return array


def _described(value: Any) -> str:
    return f"an array {list(value.shape)}" if hasattr(value, "shape") else f"of type {type(value).__name__}"
