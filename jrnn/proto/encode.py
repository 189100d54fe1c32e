"""Frozen nets to NetDef messages, with the fields of `extra` put back."""

from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from jrnn.errors import FormatError, describe_op
from jrnn.ir import Arg, DeviceOption, Message, Net, Numbers, Op
from jrnn.proto.decode import TEXT_NETS
from jrnn.proto.text import format_message, parse_message
from jrnn.proto.wire import DEFAULT_LIMITS, message_class


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
        raise FormatError(f"a net travels as text only in {' and '.join(TEXT_NETS)}; use kind 'n'")
    inner = message_class("NetDef")()
    _put_net(inner, net, depth + 1)
    if m.s and parse_message(m.s.decode(), "NetDef", DEFAULT_LIMITS) == inner:
        return
    if net == Net():
        raise FormatError("an empty net has no text to travel as; use kind 'n'")
    m.s = format_message(inner).encode()


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
