"""Sequences of different lengths in one batch: past its end a sequence holds its carry and puts out zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import ScanError


def masked(step: Callable, lengths: jax.Array) -> Callable:
    """The step `(carry, (t, x)) -> (carry, y)` that stops each sequence at its length.

    Args:
        step: `(carry, x) -> (carry, y)`.
        lengths: integers; every leaf of the carry and of y must begin with the shape of `lengths`. Leaves of x that begin
            with it are zero past the ends, so that what padding holds, such as NaN, does not get into gradients.
    """

    def masked_step(carry: Any, timed: tuple[jax.Array, Any]) -> tuple[Any, Any]:
        t, x = timed
        alive = t < lengths
        new_carry, y = step(carry, jax.tree.map(lambda leaf: _without_padding(alive, leaf), x))
        held = jax.tree.map(lambda new, old: _where(alive, new, old, "carry"), new_carry, carry)
        return held, jax.tree.map(lambda leaf: _where(alive, leaf, jnp.zeros_like(leaf), "output"), y)

    return masked_step


def _without_padding(alive: jax.Array, leaf: Any) -> Any:
    fits = jnp.shape(leaf)[: alive.ndim] == alive.shape
    return _where(alive, leaf, jnp.zeros_like(leaf), "input") if fits else leaf


def _where(alive: jax.Array, live: Any, dead: Any, what: str) -> jax.Array:
    shape = jnp.shape(live)
    if shape[: alive.ndim] != alive.shape:
        raise ScanError(
            f"scan: with lengths of shape {list(alive.shape)} every leaf of the {what} must begin with that shape, "
            f"but one is {list(shape)}; put the batch first, or reshape lengths"
        )
    spread = alive.reshape(alive.shape + (1,) * (len(shape) - alive.ndim))
    return jnp.where(spread, live, dead)
