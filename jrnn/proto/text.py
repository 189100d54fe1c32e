"""Messages as protobuf text without loss: comments at the top keep unknown fields, which text cannot express."""

import re
from collections.abc import Iterator

from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jrnn.errors import FormatError
from jrnn.proto.wire import Limits, message_class

_UNKNOWN = re.compile(r"# unknown fields of (\S+): ([0-9a-f]+)\n")
_STEP = re.compile(r"\.(\w+)(?:\[(\d+)\])?")


def format_message(message: Message) -> str:
    """Returns the text of a message; `parse_message` reads it back to an equal message."""
    head = [f"# unknown fields of {path or '.'}: {data.hex()}\n" for path, data in _unknown_fields(message, "")]
    return "".join(head) + str(text_format.MessageToString(message))


def parse_message(text: str, name: str, limits: Limits) -> Message:
    """Returns the message of class `name` that a text describes."""
    if text.count("{") + text.count("<") > limits.messages:
        raise FormatError(f"text holds more than the limit of {limits.messages} messages")
    message = message_class(name)()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as e:
        raise FormatError(f"not a {name} as text: line {_shortened(str(e))}") from None
    except RecursionError:
        raise FormatError(f"not a {name} as text: nested too deeply") from None
    except ValueError as e:
        raise FormatError(f"not a {name} as text: {_shortened(str(e))}") from None
    at = 0
    while found := _UNKNOWN.match(text, at):
        at = found.end()
        _add_unknown(message, found[1], bytes.fromhex(found[2]) if len(found[2]) % 2 == 0 else b"")
    return message


def _shortened(text: str) -> str:
    """Shortens a message that quotes a very long line."""
    return text if len(text) <= 240 else f"{text[:120]} ... {text[-100:]}"


def _unknown_fields(message: Message, path: str) -> Iterator[tuple[str, bytes]]:
    """Yields the path and the serialized unknown fields of every message that has some."""
    if len(UnknownFieldSet(message)):
        rest = type(message)()
        rest.CopyFrom(message)
        for field, _ in message.ListFields():
            rest.ClearField(field.name)
        yield path, rest.SerializePartialToString()
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if isinstance(value, Message):
            yield from _unknown_fields(value, f"{path}.{field.name}")
        else:
            for i, item in enumerate(value):
                yield from _unknown_fields(item, f"{path}.{field.name}[{i}]")


def _add_unknown(message: Message, path: str, data: bytes) -> None:
    rule = "a comment of unknown fields must name a message of this text and hold fields that the schema lacks"
    try:
        for name, index in _STEP.findall(path):
            message = getattr(message, name)[int(index)] if index else getattr(message, name)
        if not data or type(message).FromString(data).ListFields():
            raise FormatError(f"{path}: {rule}")
        message.MergeFromString(data)
    except (AttributeError, IndexError, TypeError, DecodeError):
        raise FormatError(f"{path}: {rule}") from None
