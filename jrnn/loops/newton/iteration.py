"""The iteration of Newton's method for one group of carries, and the certificate of its result.

An update d solves the linear recurrence `d[t] = (1 - damping) J[t] d[t-1] + r[t]`. Where only the diagonal of J is used, d
leaves out a part of the change, so that the error is followed by a recurrence of its own.

Residuals and errors are measured in units of the *scale* of an element at a step: its size, what its rounding amounts to in
units of the last place, and the scale of what it still holds of earlier steps.

The loop of updates has two phases. In phase 0 states are updated. The last update is made, too: its size is known, and what
is left after it is of the order of its square. Phase 1 is one more evaluation, for the residuals of the states that are
returned.

Shapes: T time, A the batch axes of the Jacobian, M the size of its blocks (`affine/blocks.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jrnn.loops.affine import rounds
from jrnn.loops.affine.blocks import Blocks
from jrnn.loops.affine.carries import GroupFunction, Values
from jrnn.loops.newton.certificate import (
    Enclosures,
    before_each_step,
    bounds,
    bounds_in_radii,
)
from jrnn.loops.newton.enclosure import Box
from jrnn.loops.newton.options import Newton
from jrnn.loops.wrappers.branches import any_of_all

DEFAULT_ULPS = 32  # the default tolerance, in units of the last place
# Scales are this factor away from the least normal and the largest number: XLA multiplies by their reciprocals.
_SCALE_MARGIN = 1024.0
_FORGOTTEN_DAMPING = 0.3  # damping is halved while it is larger, and then left out

# The new carries, states or the like of a group, [T, ...].
Stacked = list[Array]


class Report(NamedTuple):
    """What was done for a group of carries, or for the outputs.

    Attributes:
        iterations: the number of updates.
        residual: the largest residual, in units of scales.
        error: a bound of the error, in units of scales.
        certified: whether the bound is a proof.
    """

    iterations: Array
    residual: Array
    error: Array
    certified: Array


class GroupReport(NamedTuple):
    """What was done for a group of carries, and how far its states may be off.

    Attributes:
        report: what was done.
        errors: bounds of the errors of the states, [T, A, M].
        rounding: what the loop itself knows of them: a unit of the last place of their scales, [T, A, M].
    """

    report: Report
    errors: Array
    rounding: Array


class InputRadii(NamedTuple):
    """How far the inputs that a group reads may be off, for each of them; None: it depends on no other carry.

    Attributes:
        errors: with the bounds of the states of earlier groups.
        rounding: as the loop itself knows these states, to a unit of the last place of their scales.
    """

    errors: list[Array | None]
    rounding: list[Array | None]


# The step at all times ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StackedStep:
    """The step of a group of carries, at all times.

    Attributes:
        part: the part of the step that makes them.
        blocks: how they are vectors.
        init: the first carries.
        radii: how far inputs that are computed from carries of earlier groups may be off.
        diagonal: only the diagonal of the Jacobian is used.
    """

    part: GroupFunction
    blocks: Blocks
    init: Stacked
    radii: InputRadii | None
    diagonal: bool

    def at(
        self,
        consts: Values | None,
        stacks: Values | None,
        init: Values | None,
        radii: InputRadii | None,
    ) -> StackedStep:
        """Returns the step with other values."""
        part = replace(self.part, consts=consts, stacks=stacks)
        return replace(self, part=part, init=init, radii=radii)

    def old(self, states: Values) -> Stacked:
        """Returns the carries before each step."""
        return before_each_step(states, self.init)

    def new(self, old: Values) -> Stacked:
        """Returns the new carries of all steps from the old ones."""
        return self.each(self.part.fn, old)

    def each(self, fn: Callable[..., Values], old: Values, *more: Values | Array) -> Values:
        """Returns `fn(consts, stack, old, *more)` of all steps."""

        def at_one_time(stack, old, *more):
            return fn(self.part.consts, stack, old, *more)

        return jax.vmap(at_one_time)(self.part.stacks, list(old), *more)

    def join(self, leaves: Values) -> Array:
        """Returns carries as vectors [T, A, M], in float32 or wider."""
        dtype = jnp.result_type(jnp.float32, *leaves)
        return self.blocks.join([leaf.astype(dtype) for leaf in leaves], 1)

    def split(self, joined: Array) -> Stacked:
        """The inverse of `join`, with the dtypes of the carries."""
        leaves = self.blocks.part(joined, 1)
        return [leaf.astype(h.dtype) for leaf, h in zip(leaves, self.init)]

    def slopes(self, old: Values) -> Array:
        """Returns the Jacobians of all steps, [T, A, M, M]; or their diagonals, [T, A, M]."""
        blocks = self.blocks
        wide = jnp.result_type(jnp.float32, *old)

        def at_one_time(consts, stack, old):
            def new(old):
                return self.part.fn(consts, stack, old)

            _, push = jax.linearize(new, list(old))

            def diagonal_element(k):
                column = blocks.join(push(blocks.basis(k, old)))
                return lax.dynamic_index_in_dim(column, k, -1, keepdims=False)

            if self.diagonal:
                diagonal = lax.map(diagonal_element, jnp.arange(blocks.block))
                return jnp.moveaxis(diagonal, 0, -1).astype(wide)
            return blocks.jacobian(push, old).astype(wide)

        return self.each(at_one_time, old)

    def tangents(self, old: Values, added: Values) -> Stacked:
        """Returns the tangents of the states, from the tangents that each step adds."""
        if self.diagonal:
            return self.tangents_by_steps(old, added)
        # No state with a tangent is before the first step, and infinity times 0 is no number.
        slopes = self.slopes(old).at[0].set(0)
        is_finite = jnp.isfinite(slopes)

        def at_once(added):
            return self.split(rounds.solve(jnp.where(is_finite, slopes, 0), self.join(added)))

        def by_steps(added):
            return self.tangents_by_steps(old, added)

        return lax.cond(any_of_all(~is_finite), by_steps, at_once, list(added))

    def tangents_by_steps(self, old: Values, added: Values) -> Stacked:
        """Returns what `tangents` does, without Jacobians."""

        def step(tangents, inputs):
            stack, old, added = inputs

            def new(old):
                return self.part.fn(self.part.consts, stack, old)

            _, pushed = jax.jvp(new, (list(old),), (tangents,))
            tangents = [p + v for p, v in zip(pushed, added)]
            return tangents, tangents

        first = [v[0] for v in added]
        inputs = self.part.stacks, list(old), list(added)
        _, later = lax.scan(step, first, jax.tree.map(lambda v: v[1:], inputs))
        return [jnp.concatenate([v[:1], rest]) for v, rest in zip(added, later)]

    def by_steps(self, length: int) -> tuple[Stacked, GroupReport]:
        """Returns the states, one after the other, and what an iteration would report."""

        def step(h, stack):
            new = self.part.fn(self.part.consts, stack, h)
            return new, new

        _, states = lax.scan(step, self.init, self.part.stacks, length)
        zero = jnp.zeros(())
        report = Report(jnp.int32(0), zero, zero, jnp.asarray(True))
        return states, GroupReport(report, zero, zero)


# Iteration ------------------------------------------------------------------------------------------------------------


class _State(NamedTuple):
    """What the loop of updates carries.

    Attributes:
        iterations: the number of updates so far.
        phase: 0 while states are updated; the loop ends with phase 2.
        states: the states.
        residual: the largest residual before the last update.
        damping: the part of the Jacobian to leave out.
        error: the estimated errors of the states, [T, A, M].
        residuals, rounding, scale: as `Iteration.residuals` returned them, [T, A, M].
    """

    iterations: Array
    phase: Array
    states: Stacked
    residual: Array
    damping: Array
    error: Array
    residuals: Array
    rounding: Array
    scale: Array


class Iteration:
    """The iteration for a group of carries, and its certificate."""

    def __init__(self, step: StackedStep, options: Newton):
        self.step = step
        self.options = options
        self.eps = max(float(jnp.finfo(h.dtype).eps) for h in step.init)
        self.dtype = jnp.result_type(jnp.float32, *step.init)
        self.tolerance = tolerance_of(options, self.eps)
        stack, radii = jax.tree.map(_type_at_one_time, (step.part.stacks, step.radii.errors))
        self.enclosures = Enclosures.of(
            step.blocks,
            step.part.fn,
            step.part.consts,
            stack,
            radii,
            old=list(map(jax.typeof, step.init)),
        )

    def enclosed(
        self, fn: Callable[..., Values], radii: Values, old: Values, *more: Array
    ) -> Values:
        """Returns what a function of enclosures makes of all steps, from inputs with these radii."""

        def at_one_time(consts, stack, old, radii, *more):
            return fn([*map(Box, consts), *map(Box, stack, radii)], old, *more)

        return self.step.each(at_one_time, old, radii, *more)

    def run(self, guess: Values | None, length: int) -> tuple[Stacked, GroupReport]:
        """Returns the states, and what was done."""
        states = self.first_states(guess, length)
        damping = 0.0 if self.options.damping is None else self.options.damping
        zeros = jnp.zeros_like(self.step.join(states))
        start = _State(
            iterations=jnp.int32(0),
            phase=jnp.int32(0),
            states=states,
            residual=jnp.asarray(jnp.inf, self.dtype),
            damping=jnp.asarray(damping, self.dtype),
            error=zeros,
            residuals=zeros,
            rounding=zeros,
            scale=zeros,
        )
        end = lax.while_loop(lambda state: state.phase < 2, self.iterate, start)
        radius = max(self.tolerance, self.eps**0.5) * end.scale
        error = self.certified_error(end, radius)
        report = Report(
            iterations=end.iterations,
            residual=largest(end.residuals / end.scale),
            error=largest(error / end.scale),
            certified=jnp.all(error <= radius),
        )
        return end.states, GroupReport(report, error, self.eps * end.scale)

    def first_states(self, guess: Values | None, length: int) -> Stacked:
        """Returns the states to start from."""
        init = self.step.init
        if guess is not None:
            return [jnp.asarray(g, h.dtype) for g, h in zip(guess, init)]
        if self.options.guess == "sweep":
            return self.step.new([jnp.broadcast_to(h, (length, *h.shape)) for h in init])
        return [jnp.zeros((length, *h.shape), h.dtype) for h in init]

    def certified_error(self, end: _State, radius: Array) -> Array:
        """Returns the bound e of the errors of the states, [T, A, M], within boxes of a radius (`certificate.py`)."""
        step = self.step
        radii = step.radii.errors
        error = jnp.full_like(end.residuals, jnp.inf)
        if self.enclosures is not None:
            old = step.old(end.states)
            before = rounds.shift_one_step(radius)
            rounding = self.enclosed(self.enclosures.rounding, radii, old).astype(self.dtype)
            added = jnp.abs(end.residuals) + end.rounding + rounding
            if step.diagonal:
                slopes = self.enclosed(self.enclosures.slopes_times_radius, radii, old, before)
                error = bounds_in_radii(*slopes, added, radius)
            else:
                slopes = self.enclosed(self.enclosures.slopes, radii, old, before)
                error = bounds(*slopes, added)
        # Without residuals, every step is the loop's.
        exact = [jnp.all(v == 0) for v in (end.residuals, *radii) if v is not None]
        return jnp.where(jnp.all(jnp.stack(exact)), 0, error)

    def residuals(self, states: Values) -> tuple[Stacked, Array, Array, Array, Array]:
        """Returns the new carries, the residual, what rounding may change, the Jacobian or its diagonal, and scales.

        The scale of an element at a step: its terms' scale, plus what remains of earlier steps, [T, A, M].
        """
        step = self.step
        old = step.old(states)
        new = step.new(old)
        joined = step.join(states)
        if self.enclosures is None:  # then only residuals of 0 prove anything
            rounding = jnp.zeros_like(joined)
        else:
            rounding = self.enclosed(self.enclosures.rounding, step.radii.rounding, old)
            rounding = rounding.astype(self.dtype)
        slopes = step.slopes(old)
        limits = jnp.finfo(self.dtype)
        own = jnp.nan_to_num(jnp.abs(joined) + rounding / self.eps, nan=jnp.inf)
        own = jnp.clip(own, limits.tiny * _SCALE_MARGIN, limits.max / _SCALE_MARGIN)
        bounded_slopes = jnp.nan_to_num(jnp.clip(jnp.abs(slopes), 0, 1))
        if step.diagonal:
            scale = rounds.associative_max(bounded_slopes[..., None, None], own[..., None])[..., 0]
        else:
            scale = rounds.associative_max(bounded_slopes, own)
        return new, step.join(new) - joined, rounding, slopes, scale

    def update(
        self, states: Values, residuals: Array, slopes: Array, error: Array, damping: Array
    ) -> tuple[Array, Array]:
        """Returns the update, and the estimated error."""
        step = self.step
        slopes = (1 - damping) * slopes
        if not step.diagonal:
            update = rounds.associative_solve(slopes, residuals)
            return update, update

        def solve(b):
            return rounds.associative_solve([[slopes]], [b])[0]

        # The update leaves out a part of the Jacobian, so the error has an iteration of its own, with all of it.
        before = rounds.shift_one_step(error)
        _, pushed = jax.jvp(step.new, (step.old(states),), (step.split(before),))
        error_residuals = residuals + step.join(pushed) - slopes * rounds.shift_one_step(error)
        return solve(residuals), solve(error_residuals)

    def iterate(self, state: _State) -> _State:
        """Runs the parts of one update that the phase needs."""
        step = self.step
        tolerance = self.tolerance
        new, residuals, rounding, slopes, scale = self.residuals(state.states)
        update, error = self.update(state.states, residuals, slopes, state.error, state.damping)
        residual = largest(residuals / scale)
        is_small = residual <= tolerance
        done = (
            is_small
            & (largest(error / scale) <= max(tolerance, self.eps**0.75))
            & (state.damping == 0)
        )
        updated = step.split(step.join(state.states) + update)
        # Where an update overflows, the step itself is taken, or nothing is known.
        updated = [
            jnp.where(jnp.isfinite(u), u, jnp.where(jnp.isfinite(n), n, jnp.zeros_like(n)))
            for u, n in zip(updated, new)
        ]
        updates = state.phase == 0
        iterations = state.iterations + (updates & ~done)
        goes_on = updates & ~done & (iterations < self.options.iterations)
        return _State(
            iterations=iterations,
            phase=jnp.where(goes_on, 0, state.phase + 1),
            states=[jnp.where(updates, u, h) for u, h in zip(updated, state.states)],
            residual=residual,
            damping=self.next_damping(state, residual, is_small),
            error=error,
            residuals=residuals,
            rounding=rounding,
            scale=scale,
        )

    def next_damping(self, state: _State, residual: Array, is_small: Array) -> Array:
        """Returns the damping of the next update."""
        if self.options.damping is not None:
            return jnp.where(is_small, 0.0, self.options.damping).astype(self.dtype)
        damping = state.damping
        grew = ~(residual <= 2 * state.residual)
        less = jnp.where(damping > _FORGOTTEN_DAMPING, damping / 2, 0)
        return jnp.where(grew, (1 + damping) / 2, less)


def _type_at_one_time(stacked: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype)


def tolerance_of(options: Newton, eps: float) -> float:
    """Returns the tolerance of the options; the default follows from the rounding of a type."""
    return DEFAULT_ULPS * eps if options.tolerance is None else options.tolerance


def largest(v: Array) -> Array:
    """The largest absolute value; infinite if one is not a number."""
    return jnp.max(jnp.where(jnp.isnan(v), jnp.inf, jnp.abs(v)))
