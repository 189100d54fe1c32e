"""The strategy "associative": loops that are affine with a diagonal Jacobian are solved in log T doubling steps.

On a CPU doubling steps cost more than they save. Only the coefficients are computed for all steps before the loop, and only
if that is asked for. On accelerators the loops of gradients are solved without being asked, because values of loops that
the caller wrote keep the order of sums of `jax.lax.scan`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jrnn import jaxprs
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.times import Estimate
from jrnn.loops.ir import Loop, Results, ScanParams, Unsupported, Values
from jrnn.loops.ir.description import Description, described
from jrnn.loops.passes import split
from jrnn.loops.passes.moves import is_computation
from jrnn.loops.passes.sums import dot_smaller_first
from jrnn.loops.plan import Candidate
from jrnn.loops.strategies.context import Context
from jrnn.loops.strategies.nodes import Split, Steps, steps_with_wide_sums
from jrnn.loops.strategies.try_few_kernels import split_for_accelerator

NAME = "associative"
_COMPARED_STEPS = 5  # for which the solution is compared with the loop
_MIN_STEPS = 64  # of the associative solver; an estimate, not measured


@dataclass(frozen=True)
class AssociativeSolve:
    """Solves an affine loop for all steps in log T doubling steps. It is chosen without an estimate."""

    loop: Loop

    def run(
        self,
        consts: Values,
        init: Values,
        xs: Values,
        length: Any,
    ) -> Results:
        from jrnn.loops.affine.associative import solve_loop

        return solve_loop(self.loop, consts, init, xs, length)

    def estimate(self, estimator: Estimator) -> Estimate:
        return Estimate(0.0, 0)

    def describe(self) -> Description:
        return described(self.loop)


def try_associative(context: Context) -> Sequence[Candidate]:
    """Returns the loop solved for all steps at once, or on a CPU with its coefficients computed before it."""
    if context.target.platform != "cpu":
        split_loop = split_for_accelerator(context)
        why = _why_not_solved(split_loop.residual, context)
        if why is not None:
            raise Unsupported(why)
        return [context.candidate(NAME, Split(split_loop, AssociativeSolve(split_loop.residual)))]
    if not context.is_requested(NAME):
        return []
    from jrnn.loops.affine import associative

    why = associative.refusal(context.split(None).residual)
    if why is not None:
        raise Unsupported(why)
    split_loop = split(context.loop, is_computation, contract=dot_smaller_first)
    node = Split(split_loop, Steps(split_loop.residual))
    # Multiplications and additions that stay in a loop keep their order.
    finish = functools.partial(node.with_inner, steps_with_wide_sums)
    return [context.candidate(NAME, node, finish=finish)]


def refusal(loop: Loop) -> str | None:
    """Returns why a traced loop cannot be solved, or None."""
    from jrnn.loops.affine import associative

    return associative.refusal(split(loop).residual)


def _why_not_solved(residual: Loop, context: Context) -> str | None:
    """Returns the reason why a loop is not solved for all steps at once, or None."""
    from jrnn.loops.affine import associative

    if not jaxprs.is_known(residual.length):
        return "the number of steps is symbolic"
    if context.is_requested(NAME):
        why = associative.refusal(residual)
    else:
        why = associative.why_not_automatic(residual, _MIN_STEPS)
        if why is None and not context.provenance.of_gradient(residual.reverse):
            why = "the order of its sums would change; ask for it by executor='associative'"
        if why is None and not associative.is_bounded(residual):
            why = "its factors are not provably at most 1, so products of them could overflow"
    if why is None and context.options.verify:
        from jrnn.loops.ir import derived

        short = ScanParams.of_loop(residual, _COMPARED_STEPS)
        agrees, note = derived.validate(short, "in rounds", _solved)
        return None if agrees else note
    return why


def _solved(scan: ScanParams) -> Any:
    """Returns what solves a loop at once, for its comparison with the loop; None if it is not affine."""
    from jrnn.loops.affine import associative

    loop, constants = scan.inlined(jaxprs.LOWERED_CALLS)
    if associative.refusal(loop) is not None:
        return None

    def run(consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]) -> Any:
        return AssociativeSolve(loop).run([*constants, *consts], init, xs, scan.length)

    return run
