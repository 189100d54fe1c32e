"""Sequences of different lengths in one batch: past its end a sequence holds its carry and puts out zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import ScanError


def masked(step: Callable, lengths: jax.Array, xs: Any) -> Callable:
    """The step `(carry, (t, x)) -> (carry, y)` that stops each sequence at its length.

    Args:
        step: `(carry, x) -> (carry, y)`.
        lengths: integers; every leaf of the carry and of y must begin with the shape of `lengths`.
        xs: what x is taken from. Past its end a sequence is given its first x again, for the step is evaluated there too:
            what padding holds, such as NaN, does not get into gradients, nor does the 1/0 of a step that divides by x.
    """
    spares = [_spare(lengths, stack) for stack in jax.tree.leaves(xs)]

    def masked_step(carry: Any, timed: tuple[jax.Array, Any]) -> tuple[Any, Any]:
        t, x = timed
        alive = t < lengths
        leaves, tree = jax.tree.flatten(x)
        live = [v if spare is None else _where(alive, v, spare, "input") for v, spare in zip(leaves, spares)]
        out = step(carry, jax.tree.unflatten(tree, live))
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


def _spare(lengths: jax.Array, stack: Any) -> jax.Array | None:
    """Each sequence's first x, or ones where it has none; None where x is not one for each sequence."""
    steps, shape = jnp.shape(stack)[:1], jnp.shape(stack)[1:]
    number = jnp.issubdtype(jnp.result_type(stack), jnp.number) or jnp.issubdtype(jnp.result_type(stack), jnp.bool_)
    if steps in ((), (0,)) or shape[: lengths.ndim] != lengths.shape or not number:
        return None
    return jax.lax.stop_gradient(_where(lengths > 0, stack[0], jnp.ones_like(stack[0]), "input"))


def _where(alive: jax.Array, live: Any, dead: Any, what: str) -> jax.Array:
    shape = jnp.shape(live)
    if shape[: alive.ndim] != alive.shape:
        raise ScanError(
            f"scan: with lengths of shape {list(alive.shape)} every leaf of the {what} must begin with that shape, "
            f"but one is {list(shape)}; put the batch first, or reshape lengths"
        )
    spread = alive.reshape(alive.shape + (1,) * (len(shape) - alive.ndim))
    return jnp.where(spread, live, dead)
