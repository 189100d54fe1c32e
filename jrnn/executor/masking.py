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
        out = step(carry, jax.tree.map(lambda leaf: _without_padding(alive, leaf), x))
        if not _fits(out, carry):
            return out  # `jax.lax.scan` says what is wrong with it
        new_carry, y = out
        held = jax.tree.map(lambda new, old: _where(alive, new, old, "carry"), new_carry, carry)
        return held, jax.tree.map(lambda leaf: _where(alive, leaf, jnp.zeros_like(leaf), "output"), y)

    return masked_step


def _fits(out: Any, carry: Any) -> bool:
    """Whether a step's result is a pair whose carry has the types of the old one, or better than weak ones."""
    if not (isinstance(out, tuple) and len(out) == 2 and jax.tree.structure(out[0]) == jax.tree.structure(carry)):
        return False
    pairs = [(jax.typeof(new), jax.typeof(old)) for new, old in zip(jax.tree.leaves(out[0]), jax.tree.leaves(carry))]
    return all(new.shape == old.shape and (new.dtype == old.dtype or old.weak_type) for new, old in pairs)


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
