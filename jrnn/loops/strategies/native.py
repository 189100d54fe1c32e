"""The strategy "native": the core is one call of the kernel for CPUs (`kernels/native/`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jrnn import jaxprs
from jrnn.jaxprs import Eqn
from jrnn.loops.costs.equation_costs import LARGE_PRODUCT, is_matvec, is_outer
from jrnn.loops.ir import Refused
from jrnn.loops.passes import Moves
from jrnn.loops.strategies.arithmetic import Arithmetic
from jrnn.loops.strategies.candidates import Candidate
from jrnn.loops.strategies.nodes import Split
from jrnn.loops.strategies.problem import Problem

NAME = "native"
_LONGEST = 400  # equations of a step for which the kernel is tried


def propose(problem: Problem) -> Sequence[Candidate]:
    """Returns calls of the kernel, with products of inputs in the loop, or before it."""
    is_requested = problem.options.executor == NAME
    if not is_requested and not _may_pay(problem):
        return ()
    target = problem.target
    movable = problem.movable
    if target.exported or target.devices > 1:
        where = (
            "exported"
            if target.exported
            else "divided among devices; put the scan inside of jax.shard_map"
        )
        return _none(f"the program is {where}", is_requested)
    from jrnn.loops.kernels.native.runner import split_for_kernel

    candidates = {}
    refusal = ""
    labels = {
        Moves(accumulate=movable.accumulate): NAME,
        movable: "native, all else outside",
    }  # perhaps the same moves
    for moves, label in labels.items():
        try:
            fission, kernel = split_for_kernel(functools.partial(problem.split, moves))
        except Refused as why:
            refusal = str(why)
            continue
        if is_requested or kernel.is_worth_a_call(target.machine):
            candidates[moves] = problem.candidate(Split(fission, kernel), label)
    return [*candidates.values()] or _none(refusal, is_requested)


def _none(why: str, is_requested: bool) -> Sequence[Candidate]:
    if is_requested:
        raise Refused(why)
    return ()


def _may_pay(problem: Problem) -> bool:
    """Returns False for loops without products for the kernel, which XLA cannot look into, and those that are one kernel."""
    others = (
        candidate.node.inner
        for candidate in problem.candidates
        if isinstance(candidate.node, Split)
    )
    if any(isinstance(inner, Arithmetic) and inner.is_one_kernel for inner in others):
        return False  # a call would pay for each of its small products
    return len(problem.loop.eqns) <= _LONGEST and any(map(_is_for_native, problem.loop.eqns))


def _is_for_native(eqn: Eqn) -> bool:
    """Returns True for a product that XLA:CPU calls, or that is long."""
    is_product = eqn.primitive.name == "dot_general" and not is_outer(eqn)
    return is_product and (not is_matvec(eqn) or jaxprs.operations(eqn) >= LARGE_PRODUCT)
