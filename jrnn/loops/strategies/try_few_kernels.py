"""The strategy "scan" on GPUs and TPUs: values of loops that the caller wrote keep the order of sums of `jax.lax.scan`.

So only sums of gradients leave the loop. On a GPU the loop that remains has few kernels, whose number determines the time of
a loop of small products. On an H200 stages save 28 to 58 % of the time of a training step of LSTM and GRU, and packs up to
16 % (docs/accelerators.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jrnn import jaxprs
from jrnn.loops.ir import Loop
from jrnn.loops.passes import SplitLoop, split
from jrnn.loops.plan import Candidate, Node
from jrnn.loops.strategies.context import Context
from jrnn.loops.strategies.nodes import Adapted, Split, steps_with_wide_sums

NAME = "scan"
# How many times the bytes of its inputs and outputs a loop may stack to do work after it. Reading a matrix state after the
# loop would stack the state of each step: 4.3 GB where `jax.lax.scan` takes none (2048 x 64 x 64 x 64).
_MAX_STACKED = 8
# Steps in one iteration of the loop: they share the kernels that count the iterations and write the stacked arrays.
#   steps in an iteration      1     2     4     8     16    (more take longer to compile)
#   time of training an LSTM   1.38  1.12  1     0.98  0.96  (H200)
_STEPS = 4
# A step with more equations runs once in an iteration, because the program would become long.
_MAX_EQUATIONS = 400
_MAX_PACK_BYTES = 4 << 20  # of a pack at one step: taking more apart costs as much as a kernel


def try_few_kernels(context: Context) -> Sequence[Candidate]:
    """Returns the loop with contractions before and after it."""
    split_loop = split_for_accelerator(context)
    node: Node
    if context.target.platform in ("cuda", "rocm"):
        node = _few_kernels(split_loop.residual, context.target.devices)
    else:
        node = steps_with_wide_sums(split_loop.residual)
    return [context.candidate(NAME, Split(split_loop, node))]


def split_for_accelerator(context: Context) -> SplitLoop:
    """Hoists and sinks everything movable, except where the work after the loop reads large stacked arrays."""
    moves = context.movable
    if _stacks_much(context.split(None)):
        moves = replace(moves, sink=frozenset())
    return context.split(moves)


def _stacks_much(split_loop: SplitLoop) -> bool:
    """Returns True if a loop stacks many more bytes for the work after it than it reads and writes."""
    whole = split_loop.loop
    stacked_bytes = sum(jaxprs.nbytes(v) for v in split_loop.residual.ys if v not in whole.ys)
    own_bytes = sum(map(jaxprs.nbytes, (*whole.xs, *whole.ys)))
    return stacked_bytes > _MAX_STACKED * own_bytes


def _few_kernels(residual: Loop, devices: int) -> Node:
    """Returns a loop in stages. What the stages need from constants is computed before the loop."""
    from jrnn.loops.passes.gpu_one_kernel import one_kernel_per_stage
    from jrnn.loops.passes.gpu_packed_outputs import pack_stacks

    is_alone = (
        devices == 1
    )  # parts of arrays that are divided among devices would move to be joined
    staged, adapter = one_kernel_per_stage(residual, stack=is_alone)
    prepared = split(staged)
    loop = prepared.residual
    if jaxprs.is_known(loop.length) and len(loop.eqns) <= _MAX_EQUATIONS:
        loop = replace(loop, unroll=max(loop.unroll, min(_STEPS, loop.length)))
    packs = None
    if is_alone:
        loop, packs = pack_stacks(loop, _MAX_PACK_BYTES)
    steps = steps_with_wide_sums(loop)
    inner = steps if packs is None else Adapted(steps, packs)
    remark = f"{loop.unroll} steps in one iteration of the loop, which writes {len(loop.ys)} arrays"
    return Adapted(Split(prepared, inner), adapter, (remark,))
