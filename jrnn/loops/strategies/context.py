"""Context: a loop that is planned, and all that a strategy reads of it.

Shapes: T time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jrnn.loops.costs.bounds import Bounds
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.target import Target
from jrnn.loops.costs.times import Estimate, Terms, total
from jrnn.loops.ir import Loop, Options, Provenance
from jrnn.loops.passes import Moves, SplitLoop, movable, split
from jrnn.loops.passes.moves import Dependences
from jrnn.loops.passes.sums import Contract, dot_as_written, dot_smaller_first
from jrnn.loops.plan import Candidate, Node

NO_COST = Estimate(0.0, 0)


@dataclass(eq=False)
class Context:
    """A loop that is planned. Strategies read it and propose candidates.

    Attributes:
        loop: the loop in canonical form, which candidates run.
        target: what it is lowered for.
        options: the caller's.
        provenance: what differentiation left.
        baseline: the loop as JAX lowers it, with what that costs.
        bounds: what candidates may use, and must gain.
        adapter_terms: what all candidates cost in addition to the loop that they run, for its canonical form.
        candidates: what the strategies that were asked earlier proposed.
    """

    loop: Loop
    target: Target
    options: Options
    provenance: Provenance
    baseline: Candidate
    bounds: Bounds
    adapter_terms: Terms = field(default_factory=dict)
    candidates: Sequence[Candidate] = ()
    _splits: dict[tuple[Moves | None, Contract | None], SplitLoop] = field(default_factory=dict)

    @functools.cached_property
    def estimator(self) -> Estimator:
        """What the equations of the loop cost."""
        return Estimator(self.loop, self.target.machine)

    @functools.cached_property
    def _dependences(self) -> Dependences:
        return Dependences.of(self.loop)

    @functools.cached_property
    def movable(self) -> Moves:
        """All that may leave the loop. Only sums of gradients may change their order."""
        return movable(self.split(None), self.provenance.of_gradient(self.loop.reverse))

    def split(self, moves: Moves | None, contract: Contract | None = None) -> SplitLoop:
        """Returns the loop in parts; all that can leave it leaves it if `moves` is None.

        Sums are computed by `contract`, from stacks of parts of concatenations, or else as the platform computes them best.
        """
        key = (moves, contract)
        if key not in self._splits:
            by_platform = dot_smaller_first if self.target.platform == "cpu" else dot_as_written
            self._splits[key] = split(
                self.loop,
                moves=moves,
                dependences=self._dependences,
                contract=contract or by_platform,
                joins_parts=contract is not None,
            )
        return self._splits[key]

    def is_requested(self, strategy: str) -> bool:
        """Returns whether the caller asked for a strategy by name."""
        return self.options.executor == strategy

    def candidate(
        self,
        strategy: str,
        node: Node,
        label: str = "",
        min_gain: float | None = None,
        finish: Callable[[], Node] | None = None,
    ) -> Candidate:
        """Returns a candidate for a node that runs `loop`.

        Args:
            strategy: the name of the strategy.
            node: runs the loop.
            label: what it does, in a few words; by default the name of the strategy.
            min_gain: the part of the baseline's time that it must save, if that is not the bounds'.
            finish: returns the node to run once the candidate is chosen, if that is another one.
        """
        cost = NO_COST
        if self.target.is_estimated:
            cost = self.with_adapters(node.estimate(self.estimator))
        return Candidate(
            label or strategy, cost, node, strategy=strategy, min_gain=min_gain, finish=finish
        )

    def with_adapters(self, cost: Estimate) -> Estimate:
        """Returns an estimate of the loop with what is computed before and after it for its canonical form."""
        terms = total(dict(cost.terms), self.adapter_terms)
        seconds = cost.seconds + sum(self.adapter_terms.values())
        return Estimate(seconds, cost.memory, tuple(terms.items()))
