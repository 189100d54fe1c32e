"""The plan of a loop that is about to be differentiated: in chunks, or step by step by JAX's rules.

Shapes: T time, C steps of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jrnn import jaxprs
from jrnn.jaxprs.jax_internals import are_arrays, argument_names
from jrnn.jaxprs.tangents import Linearized, is_smooth
from jrnn.loops.affine.carries import NotAffine
from jrnn.loops.chunks.chunked import Chunked, check, chunked
from jrnn.loops.chunks.estimate import BY_STEPS
from jrnn.loops.chunks.normal import opened
from jrnn.loops.costs.estimates import Estimate, Estimator
from jrnn.loops.costs.machines import Machine
from jrnn.loops.ir import Loop, Options, ScanParams, derived, observers, tag
from jrnn.loops.passes.canonical import with_plain_carries
from jrnn.loops.strategies.candidates import REFERENCE, Candidate, Choice, bound, choose
from jrnn.loops.strategies.nodes import Steps, converted
from jrnn.loops.strategies.plan import LoopPlan, Target

# A program in chunks is compared with its loop for three chunks of this length, of which the last is not full.
_COMPARED_CHUNK = 4
_COMPARED = 11

# Elements of S in all; a delta rule on 4 x 16 x 16 took 1.1 times the time of its steps, on 16 x 32 x 32 0.96.
_LEAST = 2048

_MARGIN = 0.25  # the part of the time that chunks must save: their program takes several times as long to compile


def pays(scan: ScanParams) -> bool:
    """Returns True if training a loop in chunks may be faster than step by step: T of two chunks, and a large state."""
    _, carry, xs = scan.apart(jaxprs.jaxpr_of(scan.jaxpr).invars)
    given = max(map(jaxprs.nbytes, xs), default=0)
    large = [
        v for v in carry if v.aval.ndim > 1 and jaxprs.nbytes(v) > 2 * given and sum(n > 1 for n in v.aval.shape) > 1
    ]
    return scan.length >= 128 and any(v.aval.shape and jaxprs.elements(v.aval.shape) >= _LEAST for v in large)


def stored_states(loop: Loop, moves: Sequence[bool]) -> int:
    """Returns the bytes a step of the largest carries, and of values as large that follow from them, that JAX's derivative
    of a loop would read.

    A state that only adds inputs, and is multiplied only with values that have no tangents, is not read.

    Args:
        loop: the loop.
        moves: which of its inputs have tangents.
    """
    inputs, n_consts = loop.inputs, len(loop.consts)
    moving, before = {v for v, m in zip(inputs, moves) if m}, -1
    while len(moving) > before:  # a carry also moves if the new carry does
        before, reached = len(moving), jaxprs.depends(loop.eqns, moving)
        moving.update(v for v, out in zip(loop.carry, loop.carry_out) if jaxprs.is_in(out, reached))
    places = [i for i, v in enumerate(inputs) if v in moving and is_smooth(v.aval)]
    parts = Linearized.of(loop.step, [v.aval for v in inputs], places)
    states = parts.program.invars[n_consts : n_consts + len(loop.carry)]
    most = max(map(jaxprs.nbytes, states), default=0)
    follow = jaxprs.depends(parts.step, [v for v in states if jaxprs.nbytes(v) == most])
    return sum(jaxprs.nbytes(v) for v in set(parts.wanted) if v in follow and jaxprs.nbytes(v) >= most)


def forward(loop: Loop, target: Target, options: Options) -> LoopPlan | None:
    """Returns the plan of a loop that is not differentiated, in chunks, as if it were; or None.

    Without a gradient a loop gains about what it gains with one, and has the same values.
    """
    if options.executor != "auto" or options.written is not None or options.memory is not None:
        return None  # step by step it needs less memory
    scan = ScanParams(loop.closed(), len(loop.consts), len(loop.carry), loop.length, loop.reverse, loop.unroll)
    planned = plan(scan, target, options, tuple(is_smooth(v.aval) for v in loop.inputs))
    return planned[0] if planned is not None and planned[0].node is not None else None


def prepares_at_once(target: Target) -> bool:
    """Returns True for platforms on which the number of kernels determines the time of a chunk."""
    return target.platform != "cpu"


@functools.lru_cache(maxsize=256)
def plan(
    scan: ScanParams, target: Target, options: Options, moves: tuple[bool, ...]
) -> tuple[LoopPlan, Sequence[Any]] | None:
    """Returns the plan of a loop and the values of its constants. The plan leaves the loop to JAX with the reason.

    Args:
        scan: the loop.
        target: what it is lowered for.
        options: the caller's.
        moves: which of its inputs have tangents.

    Returns:
        The plan and values; None for loops that need not be tried.
    """
    body = jaxprs.jaxpr_of(scan.jaxpr)
    if not jaxprs.is_known(scan.length) or body.effects:
        return None
    if not are_arrays([v.aval for v in body.invars]) or not pays(scan):
        return None
    try:
        with tag.untagged():
            return _plan(scan, target, options, moves)
    except NotAffine as reason:
        why = str(reason) if reason.eqn is None else reason.explained()  # several have their remedies
    except Exception as error:
        why = observers.unexpected(error)
    return LoopPlan.left(target, None, why), ()


def compared(chunked: Any, memory: float | None, machine: Machine) -> Choice:
    """Compares a train step that stores states at every step with one in chunks.

    Args:
        chunked: the node `Chunked`.
        memory: the option `memory`.
        machine: the constants.
    """
    estimator = Estimator(chunked.loop, machine)
    forward, stack = estimator.whole(), jaxprs.extent(chunked.loop.length) * chunked.stored
    moved = stack / machine.written + machine.reading(stack, stack)  # new memory in each run, however small
    by_steps = BY_STEPS * forward.seconds
    terms = (("steps", by_steps), ("stacks of states", moved))
    by_jax = Estimate(by_steps + moved, stack + forward.memory, terms)
    reference = Candidate(REFERENCE, by_jax, Steps(chunked.loop))
    chunks = Candidate("in chunks", chunked.estimate(estimator), chunked)
    theirs, ours = reference.estimate.memory, chunks.estimate.memory
    if memory is not None and ours < theirs and bound(memory, theirs) < theirs:
        return Choice(chunks, ((reference, "more memory than allowed"),))
    return choose([reference, chunks], memory, margin=_MARGIN if chunked.stages else 0.0)


def _plan(scan: ScanParams, target: Target, options: Options, moves: Sequence[bool]) -> tuple[LoopPlan, Sequence[Any]]:
    program, loop, conversions = _read(scan)
    check(loop)  # before it is differentiated, which reverse-mode rules in it do not allow
    consts, carry, xs = scan.apart(moves)
    said = [[*(False for _ in program.consts), *consts], carry, xs]
    for conversion in conversions:
        said = conversion.said_of(*said)
    stored = stored_states(loop, [moves for of in said for moves in of])
    if not stored:
        return LoopPlan.left(target, loop, "this gradient reads no state"), ()
    values, at_once = dict(zip(loop.consts, program.consts)), prepares_at_once(target)
    node = replace(chunked(loop, values, _names(scan, conversions), at_once), stored=stored)
    choice = compared(node, options.memory, target.machine)
    notes = node.notes
    if not isinstance(choice.chosen.node, Chunked):
        (other, reason), at = choice.others[0], choice.chosen.estimate
        return LoopPlan.left(target, loop, f"{reason}: {other.estimate} in chunks, {at} step by step"), ()
    if options.verify and node.stages:
        few, kind = replace(scan, length=_COMPARED, unroll=1), "chunks at once" if at_once else "chunks"
        agrees, note = derived.verdict(few, kind, functools.partial(_small, at_once))
        if not agrees:
            return LoopPlan.left(target, loop, note), ()
        notes = (*notes, note) if note else notes
    return LoopPlan(target, node.loop, converted(node, conversions), "chunks", notes, choice), program.consts


def _names(scan: ScanParams, conversions: Sequence[Any]) -> list[str]:
    """Returns what the user calls each carry of a loop, which holds parts of each of the step's; or nothing."""
    names = argument_names(jaxprs.jaxpr_of(scan.jaxpr))[scan.n_consts :][: scan.n_carry]
    if len(names) < scan.n_carry or not all(names):
        return []
    for conversion in conversions:
        _, names, _ = conversion.said_of((), names, ())
    return names


def _read(scan: ScanParams) -> tuple[jaxprs.Program, Loop, Sequence[Any]]:
    """Returns the program of a step, the canonical form of its loop, and the conversions to it."""
    program = opened(scan.jaxpr)
    return program, *with_plain_carries(scan.loop(program))


def _small(at_once: bool, scan: ScanParams) -> derived.Run:
    """Returns the loop of a step in chunks of few steps."""
    program, loop, conversions = _read(scan)
    node = replace(chunked(loop, dict(zip(loop.consts, program.consts)), at_once=at_once), size=_COMPARED_CHUNK)
    return lambda consts, init, xs: converted(node, conversions).run([*program.consts, *consts], init, xs, scan.length)
