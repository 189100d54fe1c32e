"""The GPU backend: the passes of accelerators, and few kernels in the loop that stays.

In a loop of small products, the number of kernels determines the time. On an H200 stages save 28 to 58 % of the time of a
training step of LSTM and GRU, and packs up to 16 % (docs/accelerators.md).
"""

from __future__ import annotations

from dataclasses import replace

from jrnn import jaxprs
from jrnn.loops.ir import Loop, Options
from jrnn.loops.passes import split
from jrnn.loops.strategies import Converted, LoopPlan, Split, Target, accelerator, by_steps
from jrnn.loops.strategies.backend import Backend

# Steps per trip of the loop: they share the kernels that count the trips and write the stacks. On an H200 an LSTM trained in
# 1.38, 1.12, 1, 0.98 and 0.96 of the time with 1, 2, 4, 8 and 16 steps; more take longer to compile.
_STEPS = 4
_LONGEST = 400  # a step with more equations runs once per trip, because the program would become long
# The most bytes of a pack at one step: taking more apart costs as much as a kernel.
_PACKED = 4 << 20


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    """Returns the plan of a loop on a GPU."""
    planned = accelerator.plan(loop, target, options)
    if planned.executor != "scan" or not isinstance(planned.node, Split):
        return planned
    inner = _few_kernels(planned.node.fission.core, target)
    return replace(planned, node=replace(planned.node, inner=inner))


def _few_kernels(core: Loop, target: Target) -> Converted:
    """Returns a loop in stages. What the stages need from constants is computed before the loop."""
    from jrnn.loops.passes.one_kernel import one_kernel_a_stage
    from jrnn.loops.passes.packed import pack_stacks

    alone = target.devices == 1  # parts of arrays that are divided among devices would move to be joined
    staged, held = one_kernel_a_stage(core, stack=alone)
    prepared = split(staged)
    loop = prepared.core
    if jaxprs.is_known(loop.length) and len(loop.eqns) <= _LONGEST:
        loop = replace(loop, unroll=max(loop.unroll, min(_STEPS, loop.length)))
    loop, packs = pack_stacks(loop, _PACKED) if alone else (loop, None)
    inner = by_steps(loop) if packs is None else Converted(by_steps(loop), packs)
    remark = f"{loop.unroll} steps a trip of the loop, which writes {len(loop.ys)} arrays"
    return Converted(Split(prepared, inner), held, (remark,))


BACKEND = Backend(accelerator.on_canonical(plan), ("cuda", "rocm"))
