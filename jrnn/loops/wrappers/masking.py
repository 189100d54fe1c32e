"""`lengths`, `resets` and `mask`: sequences in one batch that end, start again, or leave out steps, each for itself.

Shapes: T time, N batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn.errors import ScanError
from jrnn.jaxprs.jax_internals import is_traced
from jrnn.jaxprs.mesh_axes import varying_axes
from jrnn.loops.ir import StepFn, Tree, observers
from jrnn.loops.wrappers import branches
from jrnn.loops.wrappers.branches import any_of_all, select_in_branch

_SIDE_EFFECTS_NOTE = (
    "the step has side effects: they happen at each step at which a sequence is not masked; masked sequences get "
    "placeholder inputs"
)
# `(chosen, then, otherwise, what, option) -> then where chosen`: see `_where`.
Where = Callable[..., Array]


def checked_reset_state(reset_state: Tree, init: Tree, resets: Array | None) -> Tree:
    """Returns the carry after resets, each leaf None or of the shape of the one of `init`; raises ScanError."""
    if resets is None:
        raise ScanError("scan: reset_state is given without resets; give resets [T, N] too")

    def checked(path, first, new):
        if new is None:
            return None
        name = jax.tree_util.keystr(path)
        shape = jnp.shape(first)
        try:
            if not jax.dtypes.issubdtype(jnp.result_type(new), jax.dtypes.extended):
                new = jnp.asarray(new)
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
        return jax.tree.map_with_path(checked, init, reset_state)
    except ValueError as e:
        if isinstance(e, ScanError):
            raise
        raise ScanError(
            f"scan: reset_state must be a pytree as init, whose leaves may be None: {e}"
        ) from None


def _rank(dtype: np.dtype) -> int:
    """The rank of a type: a type of a higher rank can represent all values of the lower ones."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    for rank, kind in enumerate(kinds):
        if jnp.issubdtype(dtype, kind):
            return rank
    return len(kinds)


def masked(
    f: StepFn,
    first: Tree,
    xs: Tree,
    steps: int | None,
    lengths: Array | None,
    resets: Array | None,
    mask: Array | None = None,
) -> tuple[StepFn, Tree]:
    """Returns the step and the inputs with lengths, resets and a mask of the steps that count.

    `first` is the carry after resets, in which None leaves a leaf alone. `steps` is T, or None if it is unknown.
    """
    if steps is None:
        return f, xs  # `jax.lax.scan` reports it
    lengths, resets, mask = checked_masks(lengths, resets, mask, steps)
    if mask is not None:
        alive = _of_all_steps(mask, "mask", steps)
        if lengths is not None:
            before_the_end = jax.vmap(lambda t: t < lengths)(jnp.arange(steps))
            alive, before_the_end = _aligned(alive, before_the_end)
            alive = alive & before_the_end
            if resets is not None:
                resets = _of_all_steps(resets, "resets", steps)
                resets, before_the_end = _aligned(resets, before_the_end)
                resets = resets & before_the_end
        f = with_mask(f, alive, xs)
        xs = (alive, xs)
    if resets is not None:
        f, xs = with_resets(f, first, resets, steps, xs)
    if lengths is not None and mask is None:
        f = with_lengths(f, lengths, xs)
        xs = (jnp.arange(steps), xs)
    return f, xs


def checked_masks(
    lengths: Array | None, resets: Array | None, mask: Array | None, steps: int | None
) -> tuple[Array | None, Array | None, Array | None]:
    """Returns masks as arrays, or None; raises ScanError. Lengths whose values are known are checked."""
    if lengths is not None:
        lengths = _checked_lengths(lengths, steps)
    if resets is not None:
        resets = _checked(resets, "resets", bool, "booleans")
    if mask is not None:
        mask = _checked(mask, "mask", bool, "booleans")
    return lengths, resets, mask


def _of_all_steps(values: Array, name: str, steps: int) -> Array:
    if values.shape[:1] != (steps,):
        raise ScanError(
            f"scan: {name} must be [T, ...] with T = {steps}, but are {list(values.shape)}; put time first"
        )
    return values


def _aligned(a: Array, b: Array) -> tuple[Array, Array]:
    """Appends axes of size 1 so that both have as many axes."""
    ndim = max(a.ndim, b.ndim)
    return branches.with_axes(a, ndim), branches.with_axes(b, ndim)


def _checked_lengths(lengths: Array, steps: int | None) -> Array:
    values = lengths
    lengths = _array(lengths, "lengths")
    if lengths.dtype == bool:
        raise ScanError(
            "scan: lengths must be integers, but are bool; give booleans [T, N] as mask="
        )
    lengths = _checked(lengths, "lengths", int, "integers")
    is_known = not any(map(is_traced, jax.tree.leaves(values)))
    if isinstance(steps, int) and is_known and getattr(values, "is_fully_addressable", True):
        outside = [n for n in np.ravel(values).tolist() if not 0 <= n <= steps]
        if outside:
            raise ScanError(
                f"scan: lengths must lie between 0 and T = {steps}, but one is {outside[0]}"
            )
    return lengths


def _array(values: Array, name: str) -> Array:
    try:
        return jnp.asarray(values)
    except (TypeError, ValueError, OverflowError) as e:
        raise ScanError(
            f"scan: {name} must be an array, but are {values!r:.80}: {e!s:.200}"
        ) from None


def _checked(values: Array, name: str, kind: type, kinds: str) -> Array:
    values = _array(values, name)
    if not jnp.issubdtype(values.dtype, jnp.bool_ if kind is bool else jnp.integer):
        raise ScanError(
            f"scan: {name} must be {kinds}, but are {values.dtype}; give {name}.astype({kind.__name__})"
        )
    return values


def with_lengths(step: StepFn, lengths: Array, xs: Tree) -> StepFn:
    """Returns a step `(carry, (t, x)) -> (carry, y)` that stops each sequence at its length.

    After the end of a sequence, the step is evaluated with the sequence's first x. So padding, such as NaN, does not get
    into gradients, nor does the 1/0 of a step that divides by a padding of zeros.

    Args:
        step: `(carry, x) -> (carry, y)`.
        lengths: integers; the shape of every leaf of the carry and of y must begin with the shape of `lengths`.
        xs: the inputs of the scan.
    """
    placeholders = _placeholders(lengths > 0, xs, lambda stacked: stacked[0], "lengths")
    masked_step = _masked_step(step, placeholders, "lengths")

    def timed_step(carry, time_and_x):
        t, x = time_and_x
        return masked_step(carry, t < lengths, x)

    return timed_step


def with_mask(step: StepFn, alive: Array, xs: Tree) -> StepFn:
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

    def at_first(stacked):
        index = branches.with_axes(first[None], stacked.ndim)
        return jnp.take_along_axis(stacked, index, axis=0)[0]

    placeholders = _placeholders(jnp.any(alive, axis=0), xs, at_first, "mask")
    masked_step = _masked_step(step, placeholders, "mask[0]")
    return lambda carry, masked_x: masked_step(carry, *masked_x)


def _masked_step(step: StepFn, placeholders: list[Array | None], option: str) -> StepFn:
    """Returns a step `(carry, alive, x) -> (carry, y)`: where not alive, x is a placeholder, and nothing changes."""

    def selected(step, alive, carry, x, where):
        """The step on selected inputs, with a selection of its results."""
        leaves, tree = jax.tree.flatten(x)
        for i, placeholder in enumerate(placeholders):
            if placeholder is not None:
                leaves[i] = where(alive, leaves[i], placeholder, "input", option)
        out = step(carry, jax.tree.unflatten(tree, leaves))
        if not _fits(out, carry):
            return out  # `jax.lax.scan` reports it
        new_carry, y = out

        def new_or_old(new, old):
            return where(alive, new, old, "carry", option)

        def y_or_zeros(leaf):
            return where(alive, leaf, jnp.zeros_like(leaf), "output", option)

        return jax.tree.map(new_or_old, new_carry, carry), jax.tree.map(y_or_zeros, y)

    def masked_step(carry, alive, x):
        traced = branches.Traced.of(step, carry, x)
        fits = traced is not None and _fits(traced.out, carry, promotes=False)
        if not fits or not branches.runs_in_branch(traced, alive, carry):
            return selected(traced or step, alive, carry, x, _where)
        if traced.has_effects and alive.ndim:
            observers.notify(_SIDE_EFFECTS_NOTE)
        zeros = branches.zeros_of(traced.out[1], varying_axes(alive))

        def run(carry, x):
            return selected(step, alive, carry, x, _where_in_branch)

        def skip(carry, x):
            return carry, zeros

        return jax.lax.cond(any_of_all(alive), run, skip, carry, x)

    return masked_step


def with_resets(
    step: StepFn, first: Tree, resets: Array, steps: int, xs: Tree
) -> tuple[StepFn, Tree]:
    """Returns a step and inputs that set the carry back to `first` before each step where `resets` is True.

    Args:
        step: `(carry, x) -> (carry, y)`.
        first: the carry after resets; a leaf that is None is left alone.
        resets: [T, ...] booleans; the shape of every other leaf of the carry must begin with the shape of `resets[0]`.
        steps: T.
        xs: the inputs of the scan.
    """
    resets = _of_all_steps(resets, "resets", steps)

    def with_first(carry, reset, where):
        """Returns the carry after a reset, where there is one."""

        def leaf(first, old):
            if first is None:
                return old
            typed = first if jax.typeof(old).weak_type else jnp.asarray(first, jnp.result_type(old))
            return where(reset, typed, old, "carry", "resets[0]")

        return jax.tree.map(leaf, first, carry, is_leaf=lambda leaf: leaf is None)

    def resetting_step(carry, reset_and_x):
        reset, x = reset_and_x
        if not branches.resets_in_branch(step, reset, carry, x):
            return step(with_first(carry, reset, _where), x)

        def restart(carry):
            return with_first(carry, reset, _where_in_branch)

        def go_on(carry):
            return carry

        return step(jax.lax.cond(any_of_all(reset), restart, go_on, carry), x)

    return resetting_step, (resets, xs)


def _fits(out: Tree, carry: Tree, promotes: bool = True) -> bool:
    """Returns True if a step returned a pair, and its carry has the old carry's types, or `promotes` weak ones."""
    if not isinstance(out, tuple) or len(out) != 2:
        return False
    if jax.tree.structure(out[0]) != jax.tree.structure(carry):
        return False
    for new, old in zip(jax.tree.leaves(out[0]), map(jax.typeof, jax.tree.leaves(carry))):
        is_typed = jnp.result_type(new) == old.dtype or (promotes and old.weak_type)
        if jnp.shape(new) != old.shape or not is_typed:
            return False
    return True


def _placeholders(
    lives: Array, xs: Tree, pick: Callable[[Array], Array], option: str
) -> list[Array | None]:
    """Returns, for each leaf of xs, an x of each sequence that counts.

    It is ones for a sequence without one, and None for a leaf that has no axes of sequences.

    Args:
        lives: whether a sequence has a step that counts.
        xs: the inputs of the scan.
        pick: from a leaf to the x of each sequence.
        option: the option that says which steps count.
    """
    placeholders = []
    for stacked in jax.tree.leaves(xs):
        steps = jnp.shape(stacked)[:1]
        shape = jnp.shape(stacked)[1:]
        dtype = jnp.result_type(stacked)
        is_number = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
        if steps in ((), (0,)) or shape[: lives.ndim] != lives.shape or not is_number:
            placeholders.append(None)
        else:
            picked = pick(jnp.asarray(stacked))
            selected = _where(lives, picked, jnp.ones_like(picked), "input", option)
            placeholders.append(jax.lax.stop_gradient(selected))
    return placeholders


def _where(
    chosen: Array,
    then: Array,
    otherwise: Array,
    what: str,
    option: str = "lengths",
    in_branch: bool = False,
) -> Array:
    """Selects, by booleans whose shape is the beginning of the shape of the values."""
    shape = jnp.shape(then)
    if shape[: chosen.ndim] != chosen.shape:
        raise ScanError(
            f"scan: with {option} of shape {list(chosen.shape)} every leaf of the {what} must begin with that shape, "
            f"but one is {list(shape)}; put the batch first, or reshape {option}"
        )
    if in_branch:
        return select_in_branch(chosen, then, otherwise)
    return jnp.where(branches.with_axes(chosen, len(shape)), then, otherwise)


_where_in_branch = functools.partial(_where, in_branch=True)
