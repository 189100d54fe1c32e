"""The option `axis_name` of `scan`: tracing the step, the derivative, and the results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.jaxprs import Var, primitives
from jrnn.jaxprs.jax_internals import ClosedJaxpr, is_traced, named_axis
from jrnn.jaxprs.mesh_axes import cast, like, varying_axes
from jrnn.jaxprs.tangents import is_smooth
from jrnn.loops.affine.carries import CarryStage
from jrnn.loops.ir import FlatScan, Loop, ScanParams, StepFn, Tree, derived, observers, tag
from jrnn.loops.segments.shard import TimeShard, Values
from jrnn.loops.segments.starts import RunScan, Segment, Solver, end_of_stage, stages

_VALIDATED_STEPS = 4  # the summary of a segment is compared with the loop for this number of steps


def scan(
    run: RunScan,
    f: StepFn,
    init: Tree,
    xs: Tree,
    length: int | None,
    shard: TimeShard,
    strict: bool,
) -> tuple[Tree, Tree]:
    """Runs a scan whose time axis is divided among devices.

    Args:
        run: the scan of one device, see `Segment`.
        f, init: the step and the carry before the whole sequence.
        xs, length: this device's part.
        shard: where its segment stands.
        strict: raise if all carries are handed from device to device.
    """
    init = jax.tree.map(lambda v: shard.varying(jnp.asarray(v)), init)
    flat = FlatScan.of(_typed(f), init, xs, length, shard.reverse)
    closed = flat.closed()
    n_carry = len(flat.init)
    communicates = _communicates(closed, shard)
    loop, consts = _loop(closed, n_carry, flat.length, shard)
    in_order = _stages(closed, n_carry, flat.length, shard)
    if tag.verified.value:
        in_order = _verified(in_order, closed, n_carry, shard)
    _note_stages(in_order, shard, strict)
    segment = Segment(loop, run)
    solver = Solver(shard, segment, tuple(in_order), alone=not communicates)

    last, outs = _solved(segment, solver)(consts, flat.init, flat.xs)
    return jax.tree.unflatten(flat.carry, shard.from_last(last)), jax.tree.unflatten(flat.ys, outs)


def _solved(segment: Segment, solver: Solver) -> Callable[..., tuple[Values, Values]]:
    """Returns the last carry and the outputs of a device as a function of constants, the first carry and inputs.

    Its derivative linearizes the segment at its start, and solves for the tangents of the starts of all devices.
    """

    @jax.custom_jvp
    def solved(consts, init, xs):
        start, _, _ = solver.starts(consts, init, xs)
        return segment.whole(consts, start, xs)

    def rule(primals, tangents):
        consts, init, xs = primals
        const_tangents, init_tangents, x_tangents = tangents
        start, matrices, is_finite = solver.starts(consts, init, xs)

        # What has a tangent: some of the arguments, and the carries of floating-point numbers.
        arguments = [*consts, *xs]
        varied = []
        varied_tangents = []
        for i, tangent in enumerate([*const_tangents, *x_tangents]):
            if is_smooth(arguments[i]) and not isinstance(tangent, SymbolicZero):
                varied.append(i)
                varied_tangents.append(tangent)
        smooth = [i for i, v in enumerate(start) if is_smooth(v)]

        def whole(smooth_start, varied_values):
            values = jaxprs.replaced(arguments, varied, varied_values)
            replaced_start = jaxprs.replaced(start, smooth, smooth_start)
            return segment.whole(values[: len(consts)], replaced_start, values[len(consts) :])

        results, push = jax.linearize(
            whole, jaxprs.take(start, smooth), jaxprs.take(arguments, varied)
        )

        def push_start(tangent):
            ends, _ = push(list(tangent.values()), varied_tangents)
            return {i: ends[i] for i in smooth}

        first = {}
        for i in smooth:
            tangent = init_tangents[i]
            if isinstance(tangent, SymbolicZero):
                tangent = jnp.zeros_like(start[i])
            first[i] = like(tangent, start[i])
        start_tangents = solver.tangents(first, matrices, is_finite, push_start)
        outs = push(jaxprs.take(start_tangents, smooth), varied_tangents)

        def tangent_or_zero(result, tangent):
            zero = SymbolicZero(jax.typeof(result).to_tangent_aval())
            return tangent if is_smooth(result) else zero

        return results, jax.tree.map(tangent_or_zero, results, outs)

    solved.defjvp(rule, symbolic_zeros=True)
    return solved


def _typed(f: StepFn) -> StepFn:
    """Returns the step with new carries that vary over the axes over which the old ones do."""

    def step(carry, x):
        out = f(carry, x)
        if not isinstance(out, tuple) or len(out) != 2:
            return out  # `jax.lax.scan` reports it
        new, y = out
        if jax.tree.structure(new) != jax.tree.structure(carry):
            return out
        return jax.tree.map(like, new, carry), y

    return step


def _communicates(closed: ClosedJaxpr, shard: TimeShard) -> bool:
    """Returns whether the step has collectives. Raises a ScanError if it may not run on one device alone, or twice."""
    effects = closed.jaxpr.effects
    named = set(map(named_axis, effects)) - {None}
    if named.intersection(shard.axis if isinstance(shard.axis, tuple) else (shard.axis,)):
        raise ScanError(
            f"scan: the step has a collective over {shard.axis!r}, the axis of time; a step is on one device"
        )
    others = [str(e) for e in effects if named_axis(e) is None]
    if others:
        raise ScanError(
            "scan: with axis_name the step must have no side effects, because a device may run it more than once; "
            f"it has {', '.join(others)}"
        )
    return bool(named)


def _stages(
    closed: ClosedJaxpr,
    n_carry: int,
    steps: int,
    shard: TimeShard,
) -> list[CarryStage]:
    """Returns the stages of the loop, which are read off its step with calls and checkpoints inlined."""
    program = jaxprs.inlined(closed, jaxprs.CALLS_AND_CHECKPOINTS)
    loop = ScanParams(closed, 0, n_carry, steps, shard.reverse).loop(program)
    constants = zip(program.constvars, program.consts)
    known = {v: value for v, value in constants if not is_traced(value)}
    return stages(loop, known, shard.count)


def _loop(
    closed: ClosedJaxpr,
    n_carry: int,
    steps: int,
    shard: TimeShard,
) -> tuple[Loop, Values]:
    """Returns the loop to run, and the values of its constants.

    With `check_vma`, constants that are the same on all devices become varying before the loop. Otherwise JAX sums their
    gradients over the devices at each step of the reverse loop.
    """
    program = jaxprs.inlined(closed)
    varying_constant = functools.partial(_varying_constant, program, shard)
    consts = list(map(varying_constant, program.constvars, program.consts))

    def rule(eqn, *arguments):
        operands = list(arguments)
        for i, atom in enumerate(eqn.invars):
            if jaxprs.is_literal(atom):
                operands[i] = jaxprs.value({}, atom)
        if eqn.primitive.name == "pvary":
            return [cast(operands[0], eqn.params["axes"])]
        if any(True for _ in jaxprs.sub_jaxprs(eqn)) or primitives.is_kind(eqn, "collective"):
            return None
        # Values that did not vary may now, and literals next to them do not.
        axes = varying_axes(operands)
        return jaxprs.bind(eqn, *(cast(v, axes) for v in operands))

    def step(*args):
        return replace(program, consts=args[: len(consts)]).run(*args[len(consts) :], rule=rule)

    avals = [*map(jax.typeof, consts), *(v.aval for v in program.invars)]
    varying = jaxprs.trace(step, avals)
    loop = ScanParams(closed, len(consts), n_carry, steps, shard.reverse).loop(varying)
    return loop, [*map(jnp.asarray, varying.consts), *consts]


def _varying_constant(
    program: jaxprs.Program,
    shard: TimeShard,
    name: Var,
    value: Array,
) -> Array:
    """Casts a constant, unless equations with a jaxpr inside read it: the types in that jaxpr are fixed."""
    if not is_smooth(value):
        is_extended = jnp.issubdtype(jax.typeof(value).dtype, jax.dtypes.extended)
        return value if is_extended else jnp.asarray(value)
    same = {name}
    for eqn in program.eqns:
        if same.intersection(jaxprs.inputs(eqn)) and eqn.primitive.name != "pvary":
            if any(True for _ in jaxprs.sub_jaxprs(eqn)):
                return jnp.asarray(value)
            same.update(eqn.outvars)
    return shard.varying(jnp.asarray(value))


def _verified(
    in_order: Sequence[CarryStage],
    closed: ClosedJaxpr,
    n_carry: int,
    shard: TimeShard,
) -> list[CarryStage]:
    """Returns the stages; all are handed from device to device if a summary disagrees with the loop on random numbers."""

    def summarized(scan):
        opened = jaxprs.inlined(scan.jaxpr, jaxprs.CALLS_AND_CHECKPOINTS)
        loop = scan.loop(opened)

        def plain_scan(f, init, xs, length, **options):
            return lax.scan(f, init, xs, length, scan.reverse)

        segment = Segment(loop, plain_scan)
        known = dict(zip(opened.constvars, opened.consts))
        summed_up = [s for s in stages(loop, known, shard.count) if s.kind != "opaque"]

        def run(consts, start, xs):
            consts = [*opened.consts, *consts]
            start = list(start)
            xs = list(xs)
            last, ys = segment.whole(consts, start, xs)
            for stage in summed_up:
                first = jaxprs.take(start, stage.carry)
                zeros = jaxprs.replaced(start, stage.carry, list(map(jnp.zeros_like, first)))
                ends = segment.end(stage, consts, zeros, xs)
                matrices = segment.matrices(stage, consts, start, xs)
                end = end_of_stage(stage, matrices, first, ends)
                last = jaxprs.replaced(last, stage.carry, end)
            return last, ys

        return run

    step = jaxprs.inlined(closed, jaxprs.CALLS_AND_CHECKPOINTS)
    loop = derived.lifted(step, n_carry, _VALIDATED_STEPS, shard.reverse)
    agrees, note = derived.validate(loop, f"over {shard.count} devices", summarized)
    if note:
        observers.notify(note)
    if agrees:
        return list(in_order)
    return [replace(stage, kind="opaque", forms=(), why=note) for stage in in_order]


def _note_stages(
    in_order: Sequence[CarryStage],
    shard: TimeShard,
    strict: bool,
) -> None:
    """Notes how the loop is divided, for `explain`."""
    notes = [f"time over {shard.count} devices along {shard.axis!r}"]
    for stage in in_order:
        carries = f"carry {', '.join(map(str, stage.carry))}"
        if stage.kind == "overwritten":
            how = "sent to the next device"
        elif stage.kind == "affine":
            forms = ", ".join(map(str, stage.forms))
            how = f"all devices at the same time, summed up by A, {forms}"
        else:
            how = f"one device after the other ({stage.why})"
        notes.append(f"{carries}: {how}")
    for note in notes:
        observers.notify(note)
    kinds = [stage.kind for stage in in_order]
    if strict and shard.count > 1 and "affine" not in kinds:
        why = "; ".join(stage.why for stage in in_order if stage.kind == "opaque")
        if why:
            raise ScanError(
                f"scan: strict=True, but the devices of axis {shard.axis!r} run one after the other ({why})"
            )
