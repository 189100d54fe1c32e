"""The GPU target: the passes of accelerators, and few kernels in the loop that stays.

In a loop of small products, the number of kernels determines the time. Kernels were counted in programs that XLA compiled
for an H100 (`jrnn bench --compile-for h100`). The limits are estimates, not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jrnn import jaxprs
from jrnn.loops.backends import accelerator
from jrnn.loops.loop import Loop, Results
from jrnn.loops.mark import Options
from jrnn.loops.passes import Fission, Packed, Staged, one_kernel_a_stage, pack_stacks, split, widen_sums
from jrnn.loops.plans.plan import LoopPlan, Runner, Target

_STEPS = 4  # steps per trip of the loop: they share the kernels that count the trips and write the stacks
_LONGEST = 400  # a step with more equations runs once per trip, because the program would become long
_PACKED = (
    4 << 20
)  # the most bytes of a pack at one step: taking more apart costs as much as a kernel, 2 to 3 microseconds


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    found = accelerator.plan(loop, target, options)
    if found.executor != "scan" or found.fission is None:
        return found
    core = _few_kernels(found.fission.core, target)
    return replace(found, core=core, notes=(*found.notes, core.note))


@dataclass(frozen=True)
class _Prepared:
    """Runs a loop in stages; `fission` computes what the stages need from constants before the loop."""

    staged: Staged
    fission: Fission
    inner: Runner
    note: str

    def run(self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: Any) -> Results:
        last, ys = self.fission.run(consts, self.staged.initial(init), xs, length, self.inner.run)
        return self.staged.carry(last), ys


def _few_kernels(core: Loop, target: Target) -> _Prepared:
    alone = target.devices == 1  # parts of arrays that are divided among devices would move to be joined
    staged = one_kernel_a_stage(core, stack=alone)
    prepared = split(staged.loop)
    loop = prepared.core
    if jaxprs.is_known(loop.length) and len(loop.eqns) <= _LONGEST:
        loop = replace(loop, unroll=max(loop.unroll, min(_STEPS, loop.length)))
    inner = pack_stacks(loop, _PACKED) if alone else widen_sums(loop)
    stacks = len(inner.packs) if isinstance(inner, Packed) else len(loop.ys)
    return _Prepared(staged, prepared, inner, f"{loop.unroll} steps a trip of the loop, which writes {stacks} arrays")
