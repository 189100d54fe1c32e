"""PlanDefs, as bytes, text or files, to plans and back: `read_plan(serialize_plan(plan)) == plan`."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from jrnn.errors import FormatError
from jrnn.execution_step import ExecutionStep, Plan
from jrnn.ir import Net
from jrnn.proto.codec import LOOKS_BINARY, file_bytes, read_net, write_whole
from jrnn.proto.decode import Reader
from jrnn.proto.encode import to_message
from jrnn.proto.schema import message_class
from jrnn.proto.text import format_message, parse_message
from jrnn.proto.wire import DEFAULT_LIMITS, Limits, check_size, parse_binary

_SCALARS = tuple(f.name for f in dataclasses.fields(ExecutionStep) if f.name not in ("name", "substeps", "networks"))


def read_plan(source: bytes | str | os.PathLike[str], *, limits: Limits = DEFAULT_LIMITS) -> Plan:
    """Reads a plan from a file, or from bytes that are binary or text. Fields that Caffe2's schema lacks are dropped.

    Raises:
      FormatError: a file that cannot be read, damaged bytes, text that is no PlanDef, or more than `limits` admit.

    >>> plan = read_plan(b'network { name: "n" } execution_step { network: "n" num_iter: 3 }')
    >>> plan.steps[0].networks, plan.steps[0].num_iter
    (('n',), 3)
    """
    if isinstance(source, bytes):
        return _to_plan(_message(source, limits), limits)
    try:
        return _to_plan(_message(file_bytes(Path(source), limits), limits), limits)
    except FormatError as e:
        raise e.at(str(source)[:200]) from None


def read_net_or_plan(path: str | os.PathLike[str], *, limits: Limits = DEFAULT_LIMITS) -> Net | Plan:
    """Reads a file that holds either; raises FormatError, about a net, where it holds neither.

    Bytes do not say which they are. A plan read as a net has operators without types, or none; no net that runs has.
    """
    net, failure = Net(), None
    try:
        net = read_net(Path(path), limits=limits)
    except FormatError as e:
        failure = e
    if net.ops and all(op.type for op in net.ops):
        return net
    try:
        plan = read_plan(path, limits=limits)
    except FormatError:
        plan = Plan()
    if plan.steps:
        return plan
    if failure is not None:
        raise failure
    return net


def serialize_plan(plan: Plan) -> bytes:
    """The plan as a binary PlanDef.

    >>> serialize_plan(Plan("p"))
    b'\\n\\x01p'
    """
    return bytes(_to_message(plan).SerializePartialToString(deterministic=True))


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan to a file, binary under `.pb` and text under `.pbtxt`, whole or not at all."""
    target = Path(path)
    if target.suffix not in (".pb", ".pbtxt"):
        raise FormatError(f"{target}: the name of a plan's file must end in .pb (binary) or .pbtxt (text)")
    data = serialize_plan(plan) if target.suffix == ".pb" else format_message(_to_message(plan)).encode()
    write_whole(target, data)


def _message(data: bytes, limits: Limits) -> Any:
    check_size(len(data), limits.bytes, "message")
    if LOOKS_BINARY.search(data):
        return parse_binary(data, "PlanDef", limits)
    check_size(len(data), limits.text_bytes, "text")
    try:
        return parse_message(data.decode(), "PlanDef", limits)
    except UnicodeDecodeError as e:
        raise FormatError(f"text is not UTF-8: byte {e.start} is {data[e.start]:#04x}") from None


def _to_plan(m: Any, limits: Limits) -> Plan:
    reader = Reader(limits)
    steps = tuple(_to_step(s) for s in m.execution_step)
    return Plan(_text(m.name, "name"), tuple(reader.net(n, 1) for n in m.network), steps)


def _to_step(m: Any) -> ExecutionStep:
    values = {name: getattr(m, name) for name in _SCALARS if m.HasField(name)}
    for name, value in values.items():
        if isinstance(value, bytes):
            _text(value, name)
    substeps = tuple(_to_step(s) for s in m.substep)
    return ExecutionStep(_text(m.name, "name"), substeps, tuple(_text(n, "network") for n in m.network), **values)


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):  # protobuf gives the bytes of a string that is not UTF-8
        raise FormatError(f"execution step: {field} is not UTF-8: {value[:40]!r}")
    return value


def _to_message(plan: Plan) -> Any:
    m: Any = message_class("PlanDef")()
    if plan.name:
        m.name = plan.name
    for net in plan.networks:
        m.network.add().CopyFrom(to_message(net))
    for step in plan.steps:
        _put_step(m.execution_step.add(), step)
    return m


def _put_step(m: Any, step: ExecutionStep) -> None:
    if step.name:
        m.name = step.name
    m.network.extend(step.networks)
    for substep in step.substeps:
        _put_step(m.substep.add(), substep)
    for name in _SCALARS:
        if (value := getattr(step, name)) is not None:
            try:
                setattr(m, name, value)
            except (TypeError, ValueError) as e:
                raise FormatError(f"execution step {step.name!r}: {name}: {e}") from None
