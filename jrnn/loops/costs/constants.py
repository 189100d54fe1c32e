"""The constants of the cost model that are not those of a machine: one record for each thing that is estimated.

`machines.py` has the rates of a processor. What is here is counted in these rates, or in cycles, so that it holds on other
processors, too. `python scripts/benchmarks constants` measures constants again on the machine at hand, and prints the old
and the new ones.
"""

from __future__ import annotations

from typing import NamedTuple


class NativeKernelCosts(NamedTuple):
    """What a call of the kernel for CPUs costs, measured on AMD EPYCs with AVX-512 and AVX2 (docs/notes/native_kernel.md).

    Attributes:
        product_speedup: the rate of its products over that of XLA's, whose weights are packed at each call.
        far_caches: packed matrices larger than this number of caches of a core are not read while products run.
        packing_per_read: the time of packing over that of reading the same bytes from memory.
        call_kernels: a call, in kernels of XLA: decoding, memory and threads.
        stage_kernels: a stage, in kernels of XLA.
        instruction_kernels: an instruction, in kernels of XLA.
        row_kernels: a reduction of one row, or a row of a product whose last panel is not full, in kernels of XLA.
        element_per_xla: an instruction on one element, over an elementwise operation of XLA.
        function_per_xla: a function such as tanh of one element, over that of XLA.
        scalar_function_per_xla: a function without vectors, over one of XLA.
    """

    product_speedup: float = 1.15
    far_caches: float = 4
    packing_per_read: float = 2
    call_kernels: float = 100
    stage_kernels: float = 0.6
    instruction_kernels: float = 0.15
    row_kernels: float = 0.1
    element_per_xla: float = 2
    function_per_xla: float = 0.5
    scalar_function_per_xla: float = 20


class TinyLoopCycles(NamedTuple):
    """The cycles of tiny loops, measured on loops of 16,000 steps with jax 0.12 (scripts/benchmarks/tiny_loops.py).

    Attributes:
        latency: from an operand of an addition, a multiplication or both to the result.
        issue: one operation among others that do not wait for it.
        iteration: an iteration of a loop of one kernel.
        carried: a value that the loop carries through memory.
        first_order: a step in blocks, of one affine carry.
        second_order: a step in blocks, of two affine carries that are the values of others.
        response: in blocks of more carries, each value of each input.
        value: in blocks of more carries, each value.
        operation_in_tile: an operation on all steps of a tile.
        operations_of_function: a function in a tile, in operations.
        call: the call of the kernel, once.
        product_of_powers: each product for the matrices of a block, once.
        seconds: of a cycle.
    """

    latency: float = 4.0
    issue: float = 0.5
    iteration: float = 3.0
    carried: float = 1.0
    first_order: float = 1.5
    second_order: float = 2.5
    response: float = 1.0
    value: float = 0.75
    operation_in_tile: float = 0.25
    operations_of_function: float = 4.0
    call: float = 4_000.0
    product_of_powers: float = 2.0
    seconds: float = 1 / 3.5e9


class ChunkCosts(NamedTuple):
    """What a train step over matrix states in chunks costs.

    Attributes:
        half_rate_side: products of this number of rows and columns run at half of the rate of large ones.
        moves_per_doubling: how often a decay along K moves a vector for each doubling of the blocks, forward and reverse.
        functions_per_score: a score of two steps is a difference of decays, its exponential, a product and a mask. With 2,
            mLSTMs of states of 16 x 16 and 32 x 32 take 1.0 to 1.3 of the estimated part of the time of their steps.
        passes: a chunk is computed forward, again in the reverse pass, and twice as much for its derivative.
        passes_by_steps: a step, and its derivative.
        kernels: of the forward and the reverse pass of a chunk.
        batched_kernels: the same if all chunks are prepared at once, counted for a gated delta rule on an H100.
        preparation_kernels: of preparing all chunks at once, counted likewise.
    """

    half_rate_side: float = 62
    moves_per_doubling: float = 24
    functions_per_score: float = 2
    passes: float = 4
    passes_by_steps: float = 3
    kernels: float = 60
    batched_kernels: float = 23
    preparation_kernels: float = 139


class CompileSeconds(NamedTuple):
    """Seconds of processor time that XLA:CPU compiles an equation, with jax 0.12 on an Intel Xeon.

    The first two are by least squares over 86 programs of the suites "first-call", "tiny" and "small states" and of layers,
    the last is rounded from the tiny loops. That fit meets the difference between a loop and its plan within a third for
    matrix states in chunks, 0.2 to 3.6 s, and within a factor of three for tiny loops, 0.01 to 0.7 s.

    Attributes:
        call: a product, a solver, an inner loop, or an equation that reads or writes at indices: a kernel of its own.
        elementwise: another equation, which is fused with its neighbors.
        tiny_elementwise: an elementwise equation of few elements, which is an instruction or a few.
        tiny_elements: the most elements of such an equation.
        equations_by_steps: equations of a step with its derivative, over those of the step.
    """

    call: float = 18e-3
    elementwise: float = 0.9e-3
    tiny_elementwise: float = 0.3e-3
    tiny_elements: int = 8
    equations_by_steps: int = 3


NATIVE_KERNEL = NativeKernelCosts()
TINY_LOOP = TinyLoopCycles()
CHUNKS = ChunkCosts()
COMPILATION = CompileSeconds()
