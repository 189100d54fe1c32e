"""The search among ways to run a loop: what leaves the loop, and how many steps run at a time.

A backend gives it a loop, and takes the cheapest candidate that fits the bound of memory (`strategies/candidates.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jrnn import jaxprs
from jrnn.jaxprs.jax_internals import is_recomputed
from jrnn.loops.costs.equation_costs import is_call
from jrnn.loops.costs.estimates import Estimate, Estimator
from jrnn.loops.costs.machines import Machine
from jrnn.loops.ir import Loop, Options
from jrnn.loops.passes import Fission, Moves, movable, split
from jrnn.loops.passes.fission import Facts
from jrnn.loops.passes.sums import Contract
from jrnn.loops.strategies import candidates as costs
from jrnn.loops.strategies.arithmetic import LARGE_PRODUCT
from jrnn.loops.strategies.candidates import Candidate, Choice
from jrnn.loops.strategies.nodes import InChunks, Node, Split, Steps
from jrnn.loops.strategies.split_costs import SplitCosts

_CHUNK = 1 << 20  # the bytes of the arrays of one chunk, if they fit the bound of memory
_SHARE = 0.5  # of a loop's own arrays, which a plan may use besides if the states are small
_CLEARLY = 3  # a candidate that takes less than a third of another one's time replaces it, whatever `costs.doubt` is
_EFFORT = 2_000  # equations that may be estimated in the search: bounds the time of lowering


class Search:
    """Proposes candidates for a loop, and chooses one.

    Args:
        reference: the loop as JAX made it, and what it costs.
        loop: the loop after the passes.
        options: the caller's.
        machine: the constants.
        contract: computes contractions over time.
    """

    def __init__(self, reference: Candidate, loop: Loop, options: Options, machine: Machine, contract: Contract):
        self.loop, self.options, self.machine, self.contract = loop, options, machine, contract
        self.reference = reference
        self.estimator = Estimator(loop, machine)
        self.held, self.saved = _besides(reference.node.loop, options, reference.estimate)
        # The forward loop has half of the products of its reverse loop.
        self.besides = options.of_gradient(loop.reverse) * reference.estimate.seconds / 2
        self.small = _allowance(loop)
        self.margin = costs.MARGIN if any(map(is_call, loop.eqns)) else costs.ELEMENTWISE_MARGIN
        self.left = _EFFORT
        self._facts, self._splits = Facts.of(loop), {}

    def candidates(self) -> list[Candidate]:
        """Returns the reference, and splits of the loop: of one kind, of all kinds, and the best selection that is found."""
        most = self.movable
        named = {"simplify": Moves(), "hoist": Moves(early=most.early), "sink": Moves(late=most.late)}
        named |= {"sum after the loop": Moves(summed=most.summed), "all of these": most}
        tried: dict[Moves, Candidate] = {}
        for name, moves in named.items():
            if moves not in tried:
                tried[moves] = self._candidate(name, moves)
        candidates = [self.reference, *tried.values()]
        best = self.choose(candidates).chosen.estimate.seconds
        enough = min(best, (1 - self.margin) * self.reference.estimate.seconds)
        return candidates if self._least >= enough else [*candidates, *self._improved(tried, most)]

    def choose(self, candidates: Sequence[Candidate]) -> Choice:
        """Returns the cheapest candidate that fits."""
        bound = self.options.memory, self.held, self.saved, self.margin, self.besides, self.small
        return costs.choose(candidates, *bound)

    @functools.cached_property
    def _least(self) -> float:
        """The seconds of what stays in the loop in each split, without its stacks."""
        stays = Steps(self.split(None).core).estimate(self.estimator)
        return stays.seconds - dict(stays.terms)["stacks"]

    @functools.cached_property
    def movable(self) -> Moves:
        """Returns all that may leave the loop. Only sums of gradients may change their order."""
        return movable(self.split(None), self.options.of_gradient(self.loop.reverse))

    def split(self, moves: Moves | None, contract: Contract | None = None) -> Fission:
        """Returns the loop in parts; all that can leave it leaves it if `moves` is None.

        Sums are computed by `contract`, from stacks of parts of concatenations, or else by that of the search.
        """
        self.left -= len(self.loop.eqns)
        if (key := (moves, contract)) not in self._splits:
            given = dict(contract=contract or self.contract, parts=contract is not None)
            self._splits[key] = split(self.loop, moves=moves, facts=self._facts, **given)
        return self._splits[key]

    def settles(self, candidate: Candidate) -> bool:
        """Returns True if a candidate is chosen before any split of the loop, because of what stays in all of them."""
        clearly = _CLEARLY * candidate.estimate.seconds < self._least
        return clearly and self.choose([self.reference, candidate]).chosen is candidate

    def candidate(self, name: str, node: Node) -> Candidate:
        """Returns a candidate for a node that runs the loop after the passes."""
        return Candidate(name, node.estimate(self.estimator), node)

    def _candidate(self, name: str, moves: Moves) -> Candidate:
        """Returns the fastest way to run a split that fits the bound of memory, or the smallest way if none does."""
        fission = self.split(moves)
        node = Split(fission, Steps(fission.core))
        parts = node.costs(self.estimator)
        every = [
            Candidate(name, parts.at_once(n), node if n is None else InChunks(node, n)) for n in self._chunks(parts)
        ]
        fitting = list(filter(self._fits, every))
        return min(fitting or every, key=lambda c: c.estimate.seconds if fitting else c.estimate.memory)

    def _bound(self, ratio: float = 1.0) -> float:
        theirs = self.reference.estimate.memory + self.held + self.saved
        return costs.bound(self.options.memory, theirs, ratio, self.small) - self.held

    def _fits(self, candidate: Candidate) -> bool:
        ours, theirs = (c.estimate.seconds + self.besides for c in (candidate, self.reference))
        return candidate.estimate.memory <= self._bound(ours / theirs)

    def _chunks(self, parts: SplitCosts) -> Iterator[int | None]:
        """Yields numbers of steps to run at a time: all, those of `_CHUNK`, and the most that fit the bound."""
        yield None
        length = self.loop.length
        if not jaxprs.is_known(length) or parts.per_step(False) * length < _CHUNK // 2:
            return
        least = parts.at_once(1).memory - parts.per_step(True)
        for most in (_CHUNK, self._bound() - least):
            n = int(most / parts.per_step(True))
            if 2 <= n < length:
                # A divisor of the length leaves no shorter last chunk, whose results would be copied.
                yield next((m for m in range(n, n // 2, -1) if length % m == 0), n)

    def _improved(self, tried: dict[Moves, Candidate], most: Moves) -> list[Candidate]:
        """Adds and removes moves one at a time as long as that gains. Returns the better candidate, if there is one."""
        start = at = min(tried, key=lambda moves: self._rank(tried[moves]))
        changed, units = True, most.in_order(self.loop)
        while changed and len(units) > 1:
            changed = False
            for field, v in units:
                if self.left < 0:
                    break
                moved = replace(at, **{field: getattr(at, field) ^ {v}})
                if moved in tried:  # no better than the best
                    self.left -= len(self.loop.eqns)
                    continue
                tried[moved] = self._candidate("a selection", moved)
                if self._rank(tried[moved]) < self._rank(tried[at]):
                    at, changed = moved, True
        return [tried[at]] if at != start else []

    def _rank(self, candidate: Candidate) -> tuple[bool, float]:
        return not self._fits(candidate), candidate.estimate.seconds


def _allowance(loop: Loop) -> float:
    """Returns the bytes that a plan may always use: of a loop over small states, a share of its own arrays."""
    if any(e.primitive.name == "dot_general" and jaxprs.operations(e) >= LARGE_PRODUCT for e in loop.eqns):
        return costs.SMALL
    stacks = sum(map(jaxprs.nbytes, (*loop.xs, *jaxprs.variables(loop.ys))))
    own = jaxprs.extent(loop.length) * stacks + sum(map(jaxprs.nbytes, (*loop.consts, *loop.carry)))
    return min(costs.SMALL, _SHARE * own)


def _besides(loop: Loop, options: Options, reference: Estimate) -> tuple[int, int]:
    """Returns the bytes of the stacks that a reverse loop reads, and those that `jax.lax.scan` would hold besides.

    Next to the same stacks, its reverse loop makes gradients of constants at each step. That is more than its forward loop
    needs, which sets what ours may need.
    """
    if not options.of_gradient(loop.reverse):
        return 0, max(options.gradients - reference.memory, 0)
    steps = jaxprs.extent(loop.length)
    held = max(steps * sum(map(jaxprs.nbytes, loop.xs)) - options.given, 0)
    if not options.stores_less or options.recompute is not None:
        return held, 0
    # JAX names what the reverse loop computes again. Its own rule would store what the rest of the loop reads of that.
    again = list(filter(is_recomputed, loop.eqns))
    repeated = jaxprs.depends(loop.eqns, loop.xs).intersection(v for e in again for v in e.outvars)
    rest = {v for e in loop.eqns if not any(v in repeated for v in e.outvars) for v in jaxprs.inputs(e)}
    read = {v for e in again for v in jaxprs.inputs(e)}
    instead = sum(jaxprs.nbytes(v) for v in loop.xs if v in read and v not in rest)
    return held, steps * max(sum(map(jaxprs.nbytes, repeated & rest)) - instead, 0)
