"""GPU and TPU targets."""

from __future__ import annotations

from jrnn.executor import jaxprs
from jrnn.executor.loop import Loop
from jrnn.executor.mark import Options
from jrnn.executor.passes import associative, concatenate_cotangents, direct_views, distinct, split, widen_sums
from jrnn.executor.plan import LoopPlan, Target

PASSES = (direct_views, distinct, concatenate_cotangents)

# From how many steps on solving by rounds should be faster than a loop; not measured.
_SOLVING_PAYS = 64


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    """The plan of a loop on a GPU or a TPU."""
    seen = loop
    for rewrite in PASSES:
        loop = rewrite(loop)
    taken = split(loop)
    why = _not_solved(taken.core, options)
    if why is None:
        return LoopPlan(target, seen, taken, associative.Solved(taken.core), "associative")
    return LoopPlan(target, seen, taken, widen_sums(taken.core), "scan", notes=(f"not associative: {why}",))


def _not_solved(core: Loop, options: Options) -> str | None:
    """Why a loop is not solved by rounds, or None where it is."""
    if not jaxprs.is_known(core.length):
        return "the number of steps is left open"
    why = associative.refusal(core)
    if why is not None or options.executor == "associative":
        return why
    if options.executor == "scan":
        return "executor='scan' was asked for"
    if jaxprs.extent(core.length) < _SOLVING_PAYS:
        return f"fewer than {_SOLVING_PAYS} steps"
    if not associative.suits_bulk(core):
        return "values of a step are larger than what goes in and out of it"
    if not associative.is_bounded(core):
        return "its factors are not provably at most 1, so products of them could overflow"
    return None
