"""NetDef messages to frozen nets and back. Fields that `ir` lacks stay serialized in `extra`, and are put back."""

from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from jrnn.errors import FormatError, describe_op
from jrnn.nets.ir import ARG_KINDS, Arg, DeviceOption, Message, Names, Net, Numbers, Op
from jrnn.nets.proto.messages import (
    DEFAULT_LIMITS,
    Limits,
    check_text,
    format_message,
    message_class,
    parse_message,
)

# compat: before October 2017, the step nets of recurrent networks were text, in `s`.
TEXT_NETS = ("step_net", "backward_step_net")
_DEVICE_FIELDS = ("device_type", "device_id", "random_seed", "node_name", "numa_node_id")
_SCALAR_KINDS = ("f", "i", "s", "n", "t")
_LIST_KINDS = tuple(k for k in ARG_KINDS if k not in _SCALAR_KINDS)


class MessageReader:
    """Turns messages into nets. It removes fields from each message; the rest at the end is its `extra`."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.text_left = limits.text_bytes

    def text(self, source: str | bytes, depth: int) -> Net:
        """Returns the net that a NetDef text describes."""
        return self.net(self.parsed(source), depth)

    def parsed(self, source: str | bytes, name: str = "NetDef") -> ProtoMessage:
        if len(source) > self.text_left:
            raise FormatError(
                f"text is longer than the limit of {self.limits.text_bytes} bytes in all; use binary"
            )
        self.text_left -= len(source)
        try:
            text = source if isinstance(source, str) else source.decode()
        except UnicodeDecodeError as e:
            raise FormatError(
                f"text is not UTF-8: byte {e.start} is {e.object[e.start]:#04x}"
            ) from None
        return parse_message(text, name, self.limits)

    def net(self, m: Any, depth: int) -> Net:
        if depth > self.limits.depth:
            raise FormatError(f"nets are nested deeper than the limit of {self.limits.depth}")
        name = ""
        try:
            name = _take(m, "name")
            net_type = _take(m, "type")
            reads = _take_all(m, "external_input")
            gives = _take_all(m, "external_output")
            args = tuple(self.arg(a, depth) for a in m.arg)
            m.ClearField("arg")
            device = self.device(m)
            op_messages = list(m.op)
            m.ClearField("op")
            rest = _rest(m)
        except FormatError as e:
            raise e.at(f"net {name!r}") from None
        ops = tuple(self.op(o, depth, i, name) for i, o in enumerate(op_messages))
        return Net(
            name=name,
            ops=ops,
            external_inputs=reads,
            external_outputs=gives,
            type=net_type,
            args=args,
            device_option=device,
            extra=rest,
        )

    def op(self, m: Any, depth: int, index: int, net_name: str) -> Op:
        type: str = ""
        outputs: Names = ()
        try:
            type = _take(m, "type")
            outputs = _take_all(m, "output")
            inputs = _take_all(m, "input")
            args = tuple(self.arg(a, depth) for a in m.arg)
            m.ClearField("arg")
            name = _take(m, "name")
            engine = _take(m, "engine")
            device = self.device(m)
            control = _take_all(m, "control_input")
            is_gradient = m.is_gradient_op
            if is_gradient:
                m.ClearField("is_gradient_op")
            rest = _rest(m)
        except FormatError as e:
            raise e.at(describe_op(index, type, outputs, net_name)) from None
        return Op(
            type=type,
            inputs=inputs,
            outputs=outputs,
            args=args,
            name=name,
            engine=engine,
            device_option=device,
            control_inputs=control,
            is_gradient=is_gradient,
            extra=rest,
        )

    def arg(self, m: Any, depth: int) -> Arg:
        name = _take(m, "name")
        kind = _kind_of(m)
        try:
            if kind == "s" and name in TEXT_NETS and m.s:
                inner = self.parsed(m.s)
                # Text that jrnn would format differently is kept next to its net, so that it is written back unchanged.
                if format_message(inner).encode() == m.s:
                    m.ClearField("s")
                return Arg(name, self.net(inner, depth + 1), kind, _rest(m))
            value = self.value(getattr(m, kind), kind, depth) if kind else ()
            if kind:
                m.ClearField(kind)
            return Arg(name, value, kind, _rest(m))
        except FormatError as e:
            raise e.at(f"argument {name!r}") from None

    def value(self, content: Any, kind: str, depth: int) -> Any:
        match kind:
            case "n":
                return self.net(content, depth + 1)
            case "nets":
                return tuple(self.net(n, depth + 1) for n in content)
            case "t":
                return _carried(content)
            case "tensors" | "qtensors":
                return tuple(map(_carried, content))
            case "floats":
                return Numbers(np.asarray(content, np.float32), np.float32)
            case "ints":
                return Numbers(np.asarray(content, np.int64), np.int64)
            case "strings":
                return tuple(content)
        return content

    def device(self, holder: Any) -> DeviceOption | None:
        if not holder.HasField("device_option"):
            return None
        m = holder.device_option
        values = {k: _take_set(m, k) for k in _DEVICE_FIELDS}
        device = DeviceOption(**values, extra_info=_take_all(m, "extra_info"), extra=_rest(m))
        holder.ClearField("device_option")
        return device


def _kind_of(m: Any) -> str:
    """Returns the field that holds the value of an Argument message, or "" for an empty list."""
    for kind in _SCALAR_KINDS:
        if m.HasField(kind):
            return kind
    for kind in _LIST_KINDS:
        if len(getattr(m, kind)):
            return kind
    return ""


def _carried(m: Any) -> Message:
    return Message(m.DESCRIPTOR.name, _rest(m))


def _take(m: Any, field: str) -> str:
    """Clears and returns a string field; a field that is set but empty stays in `extra`."""
    value = check_text(getattr(m, field), field)
    if value:
        m.ClearField(field)
    return value


def _take_all(m: Any, field: str) -> Names:
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


def to_message(net: Net) -> ProtoMessage:
    """Returns the NetDef message of a net; raises FormatError for a value that cannot be serialized."""
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
        if isinstance(arg.value, Net) and arg.kind == "s":
            _put_text_net(m, arg.name, arg.value, depth)
        else:
            _put_value(m, arg.kind, arg.value, depth)
    except FormatError as e:
        raise e.at(f"argument {arg.name!r}") from None
    except (TypeError, ValueError, AttributeError):
        given = type(arg.value).__name__
        raise FormatError(
            f"argument {arg.name!r}: a {given} does not fit field {arg.kind!r}"
        ) from None


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


def _put_text_net(m: Any, name: str, net: Net, depth: int) -> None:
    if name not in TEXT_NETS:
        raise FormatError(
            f"only these arguments may hold a net as text: {' and '.join(TEXT_NETS)}; use kind 'n'"
        )
    inner = message_class("NetDef")()
    _put_net(inner, net, depth + 1)
    if m.s and parse_message(m.s.decode(), "NetDef", DEFAULT_LIMITS) == inner:
        return
    if net == Net():
        raise FormatError("an empty net cannot be written as text; use kind 'n'")
    m.s = format_message(inner).encode()


def _put_carried(m: Any, message: Message) -> None:
    if message.type != m.DESCRIPTOR.name:
        raise FormatError(f"there is a {message.type}, but it must be a {m.DESCRIPTOR.name}")
    _put_extra(m, message.data)


def _put_device(holder: Any, option: DeviceOption | None) -> None:
    if option is None:
        return
    m = holder.device_option
    m.SetInParent()
    _put_extra(m, option.extra)
    for field in _DEVICE_FIELDS:
        value = getattr(option, field)
        if value is not None:
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
            raise FormatError(
                f"the extra fields of a {m.DESCRIPTOR.name} are damaged: {data[:40]!r}"
            ) from None
