"""What GPUs and TPUs have in common, and the TPU backend: a loop runs in chunks, is solved in rounds, or stays a loop.

Loops over matrix states run in chunks, with a gradient or without. Values of other loops that the caller wrote keep the
order of sums of `jax.lax.scan`. So only the loops of gradients are solved in rounds without being asked, and only their sums
leave the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jrnn import jaxprs
from jrnn.loops.affine import associative
from jrnn.loops.ir import Loop, Options, ScanParams
from jrnn.loops.passes import Fission, movable, split
from jrnn.loops.passes.canonical import canonical
from jrnn.loops.strategies import LoopPlan, Solved, Split, Target, by_steps, converted
from jrnn.loops.strategies.backend import Backend

_COMPARED = 5  # steps for which a solution in rounds is compared with the loop
# A loop may stack so many times the bytes of its inputs and outputs to do work after it. Reading a matrix state after the
# loop would stack the state of each step: 4.3 GB where `jax.lax.scan` takes none (2048 x 64 x 64 x 64).
_MOST_STACKED = 8
_SOLVING_PAYS = 64  # the minimum number of steps for the associative solver; an estimate, not measured


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    """Returns the plan of the canonical form of a loop on a GPU or a TPU."""
    from jrnn.loops.strategies import chunks as choice

    in_chunks = choice.forward(loop, target, options)
    if in_chunks is not None:
        return in_chunks
    fission = split(loop)
    moves = movable(fission, floating_sums=not _keeps_order(loop, options))
    if _stacks_much(fission):
        moves = replace(moves, late=frozenset())
    fission = split(loop, moves=moves)
    why = _not_solved(fission.core, options)
    if why is None:
        return LoopPlan(target, loop, Split(fission, Solved(fission.core)), "associative")
    node = Split(fission, by_steps(fission.core))
    return LoopPlan(target, loop, node, "scan", notes=(f"not associative: {why}",))


def _stacks_much(fission: Fission) -> bool:
    """Returns True if a loop stacks many more bytes for the work after it than it reads and writes."""
    whole, core = fission.loop, fission.core
    stacked = sum(jaxprs.nbytes(v) for v in core.ys if v not in whole.ys)
    return stacked > _MOST_STACKED * sum(map(jaxprs.nbytes, (*whole.xs, *whole.ys)))


def _keeps_order(loop: Loop, options: Options) -> bool:
    """Returns True for loops whose floating-point sums stay in the loop: those that the caller wrote."""
    return not options.of_gradient(loop.reverse)


def _not_solved(core: Loop, options: Options) -> str | None:
    """Returns the reason why a loop is not solved in rounds, or None."""
    if not jaxprs.is_known(core.length):
        return "the number of steps is symbolic"
    why = associative.declined(core, options.executor, _SOLVING_PAYS)
    if why is None and options.executor != "associative" and not options.of_gradient(core.reverse):
        return "the order of its sums would change; ask for it by executor='associative'"
    if why is None and options.executor != "associative" and not associative.is_bounded(core):
        return "its factors are not provably at most 1, so products of them could overflow"
    if why is None and options.verify:
        from jrnn.loops.ir import derived

        few = ScanParams(core.closed(), len(core.consts), len(core.carry), _COMPARED, core.reverse)
        agrees, note = derived.verdict(few, "in rounds", _in_rounds)
        return None if agrees else note
    return why


def _in_rounds(scan: ScanParams) -> Any:
    program = jaxprs.opened(scan.jaxpr, jaxprs.LOWERED_CALLS)
    loop = scan.loop(program)
    if associative.refusal(loop) is not None:
        return None
    return lambda consts, init, xs: Solved(loop).run([*program.consts, *consts], init, xs, scan.length)


def on_canonical(plan: Callable[[Loop, Target, Options], LoopPlan]) -> Callable[[Loop, Target, Options], LoopPlan]:
    """Returns a planner of any loop, from one of canonical loops."""

    def planned(loop: Loop, target: Target, options: Options) -> LoopPlan:
        form, conversions = canonical(loop, target.devices)
        of_form = plan(form, target, options)
        return replace(of_form, loop=loop, node=None if of_form.node is None else converted(of_form.node, conversions))

    return planned


BACKEND = Backend(on_canonical(plan), ("tpu",))
