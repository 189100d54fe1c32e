"""The chooser: compares what all strategies propose for a loop, and makes its plan.

A loop is planned when it is about to be differentiated, and when it is lowered. Strategies of the phase propose candidates
for its canonical form, in the order of the table. Where loops are estimated, the cheapest candidate that fits the bound of
memory runs, or `jax.lax.scan`; elsewhere the first one. A strategy that is asked for by name is not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.jaxprs.jax_internals import are_arrays, cached
from jrnn.jaxprs.tangents import is_smooth
from jrnn.loops.costs.estimates import size_in_words
from jrnn.loops.ir import Loop, Options, Provenance, Refused, ScanParams, observers, tag
from jrnn.loops.passes import reads_rows
from jrnn.loops.strategies.candidates import Candidate, Choice, cheapest
from jrnn.loops.strategies.nodes import converted
from jrnn.loops.strategies.plan import NOTHING_TO_GAIN, LoopPlan, Target
from jrnn.loops.strategies.problem import Problem, reference_of, to_lower
from jrnn.loops.strategies.strategy import Strategy
from jrnn.loops.strategies.table import AUTO, SCAN, STRATEGIES

_AS_WRITTEN = Provenance()
BRIEF = 3e-5  # seconds of all steps of a loop that is left alone
_MANY = 1_000  # runs of a loop that is in another one, whose number is not known


def lowered(
    scan: ScanParams, target: Target, options: Options, provenance: Provenance = _AS_WRITTEN
) -> LoopPlan:
    """Returns the plan of a loop that is lowered.

    Args:
        scan: the loop.
        target: what it is lowered for.
        options: the caller's.
        provenance: what differentiation left, if it was differentiated.
    """
    return _lowered(tuple(STRATEGIES.values()), scan, target, options, provenance)


def differentiated(
    scan: ScanParams, target: Target, options: Options, tangents: tuple[bool, ...]
) -> LoopPlan | None:
    """Returns the plan of a loop that is about to be differentiated, or None if it need not be read.

    A plan without a node leaves it to JAX's rules.

    Args:
        scan: the loop.
        target: what it is lowered for.
        options: the caller's.
        tangents: which of its inputs have tangents.
    """
    return _differentiated(tuple(STRATEGIES.values()), scan, target, options, tangents)


def fallback_after(error: Exception, target: Target, loop: Loop | None) -> LoopPlan:
    """Returns a plan that leaves the loop to JAX, with the error as the reason. Raises the error in tests."""
    if isinstance(error, ScanError):
        raise error
    return LoopPlan.fallback(target, loop, observers.report_unexpected(error, " in a pass"))


def report(plan: LoopPlan) -> None:
    """Tells observers of a plan, if there are any, with how long it compiles."""
    if observers.has_observers():
        observers.notify(plan.with_compilation())


@cached(256)
def _lowered(
    rows: Sequence[Strategy],
    scan: ScanParams,
    target: Target,
    options: Options,
    provenance: Provenance,
) -> LoopPlan:
    loop = None
    body = jaxprs.jaxpr_of(scan.jaxpr)
    if not are_arrays([v.aval for v in body.invars]):
        return LoopPlan.fallback(
            target, None, "it reads or writes Refs, or values of types that are not arrays"
        )
    try:
        program = jaxprs.inlined(scan.jaxpr, jaxprs.LOWERED_CALLS)
        has_checkpoint = any(e.primitive.name in jaxprs.CHECKPOINTS for e in body.eqns)
        loop = replace(
            scan.loop(program), recomputes=has_checkpoint and options.recompute is not None
        )
        return replace(
            _plan(rows, scan, loop, target, options, provenance), constants=tuple(program.consts)
        )
    except Exception as error:
        return fallback_after(error, target, loop)


def _plan(
    rows: Sequence[Strategy],
    scan: ScanParams,
    loop: Loop,
    target: Target,
    options: Options,
    provenance: Provenance,
) -> LoopPlan:
    if jaxprs.is_known(loop.length) and loop.length == 0:
        return LoopPlan.fallback(target, loop, "it has no steps")
    if options.executor == AUTO and not options.strict and _has_one_step(loop):
        return LoopPlan.fallback(target, loop, "it has one step")
    reference = reference_of(loop, target)
    if options.executor == AUTO and _is_brief(reference, target):
        return LoopPlan.fallback(
            target, loop, "it takes less time than planning it", choice=Choice(reference)
        )
    problem = to_lower(scan, reference, target, options, provenance)
    return _as_if_differentiated(rows, problem) or _choose_plan(rows, "lowering", problem)


def _has_one_step(loop: Loop) -> bool:
    return jaxprs.is_known(loop.length) and loop.length == 1


def _is_brief(reference: Candidate, target: Target) -> bool:
    """Returns True for a loop that gains less than its lowering takes: `x W^T` takes 1.2 to 1.4 times as long as `x W`."""
    runs = _MANY if target.repeated else 1
    is_short = target.is_estimated and runs * reference.estimate.seconds < BRIEF
    return is_short and not reads_rows(reference.node.loop)


def _as_if_differentiated(rows: Sequence[Strategy], problem: Problem) -> LoopPlan | None:
    """Returns the plan of a loop that is not differentiated on an accelerator, as if it were; or None.

    Without a gradient a loop gains about what it gains with one, and has the same values. Step by step it needs less memory.
    """
    options = problem.options
    loop = problem.loop
    is_differentiated = problem.provenance.written_reverse is not None
    if problem.is_estimated or is_differentiated or options.memory is not None:
        return None
    scan = ScanParams.of_loop(loop)
    plan = _differentiated(
        rows, scan, problem.target, options, tuple(is_smooth(v.aval) for v in loop.inputs)
    )
    if plan is None or plan.node is None:
        return None
    return replace(plan, loop=problem.original, node=converted(plan.node, problem.conversions))


@cached(256)
def _differentiated(
    rows: Sequence[Strategy],
    scan: ScanParams,
    target: Target,
    options: Options,
    tangents: tuple[bool, ...],
) -> LoopPlan | None:
    body = jaxprs.jaxpr_of(scan.jaxpr)
    if (
        not jaxprs.is_known(scan.length)
        or body.effects
        or not are_arrays([v.aval for v in body.invars])
    ):
        return None
    rows = [
        row
        for row in rows
        if row.phase == "differentiation" and options.executor in (AUTO, row.name)
    ]
    rows = [
        row
        for row in rows
        if options.executor == row.name or row.screen is None or row.screen(scan)
    ]
    if not rows:
        return None
    from jrnn.loops.strategies.differentiated import to_differentiate

    loop = None
    try:
        with tag.untagged():
            problem = to_differentiate(scan, target, options, tangents)
            loop = problem.original
            consts = tuple(
                problem.constants[v] for v in problem.loop.consts if v in problem.constants
            )
            return replace(_choose_plan(rows, "differentiation", problem), constants=consts)
    except Refused as why:
        return LoopPlan.fallback(target, loop, *(f"not {row.name}: {why}" for row in rows))
    except Exception as error:
        return fallback_after(error, target, loop)


def _choose_plan(rows: Sequence[Strategy], phase: str, problem: Problem) -> LoopPlan:
    """Returns the plan of a loop by the strategies of a phase: the best candidate whose compilation fits the budget."""
    executor = problem.options.executor
    notes = list[str]()
    groups = list[list[Candidate]]()
    requested: list[Candidate] | None = None
    for row in rows:
        if row.phase != phase or (executor not in (AUTO, row.name) and row.name != SCAN):
            continue
        try:
            proposed = _proposed(row, problem)
            if executor == row.name and problem.options.memory is not None:
                proposed = _within_memory(problem, proposed)
        except Refused as why:
            notes.append(f"not {row.name}: {why}")
            continue
        if proposed and (executor == row.name != SCAN or not problem.is_estimated):
            requested = list(proposed)
            break
        problem.candidates += proposed
        groups.append(proposed)
    # Candidates that change more come later, and stand earlier in the table.
    candidates = (
        [candidate for group in reversed(groups) for candidate in group]
        if requested is None
        else requested
    )
    over_budget: list[tuple[Candidate, str]] = []  # the budget
    while True:
        choice = _choice(candidates, problem, requested is not None)
        choice = choice._replace(others=(*choice.others, *over_budget))
        refusals = dict.fromkeys(f"not {c.strategy}: {why}" for c, why in over_budget)
        if choice.chosen is problem.reference:
            return _fallback(problem, phase, notes, choice, list(refusals))
        row = next(row for row in rows if row.name == choice.chosen.strategy)
        try:
            node = row.finish(problem, choice.chosen.node)
        except Refused as why:
            return LoopPlan.fallback(problem.target, problem.original, f"not {row.name}: {why}")
        node = converted(node, problem.conversions)
        compared = choice if problem.is_estimated else None
        plan = LoopPlan(
            problem.target, problem.original, node, row.name, (*notes, *refusals), compared
        )
        plan = replace(plan, differentiated=phase == "differentiation")
        plan, why_not = _within_budget(plan, problem.options.compile_budget)
        if not why_not:
            return plan
        over_budget.append((choice.chosen, why_not))
        candidates = [candidate for candidate in candidates if candidate is not choice.chosen]


def _choice(candidates: Sequence[Candidate], problem: Problem, requested: bool) -> Choice:
    if not requested:
        return cheapest([problem.reference, *candidates], problem.bounds)
    if not candidates:
        return Choice(problem.reference)
    chosen = min(candidates, key=lambda candidate: candidate.estimate.seconds)
    return Choice(
        chosen, tuple((candidate, "slower") for candidate in candidates if candidate is not chosen)
    )


def _fallback(
    problem: Problem, phase: str, notes: Sequence[str], choice: Choice, refusals: Sequence[str]
) -> LoopPlan:
    """Returns the plan of a loop for which no candidate was chosen."""
    target = problem.target
    loop = problem.original
    if phase == "lowering":
        return LoopPlan.fallback(
            target, loop, *notes, *refusals, *([] if refusals else [NOTHING_TO_GAIN]), choice=choice
        )
    at = choice.chosen.estimate
    reasons = (
        f"not {c.strategy}: {why}: {c.estimate}, {at} step by step" for c, why in choice.others
    )
    return LoopPlan.fallback(target, loop, *notes, *reasons)


def _within_budget(plan: LoopPlan, budget: float | None) -> tuple[LoopPlan, str]:
    """Returns the plan, with its compilation if that is bounded, and the reason why it takes too long, or ""."""
    if budget is None or not plan.target.is_estimated:
        return plan, ""
    plan = plan.with_compilation()
    added = plan.added_compile_seconds
    if added is None:
        return plan, f"how long it compiles is not known, and compile_budget={budget:g} bounds it"
    too_long = f"it compiles about {added:.2g} s longer, more than compile_budget={budget:g}"
    return plan, too_long if added > budget else ""


def _proposed(row: Strategy, problem: Problem) -> list[Candidate]:
    if row.platforms and problem.target.platform not in row.platforms:
        if problem.options.executor == row.name:
            raise Refused(f"it runs on {' and '.join(row.platforms)} alone")
        return []
    proposed = row.propose(problem)
    return [replace(c, strategy=row.name, label=c.label or row.name) for c in proposed]


def _within_memory(problem: Problem, proposed: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates of a strategy that the caller asks for by name, if they are within the option `memory`."""
    max_bytes = problem.bounds.max_bytes(problem.reference.estimate)
    fitting = [c for c in proposed if c.estimate.memory <= max_bytes]
    if proposed and not fitting:
        min_bytes = min(c.estimate.memory for c in proposed)
        bound = f"memory={problem.options.memory:g} allows {size_in_words(max(max_bytes, 0))}"
        raise Refused(f"it needs {size_in_words(min_bytes)}, and {bound}")
    return fitting
