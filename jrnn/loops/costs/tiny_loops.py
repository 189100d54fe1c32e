"""The cycles of a step of a tiny loop, which is one kernel: it waits for results, or for units that compute.

A step of a few operations takes as long as the longest path from a carry to its next value, since the next step waits for
it. `constants.TINY_LOOP` has the cycles of an operation on this path, of one next to it, and of an iteration of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, primitives
from jrnn.loops.costs.constants import EQUATIONS, LANES, TINY_LOOP
from jrnn.loops.costs.equation_costs import element_seconds
from jrnn.loops.costs.machines import CPU
from jrnn.loops.ir import Loop


def operations(eqn: Eqn) -> float:
    """Returns the operations of an equation, a function as several."""
    return element_seconds(eqn, CPU) / (EQUATIONS.min_elements * CPU.element)


def step_cycles(loop: Loop, size: int = 0) -> float:
    """Returns the cycles of a step of a loop with `size` steps in an iteration, or as XLA compiles it.

    With a size, a product that is only added is a part of the addition. Next to `size=1` other sizes save the time of
    iterations alone: 2 to 4 ns of a step, whether it takes 9 or 31 ns.
    """
    waiting = TINY_LOOP.latency * _longest_path(loop, is_fused=size > 0)
    computing = TINY_LOOP.issue * sum(map(operations, loop.eqns))
    iteration = TINY_LOOP.iteration + TINY_LOOP.carried * len(loop.carry)
    return max(waiting, computing) + iteration / max(size, 1)


def _longest_path(loop: Loop, is_fused: bool) -> float:
    """Returns the operations on the longest path from a carry to its next value, or the next value of a carry that reads it.

    Args:
        loop: the loop.
        is_fused: a product that is only added counts nothing.
    """
    longest = 0.0
    added: set[Var] = set()
    if is_fused:
        for eqn in filter(primitives.is_sum, loop.eqns):
            added.update(jaxprs.inputs(eqn))
    for group in jaxprs.carry_groups(loop.eqns, loop.carry, loop.carry_out).groups:
        length = dict.fromkeys((loop.carry[i] for i in group), 0.0)
        for eqn in loop.eqns:
            before = [length[v] for v in jaxprs.inputs(eqn) if v in length]
            if not before:
                continue
            is_free = eqn.primitive.name == "mul" and eqn.outvars[0] in added
            own = 0 if is_free else operations(eqn)
            length.update(dict.fromkeys(eqn.outvars, max(before) + own))
        for i in group:
            out = loop.carry_out[i]
            if jaxprs.is_in(out, length):
                longest = max(longest, length[out])
    return longest


def tile_operations(eqns: Sequence[Eqn]) -> float:
    """Returns the operations of equations that the kernel for CPUs computes for all steps of a tile."""
    return sum([min(operations(eqn), TINY_LOOP.operations_of_function) for eqn in eqns])


def lane_cycles(*, row_bytes: int, recurrences: int, selections: int, in_tile: float) -> float:
    """Returns the cycles of a step of a loop over lanes, as one call of the kernel for CPUs.

    Args:
        row_bytes: the bytes of all lanes of a carry.
        recurrences: the carries.
        selections: how many of these are reset or held at each step, each counted once.
        in_tile: the operations of a step next to the recurrences.
    """
    vectors = -(-row_bytes // LANES.vector_bytes)
    recurrence = LANES.recurrence * recurrences + LANES.selection * selections
    return vectors * (recurrence + LANES.operation * in_tile)


def block_cycles(
    *,
    carries: int,
    inputs: int,
    values: int,
    stores: bool,
    block_steps: int,
    steps: int,
    operations_in_tile: float,
) -> float:
    """Returns the cycles of a step of an affine loop that runs in blocks, as one call of the kernel for CPUs.

    Args:
        carries: the carries of the recurrence.
        inputs: its inputs.
        values: what each step returns of it.
        stores: whether these are stored for all steps.
        block_steps: the steps of a block.
        steps: T.
        operations_in_tile: of what is computed next to the recurrence.
    """
    costs = TINY_LOOP
    products = 0
    recurrence = {1: costs.first_order, 2: costs.second_order}.get(carries, 0.0)
    if carries > 2 or (carries == 2 and not stores):
        recurrence = costs.response * inputs * (values + (not stores)) + costs.value * (values + 1)
        products = block_steps * (carries + values) * carries * (carries + inputs + 1)
    once = costs.call + costs.product_of_powers * products
    return recurrence + costs.operation_in_tile * operations_in_tile + once / steps
