"""The constants of the cost model that belong to no machine: one record for each thing that is estimated.

`machines.py` has the rates of a processor. What is here is counted in these rates, or in cycles, so that it holds on other
processors, too. `python scripts/benchmarks constants` measures constants again on the machine at hand, and prints the old
and the new ones.
"""

from __future__ import annotations

from typing import NamedTuple


class NativeKernelCosts(NamedTuple):
    """What a call of the kernel for CPUs costs, measured on AMD EPYCs with AVX-512 and AVX2 (docs/notes/native_kernel.md).

    Attributes:
        product_speedup: the rate of its products over XLA's, whose weights are packed at each call.
        far_caches: packed matrices larger than this number of caches of a core are not read while products run.
        packing_per_read: the time of packing over the time of reading the same bytes from memory.
        call_kernels: a call, in kernels of XLA: decoding, memory and threads.
        stage_kernels: a stage, in kernels of XLA.
        instruction_kernels: an instruction, in kernels of XLA.
        row_kernels: a reduction of one row, or a row of a product whose last panel is not full, in kernels of XLA.
        element_per_xla: an instruction on one element, over an elementwise operation of XLA.
        function_per_xla: a function such as tanh of one element, over XLA's.
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


class EquationCosts(NamedTuple):
    """What single equations cost on XLA:CPU, in the rates of a machine. A "function" is the time of one value of `tanh`.
    The table of primitives has what one element costs (`Row.cost`).

    Attributes:
        placed_functions: an element that a lookup or an update places.
        index_functions: an index of a lookup or an update at one step.
        index_functions_of_all_steps: the same for all steps together, which XLA:CPU does not vectorize.
        draw_functions, draw_min_elements: an element of a draw of random bits at one step, which is elementwise work, and
            the fewest elements that it costs as much as.
        draw_functions_of_all_steps, draw_min_elements_of_all_steps: the same for all steps together.
        draw_kernels_of_all_steps: the kernels of a draw for all steps together.
        draw_kernels_in_one: the kernels of a draw at one step whose rounds are one kernel (jax 0.10.2: 0.6 us for 4 to 128
            words).
        draw_kernels_in_several: the same if they are several (2.9 us for 160 to 1,024 words).
        min_elements: arrays with fewer elements cost as much as arrays with this number.
        unvectorized_from, unvectorized_to: XLA:CPU unrolls loops over this range of elements, more than a vector has, and
            computes functions of each by itself: with jax 0.12 a step with one logistic function of 8, 16 and 64 elements
            took 40, 84 and 56 ns.
        unvectorized_functions: a function of such an element.
        solver_operations: an operation of a solver on small matrices, in operations of a product.
        batched_systems: many triangular systems at once, which JAX does not give to LAPACK, over the time of one each.
        transposed: a product x W^T in a loop, over the time of x W.
        transposing: a stacked array that is transposed, over the time to read it: [64, 256, 32] takes 0.2 ms with XLA 0.12.
        one_row_fraction: XLA before jaxlib 0.12 writes small products of one row itself: the part of what a tiny product
            costs more. With jax 0.10.2 [1, 32] by [32, 32] takes 113 ns, of 222 that would be estimated.
        own_cache: the rate of a core's own cache over a shared cache's.
        vector_elements: of a vector.
        min_packed_rows: a product of fewer rows reads its other operand in place; others pack it first, at each call.
        min_packed_caches: smaller operands, in caches of a core, stay there, where packing them takes little.
        packed_bytes_of_result: results of many steps at once leave these caches: each byte takes as long as packing this
            number.
        convolution_operations: an operation of a small convolution, in operations of a product.
        word_operations: an operation on random words, which stay in registers inside of a kernel.
        repeated_by_unrolling: the part of a step that XLA:CPU computes again for each further step of an iteration, if
            nothing in it is a product or a call: with `unroll=8` steps of neurons took 1.0 to 4.4 times as long.
        trip_of_iteration: the part of a trip that takes place once for the steps of an iteration.
    """

    placed_functions: float = 0.5
    index_functions: float = 3
    index_functions_of_all_steps: float = 30
    draw_functions: float = 4
    draw_min_elements: int = 32
    draw_functions_of_all_steps: float = 6
    draw_min_elements_of_all_steps: int = 8
    draw_kernels_of_all_steps: int = 70
    draw_kernels_in_one: int = 6
    draw_kernels_in_several: int = 29
    min_elements: int = 24
    unvectorized_from: int = 9
    unvectorized_to: int = 32
    unvectorized_functions: float = 6
    solver_operations: float = 30
    batched_systems: float = 10
    transposed: float = 1.25
    transposing: float = 5.0
    one_row_fraction: float = 0.5
    own_cache: float = 2
    vector_elements: int = 8
    min_packed_rows: int = 8
    min_packed_caches: float = 0.25
    packed_bytes_of_result: float = 4
    convolution_operations: float = 4
    word_operations: float = 0.4
    repeated_by_unrolling: float = 0.125
    trip_of_iteration: float = 0.5


class TinyLoopCycles(NamedTuple):
    """The cycles of tiny loops, measured on loops of 16,000 steps with jax 0.12 (scripts/benchmarks/tiny_loops.py).

    Attributes:
        latency: from an operand of an addition, a multiplication or both to the result.
        issue: one operation among others that do not wait for it.
        iteration: an iteration of a loop of one kernel.
        carried: a value that the loop carries through memory.
        stored: a number of an output. To add one up in the carry takes as long, and to sum it after the loop as long again.
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
    stored: float = 4.0
    first_order: float = 1.5
    second_order: float = 2.5
    response: float = 1.0
    value: float = 0.75
    operation_in_tile: float = 0.25
    operations_of_function: float = 4.0
    call: float = 4_000.0
    product_of_powers: float = 2.0
    seconds: float = 1 / 3.5e9


class LaneCycles(NamedTuple):
    """The cycles of loops over lanes by the kernel for CPUs, measured on returns, advantages, averages and resets of 4 to
    64 lanes, 2,048 and 16,000 steps, in float32 and float64.

    Attributes:
        vector_bytes: of a vector.
        recurrence: a vector of a carry of a step.
        operation: a vector of an operation of a step.
        selection: a vector of a reset of a carry, or of one that a mask holds.
        max_bytes: of all lanes of a carry. Beyond, XLA's loop waits for memory as this one does.
        max_lanes: of a carry that the kernel runs.
        max_equations: of a step that is read.
        min_steps: of a loop that is worth a call.
    """

    vector_bytes: int = 64
    recurrence: float = 10.0
    operation: float = 4.5
    selection: float = 6.0
    max_bytes: int = 256
    max_lanes: int = 1_024
    max_equations: int = 100
    min_steps: int = 16


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
        min_state_elements: matrix states of fewer elements in all run step by step: a delta rule on 4 x 16 x 16 took 1.1
            times the time of its steps, on 16 x 32 x 32 0.96.
        min_steps: loops of fewer steps run step by step.
        min_gain: the part of the time that chunks must save: their program takes several times as long to compile.
    """

    half_rate_side: float = 62
    moves_per_doubling: float = 24
    functions_per_score: float = 2
    passes: float = 4
    passes_by_steps: float = 3
    kernels: float = 60
    batched_kernels: float = 23
    preparation_kernels: float = 139
    min_state_elements: int = 2048
    min_steps: int = 128
    min_gain: float = 0.25


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
        equations_by_steps: equations of a step with its derivative, over equations of the step.
    """

    call: float = 18e-3
    elementwise: float = 0.9e-3
    tiny_elementwise: float = 0.3e-3
    tiny_elements: int = 8
    equations_by_steps: int = 3


EQUATIONS = EquationCosts()
NATIVE_KERNEL = NativeKernelCosts()
TINY_LOOP = TinyLoopCycles()
CHUNKS = ChunkCosts()
COMPILATION = CompileSeconds()
BRIEF_SECONDS = 3e-5  # of all steps of a loop that is left alone: planning it takes longer
LANES = LaneCycles()
