"""NetDef messages to frozen nets: fields that `ir` lacks stay serialized in `extra`."""

from typing import Any

import numpy as np
from google.protobuf.message import Message as ProtoMessage

from jrnn.errors import FormatError, describe_op
from jrnn.ir import ARG_KINDS, Arg, DeviceOption, Message, Net, Numbers, Op
from jrnn.proto.text import format_message, parse_message
from jrnn.proto.wire import Limits, check_text

# compat: before October 2017, the step nets of recurrent networks were text, in `s`.
TEXT_NETS = ("step_net", "backward_step_net")
_SCALAR_KINDS = ("f", "i", "s", "n", "t")
_LIST_KINDS = tuple(k for k in ARG_KINDS if k not in _SCALAR_KINDS)


class Reader:
    """Turns messages into nets. It removes fields from each message; the rest at the end is its `extra`."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.text_left = limits.text_bytes

    def text(self, source: str | bytes, depth: int) -> Net:
        """Returns the net that a NetDef text describes."""
        return self.net(self.parsed(source), depth)

    def parsed(self, source: str | bytes, name: str = "NetDef") -> ProtoMessage:
        if len(source) > self.text_left:
            raise FormatError(f"text is longer than the limit of {self.limits.text_bytes} bytes in all; use binary")
        self.text_left -= len(source)
        try:
            text = source if isinstance(source, str) else source.decode()
        except UnicodeDecodeError as e:
            raise FormatError(f"text is not UTF-8: byte {e.start} is {e.object[e.start]:#04x}") from None
        return parse_message(text, name, self.limits)

    def net(self, m: Any, depth: int) -> Net:
        if depth > self.limits.depth:
            raise FormatError(f"nets are nested deeper than the limit of {self.limits.depth}")
        name = ""
        try:
            name, net_type = _take(m, "name"), _take(m, "type")
            reads, gives = _take_all(m, "external_input"), _take_all(m, "external_output")
            args = tuple(self.arg(a, depth) for a in m.arg)
            m.ClearField("arg")
            device = self.device(m)
            held = list(m.op)
            m.ClearField("op")
            rest = _rest(m)
        except FormatError as e:
            raise e.at(f"net {name!r}") from None
        ops = tuple(self.op(o, depth, i, name) for i, o in enumerate(held))
        return Net(name, ops, reads, gives, net_type, args, device, rest)

    def op(self, m: Any, depth: int, index: int, net_name: str) -> Op:
        type: str = ""
        outputs: tuple[str, ...] = ()
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
            rest = _rest(m)
        except FormatError as e:
            raise e.at(describe_op(index, type, outputs, net_name)) from None
        return Op(type, inputs, outputs, args, name, engine, device, control, is_gradient, rest)

    def arg(self, m: Any, depth: int) -> Arg:
        name = _take(m, "name")
        kind = next((k for k in _SCALAR_KINDS if m.HasField(k)), None)
        if kind is None:
            kind = next((k for k in _LIST_KINDS if len(getattr(m, k))), "")
        try:
            if kind == "s" and name in TEXT_NETS and m.s:
                said = self.parsed(m.s)
                # Text that jrnn would format differently is kept next to its net, so that it is written back unchanged.
                if format_message(said).encode() == m.s:
                    m.ClearField("s")
                return Arg(name, self.net(said, depth + 1), kind, _rest(m))
            value = self.value(getattr(m, kind), kind, depth) if kind else ()
            if kind:
                m.ClearField(kind)
            return Arg(name, value, kind, _rest(m))
        except FormatError as e:
            raise e.at(f"argument {name!r}") from None

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
        fields = ("device_type", "device_id", "random_seed", "node_name", "numa_node_id")
        values = {k: _take_set(m, k) for k in fields}
        made = DeviceOption(**values, extra_info=_take_all(m, "extra_info"), extra=_rest(m))
        holder.ClearField("device_option")
        return made


def _carried(m: Any) -> Message:
    return Message(m.DESCRIPTOR.name, _rest(m))


def _take(m: Any, field: str) -> str:
    """Clears and returns a string field; a field that is set but empty stays in `extra`."""
    value = check_text(getattr(m, field), field)
    if value:
        m.ClearField(field)
    return value


def _take_all(m: Any, field: str) -> tuple[str, ...]:
    values = tuple(check_text(value, field) for value in getattr(m, field))
    m.ClearField(field)
    return values


def _take_set(m: Any, field: str) -> Any:
    """Clears and returns the value of a field; None if it is absent."""
    if not m.HasField(field):
        return None
    value = getattr(m, field)
    if isinstance(value, bytes):
        check_text(value, field)
    m.ClearField(field)
    return value


def _rest(m: Any) -> bytes:
    """Serializes the rest of a message, whose strings must be UTF-8, so that it can be written as text."""
    data: bytes = m.SerializePartialToString()
    if data:
        _check_strings(m)
    return data


def _check_strings(m: Any) -> None:
    for field, value in m.ListFields():
        values = (value,) if isinstance(value, (str, bytes, ProtoMessage)) else value
        if field.type == field.TYPE_STRING:
            for v in values:
                check_text(v, field.name)
        elif field.message_type is not None:
            for v in values:
                _check_strings(v)
