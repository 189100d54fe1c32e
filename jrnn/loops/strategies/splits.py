"""The strategy "scan" on a CPU: steps run one by one, and parts of them for all steps before or after the loop.

The search proposes splits of the loop, and how many steps run at a time. docs/notes/cpu_log.md has the measurements behind
the passes for XLA:CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jrnn import jaxprs
from jrnn.loops.costs.equation_costs import LARGE_PRODUCT
from jrnn.loops.passes import Moves, gates, join_activations, slice_operands, split
from jrnn.loops.passes.fission import is_slice
from jrnn.loops.strategies import unrolled
from jrnn.loops.strategies.candidates import Candidate, cheapest
from jrnn.loops.strategies.nodes import (
    Node,
    Split,
    SplitInChunks,
    Steps,
    map_leaf,
    steps_with_wide_sums,
)
from jrnn.loops.strategies.problem import Problem
from jrnn.loops.strategies.split_costs import SplitCosts

_CHUNK = 1 << 20  # the bytes of the arrays of one chunk, if they fit the bound of memory
_CLEARLY = 3  # a candidate that takes less than a third of another one's time replaces it, however uncertain both are


def propose(problem: Problem) -> Sequence[Candidate]:
    """Returns splits of the loop; nothing if a candidate is faster than the part that stays in all of them."""
    search = Search(problem)
    return () if any(map(search.beats_every_split, problem.candidates)) else search.candidates()


def for_xla(problem: Problem, node: Any) -> Node:
    """Returns a node whose core is written as XLA:CPU compiles it best."""
    return map_leaf(node, lambda leaf: _for_xla(problem, leaf))


def _for_xla(problem: Problem, leaf: Node) -> Node:
    if not isinstance(leaf, Steps):
        return leaf
    core = leaf.loop
    tiny = unrolled.of_tiny(problem, core)
    if tiny is not None:
        return tiny
    if gates.prefers_separate_slices(core, {*core.xs}.difference(problem.loop.xs)):
        fission = split(slice_operands(core), is_slice, moves=Moves())
        return Split(fission, Steps(fission.core))
    return steps_with_wide_sums(join_activations(core))


class Search:
    """The search among splits of a loop."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.bounds = problem.bounds
        self.reference = problem.reference

    def candidates(self) -> list[Candidate]:
        """Returns splits of the loop: of one kind, of all kinds, and the best selection that the search sees."""
        movable = self.problem.movable
        named = {
            "simplify": Moves(),
            "hoist": Moves(hoist=movable.hoist),
            "sink": Moves(sink=movable.sink),
        }
        named |= {
            "sum after the loop": Moves(accumulate=movable.accumulate),
            "all of these": movable,
        }
        tried: dict[Moves, Candidate] = {}
        for name, moves in named.items():
            if moves not in tried:
                tried[moves] = self._candidate(name, moves)
        best = cheapest([self.reference, *tried.values()], self.bounds).chosen.estimate.seconds
        seconds_to_beat = min(best, (1 - self.bounds.min_gain) * self.reference.estimate.seconds)
        return [
            *tried.values(),
            *(self._local_search(tried, movable) if self._core_seconds < seconds_to_beat else []),
        ]

    @functools.cached_property
    def _core_seconds(self) -> float:
        """The seconds of what stays in the loop in each split, without its stacks."""
        remaining = Steps(self.problem.split(None).core).estimate(self.problem.estimator)
        return remaining.seconds - dict(remaining.terms)["stacks"]

    @functools.cached_property
    def _is_of_small_kernels(self) -> bool:
        """Returns True if XLA runs the loop kernel by kernel, and none of them is large.

        What its kernels take is estimated too roughly to pay for a loop over chunks.
        """
        estimator = self.problem.estimator
        loop = self.problem.loop
        large = any(
            e.primitive.name == "dot_general" and jaxprs.operations(e) >= LARGE_PRODUCT
            for e in loop.eqns
        )
        return not large and not estimator.is_small(loop, estimator.part(loop.eqns, loop.outputs))

    def beats_every_split(self, candidate: Candidate) -> bool:
        """Returns True if even the part that no split can move takes `_CLEARLY` times the time of a candidate."""
        clearly = _CLEARLY * candidate.estimate.seconds < self._core_seconds
        return clearly and cheapest([self.reference, candidate], self.bounds).chosen is candidate

    def _candidate(self, label: str, moves: Moves) -> Candidate:
        """Returns the fastest way to run a split that fits the bound of memory, or the smallest way if none does."""
        fission = self.problem.split(moves)
        node = Split(fission, Steps(fission.core))
        parts = node.costs(self.problem.estimator)
        costs = {n: self.problem.with_conversions(parts.estimate(n)) for n in self._chunks(parts)}
        by_chunk = [
            Candidate(label, cost, node if n is None else SplitInChunks(node, n))
            for n, cost in costs.items()
        ]
        fitting = list(filter(self._fits, by_chunk))
        return min(
            fitting or by_chunk, key=lambda c: c.estimate.seconds if fitting else c.estimate.memory
        )

    def _fits(self, candidate: Candidate) -> bool:
        return candidate.estimate.memory <= self.bounds.max_bytes(
            self.reference.estimate, candidate.estimate
        )

    def _chunks(self, parts: SplitCosts) -> Iterator[int | None]:
        """Yields numbers of steps to run at a time: all, those of `_CHUNK`, and the most that fit the bound."""
        yield None
        length = self.problem.loop.length
        if (
            not jaxprs.is_known(length)
            or parts.per_step(False) * length < _CHUNK // 2
            or self._is_of_small_kernels
        ):
            return
        fixed_bytes = parts.estimate(1).memory - parts.per_step(True)
        for max_bytes in (_CHUNK, self.bounds.max_bytes(self.reference.estimate) - fixed_bytes):
            n = int(max_bytes / parts.per_step(True))
            if 2 <= n < length:
                # A divisor of the length leaves no shorter last chunk, whose results would be copied.
                yield next((m for m in range(n, n // 2, -1) if length % m == 0), n)

    def _local_search(self, tried: dict[Moves, Candidate], movable: Moves) -> list[Candidate]:
        """Adds and removes moves one at a time as long as that gains. Returns the better candidate, if there is one."""
        start = at = min(tried, key=lambda moves: self._rank(tried[moves]))
        changed = True
        single_moves = movable.in_order(self.problem.loop)
        while changed and len(single_moves) > 1:
            changed = False
            for field, v in single_moves:
                if self.problem.effort < 0:
                    break
                moved = replace(at, **{field: getattr(at, field) ^ {v}})
                if moved in tried:  # no better than the best
                    self.problem.effort -= len(self.problem.loop.eqns)
                    continue
                tried[moved] = self._candidate("a selection", moved)
                if self._rank(tried[moved]) < self._rank(tried[at]):
                    at = moved
                    changed = True
        return [tried[at]] if at != start else []

    def _rank(self, candidate: Candidate) -> tuple[bool, float]:
        return not self._fits(candidate), candidate.estimate.seconds
