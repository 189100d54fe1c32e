"""Schedules of nets: the operators to run, looked up in the registry and checked, in order.

From `graph/`: `live_ops` returns the positions of the operators that outputs depend on, and `free_names` the outer blobs
that an operator's sub-nets read. `error.at(where)` puts a place before an error's text, `near` suggests names (`errors.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jrnn.errors import JrnnError, NetError, check_known
from jrnn.nets import registry
from jrnn.nets.graph.scope import free_names
from jrnn.nets.graph.ssa import live_ops, place_of
from jrnn.nets.ir import Names, NameSet, Net, Op, inputs_of, map_ops, written_by


@dataclass(frozen=True)
class ScheduledOp:
    """One operator of a schedule: its position in the net, its definition, its decoded arguments, and unread outputs."""

    index: int
    op: Op
    definition: registry.OpDef
    kwargs: Mapping[str, Any]
    where: str
    unread: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Schedule:
    """A checked net: the operators to run, in order, and the inputs that none of them writes before they are read."""

    steps: tuple[ScheduledOp, ...]
    required: Names


def schedule(
    net: Net, outputs: Iterable[str] | None = None, *, read_outside: Iterable[str] = ()
) -> Schedule:
    """Checks a net and selects the operators that `outputs` depend on; None selects all.

    `read_outside` lists other blobs that are read after the net has run, so that they do not count as unread.

    Raises:
        NetError: for an unknown operator, an output that is written twice, or an unknown blob in `outputs`.
        OpError: for a wrong number of inputs or outputs, or a wrong argument.
    """
    keep: Iterable[int] = range(len(net.ops))
    if outputs is not None:
        known = {*net.external_inputs, *inputs_of(net.ops), *written_by(net.ops)}
        for name in outputs:
            check_known(name, known, NetError, f"net {net.name!r} has no blob {name!r} to fetch")
        keep = live_ops(_with_updates(net), outputs)
    steps: list[ScheduledOp] = []
    written: set[str] = set()
    required: NameSet = {}
    for index in keep:
        op = net.ops[index]
        where = place_of(net, index)
        try:
            definition = registry.lookup(op.type)
            definition.check_arity(op)
            for k, name in enumerate(op.outputs):
                if name in op.outputs[:k]:
                    raise NetError(f"writes blob {name!r} twice; give each output its own name")
            kwargs = definition.decode(op)
        except JrnnError as e:
            raise e.at(where) from None
        steps.append(
            ScheduledOp(index=index, op=op, definition=definition, kwargs=kwargs, where=where)
        )
        for name in op.inputs:
            if name not in written:
                required[name] = None
        written.update(op.outputs)
    read_after = (*(outputs or ()), *read_outside)
    return Schedule(_with_unread(steps, read_after), tuple(required))


def _with_updates(net: Net) -> Net:
    """The net in which operators that change an input in place list it as an output, for `live_ops`."""

    def with_updates(op: Op) -> Op:
        definition = registry.names().get(op.type)
        if definition is None or not definition.updates:
            return op
        updated = [op.inputs[k] for k in definition.updates]
        return replace(op, outputs=(*op.outputs, *updated))

    return map_ops(net, with_updates)


def _with_unread(steps: list[ScheduledOp], read_outside: Iterable[str]) -> tuple[ScheduledOp, ...]:
    """The steps, each with the outputs that neither a later step nor `read_outside` reads."""
    needed = set(read_outside)
    last_first = []
    for step in reversed(steps):
        last_first.append(replace(step, unread=frozenset(step.op.outputs) - needed))
        needed -= set(step.op.outputs)
        needed.update(step.op.inputs, free_names(step.op))
    return tuple(reversed(last_first))
