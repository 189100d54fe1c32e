"""Messages of Caffe2's schema: their classes, parsers of binary and text within limits, and the formatter of text.

The classes come from `caffe2.desc`, in a descriptor pool of their own, so that jrnn works next to other packages that
register a `caffe2` schema.

A few bytes on the wire can need much more memory: an empty operator takes two bytes. A walk over the bytes counts what a
parse would create before anything is allocated. For damaged bytes it names the field, which protobuf does not.

Text cannot express unknown fields; comments at the top of the text keep them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jrnn.errors import FormatError, near
from jrnn.files import read_file

_UNKNOWN = re.compile(r"# unknown fields of (\S+): ([0-9a-f]+)\n")
_NO_FIELD = re.compile(r'Message type "caffe2\.(\w+)" has no field named "(\w+)"')
# compat: before October 2018, DeviceOption called its field `device_id` so. A string or a comment may hold the name, too.
_OLD_DEVICE_ID = re.compile(r"""("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|\#.*)|\bcuda_gpu_id\b""")
_LONG_RUN = "\\" * 64
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_STEP = re.compile(r"\.(\w+)(?:\[(\d+)\])?")
VARINT, FIXED64, LENGTH, GROUP, END_GROUP, FIXED32 = range(6)
_PROTOBUF_DEPTH = 100  # protobuf's own limit of nested messages
_RUN_BYTES = 1 << 20  # of a run of varints, are decoded together

_WIRE_TYPES = {
    FieldDescriptor.TYPE_FLOAT: FIXED32,
    FieldDescriptor.TYPE_DOUBLE: FIXED64,
    FieldDescriptor.TYPE_STRING: LENGTH,
    FieldDescriptor.TYPE_BYTES: LENGTH,
    FieldDescriptor.TYPE_MESSAGE: LENGTH,
}

# Tags of a ModelProto's length-delimited fields; one of them follows its first field, the version.
_AFTER_ONNX_VERSION = {n << 3 | LENGTH for n in (2, 3, 4, 6, 7, 8, 14)}


@dataclass(frozen=True)
class Limits:
    """Limits of a reader. The defaults accept any net that protobuf can hold, and reject hostile input early.

    Attributes:
        depth: nets inside nets, including the outer one.
        bytes: of a file or message.
        text_bytes: of all text, which is about a hundred times slower to read.
        messages: operators, arguments, nets and other messages in total.
        strings, numbers: elements in total.
    """

    depth: int = 16
    bytes: int = 2**31 - 1
    text_bytes: int = 1 << 25
    messages: int = 1 << 20
    strings: int = 1 << 22
    numbers: int = 1 << 27


DEFAULT_LIMITS = Limits()


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    data = read_file(Path(__file__).with_name("caffe2.desc"), FormatError)
    files = descriptor_pb2.FileDescriptorSet.FromString(data).file
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


@cache
def message_class(name: str) -> type[Message]:
    """Returns the class of a message of Caffe2's schema, such as "NetDef", "PlanDef" or "BlobProto".

    >>> message_class("BlobProto")(name="w").name
    'w'
    """
    try:
        descriptor = _pool().FindMessageTypeByName(f"caffe2.{name}")
    except KeyError:
        known = _pool().FindFileByName("caffe2.proto").message_types_by_name
        raise KeyError(f"no message {name!r} in Caffe2's schema{near(name, known)}") from None
    kind: type[Any] = message_factory.GetMessageClass(descriptor)
    return kind


def check_size(size: int, limit: int, what: str) -> None:
    """Raises FormatError for more bytes than the limit."""
    if size > limit:
        raise FormatError(f"{what} of {size} bytes is larger than the limit of {limit}")


def refuse_onnx(data: bytes) -> None:
    r"""Raises FormatError if bytes begin like an ONNX model, with the number of its version, which no NetDef does.

    >>> refuse_onnx(b"\n\x01n")
    """
    version, *after = data[1:3] or b"\0"
    if data[:1] == b"\x08" and 0 < version < 128 and after and after[0] in _AFTER_ONNX_VERSION:
        raise FormatError("is an ONNX model, not a Caffe2 net; read it with jrnn.from_onnx")


def parse_binary(data: bytes, name: str, limits: Limits = DEFAULT_LIMITS) -> Message:
    """Returns the message of class `name` in `data`; raises FormatError before it creates more than `limits` allow."""
    if name in ("NetDef", "PlanDef"):
        refuse_onnx(data)
    kind = message_class(name)
    # Short data cannot exceed a limit: a message or string takes two bytes or more, and a packed number one.
    if len(data) > min(2 * limits.messages, 2 * limits.strings, limits.numbers):
        _Walk(data, limits).message(kind.DESCRIPTOR, 0, len(data), "", 1)
    message = kind()
    try:
        message.MergeFromString(data)
    except (DecodeError, ValueError) as e:
        try:
            _Walk(data, limits).message(kind.DESCRIPTOR, 0, len(data), "", 1)
        except FormatError as damage:
            raise FormatError(f"not a {name}: {damage}") from None
        raise FormatError(f"not a {name}: {e}") from None
    return message


def check_text(value: Any, what: str) -> str:
    """Returns a string of a message; raises FormatError for the bytes that protobuf gives if it is not UTF-8."""
    if not isinstance(value, str):
        raise FormatError(f"{what} is not UTF-8: {value[:40]!r}")
    return value


def _error(path: str, what: str) -> FormatError:
    return FormatError(f"{path[1:] or 'message'}: {what}")


class _Walk:
    """One walk over a message that counts its parts."""

    def __init__(self, data: bytes, limits: Limits):
        self.data = data
        self.array = np.frombuffer(data, np.uint8)
        self.limits = limits
        self.counts = {"messages": 0, "strings": 0, "numbers": 0}

    def count(self, kind: str, more: int, path: str) -> None:
        limit = getattr(self.limits, kind)
        self.counts[kind] += more
        if self.counts[kind] > limit:
            raise _error(path, f"more than the limit of {limit} {kind}")

    def message(self, descriptor: Descriptor, pos: int, end: int, path: str, depth: int) -> None:
        """Walks the fields of a message that is data[pos:end]."""
        if depth > _PROTOBUF_DEPTH:
            raise FormatError(f"{path[1:200]}...: nested deeper than {_PROTOBUF_DEPTH} messages")
        fields = descriptor.fields_by_number
        seen: dict[int, int] = {}
        groups: list[int] = []
        while pos < end:
            start = pos
            tag, pos = self.varint(pos, end, path)
            number = tag >> 3
            wire = tag & 7
            field = None if groups else fields.get(number)
            if number == 0 or wire > FIXED32:
                raise _error(path, f"no field can begin at byte {start}")
            if wire == GROUP:
                groups.append(number)
                if len(groups) + depth > _PROTOBUF_DEPTH:
                    raise _error(path, f"groups nested deeper than {_PROTOBUF_DEPTH} messages")
            elif wire == END_GROUP:
                if not groups or groups.pop() != number:
                    raise _error(path, f"a group ends at byte {start} that did not begin")
            elif wire == LENGTH:
                size, pos = self.varint(pos, end, path)
                if size > end - pos:
                    name = f"field {number}" if field is None else field.name
                    raise _error(
                        path,
                        f"truncated: {name} at byte {start} needs {size} bytes, {end - pos} remain",
                    )
                if field is not None and field.message_type is not None:
                    seen[number] = seen.get(number, -1) + 1
                    below = f"{path}.{field.name}[{seen[number]}]"
                    self.count("messages", 1, below)
                    self.message(field.message_type, pos, pos + size, below, depth + 1)
                elif field is not None:
                    self.elements(field, pos, pos + size, path)
                pos += size
            elif (
                field is not None
                and wire == _WIRE_TYPES.get(field.type, VARINT)
                and self.data[start] == tag
            ):
                pos, run = self.run(start, end, tag, wire, path)
                self.count("numbers", run, path)
            else:
                if wire == VARINT:
                    _, pos = self.varint(pos, end, path)
                else:
                    pos += 4 if wire == FIXED32 else 8
                if pos > end:
                    raise _error(path, f"truncated at byte {end}")
                if field is not None:  # its tag is longer than necessary
                    self.count("numbers", 1, path)
        if groups:
            raise _error(path, f"a group of field {groups[-1]} does not end")

    def elements(self, field: FieldDescriptor, pos: int, end: int, path: str) -> None:
        """Counts a string, or the numbers of a packed field."""
        wire = _WIRE_TYPES.get(field.type, VARINT)
        if wire == LENGTH:
            self.count("strings", 1, path)
        else:
            size = {FIXED32: 4, FIXED64: 8}.get(wire)
            self.count("numbers", (end - pos) // size if size else self.varints(pos, end), path)

    def varint(self, pos: int, end: int, path: str) -> tuple[int, int]:
        value = 0
        for shift in range(0, 70, 7):
            if pos >= end:
                raise _error(path, f"truncated at byte {end}")
            byte = self.data[pos]
            pos += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, pos
        raise _error(path, f"a number at byte {pos - 10} does not end")

    def varints(self, pos: int, end: int) -> int:
        """Returns how many numbers the packed varints in data[pos:end] hold."""
        total = 0
        for start in range(pos, end, _RUN_BYTES):
            total += int(np.count_nonzero(self._last_bytes(start, end)))
        return total

    def _last_bytes(self, start: int, end: int) -> np.ndarray:
        """Returns which bytes from `start` on end a varint, of as many as are decoded together."""
        return self.array[start : min(start + _RUN_BYTES, end)] < 0x80

    def run(self, pos: int, end: int, tag: int, wire: int, path: str) -> tuple[int, int]:
        """Skips the numbers from `pos` on, each after its tag of one byte; returns (the byte after them, how many)."""
        if wire != VARINT:
            size = 5 if wire == FIXED32 else 9
            tags = self.array[pos:end:size] == tag
            length = int(tags.size if tags.all() else tags.argmin())
            if pos + length * size > end:
                raise _error(path, f"truncated at byte {end}")
            return pos + length * size, length
        length = 0
        while pos < end and self.data[pos] == tag:
            # In (tag, varint) pairs, the bytes below 0x80 alternate between a tag and the last byte of a varint.
            low = np.flatnonzero(self._last_bytes(pos, end))
            lasts = low[1::2]
            tags = low[0::2][: lasts.size]
            good = (self.array[pos + tags] == tag) & (lasts - tags <= 10)
            good[1:] &= tags[1:] == lasts[:-1] + 1
            here = int(good.size if good.all() else good.argmin())
            if here == 0:
                self.varint(pos + 1, end, path)  # raises
                raise AssertionError("a run of numbers without damage continues")
            pos = pos + int(lasts[here - 1]) + 1
            length = length + here
        return pos, length


def format_message(message: Message) -> str:
    """Returns the text of a message; `parse_message` reads it back to an equal message."""
    text = ""
    for path, data in _unknown_fields(message, ""):
        text += f"# unknown fields of {path or '.'}: {data.hex()}\n"
    return text + str(text_format.MessageToString(message))


def _short_backslash(match: re.Match[str]) -> str:
    """Returns an escape sequence of text, with the octal form for a backslash."""
    return "\\134" if match[1] == "\\" else match[0]


def _current_device_id(match: re.Match[str]) -> str:
    """Returns the current name for the old one of a field; a string or a comment stays."""
    return match[1] or "device_id"


def parse_message(text: str, name: str, limits: Limits) -> Message:
    """Returns the message of class `name` that a text describes."""
    if text.count("{") + text.count("<") > limits.messages:
        raise FormatError(f"text holds more than the limit of {limits.messages} messages")
    message = message_class(name)()
    if _LONG_RUN in text:
        # protobuf's time to read such a run is quadratic; the octal form of a backslash ends it.
        text = _ESCAPE.sub(_short_backslash, text)
    if "cuda_gpu_id" in text:
        text = _OLD_DEVICE_ID.sub(_current_device_id, text)
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as e:
        why = _shortened(str(e)).removesuffix(".") + _cause(str(e), name)
        raise FormatError(f"not a {name} as text: line {why}") from None
    except RecursionError:
        raise FormatError(f"not a {name} as text: nested too deeply") from None
    except ValueError as e:
        raise FormatError(f"not a {name} as text: {_shortened(str(e))}") from None
    position = 0
    while match := _UNKNOWN.match(text, position):
        position = match.end()
        path, digits = match.groups()
        data = bytes.fromhex(digits) if len(digits) % 2 == 0 else b""
        _add_unknown(message, path, data)
    return message


def _cause(error: str, name: str) -> str:
    """Returns the likely cause of a field that a message in a message `name` does not have, or ""."""
    match = _NO_FIELD.search(error)
    if match is None:
        return ""
    fields = message_class(match[1]).DESCRIPTOR.fields_by_name
    if match[2] in message_class(name).DESCRIPTOR.fields_by_name:
        return "; is a brace } missing before it?"
    return near(match[2], fields)


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
            message = getattr(message, name)
            if index:
                message = message[int(index)]
        if not data or type(message).FromString(data).ListFields():
            raise FormatError(f"{path}: {rule}")
        message.MergeFromString(data)
    except (AttributeError, IndexError, TypeError, DecodeError):
        raise FormatError(f"{path}: {rule}") from None
