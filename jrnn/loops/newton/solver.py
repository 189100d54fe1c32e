"""Newton's method for all steps of a loop at once: iteration, certificate, fallback, and exact derivatives.

The states h of `h[t] = f(h[t-1], x[t])` are the root of the residuals `r[t] = f(h[t-1], x[t]) - h[t]`. An update d solves
`d[t] = J[t] d[t-1] + r[t]`, a linear recurrence with the Jacobians of f (`affine/rounds.py`). The result counts only with a
certificate (`certificate.py`), which bounds the error of each element; without one, the caller runs the loop.

Derivatives do not depend on the iteration. The tangents of the states solve one linear recurrence, cotangents its adjoint.

Sources: Lim et al., "Parallelizing non-linear sequential models over the sequence length" (DEER), 2024; Gonzalez et al.,
"Towards scalable and stable parallelization of nonlinear RNNs" (ELK), 2024.

Shapes: T time, A the batch axes of the Jacobian, M the size of its blocks (`affine/blocks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.loops.affine import rounds
from jrnn.loops.affine.blocks import Blocks, blocks_of, why_no_jacobian
from jrnn.loops.affine.carries import GroupFunction, Values, solve_in_order
from jrnn.loops.ir import ScanParams
from jrnn.loops.newton.certificate import (
    Enclosures,
    bounds,
    bounds_in_radii,
    of_outputs,
    radii_of_inputs,
)
from jrnn.loops.newton.enclosure import Box, NotEnclosed
from jrnn.loops.newton.options import Newton
from jrnn.loops.wrappers.branches import any_of_all

_ULPS = 32  # the default tolerance, in units of the last place
_PART = 1024.0
_REFUSED = "scan: executor 'newton' cannot run this step ({}); use 'auto' or 'scan'"


@dataclass(frozen=True)
class Solution:
    """The last carry and the outputs of a loop, as flat lists; the states of all steps; and per group, what was done."""

    carry: list[Any]
    ys: list[Any]
    states: list[Any]
    reports: list[
        Any
    ]  # (iterations, residual, error, whether it is certified), and the same of the outputs


@jaxprs.with_promotion
def run(
    step: Callable,
    init: Sequence[Any],
    xs: Sequence[Any],
    length: int,
    reverse: bool,
    options: Newton,
    by_steps: bool = False,
) -> Solution:
    """Runs a loop of flat lists: `step(carry, x) -> [*carry, *y]`.

    Args:
        step: the step; it may close over values that are differentiated.
        init, xs: the initial carry, and stacks [T, ...].
        length: T, at least 1.
        reverse: whether time runs backwards.
        options: the options; `guess` is a list of stacks, or a name.
        by_steps: compute the states one after the other; the derivatives are the same.
    """
    closed = jax.make_jaxpr(lambda carry, x: step(list(carry), list(x)))(
        list(init), [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs]
    )
    why = why_no_jacobian(closed, init)
    if why is not None:
        raise ScanError(_REFUSED.format(why))
    lowered = jaxprs.inlined(closed, jaxprs.LOWERED_CALLS)
    structure = blocks_of(lowered, len(init))
    _check_sizes(structure, init, length, options)
    program = jaxprs.inlined(closed)
    guess = options.guess
    if reverse:
        xs = [x[::-1] for x in xs]
        guess = guess if isinstance(guess, str) else [g[::-1] for g in guess]
    groups = [blocks.carries for blocks in structure]
    loop = ScanParams(closed, 0, len(init), length, False).loop(program)
    reports = []
    states = {}
    errors = {}
    known_to = {}

    def solve(number: int, part: GroupFunction, first: list[Any]) -> list[Any]:
        blocks = structure[number]
        values = jax.tree.map(
            lax.stop_gradient, (list(program.consts), list(init), list(xs), states)
        )
        radii = InputRadii(
            *(radii_of_inputs(loop, part.stacked, *values, off) for off in (errors, known_to))
        )
        # Without a bound there would be a scale that admits any state.
        radii = radii._replace(
            rounding=jax.tree.map(lambda v: jnp.where(jnp.isfinite(v), v, 0), radii.rounding)
        )
        first_guess = None if isinstance(guess, str) else [guess[i] for i in blocks.carries]
        diagonal = options.jacobian == "diagonal" and blocks.block > 1
        step = _StackedStep(part, blocks, first, radii, diagonal)
        solved, report = _solve(step, first_guess, length, options, by_steps)
        reports.append(report[:4])
        if not by_steps:
            states.update(zip(blocks.carries, solved))
            for off, joined in zip((errors, known_to), report[4:]):
                off.update(zip(blocks.carries, blocks.part(joined, 1)))
        return solved

    (last, ys), ordered = solve_in_order(loop, groups, solve, program.consts, init, xs, length)
    if ys and not by_steps:
        arguments = (
            lowered.consts,
            list(init),
            ordered,
            list(xs),
            ys,
            [errors[i] for i in range(len(init))],
        )
        consts, *arguments = jax.tree.map(lax.stop_gradient, arguments)
        reports.append(
            _outputs_report(replace(lowered, consts=consts), *arguments, options=options)
        )
    if reverse:
        ys = [y[::-1] for y in ys]
        ordered = [state[::-1] for state in ordered]
    return Solution(last, ys, ordered, reports)


def _check_sizes(
    structure: Sequence[Blocks], init: Sequence[Any], length: int, options: Newton
) -> None:
    for group in structure:
        itemsize = max(4, *(init[i].dtype.itemsize for i in group.carries))
        rows = 1 if options.jacobian == "diagonal" else group.block
        needed = length * itemsize * rows * sum(jaxprs.elements(shape) for shape in group.shapes)
        if needed > options.most_bytes:
            m = group.block
            raise ScanError(
                _REFUSED.format(
                    f"its Jacobians, {m} x {m} for each of {length} steps, need {needed:,} bytes, and "
                    f"Newton(most_bytes=...) allows {options.most_bytes:,}; Newton(jacobian='diagonal') needs 1/{m} of them"
                )
            )


# One group of carries -------------------------------------------------------------------------------------------------


class InputRadii(NamedTuple):
    """How far the stacks that a group reads may be off, for each of them; None: it depends on no other carry.

    Attributes:
        errors: with the bounds of the states of earlier groups.
        rounding: as the loop itself knows these states, to a unit of the last place of their scales.
    """

    errors: list[Any]
    rounding: list[Any]


@dataclass(frozen=True)
class _StackedStep:
    """The step of a group of carries, at all times.

    Attributes:
        part: the part of the step that makes them.
        blocks: how they are vectors.
        init: the first carries.
        radii: those of the stacks that are computed from carries of earlier groups.
        diagonal: only the diagonal of the Jacobian is used.
    """

    part: GroupFunction
    blocks: Blocks
    init: list[Any]
    radii: Any
    diagonal: bool

    def at(self, consts: Any, stacks: Any, init: Any, radii: InputRadii | None) -> _StackedStep:
        return replace(
            self, part=replace(self.part, consts=consts, stacks=stacks), init=init, radii=radii
        )

    def old(self, states: Values) -> list[Any]:
        """Returns the carries before each step."""
        return [jaxprs.shifted(s, h, False) for s, h in zip(states, self.init)]

    def new(self, old: Values) -> list[Any]:
        """Returns the new carries of all steps from the old ones."""
        return self.each(lambda consts, stack, old: self.part.fn(consts, stack, old), old)

    def each(self, fn: Callable, old: Values, *more: Any) -> Any:
        """Returns `fn(consts, stack, old, *more)` of all steps."""
        consts = self.part.consts
        return jax.vmap(lambda stack, old, *more: fn(consts, stack, old, *more))(
            self.part.stacks, list(old), *more
        )

    def join(self, leaves: Values) -> jax.Array:
        """Returns carries as vectors [T, A, M], in float32 or wider."""
        dtype = jnp.result_type(jnp.float32, *leaves)
        return self.blocks.join([leaf.astype(dtype) for leaf in leaves], 1)

    def split(self, joined: jax.Array) -> list[Any]:
        """The inverse of `join`, with the dtypes of the carries."""
        return [leaf.astype(h.dtype) for leaf, h in zip(self.blocks.part(joined, 1), self.init)]

    def slopes(self, old: Values) -> jax.Array:
        """Returns the Jacobians of all steps, [T, A, M, M]; or their diagonals, [T, A, M]."""
        blocks = self.blocks
        wide = jnp.result_type(jnp.float32, *old)

        def one(consts: Values, stack: Values, old: Values) -> jax.Array:
            _, push = jax.linearize(lambda old: self.part.fn(consts, stack, old), list(old))

            def own(k: Any) -> jax.Array:
                return lax.dynamic_index_in_dim(
                    blocks.join(push(blocks.basis(k, old))), k, -1, keepdims=False
                )

            if self.diagonal:
                return jnp.moveaxis(lax.map(own, jnp.arange(blocks.block)), 0, -1).astype(wide)
            return blocks.jacobian(push, old).astype(wide)

        return self.each(one, old)

    def tangents(self, old: Values, moved: Values) -> list[Any]:
        """Returns the tangents of the states, from those that each step adds."""
        if self.diagonal:
            return self.tangents_by_steps(old, moved)
        # No state with a tangent is before the first step, and infinity times 0 is no number.
        slopes = self.slopes(old).at[0].set(0)
        is_finite = jnp.isfinite(slopes)

        def at_once(moved: Values) -> list[Any]:
            return self.split(rounds.solve(jnp.where(is_finite, slopes, 0), self.join(moved)))

        def by_steps(moved: Values) -> list[Any]:
            return self.tangents_by_steps(old, moved)

        return lax.cond(any_of_all(~is_finite), by_steps, at_once, list(moved))

    def tangents_by_steps(self, old: Values, moved: Values) -> list[Any]:
        """Returns what `tangents` does, without Jacobians."""

        def step(d: list[Any], slices: Any) -> tuple[list[Any], list[Any]]:
            stack, old, b = slices
            pushed = jax.jvp(
                lambda old: self.part.fn(self.part.consts, stack, old), (list(old),), (d,)
            )[1]
            now = [p + v for p, v in zip(pushed, b)]
            return now, now

        first = [m[0] for m in moved]
        stacks = jax.tree.map(lambda v: v[1:], (self.part.stacks, list(old), list(moved)))
        later = lax.scan(step, first, stacks)[1]
        return [jnp.concatenate([m[:1], rest]) for m, rest in zip(moved, later)]

    def by_steps(self, length: int) -> tuple[list[Any], Any]:
        """Returns the states, one after the other, and what an iteration would report."""

        def step(h: list[Any], stack: Any) -> tuple[list[Any], list[Any]]:
            new = self.part.fn(self.part.consts, stack, h)
            return new, new

        zero = jnp.zeros(())
        states = lax.scan(step, self.init, self.part.stacks, length)[1]
        return states, (jnp.int32(0), zero, zero, jnp.asarray(True), zero, zero)


def _solve(
    step: _StackedStep, guess: Any, length: int, options: Newton, by_steps: bool
) -> tuple[list[Any], Any]:
    """Returns the states of a group, with derivatives, and what was done."""

    arguments = step.part.consts, step.part.stacks, step.init, step.radii, guess
    # JAX keeps the rule of the derivative, which must not keep the tracers of this call.
    step = step.at(None, None, None, None)

    @jax.custom_jvp
    def states_of(consts: Any, stacks: Any, init: Any, radii: Any, guess: Any) -> Any:
        here = step.at(consts, stacks, init, radii)
        return here.by_steps(length) if by_steps else _Iteration(here, options).run(guess, length)

    @states_of.defjvp
    @jaxprs.with_promotion
    def _(primals: Any, tangents: Any) -> Any:
        states, report = states_of(*primals)

        def step_from(consts: Any, stacks: Any, init: Any) -> list[Any]:
            here = step.at(consts, stacks, init, None)
            return here.new(here.old(states))

        _, moved = jax.jvp(step_from, primals[:3], tangents[:3])
        here = step.at(*primals[:4])
        nothing = jax.tree.map(
            lambda v: jnp.zeros(v.shape, jax.typeof(v).to_tangent_aval().dtype), report
        )
        return (states, report), (here.tangents(here.old(states), moved), nothing)

    return states_of(*arguments)


# Iteration ------------------------------------------------------------------------------------------------------------


class _Iteration:
    """The iteration for a group of carries, and its certificate."""

    def __init__(self, step: _StackedStep, options: Newton):
        self.step = step
        self.options = options
        self.eps = max(float(jnp.finfo(h.dtype).eps) for h in step.init)
        self.dtype = jnp.result_type(jnp.float32, *step.init)
        self.tolerance = _ULPS * self.eps if options.tolerance is None else options.tolerance
        stack, radii = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype),
            (step.part.stacks, step.radii.errors),
        )
        old = [jax.typeof(h) for h in step.init]
        self.enclosures = Enclosures.of(
            step.blocks, step.part.fn, step.part.consts, stack, radii, old
        )

    def enclosed(self, fn: Callable, radii: Values, old: Values, *more: Any) -> Any:
        """Returns what a function of enclosures makes of all steps, from stacks with these radii."""

        def at_one_time(
            consts: Values, stack: Values, old: Values, radii: Values, *more: Any
        ) -> Any:
            return fn([*map(Box, consts), *map(Box, stack, radii)], old, *more)

        return self.step.each(at_one_time, old, radii, *more)

    def run(self, guess: Any, length: int) -> tuple[list[Any], Any]:
        """Returns the states, and (iterations, residual, error, whether the states are certified, e, eps S [T, A, M])."""
        step = self.step
        options = self.options
        if guess is not None:
            states = [jnp.asarray(g, h.dtype) for g, h in zip(guess, step.init)]
        elif options.guess == "sweep":
            states = step.new([jnp.broadcast_to(h, (length, *h.shape)) for h in step.init])
        else:
            states = [jnp.zeros((length, *h.shape), h.dtype) for h in step.init]
        damping = jnp.asarray(0.0 if options.damping is None else options.damping, self.dtype)
        nothing = jnp.zeros_like(step.join(states))
        start = (
            jnp.int32(0),
            jnp.int32(0),
            states,
            jnp.asarray(jnp.inf, self.dtype),
            damping,
            nothing,
            (nothing,) * 3,
        )
        k, _, states, *_, (r, rounding, scale) = lax.while_loop(
            lambda state: state[1] < 2, self.iterate, start
        )
        radius = max(self.tolerance, self.eps**0.5) * scale
        error = jnp.full_like(r, jnp.inf)
        if self.enclosures is not None:
            old = step.old(states)
            before = rounds.shift_one_step(radius)
            radii = step.radii.errors
            added = (
                jnp.abs(r)
                + rounding
                + self.enclosed(self.enclosures.rounding, radii, old).astype(self.dtype)
            )
            if step.diagonal:
                error = bounds_in_radii(
                    *self.enclosed(self.enclosures.spread, radii, old, before), added, radius
                )
            else:
                error = bounds(*self.enclosed(self.enclosures.slopes, radii, old, before), added)
        same = [
            jnp.all(v == 0) for v in (r, *step.radii.errors) if v is not None
        ]  # every step is the loop's
        error = jnp.where(jnp.all(jnp.stack(same)), 0, error)
        certified = jnp.all(error <= radius)
        return states, (
            k,
            _largest(r / scale),
            _largest(error / scale),
            certified,
            error,
            self.eps * scale,
        )

    def residuals(self, states: Values) -> tuple[list[Any], Any, Any, Any, Any]:
        """Returns the new carries, the residual, what rounding may change, the Jacobian or its diagonal, and scales.

        The scale of an element at a step is that of its terms, and of what it still holds of earlier steps, [T, A, M].
        """
        step = self.step
        old = self.step.old(states)
        new = step.new(old)
        joined = step.join(states)
        if self.enclosures is None:  # then only residuals of 0 prove anything
            rounding = jnp.zeros_like(joined)
        else:
            rounding = self.enclosed(self.enclosures.rounding, step.radii.rounding, old).astype(
                self.dtype
            )
        slopes = step.slopes(old)
        limits = jnp.finfo(self.dtype)
        own = jnp.nan_to_num(jnp.abs(joined) + rounding / self.eps, nan=jnp.inf)
        # XLA multiplies by the reciprocal, which is a normal number then.
        own = jnp.clip(own, limits.tiny * _PART, limits.max / _PART)
        bounded_slopes = jnp.nan_to_num(jnp.clip(jnp.abs(slopes), 0, 1))
        if step.diagonal:
            scale = rounds.associative_max(bounded_slopes[..., None, None], own[..., None])[..., 0]
        else:
            scale = rounds.associative_max(bounded_slopes, own)
        return new, step.join(new) - joined, rounding, slopes, scale

    def update(
        self, states: list[Any], r: Any, slopes: Any, error: Any, damping: Any
    ) -> tuple[Any, Any]:
        """Returns the update, and the estimated error."""
        step = self.step
        slopes = (1 - damping) * slopes
        if not step.diagonal:
            d = rounds.associative_solve(slopes, r)
            return d, d
        # The update leaves out a part of the Jacobian, so the error has an iteration of its own, with all of it.
        pushed = jax.jvp(
            step.new, (step.old(states),), (step.split(rounds.shift_one_step(error)),)
        )[1]
        whole = r + step.join(pushed) - slopes * rounds.shift_one_step(error)
        d, error = (rounds.associative_solve([[slopes]], [b])[0] for b in (r, whole))
        return d, error

    def iterate(self, state: Any) -> Any:
        step = self.step
        tolerance = self.tolerance
        k, phase, states, residual_before, damping, error_before, _ = state
        new, r, rounding, slopes, scale = self.residuals(states)
        d, error = self.update(states, r, slopes, error_before, damping)
        residual = _largest(r / scale)
        done = (
            (residual <= tolerance)
            & (_largest(error / scale) <= max(tolerance, self.eps**0.75))
            & (damping == 0)
        )
        if self.options.damping is None:
            grew = ~(residual <= 2 * residual_before)
            damping = jnp.where(grew, (1 + damping) / 2, jnp.where(damping > 0.3, damping / 2, 0))
        else:
            damping = jnp.where(residual <= tolerance, 0.0, self.options.damping).astype(self.dtype)
        moved = step.split(step.join(states) + d)
        # Where an update overflows, the step itself is taken, or nothing is known.
        moved = [
            jnp.where(jnp.isfinite(m), m, jnp.where(jnp.isfinite(n), n, jnp.zeros_like(n)))
            for m, n in zip(moved, new)
        ]
        # The last update is made, too: it is known, and what is left after it is of the order of its square. Then one more
        # evaluation has the residuals of the states that are returned.
        moves = phase == 0
        states = [jnp.where(moves, m, s) for m, s in zip(moved, states)]
        k = k + (moves & ~done)
        phase = jnp.where(moves & ~done & (k < self.options.iterations), 0, phase + 1)
        return k, phase, states, residual, damping, error, (r, rounding, scale)


# Outputs ------------------------------------------------------------------------------------------------------------


def _outputs_report(
    step: jaxprs.Program,
    init: Values,
    states: Values,
    xs: Values,
    ys: Values,
    errors: Values,
    options: Newton,
) -> tuple[Any, Any, Any, Any]:
    """Returns (0, 0, error, whether the outputs are certified), from bounds of the errors of the states.

    The error of an output is measured in units of its largest element at any step, beyond what rounding alone may change. An
    output that is no floating-point number must be exact.
    """
    eps = max(float(jnp.finfo(h.dtype).eps) for h in init)
    old = [jaxprs.shifted(s, h, False) for s, h in zip(states, init)]
    before = [jaxprs.shifted(e, jnp.zeros(e.shape[1:], e.dtype), False) for e in errors]
    exact = jnp.all(jnp.stack([jnp.all(e == 0) for e in errors]))
    error = jnp.zeros(())
    certified = jnp.asarray(True)
    none = jnp.zeros(())
    try:
        bounded = of_outputs(step, old, states, xs, before, errors)
    except NotEnclosed:
        bounded = [(jnp.full(y.shape, jnp.inf), jnp.zeros(y.shape)) for y in ys]
    for y, (off, rounding) in zip(ys, bounded):
        if jnp.issubdtype(y.dtype, jnp.floating):
            own = max(eps, float(jnp.finfo(y.dtype).eps))
            most = max(_ULPS * own if options.tolerance is None else options.tolerance, own**0.5)
            size = jnp.max(
                jnp.where(jnp.isfinite(y), jnp.abs(y), 0), initial=jnp.finfo(y.dtype).tiny
            )
            off = jnp.where(off == 0, 0, off / (size.astype(off.dtype) + _ULPS * rounding / most))
        else:
            off = jnp.where(off == 0, 0, jnp.inf)
            most = 0.0
        off = jnp.where(exact, 0, _largest(off))
        error = jnp.maximum(error, off)
        certified = certified & (off <= most)
    return jnp.int32(0), none, error, certified


def _largest(v: jax.Array) -> jax.Array:
    """The largest absolute value; infinite if one is not a number."""
    return jnp.max(jnp.where(jnp.isnan(v), jnp.inf, jnp.abs(v)))
