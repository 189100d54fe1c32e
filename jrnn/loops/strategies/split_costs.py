"""What a loop costs that is split into parts, all steps at once or some at a time.

Shapes: T time.
"""

from __future__ import annotations

import math

from jrnn import jaxprs
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.times import Estimate, estimate, total
from jrnn.loops.passes import SplitLoop

_FIRST_WRITE = 0.5  # of the time of writing: what the first write of new memory adds
_TRANSPOSING = 3  # times the time of reading: the time of transposing a matrix in a cache


class SplitCosts:
    """The costs of a split loop; the residual loop costs `inside`.

    Attributes:
        before, after: what is computed for all steps before and after the residual loop.
        sums: what is summed after it; their operands are `operand_bytes` a step, their results `result_bytes`.
        stack_bytes: a step, of the arrays that the original loop would not make.
        shifted_bytes: a step, of copies that are shifted by a step.
        peak_bytes: a step, of temporary arrays before and after the residual loop.
        own_bytes: a step, of the loop's own inputs and outputs.
        transposed_bytes: of constants that are transposed for the residual loop.
        all_transposed_bytes: the same with constants for products of some steps at a time.
    """

    def __init__(
        self,
        estimator: Estimator,
        split_loop: SplitLoop,
        inside: Estimate,
    ):
        loop = split_loop.loop
        residual = split_loop.residual
        sizes = estimator.sizes
        self.machine = estimator.machine
        self.steps = jaxprs.extent(loop.length)
        self.inside = inside
        own = {*loop.xs, *jaxprs.variables(loop.ys)}
        hoisted = split_loop.hoisted_vars
        sunk = split_loop.sunk_vars
        self.own_bytes = sizes(own)
        self.stack_bytes = sizes({*hoisted, *residual.ys, *sunk} - own)
        read_after = jaxprs.free_variables((*split_loop.sunk_eqns, *split_loop.sum_eqns))
        self.shifted_bytes = sizes([v for v in read_after if v in split_loop.shifted])

        # What is no contraction or reduction is stacked, and the stacked array is summed.
        sum_eqns = split_loop.sum_eqns
        totals = jaxprs.results(sum_eqns)
        added = set(jaxprs.free_variables(sum_eqns))
        for values in split_loop.accumulated.values():
            added.update(set(jaxprs.variables(values)).difference(totals))
        self.operand_bytes = sizes(added & loop.varying)
        self.result_bytes = sizes([loop.carry[i] for i in split_loop.accumulated])

        self.before = estimator.part(split_loop.hoisted_eqns, hoisted, all_steps=True)
        self.after = estimator.part(split_loop.sunk_eqns, sunk, all_steps=True)
        self.sums = estimator.sums(sum_eqns)
        self.peak_bytes = max(self.before.peak_bytes, self.after.peak_bytes, self.sums.peak_bytes)
        transposes = [e for e in split_loop.constant_eqns if e.primitive.name == "transpose"]
        transposed = set(jaxprs.results(transposes))
        self.transposed_bytes = sizes(transposed.intersection(residual.consts))
        self.all_transposed_bytes = sizes(transposed)

    def per_step(self, in_tiles: bool) -> int:
        """Returns the bytes of temporary arrays that each step of a tile adds."""
        return self.stack_bytes + self.shifted_bytes + in_tiles * self.own_bytes + self.peak_bytes

    def estimate(self, tile: int | None = None) -> Estimate:
        """Returns the estimate for `tile` steps at a time, or all at once."""
        machine = self.machine
        steps = self.steps
        n = min(tile or steps, steps)
        times = math.ceil(steps / n)
        in_tiles = times > 1
        tile_bytes = n * self.per_step(in_tiles)
        size = max(tile_bytes, n)
        sums = self.sums._replace(read_bytes=self.operand_bytes)
        parts = [
            part.terms(machine, steps, size, times) for part in (self.before, self.after, sums)
        ]

        # The copies that parts need, and with tiles also copies of the loop's own arrays.
        stacks = steps * machine.reading(2 * in_tiles * self.own_bytes, size)
        stacks += steps * machine.writing(self.shifted_bytes, size)
        stacks += n * self.stack_bytes * _FIRST_WRITE / machine.write_rate
        writes = times * (1 + 2 * in_tiles)
        stacks += writes * machine.writing(self.result_bytes, self.result_bytes)

        transposed_bytes = self.all_transposed_bytes if in_tiles else self.transposed_bytes
        packing = _TRANSPOSING * transposed_bytes / machine.cache_rate
        if transposed_bytes > machine.core_cache_bytes:
            packing = transposed_bytes / machine.read_rate
            packing += transposed_bytes / machine.write_rate
        calls = in_tiles * times * 2 * machine.trip
        terms = {"calls": calls, "weight copies": packing, "stacks": stacks}

        # What is copied after the loop reuses the memory of the transposed constants.
        reused = 0 if in_tiles else n * self.peak_bytes
        memory = tile_bytes + self.inside.memory + max(transposed_bytes - reused, 0)
        memory += in_tiles * 2 * self.result_bytes
        return estimate(total(dict(self.inside.terms), *parts, terms), memory)
