"""NetDefs, as bytes or text, to frozen nets and back, without loss.

What `ir` has no place for (unknown fields, fields set to their default, debug_info and the like) travels in `extra`.
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, EncodeError
from google.protobuf.message import Message as ProtoMessage

from ..errors import FormatError, describe_op
from ..ir import ARG_KINDS, Arg, DeviceOption, Message, Net, Numbers, Op
from .schema import message_class
from .text import format_message, parse_message
from .wire import Limits, check_counts, check_size, locate_damage

DEFAULT_LIMITS = Limits()
_SCALAR_KINDS = ("f", "i", "s", "n", "t")
_LIST_KINDS = tuple(k for k in ARG_KINDS if k not in _SCALAR_KINDS)
_TEXT_NETS = ("step_net", "backward_step_net")  # compat: before October 2017 these travelled as text in `s`
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1f]")


# ---- Public functions ----


def read_net(source: str | bytes | os.PathLike[str], *, limits: Limits = DEFAULT_LIMITS) -> Net:
    """Reads a net from a file, from bytes (binary or text), or from text.

    A str is a path where a file of that name exists; otherwise, text if it holds a line break, "{" or ":".

    Raises:
      FormatError: a file that cannot be read, damaged bytes, text that is no NetDef, or more than `limits` admit.

    >>> read_net('name: "tiny" op { type: "Relu" input: "x" output: "y" }').ops[0].outputs
    ('y',)
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _read_bytes(bytes(source), limits)
    if isinstance(source, str) and not os.path.exists(source) and (not source or re.search(r"[\n{:]", source)):
        return _Reader(limits).text(source, 1)
    try:
        return _read_bytes(_file_bytes(Path(source), limits), limits)
    except FormatError as e:
        raise e.at(str(source)) from None


def serialize_net(net: Net) -> bytes:
    """The net as a binary NetDef: `read_net(serialize_net(net)) == net`.

    >>> serialize_net(Net(name="n"))
    b'\\n\\x01n'
    """
    try:
        return _to_message(net).SerializePartialToString(deterministic=True)
    except (EncodeError, ValueError) as e:
        if isinstance(e, FormatError):
            raise
        raise FormatError(f"net {net.name!r} cannot be serialized: {e}") from None


def format_net(net: Net) -> str:
    """The net as NetDef text: `read_net(format_net(net)) == net`.

    >>> print(format_net(Net(ops=(Op("Relu", ("x",), ("y",)),))), end="")
    op {
      input: "x"
      output: "y"
      type: "Relu"
    }
    """
    return format_message(_to_message(net))


def write_net(net: Net, path: str | os.PathLike[str]) -> None:
    """Writes a net to a file, binary under `.pb` and text under `.pbtxt`, whole or not at all."""
    target = Path(path)
    if target.suffix == ".pb":
        data = serialize_net(net)
    elif target.suffix == ".pbtxt":
        data = format_net(net).encode()
    else:
        raise FormatError(f"{target}: the name of a net's file must end in .pb (binary) or .pbtxt (text)")
    # Written under another name first, so that a failure on the way leaves an older file as it was.
    half = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with open(half, "xb") as f:
            f.write(data)
        os.replace(half, target)
    except OSError as e:
        raise FormatError(f"{target}: cannot be written: {e.strerror}") from None
    finally:
        half.unlink(missing_ok=True)


# ---- Bytes to messages ----


def _file_bytes(path: Path, limits: Limits) -> bytes:
    try:
        if not (path.is_file() or path.is_fifo()):
            raise FormatError("is not a file" if path.exists() else "no such file")
        with open(path, "rb") as f:
            check_size(os.fstat(f.fileno()).st_size, limits.bytes, "file")
            data = f.read(limits.bytes + 1)
    except (OSError, ValueError) as e:
        if isinstance(e, FormatError):
            raise
        raise FormatError(f"cannot be read: {e}") from None
    check_size(len(data), limits.bytes, "file")
    return data


def _read_bytes(data: bytes, limits: Limits) -> Net:
    check_size(len(data), limits.bytes, "message")
    reader = _Reader(limits)
    if not data or _BINARY.search(data):
        return reader.net(parse_binary(data, "NetDef", limits), 1)
    # All bytes are printable: almost surely text, but a message of one long name looks the same.
    try:
        return reader.text(data, 1)
    except FormatError as not_text:
        try:
            message = parse_binary(data, "NetDef", limits)
        except FormatError:
            raise not_text from None
        return reader.net(message, 1)


def parse_binary(data: bytes, name: str, limits: Limits = DEFAULT_LIMITS) -> ProtoMessage:
    """The message of class `name` in `data`; raises FormatError before it would create more than `limits` allow."""
    kind = message_class(name)
    check_counts(data, kind.DESCRIPTOR, limits)
    message = kind()
    try:
        message.MergeFromString(data)
    except (DecodeError, ValueError):
        raise FormatError(f"not a {name}: {locate_damage(data, kind.DESCRIPTOR, limits)}") from None
    return message


# ---- Messages to nets ----


class _Reader:
    """Turns messages into nets, taking them apart: what is left of a message at the end is its `extra`."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.text_left = limits.text_bytes

    def text(self, source: str | bytes, depth: int) -> Net:
        if len(source) > self.text_left:
            raise FormatError(f"text is longer than the limit of {self.limits.text_bytes} bytes in all; use binary")
        self.text_left -= len(source)
        try:
            text = source if isinstance(source, str) else source.decode()
        except UnicodeDecodeError as e:
            raise FormatError(f"text is not UTF-8: byte {e.start} is {e.object[e.start]:#04x}") from None
        return self.net(parse_message(text, "NetDef", self.limits), depth)

    def net(self, m: Any, depth: int) -> Net:
        if depth > self.limits.depth:
            raise FormatError(f"nets are nested deeper than the limit of {self.limits.depth}")
        name = ""
        try:
            name = _take(m, "name")
            ops = tuple(self.op(o, depth, i, name) for i, o in enumerate(m.op))
            m.ClearField("op")
            args = tuple(self.arg(a, depth) for a in m.arg)
            m.ClearField("arg")
            net_type = _take(m, "type")
            reads, gives = _take_all(m, "external_input"), _take_all(m, "external_output")
            device = self.device(m)
        except _Placed as e:
            raise FormatError(str(e)) from None
        except FormatError as e:
            raise e.at(f"net {name!r}") from None
        return Net(name, ops, reads, gives, net_type, args, device, m.SerializePartialToString())

    def op(self, m: Any, depth: int, index: int, net_name: str) -> Op:
        type, outputs = "", ()
        try:
            type = _take(m, "type")
            outputs = _take_all(m, "output")
            inputs = _take_all(m, "input")
            args = tuple(self.arg(a, depth) for a in m.arg)
            m.ClearField("arg")
            name, engine = _take(m, "name"), _take(m, "engine")
            device = self.device(m)
            control = _take_all(m, "control_input")
            if is_gradient := m.is_gradient_op:
                m.ClearField("is_gradient_op")
        except FormatError as e:
            raise _Placed(f"{describe_op(index, type, outputs, net_name)}: {e}") from None
        rest = m.SerializePartialToString()
        return Op(type, inputs, outputs, args, name, engine, device, control, is_gradient, rest)

    def arg(self, m: Any, depth: int) -> Arg:
        name = _take(m, "name")
        kind = next((k for k in _SCALAR_KINDS if m.HasField(k)), None)
        if kind is None:
            kind = next((k for k in _LIST_KINDS if len(getattr(m, k))), "")
        try:
            value = self.value(getattr(m, kind), kind, depth) if kind else ()
            original = value if kind == "s" and name in _TEXT_NETS else b""
            if original:
                value = self.text(original, depth + 1)
        except FormatError as e:
            raise e.at(f"argument {name!r}") from None
        # Text that jrnn would word otherwise is kept beside the net that it says, so that it goes back as it came.
        if kind and not (original and format_net(value).encode() != original):
            m.ClearField(kind)
        return Arg(name, value, kind, m.SerializePartialToString())

    def value(self, held: Any, kind: str, depth: int) -> Any:
        match kind:
            case "n":
                return self.net(held, depth + 1)
            case "nets":
                return tuple(self.net(n, depth + 1) for n in held)
            case "t":
                return _carried(held)
            case "tensors" | "qtensors":
                return tuple(_carried(t) for t in held)
            case "floats":
                return Numbers(np.asarray(held, np.float32), np.float32)
            case "ints":
                return Numbers(np.asarray(held, np.int64), np.int64)
            case "strings":
                return tuple(held)
        return held

    def device(self, holder: Any) -> DeviceOption | None:
        if not holder.HasField("device_option"):
            return None
        m = holder.device_option
        numbers = [_take_number(m, k) for k in ("device_type", "device_id", "random_seed")]
        node = _take(m, "node_name") if m.HasField("node_name") else None
        numa = _take_number(m, "numa_node_id")
        info = _take_all(m, "extra_info")
        if node == "":
            m.ClearField("node_name")
        made = DeviceOption(*numbers, node, numa, info, m.SerializePartialToString())
        holder.ClearField("device_option")
        return made


class _Placed(FormatError):
    """A FormatError that already says in which net it is."""


def _carried(m: Any) -> Message:
    return Message(m.DESCRIPTOR.name, m.SerializePartialToString())


def _take(m: Any, field: str) -> str:
    """A string field, cleared; one that is set but empty stays, for `extra` to keep."""
    value = getattr(m, field)
    if value:
        _check_text((value,), field)
        m.ClearField(field)
    return value


def _take_all(m: Any, field: str) -> tuple[str, ...]:
    values = tuple(getattr(m, field))
    if values:
        _check_text(values, field)
        m.ClearField(field)
    return values


def _take_number(m: Any, field: str) -> int | None:
    if not m.HasField(field):
        return None
    value = getattr(m, field)
    m.ClearField(field)
    return value


def _check_text(values: tuple[Any, ...], field: str) -> None:
    for v in values:
        if not isinstance(v, str):  # protobuf gives the bytes of a string that is not UTF-8
            raise FormatError(f"{field} is not UTF-8: {v[:40]!r}")


# ---- Nets to messages ----


def _to_message(net: Net) -> ProtoMessage:
    message = message_class("NetDef")()
    _put_net(message, net, 1)
    return message


def _put_net(m: Any, net: Net, depth: int) -> None:
    if depth > DEFAULT_LIMITS.depth:
        raise FormatError(f"nets are nested deeper than the limit of {DEFAULT_LIMITS.depth}")
    _put_extra(m, net.extra)
    where = f"net {net.name!r}"
    try:
        _put_strings(m, name=net.name, type=net.type)
        m.external_input.extend(net.external_inputs)
        m.external_output.extend(net.external_outputs)
        _put_device(m, net.device_option)
        for a in net.args:
            _put_arg(m.arg.add(), a, depth)
        for i, o in enumerate(net.ops):
            where = describe_op(i, o.type, o.outputs, net.name)
            _put_op(m.op.add(), o, depth)
    except FormatError as e:
        raise e.at(where) from None
    except (TypeError, ValueError) as e:
        raise FormatError(f"{where}: {e}") from None


def _put_op(m: Any, op: Op, depth: int) -> None:
    _put_extra(m, op.extra)
    _put_strings(m, type=op.type, name=op.name, engine=op.engine)
    m.input.extend(op.inputs)
    m.output.extend(op.outputs)
    m.control_input.extend(op.control_inputs)
    _put_device(m, op.device_option)
    if op.is_gradient:
        m.is_gradient_op = True
    for a in op.args:
        _put_arg(m.arg.add(), a, depth)


def _put_arg(m: Any, arg: Arg, depth: int) -> None:
    _put_extra(m, arg.extra)
    _put_strings(m, name=arg.name)
    try:
        _put_value(m, arg.kind, arg.value, depth)
    except FormatError as e:
        raise e.at(f"argument {arg.name!r}") from None
    except (TypeError, ValueError, AttributeError):
        given = type(arg.value).__name__
        raise FormatError(f"argument {arg.name!r}: a {given} cannot travel in field {arg.kind!r}") from None


def _put_value(m: Any, kind: str, value: Any, depth: int) -> None:
    match kind, value:
        case "", ():
            pass
        case "n", Net():
            m.n.SetInParent()
            _put_net(m.n, value, depth + 1)
        case "nets", tuple():
            for n in value:
                _put_net(m.nets.add(), n, depth + 1)
        case "s", Net():
            if not (m.s and _Reader(DEFAULT_LIMITS).text(m.s, depth + 1) == value):
                m.s = format_net(value).encode()
        case "t", Message():
            m.t.SetInParent()
            _put_carried(m.t, value)
        case (("tensors" | "qtensors"), tuple()):
            for t in value:
                _put_carried(getattr(m, kind).add(), t)
        case (("floats" | "ints"), Numbers()):
            getattr(m, kind).extend(np.asarray(value).tolist())
        case (("floats" | "ints" | "strings"), tuple()):
            getattr(m, kind).extend(value)
        case (("f" | "i" | "s"), (int() | float() | bytes())):
            setattr(m, kind, value)
        case _:
            raise TypeError


def _put_carried(m: Any, message: Message) -> None:
    if message.type != m.DESCRIPTOR.name:
        raise FormatError(f"a {message.type} stands where a {m.DESCRIPTOR.name} must")
    _put_extra(m, message.data)


def _put_device(holder: Any, option: DeviceOption | None) -> None:
    if option is None:
        return
    m = holder.device_option
    m.SetInParent()
    _put_extra(m, option.extra)
    for field in ("device_type", "device_id", "random_seed", "node_name", "numa_node_id"):
        if (value := getattr(option, field)) is not None:
            setattr(m, field, value)
    m.extra_info.extend(option.extra_info)


def _put_strings(m: Any, **values: str) -> None:
    for field, value in values.items():
        if value:
            setattr(m, field, value)


def _put_extra(m: Any, data: bytes) -> None:
    if data:
        try:
            m.MergeFromString(data)
        except DecodeError:
            raise FormatError(f"the carried fields of a {m.DESCRIPTOR.name} are damaged: {data[:40]!r}") from None
