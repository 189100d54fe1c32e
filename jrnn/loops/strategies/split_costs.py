"""What a loop costs that is split into parts, all steps at once or some at a time.

Shapes: T time.
"""

from __future__ import annotations

import math

from jrnn import jaxprs
from jrnn.loops.costs.estimates import Estimate, Estimator, estimate, total
from jrnn.loops.passes import Fission

_TOUCHING = 0.5  # the first time that new memory is written takes so many times the time of writing it
_TURNING = 3  # a matrix in a cache is transposed in so many times the time of reading it


class SplitCosts:
    """The costs of a loop in parts, of which the loop that stays costs `inside`.

    Attributes:
        before, after: what is computed for all steps before and after it.
        sums: what is summed after it; their operands are `operands` bytes a step, their results `results` bytes.
        stacks: bytes a step of the arrays that the original loop would not make.
        shifted: bytes a step of copies that are shifted by a step.
        given: bytes a step of the loop's own inputs and outputs.
        turned: bytes of constants that are transposed for the loop that stays.
        all_turned: the same with those for products of some steps at a time.
    """

    def __init__(self, estimator: Estimator, fission: Fission, inside: Estimate):
        loop, core = fission.loop, fission.core
        self.estimator, self.fission, self.inside = estimator, fission, inside
        read_after = set(jaxprs.free_variables((*fission.sunk, *fission.added)))
        given = {*loop.xs, *jaxprs.variables(loop.ys)}
        totals = {v for e in fission.added for v in e.outvars}
        added = {*jaxprs.free_variables(fission.added)}
        # What is no contraction or reduction is stacked, and the stack is summed.
        added |= {v for values in fission.summed.values() for v in jaxprs.variables(values) if v not in totals}
        self.before = estimator.part(fission.hoisted, fission.early, together=True)
        self.after = estimator.part(fission.sunk, fission.late, together=True)
        self.sums = estimator.sums(fission.added)
        self.operands = estimator.sizes(v for v in added if v in estimator.moving)
        self.stacks = estimator.sizes({*fission.early, *core.ys, *fission.late} - given)
        self.shifted = estimator.sizes(v for v in core.carry if v in read_after and v not in core.ys)
        self.given = estimator.sizes(given)
        self.results = estimator.sizes(loop.carry[i] for i in fission.summed)
        turned = {v for e in fission.once if e.primitive.name == "transpose" for v in e.outvars}
        self.turned = estimator.sizes(turned.intersection(core.consts))
        self.all_turned = estimator.sizes(turned)

    def per_step(self, in_chunks: bool) -> int:
        """Returns the bytes of temporary arrays that each step of a chunk adds."""
        return (
            self.stacks + self.shifted + in_chunks * self.given + max(self.before.peak, self.after.peak, self.sums.peak)
        )

    def at_once(self, chunk: int | None = None) -> Estimate:
        """Returns the estimate for `chunk` steps at a time, or all at once."""
        machine = self.estimator.machine
        steps = jaxprs.extent(self.fission.loop.length)
        n = min(chunk or steps, steps)
        times = math.ceil(steps / n)
        again = times > 1
        size = n * max(self.per_step(again), 1)
        terms = [p.terms(machine, steps, size, times) for p in (self.before, self.after)]
        sums = self.sums._replace(read=self.operands).terms(machine, steps, size, times)
        results = times * (machine.writing(self.results, self.results) * (1 + 2 * again))
        copies = steps * (machine.reading(2 * again * self.given, size) + machine.writing(self.shifted, size))
        copies += n * self.stacks * _TOUCHING / machine.written
        turned = self.all_turned if again else self.turned
        near = turned <= machine.near
        turning = _TURNING * turned / machine.cached if near else turned / machine.read + turned / machine.written
        more = dict(calls=again * times * 2 * machine.trip, packing=turning, stacks=copies + results)
        memory = n * self.per_step(again) + self.inside.memory + again * 2 * self.results
        return estimate(total(dict(self.inside.terms), *terms, sums, more), memory)
