"""The strategy "scan" on GPUs and TPUs: values of loops that the caller wrote keep the order of sums of `jax.lax.scan`.

So only sums of gradients leave the loop. On a GPU the core has few kernels, whose number determines the time of a
loop of small products. On an H200 stages save 28 to 58 % of the time of a training step of LSTM and GRU, and packs up to
16 % (docs/accelerators.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jrnn import jaxprs
from jrnn.loops.ir import Loop
from jrnn.loops.passes import Fission, split
from jrnn.loops.strategies.candidates import Candidate
from jrnn.loops.strategies.nodes import Converted, Split, steps_with_wide_sums
from jrnn.loops.strategies.problem import Problem

# A loop may stack so many times the bytes of its inputs and outputs to do work after it. Reading a matrix state after the
# loop would stack the state of each step: 4.3 GB where `jax.lax.scan` takes none (2048 x 64 x 64 x 64).
_MOST_STACKED = 8
# Steps per trip of the loop: they share the kernels that count the trips and write the stacks. On an H200 an LSTM trained in
# 1.38, 1.12, 1, 0.98 and 0.96 of the time with 1, 2, 4, 8 and 16 steps; more take longer to compile.
_STEPS = 4
_LONGEST = (
    400  # a step with more equations runs once per trip, because the program would become long
)
# The most bytes of a pack at one step: taking more apart costs as much as a kernel.
_PACKED = 4 << 20


def propose(problem: Problem) -> Sequence[Candidate]:
    """Returns the loop with contractions before and after it."""
    fission = division(problem)
    on_gpu = problem.target.platform in ("cuda", "rocm")
    inner = (
        _few_kernels(fission.core, problem.target.devices)
        if on_gpu
        else steps_with_wide_sums(fission.core)
    )
    return [problem.candidate(Split(fission, inner))]


def division(problem: Problem) -> Fission:
    """Returns a loop in parts: what may leave it leaves it, unless the work after it reads large stacks."""
    moves = problem.movable
    if _stacks_much(problem.split(None)):
        moves = replace(moves, sink=frozenset())
    return problem.split(moves)


def _stacks_much(fission: Fission) -> bool:
    """Returns True if a loop stacks many more bytes for the work after it than it reads and writes."""
    whole = fission.loop
    core = fission.core
    stacked = sum(jaxprs.nbytes(v) for v in core.ys if v not in whole.ys)
    return stacked > _MOST_STACKED * sum(map(jaxprs.nbytes, (*whole.xs, *whole.ys)))


def _few_kernels(core: Loop, devices: int) -> Converted:
    """Returns a loop in stages. What the stages need from constants is computed before the loop."""
    from jrnn.loops.passes.one_kernel import one_kernel_per_stage
    from jrnn.loops.passes.packed import pack_stacks

    alone = devices == 1  # parts of arrays that are divided among devices would move to be joined
    staged, constants = one_kernel_per_stage(core, stack=alone)
    prepared = split(staged)
    loop = prepared.core
    if jaxprs.is_known(loop.length) and len(loop.eqns) <= _LONGEST:
        loop = replace(loop, unroll=max(loop.unroll, min(_STEPS, loop.length)))
    loop, packs = pack_stacks(loop, _PACKED) if alone else (loop, None)
    inner = (
        steps_with_wide_sums(loop)
        if packs is None
        else Converted(steps_with_wide_sums(loop), packs)
    )
    remark = f"{loop.unroll} steps a trip of the loop, which writes {len(loop.ys)} arrays"
    return Converted(Split(prepared, inner), constants, (remark,))
