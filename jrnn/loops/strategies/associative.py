"""The strategy "associative": loops that are affine with a diagonal Jacobian are solved in log T rounds.

On a CPU rounds cost more than they save. Only the coefficients are computed for all steps before the loop, and only if that
is asked for. On accelerators the loops of gradients are solved in rounds without being asked, because values of loops that
the caller wrote keep the order of sums of `jax.lax.scan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jrnn import jaxprs
from jrnn.loops.affine import associative
from jrnn.loops.ir import Loop, Refused, ScanParams
from jrnn.loops.passes import split
from jrnn.loops.passes.fission import is_computation
from jrnn.loops.passes.sums import dot_smaller_first
from jrnn.loops.strategies.accelerators import division
from jrnn.loops.strategies.candidates import Candidate
from jrnn.loops.strategies.nodes import (
    AssociativeSolve,
    Node,
    Split,
    Steps,
    map_leaf,
    steps_with_wide_sums,
)
from jrnn.loops.strategies.problem import Problem

NAME = "associative"
_COMPARED = 5  # steps for which a solution in rounds is compared with the loop
_SOLVING_PAYS = (
    64  # the minimum number of steps for the associative solver; an estimate, not measured
)


def propose(problem: Problem) -> Sequence[Candidate]:
    """Returns the loop solved in rounds, or on a CPU with its coefficients computed before it."""
    is_requested = problem.options.executor == NAME
    if problem.target.platform == "cpu":
        if not is_requested:
            return ()
        if (why := associative.refusal(problem.split(None).core)) is not None:
            raise Refused(why)
        fission = split(problem.loop, is_computation, contract=dot_smaller_first)
        return [problem.candidate(Split(fission, Steps(fission.core)))]
    fission = division(problem)
    if (why := _not_solved(fission.core, problem, is_requested)) is not None:
        raise Refused(why)
    return [problem.candidate(Split(fission, AssociativeSolve(fission.core)))]


def finish(problem: Problem, node: Any) -> Node:
    """Returns the node to run: multiplications and additions that stay in a loop keep their order."""
    return map_leaf(
        node, lambda leaf: steps_with_wide_sums(leaf.loop) if isinstance(leaf, Steps) else leaf
    )


def _not_solved(core: Loop, problem: Problem, is_requested: bool) -> str | None:
    """Returns the reason why a loop is not solved in rounds, or None."""
    of_gradient = problem.provenance.of_gradient(core.reverse)
    if not jaxprs.is_known(core.length):
        return "the number of steps is symbolic"
    why = (
        associative.refusal(core)
        if is_requested
        else associative.why_not_automatic(core, _SOLVING_PAYS)
    )
    if why is None and not is_requested and not of_gradient:
        return "the order of its sums would change; ask for it by executor='associative'"
    if why is None and not is_requested and not associative.is_bounded(core):
        return "its factors are not provably at most 1, so products of them could overflow"
    if why is None and problem.options.verify:
        from jrnn.loops.ir import derived

        agrees, note = derived.validate(
            ScanParams.of_loop(core, _COMPARED), "in rounds", _in_rounds
        )
        return None if agrees else note
    return why


def _in_rounds(scan: ScanParams) -> Any:
    program = jaxprs.inlined(scan.jaxpr, jaxprs.LOWERED_CALLS)
    loop = scan.loop(program)
    if associative.refusal(loop) is not None:
        return None
    return lambda consts, init, xs: AssociativeSolve(loop).run(
        [*program.consts, *consts], init, xs, scan.length
    )
