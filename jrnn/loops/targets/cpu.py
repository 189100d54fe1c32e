"""The CPU target. docs/notes/cpu_log.md has the measurements behind its passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jrnn import jaxprs
from jrnn.loops import costs, native, tuned
from jrnn.loops.arithmetic import Arithmetic, arithmetic
from jrnn.loops.costs import Candidate, Choice, Estimate
from jrnn.loops.equation_costs import is_call, is_outer
from jrnn.loops.estimates import Estimator, Split, estimate, total
from jrnn.loops.kernels import Refused
from jrnn.loops.loop import Loop
from jrnn.loops.machines import Machine
from jrnn.loops.mark import Options
from jrnn.loops.passes import (
    Fission,
    Moves,
    activate_together,
    associative,
    batch_first,
    columns,
    concatenate_cotangents,
    direct_views,
    distinct,
    gates,
    movable,
    slice_apart,
    split,
    widen_sums,
)
from jrnn.loops.passes.fission import computation, slices
from jrnn.loops.passes.sums import smaller_first
from jrnn.loops.plan import NOTHING, LoopPlan, Runner, Target

if TYPE_CHECKING:  # it loads when a caller chooses the executor "native"
    from jrnn.loops.native.runner import Native

PASSES = (direct_views, distinct, concatenate_cotangents)

_CHUNK = 1 << 20  # the bytes of the arrays of one chunk, if they fit the bound of memory
_LEAST_GAIN = 0.03  # the part of a loop's time that another layout must save
_LONGEST_CALLED = 400  # equations of a step for which the native kernel is tried
_EFFORT = 2_000  # equations that may be estimated in the search: bounds the time of lowering


def plan(loop: Loop, target: Target, options: Options, take: str | None = None) -> LoopPlan:
    """Returns the plan of a loop: the way `take` if there is such a one, or else the one that is estimated to be best."""
    original, loop = loop, _passed(loop, target)
    notes: tuple[str, ...] = ()
    if options.executor == "associative":
        # On a CPU rounds cost more than they save. Only the coefficients are computed for all steps before the loop. The
        # multiplications and additions stay in the loop, in their order.
        why = associative.refusal(split(loop).core)
        if why is None:
            fission = split(loop, computation, contract=smaller_first)
            return LoopPlan(target, original, fission, widen_sums(fission.core), "associative")
        notes = (f"not associative: {why}",)
    search = _Search(original, loop, options, target)
    name, trip = (None, 1) if take is None else tuned.parted(take)
    choice = search.choice(name)
    if choice.chosen.way == name:
        notes = (tuned.NOTE + str(take),)
    if options.executor == native.NAME and search.refusal:
        notes = (f"not native: {search.refusal}",)
    if choice.chosen.plan is None and trip > 1:
        fission = split(replace(original, unroll=trip), moves=Moves())
        return LoopPlan(target, original, fission, fission.core, "scan", notes=notes, choice=choice)
    if choice.chosen.plan is None:
        notes = notes if choice.chosen.way == name else (*notes, NOTHING)
        return LoopPlan(target, original, None, None, "lax.scan", notes=notes, choice=choice)
    way: _Way = choice.chosen.plan
    if way.native is not None:
        notes = (*notes, str(way.native))
        return LoopPlan(target, original, way.fission, way.native, native.NAME, way.chunk, notes, choice)
    if way.arithmetic is not None:
        notes = (*notes, str(way.arithmetic))
        return LoopPlan(target, original, way.fission, way.arithmetic.loop, "scan", way.chunk, notes, choice)
    core = replace(way.fission.core, unroll=max(way.fission.core.unroll, trip))
    if gates.better_apart(core):
        inner: Runner = split(slice_apart(core), slices)
    else:
        inner = widen_sums(activate_together(core))
    return LoopPlan(target, original, way.fission, inner, "scan", way.chunk, notes, choice)


def ways(loop: Loop, target: Target, options: Options) -> tuple[list[Candidate], tuple[int, int]]:
    """Returns all ways to run a loop, also those that "auto" does not compare; and `Question.held`."""
    search = _Search(loop, _passed(loop, target), options, target)
    return search.everything(), (search.held, search.saved)


def _passed(loop: Loop, target: Target) -> Loop:
    for rewrite in PASSES:
        loop = rewrite(loop)
    turned = columns(batch_first(loop))
    return turned if _turning_pays(loop, turned, target.machine) else loop


def _turning_pays(loop: Loop, turned: Loop, machine: Machine) -> bool:
    """Returns True if products in another layout save a part of the time of a loop. Tiny products have no layout to gain."""
    if turned is loop:
        return False
    steps = jaxprs.extent(loop.length)
    costs_of = [Estimator(found, machine).split(split(found, moves=Moves())) for found in (loop, turned)]
    before, after = (found.inside.products * steps for found in costs_of)
    return before - after > _LEAST_GAIN * costs_of[0].at_once().seconds


@dataclass(frozen=True)
class _Way:
    """A loop in parts, run `chunk` steps at a time, or all at once if None.

    `native` or `arithmetic` runs the loop that stays, if given.
    """

    fission: Fission
    chunk: int | None
    native: Native | None = None
    arithmetic: Arithmetic | None = None
    coefficients: bool = False  # all that needs no carry is computed before the loop

    @property
    def name(self) -> str:
        """Names what leaves the loop by the numbers of its equations and carries, and what runs the rest."""
        moves = movable(self.fission, True)
        place = {v: i for i, eqn in enumerate(self.fission.loop.eqns) for v in eqn.outvars}
        early, late = (sorted(place[v] for v in made) for made in (moves.early, moves.late))
        numbers = {"early": early, "late": late, "summed": sorted(moves.summed)}
        parts = [f"{self.chunk} at a time"] if self.chunk else []
        parts += [f"{where} {' '.join(map(str, at))}" for where, at in numbers.items() if at]
        parts += ["coefficients before the loop"] * self.coefficients
        runner = native.NAME if self.native is not None else "steps" if self.arithmetic is None else "as arithmetic"
        return "; ".join([*parts, runner])


class _Search:
    """Proposes candidates for a loop, and chooses one.

    Args:
        original: the loop as JAX made it.
        loop: the loop after the passes.
        options: the caller's.
        target: what it is lowered for.

    Attributes:
        refusal: the reason why no candidate is a call of the native kernel, or "".
    """

    def __init__(self, original: Loop, loop: Loop, options: Options, target: Target):
        self.loop, self.options, self.target = loop, options, target
        self.refusal = ""
        self.reference = Candidate("lax.scan", Estimator(original, target.machine).whole(), None)
        self.estimator = Estimator(loop, target.machine)
        self.held, self.saved = _besides(original, options, self.reference.estimate)
        # The forward loop has half of the products of its reverse loop.
        self.besides = options.of_gradient(loop.reverse) * self.reference.estimate.seconds / 2
        self.left = _EFFORT

    def choice(self, take: str | None = None) -> Choice:
        """Returns the way `take` if there is such a one, or else the one that is estimated to be best."""
        if self.options.executor == native.NAME:
            called = self._called(self._movable())
            if called:
                chosen = min(called, key=lambda way: way.estimate.seconds)
                return Choice(chosen, tuple((way, "slower") for way in called if way is not chosen))
        candidates = self.candidates() if take is None else self.everything()
        taken = next((way for way in candidates if take is not None and way.way == take), None)
        if taken is not None:
            return Choice(
                taken, tuple((way, "not the fastest that was measured") for way in candidates if way is not taken)
            )
        margin = costs.MARGIN if any(map(is_call, self.loop.eqns)) else costs.ELEMENTWISE_MARGIN
        return costs.choose(candidates, self.options.memory, self.held, self.saved, margin, self.besides)

    def everything(self) -> list[Candidate]:
        """Returns the candidates, and ways that are not compared by what they cost, because they seldom gain."""
        ways = [*self.candidates(), *self._called(self._movable())]
        if associative.refusal(split(self.loop).core) is None:
            fission = split(self.loop, computation, contract=smaller_first)
            estimate = self.estimator.split(fission).at_once()
            ways.append(Candidate("coefficients", estimate, _Way(fission, None, coefficients=True)))
        return list({way.way: way for way in reversed(ways)}.values())[::-1]

    def _movable(self) -> Moves:
        return movable(self._split(None), self.options.of_gradient(self.loop.reverse))

    def candidates(self) -> list[Candidate]:
        """Returns the ways that are compared by what they cost. The first one is the reference."""
        most = self._movable()
        tried = {Moves(): self._candidate("simplify", Moves())}
        for name, field in (("hoist", "early"), ("sink", "late"), ("sum after the loop", "summed")):
            moves = Moves(**{field: getattr(most, field)})
            if moves not in tried:
                tried[moves] = self._candidate(name, moves)
        if most not in tried:
            tried[most] = self._candidate("all of these", most)
        start = min(tried, key=lambda moves: self._rank(tried[moves]))
        chosen = self._improved(start, tried[start], most)
        small = [way for moves in dict.fromkeys((Moves(), most)) if (way := self._as_arithmetic(moves))]
        called = self._called(most) if self.options.executor == "auto" and self._may_call() else []
        return [self.reference, *tried.values(), *chosen, *called, *small]

    def _may_call(self) -> bool:
        """Returns True for a loop that the native kernel might run faster, without a look at the kernel."""
        products = (e for e in self.loop.eqns if e.primitive.name == "dot_general" and not is_outer(e))
        return any(products) and len(self.loop.eqns) <= _LONGEST_CALLED

    def _called(self, most: Moves) -> list[Candidate]:
        """Returns the candidates whose loop is one call of the native kernel, with products of inputs in it or before it."""
        if self.target.exported or self.target.devices > 1:
            where = (
                "exported" if self.target.exported else "divided among devices; put the scan inside of jax.shard_map"
            )
            self.refusal = f"the program is {where}"
            return []
        from jrnn.loops.native.runner import called

        found = {}
        for name, moves in (("native", Moves(summed=most.summed)), ("native, all else outside", most)):
            try:
                fission, runner = called(self._split(moves))
            except Refused as why:
                self.refusal = str(why)
                continue
            if self.options.executor == "auto" and not runner.is_worth_a_call(self.target.machine):
                continue
            found[moves] = Candidate(name, runner.estimate(self.estimator.split(fission)), _Way(fission, None, runner))
        return [*found.values()]

    def _as_arithmetic(self, moves: Moves) -> Candidate | None:
        """Returns the candidate whose loop has small linear algebra as arithmetic, or None if it has none."""
        fission = self._split(moves)
        found = arithmetic(fission.core, self.estimator) if self.options.executor == "auto" else None
        if found is None:
            return None
        parts = self.estimator.split(fission)
        whole = parts.at_once()
        before = {name: -seconds for name, seconds in self.estimator.trips(fission.core, parts.inside).items()}
        changed = estimate(total(dict(whole.terms), before, found.terms), whole.memory)
        name = "as arithmetic" if moves == Moves() else "as arithmetic, all else outside"
        return Candidate(name, changed, _Way(fission, None, arithmetic=found))

    def _split(self, moves: Moves | None) -> Fission:
        self.left -= len(self.loop.eqns)
        return split(self.loop, contract=smaller_first, moves=moves)

    def _candidate(self, name: str, moves: Moves) -> Candidate:
        """Returns the fastest way to run a split that fits the bound of memory, or the smallest way if none does."""
        fission = self._split(moves)
        parts = self.estimator.split(fission)
        ways = [Candidate(name, parts.at_once(n), _Way(fission, n)) for n in self._chunks(parts)]
        fitting = [way for way in ways if self._fits(way)]
        if fitting:
            return min(fitting, key=lambda way: way.estimate.seconds)
        return min(ways, key=lambda way: way.estimate.memory)

    def _bound(self, ratio: float = 1.0) -> float:
        theirs = self.reference.estimate.memory + self.held + self.saved
        return costs.bound(self.options.memory, theirs, ratio) - self.held

    def _fits(self, way: Candidate) -> bool:
        ours, theirs = (c.estimate.seconds + self.besides for c in (way, self.reference))
        return way.estimate.memory <= self._bound(ours / theirs)

    def _chunks(self, parts: Split) -> Iterator[int | None]:
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

    def _improved(self, start: Moves, best: Candidate, most: Moves) -> list[Candidate]:
        """Adds and removes moves one at a time as long as that gains. Returns the better candidate, if there is one."""
        at, changed = start, True
        units = [(field, v) for field in ("summed", "early", "late") for v in getattr(most, field)]
        while changed and len(units) > 1:
            changed = False
            for field, v in units:
                if self.left < 0:
                    break
                moved = replace(at, **{field: getattr(at, field) ^ {v}})
                found = self._candidate("a selection", moved)
                if self._rank(found) < self._rank(best):
                    best, at, changed = found, moved, True
        return [best] if at != start else []

    def _rank(self, way: Candidate) -> tuple[bool, float]:
        return not self._fits(way), way.estimate.seconds


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
    again = [e for e in loop.eqns if "rematted_computation" in str(e.source_info.name_stack)]
    made = jaxprs.depends(loop.eqns, loop.xs).intersection(v for e in again for v in e.outvars)
    rest = {v for e in loop.eqns if not any(v in made for v in e.outvars) for v in jaxprs.inputs(e)}
    read = {v for e in again for v in jaxprs.inputs(e)}
    instead = sum(jaxprs.nbytes(v) for v in loop.xs if v in read and v not in rest)
    return held, steps * max(sum(map(jaxprs.nbytes, made & rest)) - instead, 0)
