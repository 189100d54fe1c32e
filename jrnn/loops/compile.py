"""What a tagged loop becomes when JAX lowers it. All that is decided then is decided here, from top to bottom.

`compile_loop` makes the plan of one loop: the baseline (the loop as JAX lowers it), the canonical form, what each strategy
proposes, and the cheapest candidate that fits memory and the budget of compilation. A new strategy is one function
`try_x(context)` in `strategies/`, and one line in `strategies_for`.

Shapes: T time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jrnn import jaxprs
from jrnn.jaxprs.jax_internals import are_arrays, cached
from jrnn.jaxprs.tangents import is_smooth
from jrnn.loops.costs.bounds import Bounds, bounds_of
from jrnn.loops.costs.constants import BRIEF_SECONDS, EQUATIONS
from jrnn.loops.costs.equation_costs import has_large_products, product_seconds
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.target import Target
from jrnn.loops.costs.times import Terms, size_in_words, total
from jrnn.loops.ir import (
    AUTO,
    Adapter,
    Loop,
    Options,
    Provenance,
    ScanParams,
    Unsupported,
    checked_passes,
    planning,
)
from jrnn.loops.passes import (
    NOTHING_MOVES,
    compose_views,
    reads_rows,
    split,
    transpose_constant_rhs,
)
from jrnn.loops.passes.canonical import SIMPLIFICATIONS, reads_array_literals
from jrnn.loops.passes.canonical.axis_order import AxisOrder, normalize_axes
from jrnn.loops.passes.canonical.constant_carries import eliminate_carries
from jrnn.loops.passes.canonical.random_keys import HoistedKeys, hoist_random_keys
from jrnn.loops.passes.canonical.unpack import unpack_carries
from jrnn.loops.passes.carries_in_place import copied_bytes
from jrnn.loops.passes.rounded_operands import round_operands
from jrnn.loops.plan import (
    LAX_SCAN,
    NOTHING_TO_GAIN,
    Candidate,
    Plan,
    Rejected,
    cheapest,
    left_after_error,
)
from jrnn.loops.strategies import try_associative, try_native
from jrnn.loops.strategies.context import NO_COST, Context
from jrnn.loops.strategies.nodes import Split, Steps, adapted
from jrnn.loops.strategies.plan_chunks import plan_to_differentiate
from jrnn.loops.strategies.try_arithmetic import try_arithmetic
from jrnn.loops.strategies.try_few_kernels import try_few_kernels
from jrnn.loops.strategies.try_split import try_split
from jrnn.loops.strategies.try_unrolled import try_unrolled

Strategy = Callable[[Context], Sequence[Candidate]]  # it may raise `Unsupported` with the reason

SCAN = "scan"  # the strategy that every loop has
ON_CPU: dict[str, Strategy] = {
    try_associative.NAME: try_associative.try_associative,
    "arithmetic": try_arithmetic,
    try_native.NAME: try_native.try_native,
    "unrolled": try_unrolled,
    SCAN: try_split,
}
ON_ACCELERATORS: dict[str, Strategy] = {
    try_associative.NAME: try_associative.try_associative,
    SCAN: try_few_kernels,
}
# Why a strategy cannot run a traced loop, or None. A caller who asks for one of these by name gets it or an error.
REFUSALS: dict[str, Callable[[Loop], str | None]] = {
    try_associative.NAME: try_associative.refusal,
    try_native.NAME: try_native.refusal,
}
_AS_WRITTEN = Provenance()
_MANY_RUNS = 1_000  # of a loop that is in another one, whose number is not known
_TRANSPOSED_MIN_GAIN = 0.03  # the part of a loop's time that transposed constants must save


def strategies_for(target: Target) -> dict[str, Strategy]:
    """Returns the strategies of a platform, in the order in which they are asked."""
    return ON_CPU if target.platform == "cpu" else ON_ACCELERATORS


@cached(256)
def compile_loop(
    scan: ScanParams, target: Target, options: Options, provenance: Provenance = _AS_WRITTEN
) -> Plan:
    """Returns the plan of a loop that is lowered. It is made once for each loop and target.

    Args:
        scan: the loop.
        target: what it is lowered for.
        options: the caller's.
        provenance: what differentiation left, if it was differentiated.
    """
    loop = None
    body = jaxprs.jaxpr_of(scan.jaxpr)
    if not are_arrays([v.aval for v in body.invars]):
        why = "it reads or writes Refs, or values of types that are not arrays"
        return Plan.left_to_jax(target, None, why)
    try:
        loop, constants = scan.inlined(jaxprs.LOWERED_CALLS)
        has_checkpoint = any(e.primitive.name in jaxprs.CHECKPOINTS for e in body.eqns)
        recomputes = has_checkpoint and options.recompute is not None
        loop = replace(loop, recomputes=recomputes)
        with planning.budget(scan.jaxpr):
            plan = _compile(loop, target, options, provenance)
        return replace(plan, constants=tuple(constants))
    except Exception as error:
        return left_after_error(error, target, loop)


def _compile(loop: Loop, target: Target, options: Options, provenance: Provenance) -> Plan:
    """Returns the plan of a loop. This is the whole order of things."""
    is_auto = options.executor == AUTO

    # 1. Loops that planning cannot make faster.
    if jaxprs.is_known(loop.length) and loop.length == 0:
        return Plan.left_to_jax(target, loop, "it has no steps")
    if is_auto and not options.strict and _has_one_step(loop):
        return Plan.left_to_jax(target, loop, "it has one step")

    # 2. The baseline: the loop as JAX lowers it.
    baseline = by_steps(loop, target)
    if is_auto and _is_brief(baseline, loop, target):
        why = "it takes less time than planning it"
        return Plan.left_to_jax(target, loop, why, chosen=baseline)

    # 3. The same loop in a plain form, so that all that follows sees one spelling of a step.
    hoists_keys = target.is_estimated and has_large_products(loop.eqns)
    form = without_unrolling(loop) if target.is_estimated else loop
    ignores_unroll = form is not loop
    form, adapters, passes = canonical_form(form, target.devices, hoists_keys)
    if target.is_estimated:
        form = _with_transposed_constants(form, baseline, target)

    # 4. On accelerators, the chunkwise form is as fast in a loop that is not differentiated, and has the same values.
    may_run_in_chunks = not target.is_estimated and options.memory is None
    if may_run_in_chunks and not provenance.is_differentiated:
        tangents = tuple(is_smooth(v.aval) for v in form.inputs)
        plan = plan_to_differentiate(ScanParams.of_loop(form), target, options, tangents)
        if plan is not None and plan.node is not None:
            return replace(plan, loop=loop, node=adapted(plan.node, adapters))

    # Gradients of products of 16 bits multiply in 16 bits, too.
    if not target.is_estimated:
        form = round_operands(form)

    # 5. What each strategy proposes.
    bounds = Bounds(options.memory)
    if target.is_estimated:
        bounds = bounds_of(loop, form, baseline.estimate, options, provenance)
    context = Context(
        loop=form,
        target=target,
        options=options,
        provenance=provenance,
        baseline=baseline,
        bounds=bounds,
        adapter_terms=_adapter_terms(adapters, form.length, target),
    )
    notes, skips_baseline = _ask(strategies_for(target), context)

    # 6. The cheapest one whose compilation fits the budget; the loop as it is, if it is the cheapest.
    candidates = context.candidates
    over_budget: Rejected = ()
    while True:
        chosen, rejected = _choose(candidates, context, skips_baseline)
        rejected = (*rejected, *over_budget)
        refusals = dict.fromkeys(f"not {c.strategy}: {why}" for c, why in over_budget)
        if chosen is baseline:
            reasons = refusals or [NOTHING_TO_GAIN]
            return Plan.left_to_jax(
                target, loop, *notes, *reasons, chosen=baseline, rejected=rejected
            )
        try:
            node = chosen.finished()
        except Unsupported as why:
            return Plan.left_to_jax(target, loop, f"not {chosen.strategy}: {why}")
        if ignores_unroll:
            notes.append(f"unroll={loop.unroll} is a hint, and estimated to be slower")
        plan = Plan(
            target=target,
            loop=loop,
            node=adapted(node, adapters),
            strategy=chosen.strategy,
            notes=(*notes, *refusals),
            chosen=chosen if target.is_estimated else None,
            rejected=rejected if target.is_estimated else (),
            passes=tuple(passes),
        )
        plan, too_long = plan.within_budget(options.compile_budget)
        if not too_long:
            return plan
        over_budget = (*over_budget, (chosen, too_long))
        candidates = [c for c in candidates if c is not chosen]


# Parts of the decision, in the order of `_compile` ---------------------------------------------------------------------


def by_steps(loop: Loop, target: Target) -> Candidate:
    """Returns the baseline: the candidate that leaves a loop to `jax.lax.scan`. XLA may copy its carries at each step."""
    cost = NO_COST
    if target.is_estimated:
        cost = Estimator(loop, target.machine).whole(copied_bytes=copied_bytes(loop))
    return Candidate(LAX_SCAN, cost, Steps(loop))


def without_unrolling(loop: Loop) -> Loop:
    """Returns the loop with one step in an iteration, which rewrites assume; all steps in one iteration are no loop.

    With several, XLA:CPU computes the steps of an iteration again for each output, unless the step is mostly calls.
    """
    is_unrolled = loop.unroll > 1 and jaxprs.is_known(loop.length) and loop.unroll < loop.length
    return replace(loop, unroll=1) if is_unrolled else loop


def _has_one_step(loop: Loop) -> bool:
    return jaxprs.is_known(loop.length) and bool(loop.length == 1)


def _is_brief(baseline: Candidate, loop: Loop, target: Target) -> bool:
    """Returns True for a loop that gains less than its planning takes. Products `x W^T` always gain by a transposed W."""
    if not target.is_estimated:
        return False
    runs = _MANY_RUNS if target.repeated else 1
    return runs * baseline.estimate.seconds < BRIEF_SECONDS and not reads_rows(loop)


def canonical_form(
    loop: Loop, devices: int = 1, hoists_keys: bool = False
) -> tuple[Loop, list[Adapter], list[str]]:
    """Returns one spelling of a loop, the adapters that run it on the loop's own arguments, and the passes that changed it.

    Adapters and passes are in the order in which they were applied. In the context `checked_passes` each pass is compared
    with the loop before it, on numbers.

    Args:
        loop: the loop.
        devices: the number of devices that its arrays are divided among. If there are several, no axes are merged, one of
            which may be divided.
        hoists_keys: True to compute the keys that it carries in a loop of their own.
    """
    adapters: list[Adapter] = []
    applied: list[str] = []
    simplified = loop
    # Passes that keep the carries and inputs as they are, then passes that change them.
    passes: list[Callable[[Loop], Any]] = [*SIMPLIFICATIONS, eliminate_carries]
    if hoists_keys:
        passes.append(hoist_random_keys)
    passes += [unpack_carries, functools.partial(normalize_axes, merge=devices == 1)]
    for rewrite in passes:
        if rewrite is eliminate_carries:
            simplified = loop
            if reads_array_literals(loop):
                break
        before = loop
        rewritten = rewrite(before)
        loop, adapter = (rewritten, None) if isinstance(rewritten, Loop) else rewritten
        if adapter is not None:
            adapters.append(adapter)
        elif loop.eqns == before.eqns:
            continue
        name = getattr(rewrite, "func", rewrite).__name__
        applied.append(name)
        if checked_passes.value:
            from jrnn.loops.ir.derived import check_pass

            check_pass(name, rewrite, before)
    return (loop if loop is simplified else compose_views(loop)), adapters, applied


def _with_transposed_constants(loop: Loop, baseline: Candidate, target: Target) -> Loop:
    """Returns the loop with constants that are transposed once, if that saves a part of its time.

    Tiny products have no layout to gain.
    """
    products = [e for e in loop.eqns if e.primitive.name == "dot_general"]
    product_time = sum(product_seconds(e, None, target.machine) for e in products)
    whole_time = baseline.estimate.seconds
    if jaxprs.extent(loop.length) * product_time <= _TRANSPOSED_MIN_GAIN * whole_time:
        return loop
    transposed = transpose_constant_rhs(loop)
    if transposed is loop:
        return loop
    seconds = []
    for form in (loop, transposed):
        split_loop = split(form, moves=NOTHING_MOVES)
        node = Split(split_loop, Steps(split_loop.residual))
        seconds.append(node.estimate(Estimator(form, target.machine)).seconds)
    before, after = seconds
    return transposed if after < (1 - _TRANSPOSED_MIN_GAIN) * before else loop


def _adapter_terms(adapters: Sequence[Adapter], length: object, target: Target) -> Terms:
    """Returns the time that all candidates take in addition to the canonical form.

    It counts keys in a loop of their own, and stacked arrays that are transposed before and after the loop.
    """
    if not target.is_estimated:
        return {}
    terms = []
    transposed_bytes = 0
    for adapter in adapters:
        if isinstance(adapter, HoistedKeys):
            terms.append(dict(Estimator(adapter.key_loop, target.machine).whole().terms))
        if isinstance(adapter, AxisOrder):
            transposed_bytes += adapter.transposed_bytes
    size = jaxprs.extent(length) * transposed_bytes
    return total(*terms, {"elements": EQUATIONS.transposing * target.machine.reading(size, size)})


def _ask(strategies: dict[str, Strategy], context: Context) -> tuple[list[str], bool]:
    """Adds what strategies propose to the context. Returns the reasons why others propose nothing, and whether the
    candidates run without a comparison with the baseline: the caller asked for them, or nothing is estimated.

    On platforms without estimates the first strategy that proposes a candidate runs.
    """
    executor = context.options.executor
    notes = []
    if executor in ON_CPU and executor not in strategies:
        notes.append(f"not {executor}: it runs on cpu alone")
    for name, strategy in strategies.items():
        if executor not in (AUTO, name) and name != SCAN:
            continue
        is_asked_for = executor == name and name != SCAN
        try:
            proposed = list(strategy(context))
            if executor == name:
                proposed = _within_memory(context, proposed)
        except Unsupported as why:
            notes.append(f"not {name}: {why}")
            continue
        if proposed and (is_asked_for or not context.target.is_estimated):
            context.candidates = proposed
            return notes, True
        # On ties the candidate that changes least is preferred: strategies that change more are asked earlier.
        context.candidates = [*proposed, *context.candidates]
    return notes, False


def _within_memory(context: Context, proposed: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates of a strategy that the caller asks for by name, if they are within the option `memory`."""
    memory = context.options.memory
    if memory is None:
        return list(proposed)
    max_bytes = context.bounds.max_bytes(context.baseline.estimate)
    fitting = [c for c in proposed if c.estimate.memory <= max_bytes]
    if proposed and not fitting:
        min_bytes = min(c.estimate.memory for c in proposed)
        allowed = f"memory={memory:g} allows {size_in_words(max(max_bytes, 0))}"
        raise Unsupported(f"it needs {size_in_words(min_bytes)}, and {allowed}")
    return fitting


def _choose(
    candidates: Sequence[Candidate], context: Context, skips_baseline: bool
) -> tuple[Candidate, Rejected]:
    """Returns the candidate to run, and the others with the reasons.

    With `skips_baseline` the fastest candidate runs, even if the baseline is estimated to be faster.
    """
    if not skips_baseline:
        return cheapest([context.baseline, *candidates], context.bounds)
    if not candidates:
        return context.baseline, ()
    chosen = min(candidates, key=lambda candidate: candidate.estimate.seconds)
    return chosen, tuple((c, "slower") for c in candidates if c is not chosen)
