"""The nodes of a plan: they run a loop, and nest.

A node runs a loop, estimates what that costs, and describes it. `Steps` is `jax.lax.scan`. `Split` computes a part of the
step for all steps before or after the core, which its `inner` node runs. A new strategy often has a new node.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from jrnn.jaxprs import primitives
from jrnn.loops.affine import associative
from jrnn.loops.costs.estimates import Estimate, Estimator, estimate
from jrnn.loops.ir import Loop, Results, RunLoop, scan_in_chunks
from jrnn.loops.ir.description import Description, contractions, described, items
from jrnn.loops.passes import Fission, widen_sums
from jrnn.loops.strategies.split_costs import SplitCosts

Values = Sequence[Any]


class Node(Protocol):
    """Runs a loop."""

    def run(self, consts: Values, init: Values, xs: Values, length: Any) -> Results:
        """Runs `length` steps."""

    def describe(self) -> Description:
        """Returns what it does, for `explain`."""


class EstimatedNode(Node, Protocol):
    """A node that is compared with others."""

    def estimate(self, estimator: Estimator) -> Estimate:
        """Returns the time and the memory of all steps.

        Args:
            estimator: that of the loop that the node's loop is a part of. It knows what the equations cost.
        """


@dataclass(frozen=True)
class Steps:
    """Runs the steps one by one with `jax.lax.scan`."""

    loop: Loop

    def run(self, consts: Values, init: Values, xs: Values, length: Any) -> Results:
        return self.loop.run(consts, init, xs, length)

    def estimate(self, estimator: Estimator) -> Estimate:
        inside = estimator.part(self.loop.eqns, self.loop.outputs)
        return estimate(estimator.trips(self.loop, inside), inside.peak_bytes)

    def describe(self) -> Description:
        return described(self.loop)


class Conversion(Protocol):
    """From the constants, carries, inputs and outputs of a loop to those of a rewritten one, and back."""

    def around(
        self, run: RunLoop, consts: Values, init: Values, xs: Values, length: Any
    ) -> Results:
        """Runs the original loop by `run`, which runs the rewritten one."""


@dataclass(frozen=True)
class Converted:
    """Runs a loop with other arrays, such as wide sums, packs or stacks.

    Attributes:
        inner: runs the rewritten loop.
        conversion: from the arrays of the original loop to those of the rewritten one, and back.
        remarks: what there is to say about it.
    """

    inner: Node
    conversion: Conversion
    remarks: tuple[str, ...] = ()

    def run(self, consts: Values, init: Values, xs: Values, length: Any) -> Results:
        return self.conversion.around(self.inner.run, consts, init, xs, length)

    def describe(self) -> Description:
        inner = self.inner.describe()
        return inner._replace(remarks=(*self.remarks, *inner.remarks))


def converted(node: Node, conversions: Sequence[Conversion]) -> Node:
    """Returns a node that runs a loop which was rewritten in stages; the first conversion is that of the first stage."""
    for conversion in reversed(conversions):
        node = Converted(node, conversion)
    return node


def steps_with_wide_sums(loop: Loop) -> Node:
    """Returns the loop over its steps, whose narrow sums are accumulated in a wide dtype."""
    rewritten, conversion = widen_sums(loop)
    return Steps(rewritten) if conversion is None else Converted(Steps(rewritten), conversion)


@dataclass(frozen=True)
class Split:
    """Computes a part of each step for all steps before or after the core, which `inner` runs.

    Attributes:
        fission: the parts.
        inner: runs the core.
    """

    fission: Fission
    inner: Node

    def run(self, consts: Values, init: Values, xs: Values, length: Any) -> Results:
        return self.fission.run(consts, init, xs, length, self.inner.run)

    def costs(self, estimator: Estimator) -> SplitCosts:
        """Returns the costs of all parts."""
        if estimator.loop is not self.fission.loop:
            estimator = Estimator(self.fission.loop, estimator.machine)
        return SplitCosts(
            estimator, self.fission, cast(EstimatedNode, self.inner).estimate(estimator)
        )

    def estimate(self, estimator: Estimator) -> Estimate:
        return self.costs(estimator).estimate()

    def describe(self) -> Description:
        fission = self.fission
        loop = self.fission.loop
        immovable = {e.primitive.name: e for e in fission.core.eqns if not primitives.is_movable(e)}
        obstacles = [
            f"{name} stays in the loop: {primitives.why_immovable(eqn)}"
            for name, eqn in immovable.items()
        ]
        return Description(
            hoisted=items(fission.hoisted_vars, loop),
            sunk=items(fission.sunk_vars, loop),
            accumulated=items(
                [v for values in fission.accumulated.values() for v in values], loop, per_step=False
            ),
            stacked=items(fission.core.ys, loop),
            contractions=contractions(fission.core.eqns),
            remarks=self.inner.describe().remarks,
            obstacles=tuple(obstacles),
        )


@dataclass(frozen=True)
class SplitInChunks:
    """Runs a split loop `size` steps at a time, so that the arrays of all steps of a chunk stay small."""

    inner: Split
    size: int

    def run(self, consts: Values, init: Values, xs: Values, length: Any) -> Results:
        fission = self.inner.fission
        constants = fission.constants(consts)

        def run_some(carry: Any, xs: Any, steps: Any) -> Results:
            return fission.run_with(constants, carry, xs, steps, self.inner.inner.run)

        return scan_in_chunks(
            run_some, list(init), list(xs), length, self.size, fission.loop.reverse
        )

    def estimate(self, estimator: Estimator) -> Estimate:
        return self.inner.costs(estimator).estimate(self.size)

    def describe(self) -> Description:
        inner = self.inner.describe()
        remark = f"run {self.size} steps at a time, so that these arrays stay small"
        return inner._replace(chunk=self.size, remarks=(remark, *inner.remarks))


@dataclass(frozen=True)
class AssociativeSolve:
    """Solves an affine loop for all steps in log T rounds."""

    loop: Loop

    def run(self, consts: Values, init: Values, xs: Values, length: Any) -> Results:
        return associative.solve_loop(self.loop, consts, init, xs, length)

    def describe(self) -> Description:
        return described(self.loop)


def map_leaf(node: Any, change: Callable[[Any], Node]) -> Node:
    """Returns a tree whose innermost node is replaced by what `change` returns for it."""
    inner = getattr(node, "inner", None)
    changed: Node = change(node) if inner is None else replace(node, inner=map_leaf(inner, change))
    return changed
