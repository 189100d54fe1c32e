"""The strategy "native": the loop that remains is one call of the kernel for CPUs (`kernels/native/`)."""

from __future__ import annotations

from collections.abc import Sequence

from jrnn import jaxprs
from jrnn.jaxprs import Eqn
from jrnn.loops.costs.equation_costs import LARGE_PRODUCT, is_matvec, is_outer
from jrnn.loops.ir import Loop, Unsupported
from jrnn.loops.kernels import native
from jrnn.loops.passes import Moves, split
from jrnn.loops.plan import Candidate
from jrnn.loops.strategies.context import Context
from jrnn.loops.strategies.nodes import Split
from jrnn.loops.strategies.try_arithmetic import Arithmetic

NAME = "native"
_MAX_EQUATIONS = 400  # of a step for which the kernel is tried


def try_native(context: Context) -> Sequence[Candidate]:
    """Returns calls of the kernel, with products of inputs in the loop, or before it."""
    is_requested = context.is_requested(NAME)
    if not is_requested and not _may_pay(context):
        return []
    elsewhere = _runs_elsewhere(context)
    if elsewhere:
        return _nothing(elsewhere, is_requested)
    from jrnn.loops.kernels.native import library, runner
    from jrnn.loops.kernels.native.program import program_of

    can_leave = context.movable
    labels = {
        Moves(accumulate=can_leave.accumulate): NAME,
        can_leave: "native, everything else moved",  # perhaps the same moves
    }
    candidates = []
    refusal = ""
    for moves, label in labels.items():
        try:
            library.require()
            split_loop = runner.with_transposes(context.split(moves, runner.contract))
            kernel = runner.Native(program_of(split_loop.residual))
        except Unsupported as why:
            refusal = str(why)
            continue
        if is_requested or kernel.is_worth_a_call(context.target.machine):
            candidates.append(context.candidate(NAME, Split(split_loop, kernel), label))
    return candidates or _nothing(refusal, is_requested)


def refusal(loop: Loop) -> str | None:
    """Returns why a traced loop cannot run so on any CPU, or None."""
    return native.refusal(split(loop).residual)


def _runs_elsewhere(context: Context) -> str:
    """Returns why a program cannot call a kernel of this process, or ""."""
    if context.target.exported:
        return "the program is exported"
    if context.target.devices > 1:
        return "the program is divided among devices; put the scan inside of jax.shard_map"
    return ""


def _nothing(why: str, is_requested: bool) -> Sequence[Candidate]:
    if is_requested:
        raise Unsupported(why)
    return []


def _may_pay(context: Context) -> bool:
    """Returns False for loops without products for the kernel, which XLA cannot look into, and for single kernels."""
    for candidate in context.candidates:
        inner = candidate.node.inner if isinstance(candidate.node, Split) else None
        if isinstance(inner, Arithmetic) and inner.is_one_kernel:
            return False  # a call would pay for each of its small products
    eqns = context.loop.eqns
    return len(eqns) <= _MAX_EQUATIONS and any(map(_is_for_native, eqns))


def _is_for_native(eqn: Eqn) -> bool:
    """Returns True for a product that XLA:CPU calls, or that is long."""
    if eqn.primitive.name != "dot_general" or is_outer(eqn):
        return False
    return not is_matvec(eqn) or jaxprs.operations(eqn) >= LARGE_PRODUCT
