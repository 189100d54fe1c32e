"""The option `axis_name` of `scan`: tracing the step, the derivative, and the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.jaxprs import primitives
from jrnn.jaxprs.jax_internals import is_traced, named_axis
from jrnn.jaxprs.mesh_axes import cast, like, varying_axes
from jrnn.jaxprs.tangents import is_smooth
from jrnn.loops.affine.carries import CarryStage
from jrnn.loops.ir import FlatScan, Loop, ScanParams, derived, observers, tag
from jrnn.loops.segments.shard import TimeShard, Values
from jrnn.loops.segments.starts import Segment, Solver, end_of_stage, stages

_COMPARED = 4  # steps for which the summary of a segment is compared with the loop


def scan(
    run: Callable[..., Any],
    f: Callable,
    init: Any,
    xs: Any,
    length: Any,
    shard: TimeShard,
    strict: bool,
) -> tuple[Any, Any]:
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
    in_order = stages(*_analyzed(closed, n_carry, flat.length, shard.reverse), shard.count)
    if tag.verified.value:
        in_order = _verified(in_order, closed, n_carry, shard)
    _note_stages(in_order, shard, strict)
    segment = Segment(loop, run)
    solver = Solver(shard, segment, tuple(in_order), alone=not communicates)

    last, outs = _solved(segment, solver)(consts, flat.init, flat.xs)
    return jax.tree.unflatten(flat.carry, shard.from_last(last)), jax.tree.unflatten(flat.ys, outs)


def _solved(segment: Segment, solver: Solver) -> Callable[..., tuple[Values, Values]]:
    """Returns the last carry and the outputs of a device as a function of constants, the first carry and inputs."""

    @jax.custom_jvp
    def solved(consts: Values, init: Values, xs: Values) -> tuple[Values, Values]:
        return segment.whole(consts, solver.starts(consts, init, xs)[0], xs)

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        consts, init, xs = primals
        start, matrices, good = solver.starts(consts, init, xs)
        arguments = [*consts, *xs]
        moved = [*tangents[0], *tangents[2]]
        moves = [
            i
            for i, (v, t) in enumerate(zip(arguments, moved))
            if is_smooth(v) and not isinstance(t, SymbolicZero)
        ]
        smooth = [i for i, v in enumerate(start) if is_smooth(v)]

        def at(start_of: Values, inputs: Values) -> Any:
            values = jaxprs.replaced(arguments, moves, inputs)
            return segment.whole(
                values[: len(consts)],
                jaxprs.replaced(start, smooth, start_of),
                values[len(consts) :],
            )

        results, push = jax.linearize(at, [start[i] for i in smooth], [arguments[i] for i in moves])
        inputs = [moved[i] for i in moves]

        def pushed(tangent: dict[int, Any]) -> dict[int, Any]:
            ends = push([tangent[i] for i in smooth], inputs)[0]
            return {i: ends[i] for i in smooth}

        of_init = [
            jnp.zeros_like(v) if isinstance(t, SymbolicZero) else t
            for v, t in zip(start, tangents[1])
        ]
        first = {i: like(of_init[i], start[i]) for i in smooth}
        of_start = solver.tangents(first, matrices, good, pushed)
        outs = push([of_start[i] for i in smooth], inputs)
        zeros = jax.tree.map(lambda v: SymbolicZero(jax.typeof(v).to_tangent_aval()), results)
        return results, jax.tree.map(
            lambda v, zero, t: t if is_smooth(v) else zero, results, zeros, outs
        )

    solved.defjvp(rule, symbolic_zeros=True)
    return solved


def _typed(f: Callable) -> Callable:
    """Returns the step with new carries that vary over the axes over which the old ones do."""

    def step(carry: Any, x: Any) -> Any:
        out = f(carry, x)
        if not (
            isinstance(out, tuple)
            and len(out) == 2
            and jax.tree.structure(out[0]) == jax.tree.structure(carry)
        ):
            return out  # `jax.lax.scan` reports it
        return jax.tree.map(lambda new, old: like(new, old), out[0], carry), out[1]

    return step


def _communicates(closed: Any, shard: TimeShard) -> bool:
    """Returns whether the step has collectives. Raises a ScanError if it may not run on one device alone, or twice."""
    effects = closed.jaxpr.effects
    named = {named_axis(e) for e in effects} - {None}
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


def _analyzed(closed: Any, n_carry: int, steps: Any, reverse: bool) -> tuple[Loop, dict[Any, Any]]:
    """Returns the loop to read stages off, with calls and checkpoints inlined, and the values of its known constants."""
    program = jaxprs.inlined(closed, jaxprs.CALLS_AND_CHECKPOINTS)
    loop = ScanParams(closed, 0, n_carry, steps, reverse).loop(program)
    return loop, {v: c for v, c in zip(program.constvars, program.consts) if not is_traced(c)}


def _loop(closed: Any, n_carry: int, steps: Any, shard: TimeShard) -> tuple[Loop, Values]:
    """Returns the loop to run, and the values of its constants.

    With `check_vma`, constants that are the same on all devices become varying before the loop. Otherwise JAX sums their
    gradients over the devices at each step of the reverse loop.
    """
    program = jaxprs.inlined(closed)
    consts = [
        _varying_constant(program, v, c, shard) for v, c in zip(program.constvars, program.consts)
    ]

    def rule(eqn: Any, *arguments: Any) -> Values | None:
        operands = [
            jaxprs.value({}, a) if jaxprs.is_literal(a) else v
            for a, v in zip(eqn.invars, arguments)
        ]
        if eqn.primitive.name == "pvary":
            return [cast(operands[0], eqn.params["axes"])]
        if any(True for _ in jaxprs.sub_jaxprs(eqn)) or primitives.is_kind(eqn, "collective"):
            return None
        # Values that did not vary may now, and literals next to them do not.
        axes = varying_axes(operands)
        return jaxprs.bind(eqn, *(cast(v, axes) for v in operands))

    def step(*args: Any) -> list[Any]:
        return replace(program, consts=args[: len(consts)]).run(*args[len(consts) :], rule=rule)

    varying = jaxprs.trace(step, [*map(jax.typeof, consts), *(v.aval for v in program.invars)])
    loop = ScanParams(closed, len(consts), n_carry, steps, shard.reverse).loop(varying)
    return loop, [*map(jnp.asarray, varying.consts), *consts]


def _varying_constant(program: jaxprs.Program, name: Any, value: Any, shard: TimeShard) -> Any:
    """Casts a constant, unless equations with a jaxpr inside read it: the types in that jaxpr are fixed."""
    if not is_smooth(value):
        return (
            value
            if jnp.issubdtype(jax.typeof(value).dtype, jax.dtypes.extended)
            else jnp.asarray(value)
        )
    same = {name}
    for eqn in program.eqns:
        if same.intersection(jaxprs.inputs(eqn)) and eqn.primitive.name != "pvary":
            if any(True for _ in jaxprs.sub_jaxprs(eqn)):
                return jnp.asarray(value)
            same.update(eqn.outvars)
    return shard.varying(jnp.asarray(value))


def _verified(
    in_order: Sequence[CarryStage], closed: Any, n_carry: int, shard: TimeShard
) -> list[CarryStage]:
    """Returns the stages; all are handed from device to device if a summary disagrees with the loop on random numbers."""

    def summarized(scan: ScanParams) -> derived.Run:
        opened = jaxprs.inlined(scan.jaxpr, jaxprs.CALLS_AND_CHECKPOINTS)
        loop = scan.loop(opened)

        def run(
            f: Callable,
            init: Any,
            xs: Any,
            length: int,
            linear: bool = False,
            elementwise: bool = False,
        ) -> Any:
            return lax.scan(f, init, xs, length, scan.reverse)

        segment = Segment(loop, run)
        of_small = stages(loop, dict(zip(opened.constvars, opened.consts)), shard.count)

        def of(
            consts: Sequence[Any], start: Sequence[Any], xs: Sequence[Any]
        ) -> tuple[Values, Values]:
            consts = [*opened.consts, *consts]
            start = list(start)
            xs = list(xs)
            last, ys = segment.whole(consts, start, xs)
            for stage in (s for s in of_small if s.kind != "opaque"):
                first = [start[i] for i in stage.carry]
                zeros = jaxprs.replaced(start, stage.carry, list(map(jnp.zeros_like, first)))
                ends = segment.end(stage, consts, zeros, xs)
                matrices = [segment.matrix(stage, t, consts, start, xs) for t in stage.forms]
                last = jaxprs.replaced(
                    last, stage.carry, end_of_stage(stage, matrices, first, ends)
                )
            return last, ys

        return of

    few = derived.lifted(
        jaxprs.inlined(closed, jaxprs.CALLS_AND_CHECKPOINTS), n_carry, _COMPARED, shard.reverse
    )
    agrees, note = derived.validate(few, f"over {shard.count} devices", summarized)
    if note:
        observers.notify(note)
    return (
        list(in_order)
        if agrees
        else [replace(s, kind="opaque", forms=(), why=note) for s in in_order]
    )


def _note_stages(in_order: Sequence[CarryStage], shard: TimeShard, strict: bool) -> None:
    """Notes how the loop is divided, for `explain`."""
    notes = [f"time over {shard.count} devices along {shard.axis!r}"]
    for stage in in_order:
        carries = f"carry {', '.join(map(str, stage.carry))}"
        if stage.kind == "overwritten":
            notes.append(f"{carries}: sent to the next device")
        elif stage.kind == "affine":
            notes.append(
                f"{carries}: all devices at the same time, summed up by A, {', '.join(map(str, stage.forms))}"
            )
        else:
            notes.append(f"{carries}: one device after the other ({stage.why})")
    for note in notes:
        observers.notify(note)
    if strict and shard.count > 1 and not any(stage.kind == "affine" for stage in in_order):
        why = "; ".join(stage.why for stage in in_order if stage.kind == "opaque")
        if why:
            raise ScanError(
                f"scan: strict=True, but the devices of axis {shard.axis!r} run one after the other ({why})"
            )
