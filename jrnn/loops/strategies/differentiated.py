"""The problem of a loop that is about to be differentiated: its train step by JAX's rules, which store states, or another.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jrnn import jaxprs
from jrnn.jaxprs.tangents import Linearized, is_smooth
from jrnn.loops.affine.carries import NotAffine
from jrnn.loops.chunks.chunked import check
from jrnn.loops.chunks.control_flow import expand_control
from jrnn.loops.chunks.estimate import BY_STEPS
from jrnn.loops.costs.estimates import Estimate, Estimator
from jrnn.loops.costs.machines import Machine
from jrnn.loops.ir import Loop, Options, Provenance, Refused, ScanParams
from jrnn.loops.passes.canonical import with_plain_carries
from jrnn.loops.strategies.candidates import REFERENCE, Bounds, Candidate
from jrnn.loops.strategies.nodes import Steps
from jrnn.loops.strategies.plan import Target
from jrnn.loops.strategies.problem import Problem


def to_differentiate(
    scan: ScanParams, target: Target, options: Options, tangents: Sequence[bool]
) -> Problem:
    """Returns the problem of a loop that is differentiated. Values keep their axes in its canonical form.

    Args:
        scan: the loop.
        target: what it is lowered for.
        options: the caller's.
        tangents: which of its inputs have tangents.

    Raises:
        Refused: if its steps cannot be evaluated together, or JAX's derivative stores no state.
    """
    program = expand_control(scan.jaxpr)
    original = scan.loop(program)
    loop, conversions = with_plain_carries(original)
    try:
        check(loop)  # before it is differentiated, which reverse-mode rules in it do not allow
    except NotAffine as reason:
        raise Refused(reason.why) from reason
    consts, carry, xs = scan.partition(tangents)
    moving = [[*(False for _ in program.consts), *consts], carry, xs]
    for conversion in conversions:
        moving = conversion.map_inputs(*moving)
    stored = stored_state_bytes(loop, [moves for of in moving for moves in of])
    if not stored:
        raise Refused("this gradient reads no state")
    eqns, _ = jaxprs.needed(loop.eqns, loop.outputs, set(loop.inputs))
    loop = replace(loop, eqns=tuple(eqns))
    constants = dict(zip(loop.consts, program.consts))
    bounds = Bounds(options.memory, binds_reference=True)
    reference = Candidate(REFERENCE, _train_step_cost(loop, stored, target.machine), Steps(loop))
    return Problem(
        scan,
        original,
        loop,
        conversions,
        target,
        options,
        Provenance(),
        reference,
        bounds,
        is_estimated=True,
        constants=constants,
        stored_bytes=stored,
    )


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
    follow = jaxprs.depends(parts.step, [v for v in states if jaxprs.nbytes(v) == largest_bytes])
    return sum(
        jaxprs.nbytes(v)
        for v in set(parts.primals_read)
        if v in follow and jaxprs.nbytes(v) >= largest_bytes
    )


def _train_step_cost(loop: Loop, stored: int, machine: Machine) -> Estimate:
    """Returns what a train step costs that stores `stored` bytes of states at every step."""
    forward = Estimator(loop, machine).whole()
    stack = jaxprs.extent(loop.length) * stored
    moved = stack / machine.write_rate + machine.reading(
        stack, stack
    )  # new memory in each run, however small
    by_steps = BY_STEPS * forward.seconds
    return Estimate(
        by_steps + moved, stack + forward.memory, (("steps", by_steps), ("stacks of states", moved))
    )
