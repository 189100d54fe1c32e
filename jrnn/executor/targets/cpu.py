"""The CPU target: what XLA:CPU makes fast, and its limits. docs/notes/cpu_log.md has the measurements."""

from __future__ import annotations

from jrnn.executor import jaxprs
from jrnn.executor.loop import Loop
from jrnn.executor.mark import Options
from jrnn.executor.passes import (
    Fission,
    activate_together,
    associative,
    batch_first,
    columns,
    concatenate_cotangents,
    contraction,
    direct_views,
    distinct,
    fission,
    gates,
    slice_apart,
    split,
    widen_sums,
)
from jrnn.executor.plan import LoopPlan, Runner, Target

PASSES = (direct_views, distinct, concatenate_cotangents, batch_first, columns)

# Bytes of arrays that `lax.scan` would not make, beyond which the loop runs in chunks; and the bytes of one chunk.
_BUDGET = 32 << 20
_CHUNK = 1 << 20
_STEPS = 12  # fewer steps a chunk make its contractions too small to be fast


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    """The plan of a loop on a CPU."""
    seen = loop
    for rewrite in PASSES:
        loop = rewrite(loop)
    taken = split(loop, contract=contraction.smaller_first)
    why = _not_solved(taken.core, options)
    if why is None:
        taken = split(loop, fission.computation, contract=contraction.smaller_first)
        return LoopPlan(target, seen, taken, widen_sums(taken.core), "associative", _chunk(taken))
    core = taken.core
    if gates.better_apart(core):
        inner: Runner = split(slice_apart(core), fission.slices)
    else:
        inner = widen_sums(activate_together(core))
    return LoopPlan(target, seen, taken, inner, "scan", _chunk(taken), (f"not associative: {why}",))


def _not_solved(core: Loop, options: Options) -> str | None:
    """Why a loop's coefficients are not computed before it, for all steps at once; None where they are.

    On a CPU rounds cost more than they save, so only multiplications and additions stay in the loop, in their order.
    """
    why = associative.refusal(core)
    if why is not None or options.executor == "associative":
        return why
    if options.executor == "scan":
        return "executor='scan' was asked for"
    if not associative.suits_bulk(core):
        return "values of a step are larger than what goes in and out of it"
    return None


def _chunk(taken: Fission) -> int | None:
    """Steps to run at a time, or None for all."""
    if not jaxprs.is_known(taken.loop.length):
        return None
    given = sum(map(jaxprs.nbytes, (*taken.loop.xs, *taken.loop.ys)))
    if taken.extra * taken.loop.length <= _BUDGET + given * taken.loop.length // 5:
        return None
    size = max(_STEPS, _CHUNK // taken.extra)
    even = [n for n in range(size, size // 2, -1) if taken.loop.length % n == 0]  # no rest, which would be copied
    size = even[0] if even else size
    return size if size < taken.loop.length else None
