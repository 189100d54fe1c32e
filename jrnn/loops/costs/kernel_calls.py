"""What a call of the kernel for CPUs costs: `kernels/native` says what it runs, and this file what that takes.

Tiny loops and loops over lanes have calls of their own, whose costs are cycles (`tiny_loops.py`).

Shapes: N rows, T time.
"""

from __future__ import annotations

from typing import NamedTuple

from jrnn.loops.costs.constants import NATIVE_KERNEL
from jrnn.loops.costs.machines import Machine
from jrnn.loops.costs.times import Terms


class KernelCall(NamedTuple):
    """What a call runs. All but `steps` and the bytes are of one step.

    Attributes:
        steps: T.
        words: the words of 32 bits of an element.
        flops: of products, with the columns that fill their last panel.
        matrix_bytes: of the matrices of products.
        packed_bytes: of those that are packed, once.
        elements: of all rows, that operations compute or reduce.
        functions: of all rows, values of functions such as tanh.
        scalar_functions: of all rows, values of functions without vector instructions.
        stages: steps of the program that run one after the other.
        instructions: operations but products.
        partial_rows: rows that are reduced, or are of products whose last panel is not full.
    """

    steps: int
    words: float
    flops: int
    matrix_bytes: int
    packed_bytes: int
    elements: int
    functions: int
    scalar_functions: int
    stages: int
    instructions: int
    partial_rows: int

    def terms(self, machine: Machine) -> Terms:
        """Returns the time of all steps on one core."""
        costs = NATIVE_KERNEL
        elements = costs.element_per_xla * self.elements * machine.element
        functions = costs.function_per_xla * self.functions
        functions += costs.scalar_function_per_xla * self.scalar_functions
        kernels = costs.stage_kernels * self.stages
        kernels += costs.instruction_kernels * self.instructions
        kernels += costs.row_kernels * self.partial_rows

        # Products read their matrices while they compute, if these are near.
        computing = self.flops * self.words / (costs.product_speedup * machine.product_rate)
        reading = self.matrix_bytes / machine.cache_rate
        products = max(computing, reading)
        if self.matrix_bytes > costs.far_caches * machine.core_cache_bytes:
            products = computing + reading
        return {
            "products": self.steps * products,
            "elements": self.steps * self.words * (elements + functions * machine.function),
            "calls": (costs.call_kernels + self.steps * kernels) * machine.kernel,
            "weight copies": costs.packing_per_read * self.packed_bytes / machine.read_rate,
        }
