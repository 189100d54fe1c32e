"""`lengths` and `resets`: sequences in one batch that end, or start again, at different steps.

Shapes: T time, N batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import ScanError


def masked(f: Callable, init: Any, xs: Any, steps: Any, lengths: Any, resets: Any) -> tuple[Callable, Any]:
    """Returns the step and the inputs with lengths and resets. `steps` is T, or None if it is unknown."""
    if steps is None:
        return f, xs  # `jax.lax.scan` reports it
    if resets is not None:
        f, xs = with_resets(f, init, _checked(resets, "resets", bool, "booleans"), steps, xs)
    if lengths is not None:
        f, xs = with_lengths(f, _checked(lengths, "lengths", int, "integers"), xs), (jnp.arange(steps), xs)
    return f, xs


def _checked(values: Any, name: str, kind: type, kinds: str) -> Any:
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.bool_ if kind is bool else jnp.integer):
        raise ScanError(f"scan: {name} must be {kinds}, but are {values.dtype}; give {name}.astype({kind.__name__})")
    return values


def with_lengths(step: Callable, lengths: jax.Array, xs: Any) -> Callable:
    """Returns a step `(carry, (t, x)) -> (carry, y)` that stops each sequence at its length.

    After the end of a sequence, the step is evaluated with the sequence's first x. So padding, such as NaN, does not get
    into gradients, nor does the 1/0 of a step that divides by a padding of zeros.

    Args:
        step: `(carry, x) -> (carry, y)`.
        lengths: integers; the shape of every leaf of the carry and of y must begin with the shape of `lengths`.
        xs: the inputs of the scan.
    """
    spares = [_spare(lengths, stack) for stack in jax.tree.leaves(xs)]

    def masked_step(carry: Any, timed: tuple[jax.Array, Any]) -> tuple[Any, Any]:
        t, x = timed
        alive = t < lengths
        leaves, tree = jax.tree.flatten(x)
        live = [v if spare is None else _where(alive, v, spare, "input") for v, spare in zip(leaves, spares)]
        out = step(carry, jax.tree.unflatten(tree, live))
        if not _fits(out, carry):
            return out  # `jax.lax.scan` reports it
        new_carry, y = out
        held = jax.tree.map(lambda new, old: _where(alive, new, old, "carry"), new_carry, carry)
        return held, jax.tree.map(lambda leaf: _where(alive, leaf, jnp.zeros_like(leaf), "output"), y)

    return masked_step


def with_resets(step: Callable, init: Any, resets: jax.Array, steps: Any, xs: Any) -> tuple[Callable, Any]:
    """Returns a step and inputs that set the carry back to `init` before each step where `resets` is True.

    Args:
        step: `(carry, x) -> (carry, y)`.
        init: the initial carry.
        resets: [T, ...] booleans; the shape of every leaf of the carry must begin with the shape of `resets[0]`.
        steps: T.
        xs: the inputs of the scan.
    """
    if resets.shape[:1] != (steps,):
        raise ScanError(f"scan: resets must be [T, ...] with T = {steps}, but are {list(resets.shape)}; put time first")

    def resetting_step(carry: Any, reset_and_x: tuple[jax.Array, Any]) -> tuple[Any, Any]:
        reset, x = reset_and_x

        def fresh(first: Any, old: Any) -> jax.Array:
            typed = first if jax.typeof(old).weak_type else jnp.asarray(first, jnp.result_type(old))
            return _where(reset, typed, old, "carry", "resets[0]")

        return step(jax.tree.map(fresh, init, carry), x)

    return resetting_step, (resets, xs)


def _fits(out: Any, carry: Any) -> bool:
    """Returns True if a step returned a pair, and its carry has the old carry's types, or replaces weak ones."""
    if not (isinstance(out, tuple) and len(out) == 2 and jax.tree.structure(out[0]) == jax.tree.structure(carry)):
        return False
    pairs = [(jax.typeof(new), jax.typeof(old)) for new, old in zip(jax.tree.leaves(out[0]), jax.tree.leaves(carry))]
    return all(new.shape == old.shape and (new.dtype == old.dtype or old.weak_type) for new, old in pairs)


def _spare(lengths: jax.Array, stack: Any) -> jax.Array | None:
    """Returns the first x of each sequence, or ones if it is empty; None if `stack` has no axes of sequences."""
    steps, shape = jnp.shape(stack)[:1], jnp.shape(stack)[1:]
    number = jnp.issubdtype(jnp.result_type(stack), jnp.number) or jnp.issubdtype(jnp.result_type(stack), jnp.bool_)
    if steps in ((), (0,)) or shape[: lengths.ndim] != lengths.shape or not number:
        return None
    return jax.lax.stop_gradient(_where(lengths > 0, stack[0], jnp.ones_like(stack[0]), "input"))


def _where(chosen: jax.Array, then: Any, otherwise: Any, what: str, given: str = "lengths") -> jax.Array:
    shape = jnp.shape(then)
    if shape[: chosen.ndim] != chosen.shape:
        raise ScanError(
            f"scan: with {given} of shape {list(chosen.shape)} every leaf of the {what} must begin with that shape, "
            f"but one is {list(shape)}; put the batch first, or reshape {given}"
        )
    spread = chosen.reshape(chosen.shape + (1,) * (len(shape) - chosen.ndim))
    return jnp.where(spread, then, otherwise)
