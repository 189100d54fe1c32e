"""`lengths`, `resets` and `mask`: sequences in one batch that end, start again, or leave out steps, each for itself.

Shapes: T time, N batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import ScanError
from jrnn.jaxprs.jax_internals import is_traced
from jrnn.jaxprs.mesh_axes import cast, varying_axes
from jrnn.loops.ir import observers
from jrnn.loops.wrappers import branches
from jrnn.loops.wrappers.branches import any_of_all, select_in_branch

_CALLED = (
    "the step has side effects: they happen at each step at which a sequence is not masked, and see made-up inputs of "
    "those that are"
)


def checked_reset_state(reset_state: Any, init: Any, resets: Any) -> Any:
    """Returns the carry after resets, each leaf None or of the shape of the one of `init`; raises ScanError."""
    if resets is None:
        raise ScanError("scan: reset_state is given without resets; give resets [T, N] too")

    def one(path: Any, first: Any, new: Any) -> Any:
        if new is None:
            return None
        name = jax.tree_util.keystr(path)
        shape = jnp.shape(first)
        try:
            new = (
                new
                if jax.dtypes.issubdtype(jnp.result_type(new), jax.dtypes.extended)
                else jnp.asarray(new)
            )
            state = new if new.shape == shape else jnp.broadcast_to(new, shape)
        except (TypeError, ValueError):
            raise ScanError(
                f"scan: reset_state{name} cannot be broadcast to the carry's shape {list(shape)}"
            ) from None
        if _rank(new.dtype) > _rank(jnp.result_type(first)):
            carry_dtype = jnp.result_type(first)
            raise ScanError(
                f"scan: reset_state{name} is {new.dtype}, which a carry of {carry_dtype} cannot hold; convert it"
            )
        return state

    try:
        return jax.tree.map_with_path(one, init, reset_state)
    except ValueError as e:
        if isinstance(e, ScanError):
            raise
        raise ScanError(
            f"scan: reset_state must be a pytree as init, whose leaves may be None: {e}"
        ) from None


def _rank(dtype: Any) -> int:
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((k for k, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), len(kinds))


def masked(
    f: Callable, first: Any, xs: Any, steps: Any, lengths: Any, resets: Any, mask: Any = None
) -> tuple[Callable, Any]:
    """Returns the step and the inputs with lengths, resets and a mask of the steps that count.

    `first` is the carry after resets, in which None leaves a leaf alone. `steps` is T, or None if it is unknown.
    """
    if steps is None:
        return f, xs  # `jax.lax.scan` reports it
    lengths, resets, mask = checked_masks(lengths, resets, mask, steps)
    if mask is not None:
        alive = _of_all_steps(mask, "mask", steps)
        if lengths is not None:
            alive, before_the_end = _aligned(
                alive, jax.vmap(lambda t: t < lengths)(jnp.arange(steps))
            )
            alive = alive & before_the_end
            if resets is not None:
                resets, before_the_end = _aligned(
                    _of_all_steps(resets, "resets", steps), before_the_end
                )
                resets = resets & before_the_end
        f = with_mask(f, alive, xs)
        xs = (alive, xs)
    if resets is not None:
        f, xs = with_resets(f, first, resets, steps, xs)
    if lengths is not None and mask is None:
        f = with_lengths(f, lengths, xs)
        xs = (jnp.arange(steps), xs)
    return f, xs


def checked_masks(lengths: Any, resets: Any, mask: Any, steps: Any) -> tuple[Any, Any, Any]:
    """Returns masks as arrays, each of which may be None; raises ScanError. Lengths whose values are known are checked."""
    return (
        None if lengths is None else _checked_lengths(lengths, steps),
        None if resets is None else _checked(resets, "resets", bool, "booleans"),
        None if mask is None else _checked(mask, "mask", bool, "booleans"),
    )


def _of_all_steps(values: jax.Array, name: str, steps: Any) -> jax.Array:
    if values.shape[:1] != (steps,):
        raise ScanError(
            f"scan: {name} must be [T, ...] with T = {steps}, but are {list(values.shape)}; put time first"
        )
    return values


def _aligned(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Appends axes of size 1 so that both have as many axes."""
    ndim = max(a.ndim, b.ndim)
    return a.reshape(a.shape + (1,) * (ndim - a.ndim)), b.reshape(b.shape + (1,) * (ndim - b.ndim))


def _checked_lengths(lengths: Any, steps: Any) -> Any:
    values = lengths
    lengths = _array(lengths, "lengths")
    if lengths.dtype == bool:
        raise ScanError(
            "scan: lengths must be integers, but are bool; give booleans [T, N] as mask="
        )
    lengths = _checked(lengths, "lengths", int, "integers")
    known = not any(map(is_traced, jax.tree.leaves(values))) and getattr(
        values, "is_fully_addressable", True
    )
    if isinstance(steps, int) and known:
        outside = [n for n in np.ravel(values).tolist() if not 0 <= n <= steps]
        if outside:
            raise ScanError(
                f"scan: lengths must lie between 0 and T = {steps}, but one is {outside[0]}"
            )
    return lengths


def _array(values: Any, name: str) -> jax.Array:
    try:
        return jnp.asarray(values)
    except (TypeError, ValueError, OverflowError) as e:
        raise ScanError(
            f"scan: {name} must be an array, but are {values!r:.80}: {e!s:.200}"
        ) from None


def _checked(values: Any, name: str, kind: type, kinds: str) -> Any:
    values = _array(values, name)
    if not jnp.issubdtype(values.dtype, jnp.bool_ if kind is bool else jnp.integer):
        raise ScanError(
            f"scan: {name} must be {kinds}, but are {values.dtype}; give {name}.astype({kind.__name__})"
        )
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
    spares = [
        _placeholder(lengths > 0, stack, lambda stack: stack[0], "lengths")
        for stack in jax.tree.leaves(xs)
    ]
    masked_step = _masked_step(step, spares, "lengths")
    return lambda carry, timed: masked_step(carry, timed[0] < lengths, timed[1])


def with_mask(step: Callable, alive: jax.Array, xs: Any) -> Callable:
    """Returns a step `(carry, (alive, x)) -> (carry, y)` that keeps the carry, with outputs of zero, where not alive.

    There the step is evaluated with the first x of the sequence that counts, for the reason given in `with_lengths`.

    Args:
        step: `(carry, x) -> (carry, y)`.
        alive: [T, ...] booleans; the shape of every leaf of the carry and of y must begin with the shape of `alive[0]`.
        xs: the inputs of the scan.
    """
    if alive.shape[0] == 0:
        return lambda carry, masked_x: step(carry, masked_x[1])
    first = jnp.argmax(alive, axis=0)

    def at_first(stack: jax.Array) -> jax.Array:
        place = first.reshape(1, *first.shape, *[1] * (stack.ndim - 1 - first.ndim))
        return jnp.take_along_axis(stack, place, axis=0)[0]

    spares = [
        _placeholder(jnp.any(alive, axis=0), stack, at_first, "mask")
        for stack in jax.tree.leaves(xs)
    ]
    masked_step = _masked_step(step, spares, "mask[0]")
    return lambda carry, masked_x: masked_step(carry, *masked_x)


def _masked_step(step: Callable, spares: list[Any], option: str) -> Callable:
    """Returns a step `(carry, alive, x) -> (carry, y)`: where not alive, x is a spare one, and nothing changes."""

    def chosen(
        step: Callable, alive: jax.Array, carry: Any, x: Any, where: Callable
    ) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(x)
        live = [
            v if spare is None else where(alive, v, spare, "input", option)
            for v, spare in zip(leaves, spares)
        ]
        out = step(carry, jax.tree.unflatten(tree, live))
        if not _fits(out, carry):
            return out  # `jax.lax.scan` reports it
        new_carry, y = out
        masked_carry = jax.tree.map(
            lambda new, old: where(alive, new, old, "carry", option), new_carry, carry
        )
        return masked_carry, jax.tree.map(
            lambda leaf: where(alive, leaf, jnp.zeros_like(leaf), "output", option), y
        )

    def masked_step(carry: Any, alive: jax.Array, x: Any) -> tuple[Any, Any]:
        traced = branches.Traced.of(step, carry, x)
        fits = traced is not None and _fits(traced.out, carry, promotes=False)
        if not fits or not branches.runs_in_branch(traced, alive, carry):
            return chosen(traced or step, alive, carry, x, _where)
        if traced.has_effects and alive.ndim:
            observers.notify(_CALLED)
        axes = varying_axes(alive)
        zeros = jax.tree.map(
            lambda y: cast(jnp.zeros(y.shape, y.dtype), axes | varying_axes(y)), traced.out[1]
        )
        return jax.lax.cond(
            any_of_all(alive),
            lambda carry, x: chosen(
                step, alive, carry, x, functools.partial(_where, in_branch=True)
            ),
            lambda carry, x: (carry, zeros),
            carry,
            x,
        )

    return masked_step


def with_resets(
    step: Callable, first: Any, resets: jax.Array, steps: Any, xs: Any
) -> tuple[Callable, Any]:
    """Returns a step and inputs that set the carry back to `first` before each step where `resets` is True.

    Args:
        step: `(carry, x) -> (carry, y)`.
        first: the carry after resets; a leaf that is None is left alone.
        resets: [T, ...] booleans; the shape of every other leaf of the carry must begin with the shape of `resets[0]`.
        steps: T.
        xs: the inputs of the scan.
    """
    resets = _of_all_steps(resets, "resets", steps)

    def resetting_step(carry: Any, reset_and_x: tuple[jax.Array, Any]) -> tuple[Any, Any]:
        reset, x = reset_and_x

        def fresh(first: Any, old: Any, where: Callable = _where) -> Any:
            if first is None:
                return old
            typed = first if jax.typeof(old).weak_type else jnp.asarray(first, jnp.result_type(old))
            return where(reset, typed, old, "carry", "resets[0]")

        def all_fresh(carry: Any, where: Callable = _where) -> Any:
            return jax.tree.map(
                functools.partial(fresh, where=where),
                first,
                carry,
                is_leaf=lambda leaf: leaf is None,
            )

        if not branches.resets_in_branch(step, reset, carry, x):
            return step(all_fresh(carry), x)
        where = functools.partial(_where, in_branch=True)
        return step(
            jax.lax.cond(any_of_all(reset), lambda c: all_fresh(c, where), lambda c: c, carry), x
        )

    return resetting_step, (resets, xs)


def _fits(out: Any, carry: Any, promotes: bool = True) -> bool:
    """Returns True if a step returned a pair, and its carry has the old carry's types, or `promotes` weak ones."""
    if not (
        isinstance(out, tuple)
        and len(out) == 2
        and jax.tree.structure(out[0]) == jax.tree.structure(carry)
    ):
        return False
    pairs = [
        (new, jax.typeof(old)) for new, old in zip(jax.tree.leaves(out[0]), jax.tree.leaves(carry))
    ]
    return all(
        jnp.shape(new) == old.shape
        and (jnp.result_type(new) == old.dtype or (promotes and old.weak_type))
        for new, old in pairs
    )


def _placeholder(lives: jax.Array, stack: Any, pick: Callable, option: str) -> jax.Array | None:
    """Returns an x of each sequence that counts, or ones if it has none; None if `stack` has no axes of sequences."""
    steps = jnp.shape(stack)[:1]
    shape = jnp.shape(stack)[1:]
    number = jnp.issubdtype(jnp.result_type(stack), jnp.number) or jnp.issubdtype(
        jnp.result_type(stack), jnp.bool_
    )
    if steps in ((), (0,)) or shape[: lives.ndim] != lives.shape or not number:
        return None
    picked = pick(jnp.asarray(stack))
    return jax.lax.stop_gradient(_where(lives, picked, jnp.ones_like(picked), "input", option))


def _where(
    chosen: jax.Array,
    then: Any,
    otherwise: Any,
    what: str,
    option: str = "lengths",
    in_branch: bool = False,
) -> jax.Array:
    shape = jnp.shape(then)
    if shape[: chosen.ndim] != chosen.shape:
        raise ScanError(
            f"scan: with {option} of shape {list(chosen.shape)} every leaf of the {what} must begin with that shape, "
            f"but one is {list(shape)}; put the batch first, or reshape {option}"
        )
    if in_branch:
        return select_in_branch(chosen, then, otherwise)
    spread = chosen.reshape(chosen.shape + (1,) * (len(shape) - chosen.ndim))
    return jnp.where(spread, then, otherwise)
