"""The GPU target: the passes of accelerators, and few kernels in the loop that stays.

In a loop of small products the number of kernels is the time. What is counted here comes from programs that XLA compiled for
an H100 (`jrnn bench --compile-for h100`); the limits are estimates until they are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jrnn.executor import jaxprs
from jrnn.executor.loop import Loop
from jrnn.executor.mark import Options
from jrnn.executor.passes import Fission, Packed, Staged, one_kernel_a_stage, pack_stacks, split, widen_sums
from jrnn.executor.plan import LoopPlan, Runner, Target
from jrnn.executor.targets import accelerator

# Steps that one trip of the loop holds: they share the kernels that count the trips and write the stacks.
_STEPS = 4
# Equations of a step beyond which several steps a trip would make the program long.
_LONGEST = 400
# Bytes a step that are packed at most: taking them apart later costs as much as a kernel, 2 to 3 microseconds.
_PACKED = 4 << 20


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    """The plan of a loop on a GPU."""
    found = accelerator.plan(loop, target, options)
    if found.executor != "scan" or found.fission is None:
        return found
    core = _few_kernels(found.fission.core, target)
    return replace(found, core=core, notes=(*found.notes, core.note))


@dataclass(frozen=True)
class _Prepared:
    """A loop in stages, with what its constants are first turned into."""

    staged: Staged
    fission: Fission
    inner: Runner
    note: str

    def with_length(self, length: Any) -> _Prepared:
        """The same for another number of steps."""
        return replace(self, fission=self.fission.with_length(length), inner=self.inner.with_length(length))

    def run(self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The loop's `(last carry, stacked ys)`."""
        last, ys = self.fission.run(consts, self.staged.initial(init), xs, self.inner.run)
        return self.staged.carry(last), ys


def _few_kernels(core: Loop, target: Target) -> _Prepared:
    """What runs the loop that stays."""
    alone = target.devices == 1  # joining parts of arrays that are divided among devices would move them
    staged = one_kernel_a_stage(core, stack=alone)
    prepared = split(staged.loop)
    loop = prepared.core
    if jaxprs.is_known(loop.length) and len(loop.eqns) <= _LONGEST:
        loop = replace(loop, unroll=max(loop.unroll, min(_STEPS, loop.length)))
    inner = pack_stacks(loop, _PACKED) if alone else widen_sums(loop)
    stacks = len(inner.packs) if isinstance(inner, Packed) else len(loop.ys)
    return _Prepared(staged, prepared, inner, f"{loop.unroll} steps a trip of the loop, which writes {stacks} arrays")
