"""NetDefs and PlanDefs, as bytes, text or files, to frozen nets and plans and back.

Nothing of a net is lost: `read_net(serialize_net(net)) == net`. Of a plan, only fields that Caffe2's schema lacks are.
"""

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import EncodeError
from google.protobuf.message import Message as ProtoMessage

from jrnn.errors import FormatError
from jrnn.files import open_file, read_rest, write_whole
from jrnn.nets.ir import ExecutionStep, Net, Plan, Values
from jrnn.nets.proto.messages import (
    DEFAULT_LIMITS,
    Limits,
    check_size,
    check_text,
    format_message,
    message_class,
    parse_binary,
)
from jrnn.nets.proto.netdef import MessageReader, to_message

FilePath = os.PathLike[str]

T = TypeVar("T")
# The fields of a step that the wire has under the same names, except for its name.
_STEP_FIELDS = [
    field.name
    for field in dataclasses.fields(ExecutionStep)
    if field.name not in ("name", "substeps", "networks")
]
_HEAD_BYTES = 1 << 16
_LOOKS_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1f]")
# A character that no sensible path has, or nothing at all.
_LOOKS_LIKE_TEXT = re.compile(r"[\n{:]|\A\Z")


def read_net(source: str | bytes | FilePath, *, limits: Limits = DEFAULT_LIMITS) -> Net:
    """Reads a net from a file, from bytes (binary or text), or from text.

    A str is a path if a file of that name exists; otherwise it is text if it has a line break, "{" or ":".

    Raises:
      FormatError: for a file that cannot be read, damaged bytes, text that is not a NetDef, or more than `limits` allow.

    >>> read_net('name: "tiny" op { type: "Relu" input: "x" output: "y" }').ops[0].outputs
    ('y',)
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _read_bytes(bytes(source), limits)
    if isinstance(source, str) and not _exists(source) and _LOOKS_LIKE_TEXT.search(source):
        return MessageReader(limits).text(source, 1)
    return read_source(source, limits, _read_bytes)


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except ValueError:  # a zero byte
        return False


def serialize_net(net: Net) -> bytes:
    """Returns the net as a binary NetDef: `read_net(serialize_net(net)) == net`.

    >>> serialize_net(Net(name="n"))
    b'\\n\\x01n'
    """
    message = to_message(net)
    try:
        return bytes(message.SerializePartialToString(deterministic=True))
    except (EncodeError, ValueError) as e:
        raise FormatError(f"net {net.name!r} cannot be serialized: {e}") from None


def format_net(net: Net) -> str:
    """Returns the net as NetDef text: `read_net(format_net(net)) == net`.

    >>> format_net(Net(name="n", external_inputs=("x",)))
    'name: "n"\\nexternal_input: "x"\\n'
    """
    return format_message(to_message(net))


def write_net(net: Net, path: str | FilePath) -> None:
    """Writes a net to a file, binary under `.pb` and text under `.pbtxt`, completely or not at all."""
    target = Path(path)
    if _is_text(target, "net"):
        data = format_net(net).encode()
    else:
        data = serialize_net(net)
    write_whole(target, data, FormatError)


def _is_text(target: Path, what: str) -> bool:
    """Returns whether a file is written as text, by its name; raises FormatError for another ending."""
    if target.suffix not in (".pb", ".pbtxt"):
        raise FormatError(
            f"{target}: the name of a {what}'s file must end in .pb (binary) or .pbtxt (text)"
        )
    return target.suffix == ".pbtxt"


def file_bytes(path: str | FilePath, limits: Limits) -> bytes:
    """Returns the contents of a file.

    Raises:
        FormatError: if it is missing, empty, too large, or if its first bytes show that it is too large for text.
    """
    with open_file(path, FormatError, limits.bytes) as opened:
        head = opened.read(_HEAD_BYTES)
        size = os.fstat(opened.fileno()).st_size
        if not head:
            raise FormatError(f"{path}: is empty")
        if len(head) == _HEAD_BYTES and not any(head):
            raise FormatError(
                f"{path}: begins with {_HEAD_BYTES} zero bytes: it was cut off while it was written, or is not a model"
            )
        if size > max(limits.text_bytes, _HEAD_BYTES) and not _LOOKS_BINARY.search(head):
            raise FormatError(
                f"{path}: text of {size} bytes is longer than the limit of {limits.text_bytes} bytes; use binary"
            )
        return head + read_rest(opened, path, FormatError, limits.bytes - len(head))


def read_source(
    source: bytes | str | FilePath, limits: Limits, parse: Callable[[bytes, Limits], T]
) -> T:
    """Parses bytes, or a file that the errors then name."""
    if isinstance(source, bytes):
        return parse(source, limits)
    data = file_bytes(source, limits)
    try:
        return parse(data, limits)
    except FormatError as e:
        raise e.at(str(source)[:200]) from None


def _read_bytes(data: bytes, limits: Limits) -> Net:
    check_size(len(data), limits.bytes, "message")
    reader = MessageReader(limits)
    if not data or _LOOKS_BINARY.search(data):
        return reader.net(parse_binary(data, "NetDef", limits), 1)
    # All bytes are printable. This is almost surely text, but a message of one long name may look like it.
    net = Net()
    failure = None
    try:
        net = reader.text(data, 1)
    except FormatError as e:
        failure = e
    if net == Net():
        try:
            net = reader.net(parse_binary(data, "NetDef", limits), 1)
        except FormatError:
            if failure:
                raise failure from None
    return net


def read_plan(source: bytes | str | FilePath, *, limits: Limits = DEFAULT_LIMITS) -> Plan:
    """Reads a plan from a file, or from bytes that are binary or text. Fields that Caffe2's schema lacks are dropped.

    Raises:
      FormatError: for a file that cannot be read, damaged bytes, text that is not a PlanDef, or more than `limits` allow.

    >>> plan = read_plan(b'network { name: "n" } execution_step { network: "n" num_iter: 3 }')
    >>> plan.steps[0].networks, plan.steps[0].num_iter
    (('n',), 3)
    """
    return read_source(source, limits, _read_plan_bytes)


def _read_plan_bytes(data: bytes, limits: Limits) -> Plan:
    check_size(len(data), limits.bytes, "message")
    reader = MessageReader(limits)
    m: Any
    if _LOOKS_BINARY.search(data):
        m = parse_binary(data, "PlanDef", limits)
    else:
        m = reader.parsed(data, "PlanDef")
    steps = tuple(map(_to_step, m.execution_step))
    name = check_text(m.name, "name")
    return Plan(name, tuple(reader.net(network, 1) for network in m.network), steps)


def _to_step(m: Any) -> ExecutionStep:
    try:
        values: Values = {}
        for name in _STEP_FIELDS:
            if m.HasField(name):
                values[name] = getattr(m, name)
                if isinstance(values[name], bytes):
                    check_text(values[name], name)
        networks = tuple(check_text(network, "network") for network in m.network)
        return ExecutionStep(
            name=check_text(m.name, "name"),
            substeps=tuple(map(_to_step, m.substep)),
            networks=networks,
            **values,
        )
    except FormatError as e:
        raise e.at("execution step") from None


def read_net_or_plan(path: str | FilePath, *, limits: Limits = DEFAULT_LIMITS) -> Net | Plan:
    """Reads a file that holds a net or a plan; raises FormatError, about a net, if it holds neither.

    The bytes do not say which. A plan read as a net has operators without types, or none, unlike any net that runs.
    """
    net = Net()
    failure = None
    try:
        net = read_net(Path(path), limits=limits)
    except FormatError as e:
        failure = e
    if net.ops and all(op.type for op in net.ops):
        return net
    try:
        plan = read_plan(path, limits=limits)
    except FormatError as e:
        has_plan_fields = failure and re.search('"(network|execution_step)"', str(failure))
        if has_plan_fields:
            raise e from None
        plan = Plan()
    if plan.steps:
        return plan
    if failure is not None:
        raise failure
    return net


def serialize_plan(plan: Plan) -> bytes:
    """Returns the plan as a binary PlanDef.

    >>> serialize_plan(Plan("p"))
    b'\\n\\x01p'
    """
    return bytes(_plan_message(plan).SerializePartialToString(deterministic=True))


def write_plan(plan: Plan, path: str | FilePath) -> None:
    """Writes a plan to a file, binary under `.pb` and text under `.pbtxt`, completely or not at all."""
    target = Path(path)
    if _is_text(target, "plan"):
        data = format_message(_plan_message(plan)).encode()
    else:
        data = serialize_plan(plan)
    write_whole(target, data, FormatError)


def _plan_message(plan: Plan) -> ProtoMessage:
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
    for name in _STEP_FIELDS:
        value = getattr(step, name)
        if value is None:
            continue
        try:
            setattr(m, name, value)
        except (TypeError, ValueError) as e:
            raise FormatError(f"execution step {step.name!r}: {name}: {e}") from None
