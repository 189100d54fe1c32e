"""The nodes of a plan: they run a loop, and nest.

`Steps` is `jax.lax.scan`. `Split` computes a part of the step for all steps before or after the loop that remains, which
its `inner` node runs. A new strategy often has a new node.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jrnn.jaxprs import primitives
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.times import Estimate
from jrnn.loops.ir import Adapter, Loop, Results, scan_in_chunks
from jrnn.loops.ir.description import Description, contractions, described, items
from jrnn.loops.passes import SplitLoop, widen_sums
from jrnn.loops.passes.carries_in_place import writes_in_place
from jrnn.loops.plan import Node
from jrnn.loops.strategies.split_costs import SplitCosts

Values = Sequence[Any]


@dataclass(frozen=True)
class Steps:
    """Runs the steps one by one with `jax.lax.scan`."""

    loop: Loop

    def run(
        self,
        consts: Values,
        init: Values,
        xs: Values,
        length: Any,
    ) -> Results:
        return self.loop.run(consts, init, xs, length)

    def estimate(self, estimator: Estimator) -> Estimate:
        return estimator.whole(self.loop)

    def describe(self) -> Description:
        if writes_in_place(self.loop):
            return described(self.loop, "carries are read before they are written, in place")
        return described(self.loop)


@dataclass(frozen=True)
class Adapted:
    """Runs a loop with other arrays, such as wide sums, packs or stacks.

    Attributes:
        inner: runs the rewritten loop.
        adapter: from the arrays of the original loop to the arrays of the rewritten one, and back.
        remarks: what there is to say about it.
    """

    inner: Node
    adapter: Adapter
    remarks: tuple[str, ...] = ()

    def run(
        self,
        consts: Values,
        init: Values,
        xs: Values,
        length: Any,
    ) -> Results:
        return self.adapter(self.inner.run, consts, init, xs, length)

    def estimate(self, estimator: Estimator) -> Estimate:
        return self.inner.estimate(estimator)

    def describe(self) -> Description:
        inner = self.inner.describe()
        return inner._replace(remarks=(*self.remarks, *inner.remarks))


def adapted(node: Node, adapters: Sequence[Adapter]) -> Node:
    """Returns a node for a loop that several passes rewrote; the adapters are in the order of the passes."""
    for adapter in reversed(adapters):
        node = Adapted(node, adapter)
    return node


def steps_with_wide_sums(loop: Loop) -> Node:
    """Returns the loop over its steps, whose narrow sums are accumulated in a wide dtype."""
    rewritten, adapter = widen_sums(loop)
    return Steps(rewritten) if adapter is None else Adapted(Steps(rewritten), adapter)


@dataclass(frozen=True)
class Split:
    """Computes a part of each step for all steps before or after the loop that remains, which `inner` runs.

    Attributes:
        split_loop: the parts.
        inner: runs the loop that remains.
    """

    split_loop: SplitLoop
    inner: Node

    def run(
        self,
        consts: Values,
        init: Values,
        xs: Values,
        length: Any,
    ) -> Results:
        return self.split_loop.run(consts, init, xs, length, self.inner.run)

    def costs(self, estimator: Estimator) -> SplitCosts:
        """Returns the costs of all parts."""
        return SplitCosts(estimator, self.split_loop, self.inner.estimate(estimator))

    def estimate(self, estimator: Estimator) -> Estimate:
        return self.costs(estimator).estimate()

    def with_inner(self, change: Callable[[Loop], Node]) -> Split:
        """Returns the same parts, with another node for the loop that remains."""
        return replace(self, inner=change(self.split_loop.residual))

    def describe(self) -> Description:
        split_loop = self.split_loop
        loop = split_loop.loop
        accumulated = [v for values in split_loop.accumulated.values() for v in values]
        immovable = {
            e.primitive.name: e for e in split_loop.residual.eqns if not primitives.is_movable(e)
        }
        obstacles = [
            f"{name} stays in the loop: {primitives.why_immovable(eqn)}"
            for name, eqn in immovable.items()
        ]
        return Description(
            hoisted=items(split_loop.hoisted_vars, loop),
            sunk=items(split_loop.sunk_vars, loop),
            accumulated=items(accumulated, loop, per_step=False),
            stacked=items(split_loop.residual.ys, loop),
            contractions=contractions(split_loop.residual.eqns),
            remarks=self.inner.describe().remarks,
            obstacles=tuple(obstacles),
        )


@dataclass(frozen=True)
class SplitInTiles:
    """Runs a split loop `size` steps at a time, so that the arrays of all steps of a tile stay small."""

    inner: Split
    size: int

    def run(
        self,
        consts: Values,
        init: Values,
        xs: Values,
        length: Any,
    ) -> Results:
        split_loop = self.inner.split_loop
        constants = split_loop.constants(consts)

        def run_tile(
            carry: Any,
            xs: Any,
            steps: Any,
        ) -> Results:
            return split_loop.run_with(constants, carry, xs, steps, self.inner.inner.run)

        return scan_in_chunks(
            run_tile, list(init), list(xs), length, self.size, split_loop.loop.reverse
        )

    def estimate(self, estimator: Estimator) -> Estimate:
        return self.inner.costs(estimator).estimate(self.size)

    def with_inner(self, change: Callable[[Loop], Node]) -> SplitInTiles:
        """Returns the same parts, with another node for the loop that remains."""
        return replace(self, inner=self.inner.with_inner(change))

    def describe(self) -> Description:
        inner = self.inner.describe()
        remark = f"run {self.size} steps at a time, so that these arrays stay small"
        return inner._replace(chunk=self.size, remarks=(remark, *inner.remarks))
