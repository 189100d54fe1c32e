"""What a loop costs that is split into parts, all steps at once or some at a time.

Shapes: T time.
"""

from __future__ import annotations

import math

from jrnn import jaxprs
from jrnn.loops.costs.estimates import Estimate, Estimator, estimate, total
from jrnn.loops.passes import SplitLoop

_FIRST_WRITE = 0.5  # of the time of writing: what the first write of new memory adds
_TRANSPOSING = 3  # times the time of reading: the time of transposing a matrix in a cache


class SplitCosts:
    """The costs of a loop in parts, of which the core costs `inside`.

    Attributes:
        before, after: what is computed for all steps before and after it.
        sums: what is summed after it; their operands are `operand_bytes` a step, their results `result_bytes`.
        stack_bytes: a step, of the arrays that the original loop would not make.
        shifted_bytes: a step, of copies that are shifted by a step.
        peak_bytes: a step, of temporary arrays before and after it.
        own_bytes: a step, of the loop's own inputs and outputs.
        transposed_bytes: of constants that are transposed for the core.
        all_transposed_bytes: the same with those for products of some steps at a time.
    """

    def __init__(self, estimator: Estimator, split_loop: SplitLoop, inside: Estimate):
        loop = split_loop.loop
        core = split_loop.residual
        self.estimator = estimator
        self.split_loop = split_loop
        self.inside = inside
        read_after = set(jaxprs.free_variables((*split_loop.sunk_eqns, *split_loop.sum_eqns)))
        loop_values = {*loop.xs, *jaxprs.variables(loop.ys)}
        # What is no contraction or reduction is stacked, and the stacked array is summed.
        added = set(jaxprs.free_variables(split_loop.sum_eqns))
        totals = jaxprs.results(split_loop.sum_eqns)
        for values in split_loop.accumulated.values():
            added.update(set(jaxprs.variables(values)).difference(totals))
        self.before = estimator.part(
            split_loop.hoisted_eqns, split_loop.hoisted_vars, all_steps=True
        )
        self.after = estimator.part(split_loop.sunk_eqns, split_loop.sunk_vars, all_steps=True)
        self.sums = estimator.sums(split_loop.sum_eqns)
        self.operand_bytes = estimator.sizes(v for v in added if v in estimator.moving)
        self.stack_bytes = estimator.sizes(
            {*split_loop.hoisted_vars, *core.ys, *split_loop.sunk_vars} - loop_values
        )
        self.shifted_bytes = estimator.sizes(
            v for v in core.carry if v in read_after and v not in core.ys
        )
        self.own_bytes = estimator.sizes(loop_values)
        self.result_bytes = estimator.sizes(loop.carry[i] for i in split_loop.accumulated)
        transposes = [e for e in split_loop.constant_eqns if e.primitive.name == "transpose"]
        transposed = set(jaxprs.results(transposes))
        self.peak_bytes = max(self.before.peak_bytes, self.after.peak_bytes, self.sums.peak_bytes)
        self.transposed_bytes = estimator.sizes(transposed.intersection(core.consts))
        self.all_transposed_bytes = estimator.sizes(transposed)

    def per_step(self, in_chunks: bool) -> int:
        """Returns the bytes of temporary arrays that each step of a chunk adds."""
        return self.stack_bytes + self.shifted_bytes + in_chunks * self.own_bytes + self.peak_bytes

    def estimate(self, chunk: int | None = None) -> Estimate:
        """Returns the estimate for `chunk` steps at a time, or all at once."""
        machine = self.estimator.machine
        steps = jaxprs.extent(self.split_loop.loop.length)
        n = min(chunk or steps, steps)
        times = math.ceil(steps / n)
        in_chunks = times > 1
        size = n * max(self.per_step(in_chunks), 1)
        terms = [p.terms(machine, steps, size, times) for p in (self.before, self.after)]
        sums = self.sums._replace(read_bytes=self.operand_bytes).terms(machine, steps, size, times)
        results = times * (
            machine.writing(self.result_bytes, self.result_bytes) * (1 + 2 * in_chunks)
        )
        copies = steps * (
            machine.reading(2 * in_chunks * self.own_bytes, size)
            + machine.writing(self.shifted_bytes, size)
        )
        copies += n * self.stack_bytes * _FIRST_WRITE / machine.write_rate
        transposed_bytes = self.all_transposed_bytes if in_chunks else self.transposed_bytes
        is_near = transposed_bytes <= machine.core_cache_bytes
        if is_near:
            transposing = _TRANSPOSING * transposed_bytes / machine.cache_rate
        else:
            transposing = transposed_bytes / machine.read_rate
            transposing += transposed_bytes / machine.write_rate
        other_terms = dict(
            calls=in_chunks * times * 2 * machine.trip, packing=transposing, stacks=copies + results
        )
        # What is copied after the loop reuses the memory of the transposed constants.
        constants = (
            transposed_bytes if in_chunks else max(transposed_bytes - n * self.peak_bytes, 0)
        )
        memory = (
            n * self.per_step(in_chunks)
            + self.inside.memory
            + constants
            + in_chunks * 2 * self.result_bytes
        )
        return estimate(total(dict(self.inside.terms), *terms, sums, other_terms), memory)
