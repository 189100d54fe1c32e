"""Newton's method for all steps of a loop at once: iteration, certificate, fallback, and exact derivatives.

The states h of `h[t] = f(h[t-1], x[t])` are the root of the residuals `r[t] = f(h[t-1], x[t]) - h[t]`. An update d solves
`d[t] = J[t] d[t-1] + r[t]`, a linear recurrence with the Jacobians of f (`affine/rounds.py`). Carries that read each other
are a group, which is solved after the groups that it reads (`iteration.py`). The result counts only with a certificate
(`certificate.py`), which bounds the error of each element; without one, the caller runs the loop.

Derivatives do not depend on the iteration. The tangents of the states solve one linear recurrence, cotangents its adjoint.

Sources: Lim et al., "Parallelizing non-linear sequential models over the sequence length" (DEER), 2024; Gonzalez et al.,
"Towards scalable and stable parallelization of nonlinear RNNs" (ELK), 2024.

Shapes: T time, A the batch axes of the Jacobian, M the size of its blocks (`affine/blocks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.loops.affine.blocks import Blocks, blocks_of, why_no_jacobian
from jrnn.loops.affine.carries import GroupFunction, Values, solve_in_order
from jrnn.loops.ir import Loop, ScanParams
from jrnn.loops.newton.certificate import (
    are_zero,
    before_each_step,
    errors_before,
    input_radii,
    of_outputs,
)
from jrnn.loops.newton.enclosure import NotEnclosed
from jrnn.loops.newton.iteration import (
    DEFAULT_ULPS,
    GroupReport,
    InputRadii,
    Iteration,
    Report,
    Stacked,
    StackedStep,
    largest,
    tolerance_of,
)
from jrnn.loops.newton.options import Newton

_REFUSED = "scan: executor 'newton' cannot run this step ({}); use 'auto' or 'scan'"


@dataclass(frozen=True)
class Solution:
    """What a loop computes, as flat lists.

    Attributes:
        carry: the last carry.
        ys: the outputs, [T, ...].
        states: the carries after every step, [T, ...].
        reports: what was done, for each group of carries and for the outputs.
    """

    carry: list[Array]
    ys: list[Array]
    states: list[Array]
    reports: list[Report]


@jaxprs.with_promotion
def run(
    step: Callable[[list[Array], list[Array]], Values],
    init: Values,
    xs: Values,
    length: int,
    reverse: bool,
    options: Newton,
    by_steps: bool = False,
) -> Solution:
    """Runs a loop of flat lists: `step(carry, x) -> [*carry, *y]`.

    Args:
        step: the step; it may close over values that are differentiated.
        init, xs: the initial carry, and inputs [T, ...].
        length: T, at least 1.
        reverse: whether time runs backwards.
        options: the options; `guess` is a list of states [T, ...], or a name.
        by_steps: compute the states one after the other; the derivatives are the same.
    """
    x_types = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs]
    closed = jax.make_jaxpr(lambda carry, x: step(list(carry), list(x)))(list(init), x_types)
    why = why_no_jacobian(closed, init)
    if why is not None:
        raise ScanError(_REFUSED.format(why))
    lowered = jaxprs.inlined(closed, jaxprs.LOWERED_CALLS)
    structure = blocks_of(lowered, len(init))
    _check_sizes(structure, init, length, options)
    program = jaxprs.inlined(closed)
    loop = ScanParams(closed, 0, len(init), length, False).loop(program)
    if reverse:
        xs = _reversed(xs)
        if not isinstance(options.guess, str):
            options = replace(options, guess=_reversed(options.guess))

    groups = _Groups(loop, structure, program.consts, init, xs, options, by_steps)
    carries = [blocks.carries for blocks in structure]
    (last, ys), states = solve_in_order(
        loop, carries, groups.solve, program.consts, init, xs, length
    )
    if ys and not by_steps:
        groups.reports.append(_outputs_report(lowered, groups, states, ys))
    if reverse:
        ys = _reversed(ys)
        states = _reversed(states)
    return Solution(last, ys, states, groups.reports)


def _reversed(arrays: Values) -> list[Array]:
    return [array[::-1] for array in arrays]


def _check_sizes(structure: Sequence[Blocks], init: Values, length: int, options: Newton) -> None:
    """Raises a ScanError if the Jacobians take more memory than the options allow."""
    for group in structure:
        m = group.block
        itemsize = max(4, *(init[i].dtype.itemsize for i in group.carries))
        rows = 1 if options.jacobian == "diagonal" else m
        needed = length * itemsize * rows * sum(map(jaxprs.elements, group.shapes))
        if needed > options.most_bytes:
            raise ScanError(
                _REFUSED.format(
                    f"its Jacobians, {m} x {m} for each of {length} steps, need {needed:,} bytes, and "
                    f"Newton(most_bytes=...) allows {options.most_bytes:,}; Newton(jacobian='diagonal') needs 1/{m} of them"
                )
            )


# Groups of carries ----------------------------------------------------------------------------------------------------


class _Groups:
    """Solves the groups of a loop, one after the other.

    Attributes:
        loop, consts, init, xs: the loop and its arguments.
        structure: the groups.
        options, by_steps: as in `run`.
        reports: of the groups that are solved.
        states: by position, the carries after every step.
        errors: by position, bounds of the errors of the states.
        rounding: by position, what the loop itself knows of the states.
    """

    def __init__(
        self,
        loop: Loop,
        structure: Sequence[Blocks],
        consts: Values,
        init: Values,
        xs: Values,
        options: Newton,
        by_steps: bool,
    ):
        self.loop = loop
        self.structure = structure
        self.consts = list(consts)
        self.init = list(init)
        self.xs = list(xs)
        self.options = options
        self.by_steps = by_steps
        self.reports: list[Report] = []
        self.states: dict[int, Array] = {}
        self.errors: dict[int, Array] = {}
        self.rounding: dict[int, Array] = {}

    def solve(self, number: int, part: GroupFunction, first: list[Array]) -> Stacked:
        """Returns the states of a group."""
        blocks = self.structure[number]
        radii = self._input_radii(part)
        guess = None
        if not isinstance(self.options.guess, str):
            guess = jaxprs.take(self.options.guess, blocks.carries)
        diagonal = self.options.jacobian == "diagonal" and blocks.block > 1
        step = StackedStep(part, blocks, first, radii, diagonal)
        solved, of_group = _solve(step, guess, self.loop.length, self.options, self.by_steps)
        self.reports.append(of_group.report)
        if not self.by_steps:
            self.states.update(zip(blocks.carries, solved))
            self.errors.update(zip(blocks.carries, blocks.part(of_group.errors, 1)))
            self.rounding.update(zip(blocks.carries, blocks.part(of_group.rounding, 1)))
        return solved

    def _input_radii(self, part: GroupFunction) -> InputRadii:
        """Returns how far what a group reads of earlier groups may be off."""
        values = self.consts, self.init, self.xs, self.states
        consts, init, xs, states = jax.tree.map(lax.stop_gradient, values)

        def radii(errors):
            return input_radii(self.loop, part.stacked, consts, init, xs, states, errors)

        errors = radii(self.errors)
        # Without a bound there would be a scale that admits any state.
        rounding = jax.tree.map(_finite_or_zero, radii(self.rounding))
        return InputRadii(errors, rounding)


def _finite_or_zero(v: Array) -> Array:
    return jnp.where(jnp.isfinite(v), v, 0)


def _solve(
    step: StackedStep, guess: Values | None, length: int, options: Newton, by_steps: bool
) -> tuple[Stacked, GroupReport]:
    """Returns the states of a group, with derivatives, and what was done."""

    arguments = step.part.consts, step.part.stacks, step.init, step.radii, guess
    # JAX keeps the rule of the derivative, which must not keep the tracers of this call.
    step = step.at(None, None, None, None)

    @jax.custom_jvp
    def states_of(consts, stacks, init, radii, guess):
        here = step.at(consts, stacks, init, radii)
        return here.by_steps(length) if by_steps else Iteration(here, options).run(guess, length)

    @states_of.defjvp
    @jaxprs.with_promotion
    def _(primals, tangents):
        states, report = states_of(*primals)

        def new(consts, stacks, init):
            here = step.at(consts, stacks, init, None)
            return here.new(here.old(states))

        _, added = jax.jvp(new, primals[:3], tangents[:3])
        here = step.at(*primals[:4])
        tangents_of_states = here.tangents(here.old(states), added)
        return (states, report), (tangents_of_states, jax.tree.map(_zero_tangent, report))

    return states_of(*arguments)


def _zero_tangent(v: Array) -> Array:
    return jnp.zeros(v.shape, jax.typeof(v).to_tangent_aval().dtype)


# Outputs ------------------------------------------------------------------------------------------------------------


def _outputs_report(step: jaxprs.Program, groups: _Groups, states: Values, ys: Values) -> Report:
    """Returns the largest error of the outputs, and whether they are certified, from bounds of the errors of the states.

    The error of an output is measured in units of its largest element at any step, beyond what rounding alone may change. An
    output that is no floating-point number must be exact.

    Args:
        step: the step, with all calls inlined.
        groups: the groups of carries, which are solved.
        states: the carries after every step.
        ys: the outputs.
    """
    errors = jaxprs.take(groups.errors, range(len(states)))
    values = step.consts, groups.init, states, groups.xs, ys, errors
    consts, init, states, xs, ys, errors = jax.tree.map(lax.stop_gradient, values)
    step = replace(step, consts=consts)
    old = before_each_step(states, init)
    before = errors_before(errors)
    exact = are_zero(errors)
    try:
        bounded = of_outputs(step, old, states, xs, before, errors)
    except NotEnclosed:
        bounded = [(jnp.full(y.shape, jnp.inf), jnp.zeros(y.shape)) for y in ys]

    eps = max(float(jnp.finfo(h.dtype).eps) for h in init)
    largest_error = jnp.zeros(())
    certified = jnp.asarray(True)
    for y, (error, rounding) in zip(ys, bounded):
        if jnp.issubdtype(y.dtype, jnp.floating):
            y_eps = max(eps, float(jnp.finfo(y.dtype).eps))
            limit = max(tolerance_of(groups.options, y_eps), y_eps**0.5)
            sizes = jnp.where(jnp.isfinite(y), jnp.abs(y), 0)
            size = jnp.max(sizes, initial=jnp.finfo(y.dtype).tiny).astype(error.dtype)
            error = jnp.where(error == 0, 0, error / (size + DEFAULT_ULPS * rounding / limit))
        else:
            limit = 0.0
            error = jnp.where(error == 0, 0, jnp.inf)
        error = jnp.where(exact, 0, largest(error))
        largest_error = jnp.maximum(largest_error, error)
        certified = certified & (error <= limit)
    return Report(jnp.int32(0), jnp.zeros(()), largest_error, certified)
