"""Carries of narrow floating-point types that only add, kept in float32 inside the loop.

One by one, bfloat16 numbers of about the same size stop to add up after 256 of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jrnn.executor import jaxprs
from jrnn.executor.jaxprs import Env
from jrnn.executor.loop import Loop
from jrnn.executor.passes.sums import accumulator, added_to_carries


@dataclass(frozen=True)
class WideSums:
    """A loop whose sums are wide, run with the carries of the loop as it was."""

    loop: Loop
    types: tuple[Any, ...]  # of the carries as they were
    runner: Any = None  # what runs the loop, where it does not run itself

    @property
    def eqns(self) -> tuple[Any, ...]:
        return self.loop.eqns

    def with_length(self, length: Any) -> WideSums:
        """The same for another number of steps."""
        runner = None if self.runner is None else self.runner.with_length(length)
        return replace(self, loop=self.loop.with_length(length), runner=runner)

    def run(self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The loop's `(last carry, stacked ys)`."""
        wide = [jnp.asarray(x, v.aval.dtype) for x, v in zip(init, self.loop.carry)]
        last, ys = (self.runner or self.loop).run(consts, wide, xs)
        return [x.astype(dtype) for x, dtype in zip(last, self.types)], ys


def widen_sums(loop: Loop) -> Loop | WideSums:
    """Keeps carries that only add in float32 where they are narrower.

    Invariant: every other value stays what it was; the sums are rounded once instead of at every step.
    """
    sums = {
        i: added
        for i, added in added_to_carries(loop).items()
        if accumulator(loop.carry[i].aval.dtype) != loop.carry[i].aval.dtype
    }
    if not sums:
        return loop

    def evaluation(env: Env) -> Env:
        narrow = {loop.carry[i]: env[loop.carry[i]].astype(loop.carry[i].aval.dtype) for i in sums}
        jaxprs.evaluate(loop.eqns, known := {**env, **narrow})
        for i, values in sums.items():
            total = env[loop.carry[i]]
            for v in values:
                total = total + jaxprs.value(known, v).astype(total.dtype)
            known[loop.carry_out[i]] = total
        return known

    wide = [v.aval for v in loop.inputs]
    first = len(loop.consts)
    for i in sums:
        wide[first + i] = wide[first + i].update(dtype=accumulator(wide[first + i].dtype), weak_type=False)
    return WideSums(loop.rewritten(evaluation, wide), tuple(v.aval.dtype for v in loop.carry))
