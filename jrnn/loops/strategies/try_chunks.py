"""The strategy "chunks": a loop over matrix states that is differentiated runs in chunks of steps (`affine/chunkwise/`).

The decision is made where JAX is about to differentiate the loop: once it is differentiated, its states are among the
residuals. What decides is the estimated train step: step by step, with its states stored, or in chunks.

Shapes: T time, C steps of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jrnn import jaxprs
from jrnn.jaxprs.jax_internals import argument_names
from jrnn.jaxprs.tangents import Linearized, is_smooth
from jrnn.loops.affine.chunkwise.chunked import Chunkwise, check, chunkwise
from jrnn.loops.affine.chunkwise.control_flow import expand_control
from jrnn.loops.costs.bounds import Bounds
from jrnn.loops.costs.chunk_costs import step_by_step
from jrnn.loops.costs.constants import CHUNKS
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.target import Target
from jrnn.loops.costs.times import size_in_words
from jrnn.loops.ir import Adapter, Loop, Options, ScanParams, Unsupported, derived
from jrnn.loops.passes import compose_views
from jrnn.loops.passes.canonical import SIMPLIFICATIONS, reads_array_literals
from jrnn.loops.passes.canonical.constant_carries import eliminate_carries
from jrnn.loops.passes.canonical.unpack import unpack_carries
from jrnn.loops.plan import LAX_SCAN, Candidate, Plan, Rejected, cheapest
from jrnn.loops.strategies.nodes import Steps, adapted

NAME = "chunks"

# A program in chunks is compared with its loop for three chunks of this length; the last one is not full.
_COMPARED_CHUNK = 4
_COMPARED_STEPS = 11


def try_chunks(
    scan: ScanParams, target: Target, options: Options, tangents: Sequence[bool]
) -> Plan:
    """Returns the plan of a loop that is about to be differentiated: in chunks, or left to JAX's rules with the reasons.

    Args:
        scan: the loop.
        target: what it is lowered for.
        options: the caller's.
        tangents: which of its inputs have tangents.

    Raises:
        Unsupported: if its steps cannot be evaluated together, or JAX's derivative stores no state.
    """
    program = expand_control(scan.jaxpr)
    original = scan.loop(program)
    loop, adapters = plain_form(original)
    check(loop)  # before it is differentiated, which reverse-mode rules in it do not allow
    stored_bytes = stored_state_bytes(loop, _moving(scan, program, adapters, tangents))
    if not stored_bytes:
        raise Unsupported("this gradient reads no state")
    constants = dict(zip(loop.consts, program.consts))
    names = _carry_names(scan, adapters)
    node = chunkwise(loop, constants, names, prefers_batched(target))
    node = replace(node, stored=stored_bytes)
    loop = node.loop
    estimator = Estimator(loop, target.machine)
    baseline_cost = step_by_step(estimator, stored_bytes)
    baseline = Candidate(LAX_SCAN, baseline_cost, Steps(loop))
    candidate = Candidate(
        "in chunks",
        node.estimate(estimator),
        node,
        strategy=NAME,
        min_gain=CHUNKS.min_gain if node.stages else 0.0,
    )
    bounds = Bounds(options.memory, binds_baseline=True)
    rejected: Rejected = ()
    if options.executor == NAME:
        _check_memory(candidate, baseline, bounds)
    else:
        chosen, rejected = cheapest([baseline, candidate], bounds)
        if chosen is baseline:
            return _left_to_jax(target, original, baseline, rejected)
    if options.verify and node.stages:
        node = _validated(scan, node)
    values = tuple(constants[v] for v in loop.consts if v in constants)
    plan = Plan(
        target,
        original,
        adapted(node, adapters),
        NAME,
        chosen=candidate,
        rejected=rejected,
        constants=values,
        is_differentiated=True,
    )
    plan, too_long = plan.within_budget(options.compile_budget)
    if too_long:
        return _left_to_jax(target, original, baseline, ((candidate, too_long),))
    return plan


def plain_form(loop: Loop) -> tuple[Loop, list[Adapter]]:
    """Returns a loop with one carry for each state, whose values keep their axes, and the adapters to it."""
    adapters: list[Adapter] = []
    for simplify in SIMPLIFICATIONS:
        loop = simplify(loop)
    if reads_array_literals(loop):
        return loop, adapters
    form = loop
    for rewrite in (eliminate_carries, unpack_carries):
        form, adapter = rewrite(form)
        if adapter is not None:
            adapters.append(adapter)
    return (loop if form is loop else compose_views(form)), adapters


def _moving(
    scan: ScanParams,
    program: jaxprs.Program,
    adapters: Sequence[Any],
    tangents: Sequence[bool],
) -> list[bool]:
    """Returns which inputs of the rewritten loop have tangents."""
    consts, carry, xs = scan.partition(tangents)
    groups: Any = ([*(False for _ in program.consts), *consts], carry, xs)
    for adapter in adapters:
        groups = adapter.map_inputs(*groups)
    return [moves for group in groups for moves in group]


def _check_memory(candidate: Candidate, baseline: Candidate, bounds: Bounds) -> None:
    """Raises `Unsupported` if a candidate that the caller asks for by name needs more than the option `memory` allows."""
    if bounds.memory is None:
        return
    max_bytes = bounds.max_bytes(baseline.estimate)
    if candidate.estimate.memory > max_bytes:
        allowed = f"memory={bounds.memory:g} allows {size_in_words(max(max_bytes, 0))}"
        raise Unsupported(f"it needs {size_in_words(candidate.estimate.memory)}, and {allowed}")


def _left_to_jax(target: Target, loop: Loop, baseline: Candidate, rejected: Rejected) -> Plan:
    by_steps = baseline.estimate
    reasons = [
        f"not {c.strategy}: {why}: {c.estimate}, {by_steps} step by step" for c, why in rejected
    ]
    return Plan.left_to_jax(target, loop, *reasons)


def stored_state_bytes(loop: Loop, moves: Sequence[bool]) -> int:
    """Returns the bytes a step of the largest carries, and of values as large that follow from them, that JAX's derivative
    of a loop would read.

    A state that only adds inputs, and is multiplied only with values that have no tangents, is not read.

    Args:
        loop: the loop.
        moves: which of its inputs have tangents.
    """
    inputs = loop.inputs
    n_consts = len(loop.consts)
    moving = {v for v, m in zip(inputs, moves) if m}
    before = -1
    while len(moving) > before:  # a carry also moves if the new carry does
        before = len(moving)
        reached = jaxprs.depends(loop.eqns, moving)
        moving.update(v for v, out in zip(loop.carry, loop.carry_out) if jaxprs.is_in(out, reached))
    argnums = [i for i, v in enumerate(inputs) if v in moving and is_smooth(v.aval)]
    parts = Linearized.of(loop.step, [v.aval for v in inputs], argnums)
    states = parts.program.invars[n_consts : n_consts + len(loop.carry)]
    largest_bytes = max(map(jaxprs.nbytes, states), default=0)
    largest = [v for v in states if jaxprs.nbytes(v) == largest_bytes]
    follow = jaxprs.depends(parts.step, largest)
    read = [v for v in set(parts.primals_read) if v in follow]
    return sum(jaxprs.nbytes(v) for v in read if jaxprs.nbytes(v) >= largest_bytes)


def prefers_batched(target: Target) -> bool:
    """Returns True for platforms on which the number of kernels determines the time of a chunk."""
    return target.platform != "cpu"


def _carry_names(scan: ScanParams, adapters: Sequence[Any]) -> list[str]:
    """Returns what the user calls each carry of a loop, which holds parts of each of the step's; or nothing."""
    names = argument_names(jaxprs.jaxpr_of(scan.jaxpr))[scan.n_consts :][: scan.n_carry]
    if len(names) < scan.n_carry or not all(names):
        return []
    for adapter in adapters:
        _, names, _ = adapter.map_inputs((), names, ())
    return names


def _validated(scan: ScanParams, node: Chunkwise) -> Chunkwise:
    """Returns the node if it agrees with the loop on random numbers; raises `Unsupported` if not."""
    short_scan = replace(scan, length=_COMPARED_STEPS, unroll=1)
    kind = "chunks at once" if node.batched else "chunks"
    derive = functools.partial(_run_in_short_chunks, node.batched)
    agrees, note = derived.validate(short_scan, kind, derive)
    if not agrees:
        raise Unsupported(note)
    return replace(node, notes=(*node.notes, note)) if note else node


def _run_in_short_chunks(batched: bool, scan: ScanParams) -> derived.Run:
    """Returns the loop of a step in chunks of few steps."""
    program = expand_control(scan.jaxpr)
    loop: Loop
    adapters: Sequence[Adapter]
    loop, adapters = plain_form(scan.loop(program))
    constants = dict(zip(loop.consts, program.consts))
    node = replace(chunkwise(loop, constants, batched=batched), size=_COMPARED_CHUNK)
    in_chunks = adapted(node, adapters)

    def run(consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]) -> Any:
        return in_chunks.run([*program.consts, *consts], init, xs, scan.length)

    return run
