"""A loop over few lanes as one call of the kernel for CPUs, if each carry is affine in itself.

XLA runs a step of 16 returns or advantages in a few kernels of 10 to 30 ns, and each one loads and stores the carry. The
kernel computes a tile of steps at once, and keeps the carry in registers. With more lanes, both wait for memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Var
from jrnn.loops.costs.constants import LANES, TINY_LOOP
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.times import Estimate, Terms, estimate, total
from jrnn.loops.costs.tiny_loops import lane_cycles, tile_operations
from jrnn.loops.ir import Length, Loop, Results, Unsupported, Values
from jrnn.loops.ir.description import Description, described
from jrnn.loops.strategies.context import Context

if TYPE_CHECKING:
    from jrnn.loops.kernels.native.affine_call import AffineCall
    from jrnn.loops.kernels.native.lane_call import LaneCall


@dataclass(frozen=True)
class OverLanes:
    """Runs a loop over lanes as one call of the kernel for CPUs."""

    call: LaneCall

    @property
    def loop(self) -> Loop:
        return self.call.loop

    def run(
        self,
        consts: Values,
        init: Values,
        xs: Values,
        length: Length,
    ) -> Results:
        return self.call.run(consts, init, xs, length)

    def estimate(self, estimator: Estimator) -> Estimate:
        steps = jaxprs.extent(self.loop.length)
        seconds = (steps * self._cycles() + TINY_LOOP.call) * TINY_LOOP.seconds
        return call_estimate(estimator, self.call, self.call.outer_sums, {"calls": seconds})

    def _cycles(self) -> float:
        """Returns the cycles of a step."""
        call = self.call
        step = call.step
        selections = 0
        for r in step.recurrences:
            selections += (r.reset is not None) + (r.choice is not None)
        return lane_cycles(
            row_bytes=jaxprs.elements(step.shape) * jnp.dtype(step.dtype).itemsize,
            recurrences=len(step.recurrences) + len(call.sums),
            selections=selections,
            in_tile=tile_operations(call.tile_eqns),
        )

    def describe(self) -> Description:
        lanes = jaxprs.elements(self.call.step.shape)
        remark = f"one call of the kernel for CPUs, over {lanes} lanes: each carry is affine"
        return described(self.loop, remark)


def call_estimate(
    estimator: Estimator,
    call: AffineCall | LaneCall,
    outer_sums: Sequence[Var],
    kernel_terms: Terms,
) -> Estimate:
    """Returns the estimate of a call of the kernel with what is computed for all steps before and after it."""
    loop = call.step.loop
    steps = jaxprs.extent(loop.length)
    ys = jaxprs.variables(loop.ys)
    stacked = {*call.encoded.stacks, *call.outs}.difference(loop.xs, ys)
    read = [*call.encoded.stacks, *ys, *outer_sums]
    outer = estimator.part(call.outer_eqns, read, all_steps=True)
    memory = estimator.whole(loop).memory
    memory += steps * (estimator.sizes(stacked) + outer.peak_bytes)
    outer_terms = outer.terms(estimator.machine, steps, memory, 1)
    return estimate(total(kernel_terms, outer_terms), memory)


def over_lanes(context: Context) -> OverLanes | None:
    """Returns a node that runs a loop over lanes by the kernel, or None if there is none."""
    from jrnn.loops.kernels.native.lane_call import lane_call

    loop = context.loop
    target = context.target
    if target.devices > 1 or target.exported or len(loop.eqns) > LANES.max_equations:
        return None
    if not jaxprs.is_known(loop.length) or loop.length < LANES.min_steps:
        return None
    arrays = [v for v in loop.carry if v.aval.shape]
    if not arrays or max(jaxprs.nbytes(v) for v in arrays) > LANES.max_bytes:
        return None
    try:
        return OverLanes(lane_call(loop))
    except Unsupported:
        return None
