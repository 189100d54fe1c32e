"""The CPU target. docs/notes/cpu_log.md has the measurements behind its passes and limits."""

from __future__ import annotations

from jrnn.loops import jaxprs
from jrnn.loops.loop import Loop
from jrnn.loops.mark import Options
from jrnn.loops.passes import (
    Fission,
    activate_together,
    associative,
    batch_first,
    columns,
    concatenate_cotangents,
    direct_views,
    distinct,
    gates,
    slice_apart,
    split,
    widen_sums,
)
from jrnn.loops.passes.fission import computation, slices
from jrnn.loops.passes.sums import smaller_first
from jrnn.loops.plan import LoopPlan, Runner, Target

PASSES = (direct_views, distinct, concatenate_cotangents, batch_first, columns)

_BUDGET = 32 << 20  # a loop whose additional stacks have more bytes runs in chunks
_CHUNK = 1 << 20  # the bytes of these stacks in one chunk
_STEPS = 12  # the minimum number of steps in a chunk: with fewer, its contractions are too small to be fast


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    original = loop
    for rewrite in PASSES:
        loop = rewrite(loop)
    fission = split(loop, contract=smaller_first)
    # On a CPU rounds cost more than they save. Of a loop that could be solved, only the coefficients are computed for all
    # steps before it. The multiplications and additions stay in the loop, in their order.
    why = associative.declined(fission.core, options.executor)
    if why is None:
        fission = split(loop, computation, contract=smaller_first)
        return LoopPlan(target, original, fission, widen_sums(fission.core), "associative", _chunk(fission))
    core = fission.core
    if gates.better_apart(core):
        inner: Runner = split(slice_apart(core), slices)
    else:
        inner = widen_sums(activate_together(core))
    return LoopPlan(target, original, fission, inner, "scan", _chunk(fission), (f"not associative: {why}",))


def _chunk(fission: Fission) -> int | None:
    """Returns the number of steps to run at a time, or None for all."""
    loop = fission.loop
    if not jaxprs.is_known(loop.length):
        return None
    given = sum(map(jaxprs.nbytes, (*loop.xs, *loop.ys)))
    if fission.extra * loop.length <= _BUDGET + given * loop.length // 5:
        return None
    most = max(_STEPS, _CHUNK // fission.extra)
    # A divisor of the length leaves no shorter last chunk, whose results would be copied.
    size = next((n for n in range(most, most // 2, -1) if loop.length % n == 0), most)
    return size if size < loop.length else None
