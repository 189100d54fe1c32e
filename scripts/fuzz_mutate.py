"""Mutations for `scripts/fuzz.py`: of bytes, of the tokens of text, and of the fields of messages by their schema."""

from __future__ import annotations

import io
import random
import re
import zipfile
from collections.abc import Sequence
from typing import Any

import onnx
from google.protobuf.descriptor import Descriptor

from jrnn.errors import FormatError
from jrnn.nets.proto import message_class
from jrnn.nets.proto.database import format_minidb, parse_minidb

Field = tuple[
    int, int, Any
]  # number, wire type, and an int, bytes or (of a message) a list of fields
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
NUMBERS = (
    0,
    1,
    2,
    7,
    16,
    100,
    127,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
STRINGS = (
    b"",
    b"x",
    b"\xff",
    b"\0",
    b"step_net",
    b"backward_step_net",
    b"../x",
    b"a" * 300,
    b"#%",
    b"\xed\xa0\x80",
)
TOKENS = (
    "{", "}", "<", ">", "[", "]", ":", ",", ";", '"', "''", '"\\377"', "op", "arg", "n", "nets", "t", "ints", "i: -1", "s",
    "=", "1e999", "0x", "9" * 5000, "-" + "9" * 30, "true", "[caffe2.NetDef] {", "# unknown fields of .op[0]: f80101\n",
    "nan", "#", "\n", "\r", "\0", "\ud800", "é", '"""', "'", "null", "NaN", "[[", "[" * 5000,
    "a = 1979-05-27", "{}", '{"step": 1e400}',
)  # fmt: skip


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Changes, removes, repeats or moves a few bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at, size = rng.randrange(len(changed) + 1), rng.choice((1, 2, 16, 300))
        change = rng.randrange(6)
        if change == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif change == 1 and at < len(changed):
            changed[at] = rng.choice((0, 1, 0x0A, 0x12, 0x2A, 0x7F, 0x80, 0xFF))
        elif change == 2:
            del changed[at : at + size]
        elif change == 3:
            changed[at:at] = bytes(changed[at : at + size]) * rng.randint(1, 4)
        elif change == 4:
            changed[at:at] = rng.choice(STRINGS)
        elif change == 5 and rng.random() < 0.3:
            del changed[at:]
    return bytes(changed)


def mutate_text(data: bytes, rng: random.Random) -> bytes:
    """Changes, removes, repeats or swaps a few tokens."""
    tokens = re.findall(r"\s+|[\w.+-]+|.", data.decode("utf-8", "replace"), re.DOTALL) or [""]
    for _ in range(rng.randint(1, 5)):
        at, other, size = (
            rng.randrange(len(tokens)),
            rng.randrange(len(tokens)),
            rng.choice((1, 3, 40)),
        )
        change = rng.randrange(5)
        if change == 0:
            tokens[at] = rng.choice(TOKENS)
        elif change == 1:
            tokens.insert(at, rng.choice(TOKENS))
        elif change == 2:
            del tokens[at : at + size]
        elif change == 3:
            tokens[at:at] = tokens[other : other + size] * rng.choice((1, 1, 2, 60))
        else:
            tokens[at], tokens[other] = tokens[other], tokens[at]
        tokens = tokens or [""]
    return "".join(tokens).encode("utf-8", "surrogatepass")


def mutate_message(data: bytes, name: str, pool: Sequence[bytes], rng: random.Random) -> bytes:
    """Changes, drops, repeats or swaps fields of a message, or takes them from another message of `pool`."""
    descriptor = (
        onnx.ModelProto.DESCRIPTOR if name == "ModelProto" else message_class(name).DESCRIPTOR
    )
    tree = parse(data, descriptor)
    for _ in range(rng.randint(1, 4)):
        places = _lists(tree, descriptor)
        fields, kind = rng.choice(places)
        change = rng.randrange(7)
        if not fields or change == 0:
            fields.insert(rng.randrange(len(fields) + 1), _new_field(kind, rng))
            continue
        at, other = rng.randrange(len(fields)), rng.randrange(len(fields))
        if change == 1:
            del fields[at]
        elif change == 2:
            fields[at:at] = [fields[other]] * rng.choice((1, 2, 30))
        elif change == 3:
            fields[at], fields[other] = fields[other], fields[at]
        elif change == 4 and pool:
            donors = [
                f
                for f, k in _lists(parse(rng.choice(pool), descriptor), descriptor)
                if k is kind and f
            ]
            if donors:
                fields.insert(at, rng.choice(rng.choice(donors)))
        else:
            fields[at] = _changed(fields[at], rng)
    return build(tree)


def mutate_minidb(data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
    """Drops, repeats or renames records; changes blobs, and the description of the model inside the first one."""
    records = parse_minidb(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(records))
        key, value = records[at]
        change = rng.randrange(6)
        if change == 0 and len(records) > 1:
            del records[at]
        elif change == 1:
            records.insert(at, rng.choice(records))
        elif change == 2:
            records[at] = (rng.choice(STRINGS) + key[rng.randrange(3) :] or b"k", value)
        elif change == 3:
            records[at] = (key, mutate_message(value, "BlobProto", (), rng))
        else:
            key, value = parse_minidb(data)[0]
            holder: Any = message_class("BlobProto").FromString(value)
            holder.content = mutate_message(holder.content, "MetaNetDef", (), rng)
            records[0] = (key, holder.SerializePartialToString())
    return format_minidb(records)


def mutate_zip(data: bytes, rng: random.Random) -> bytes:
    """Changes, drops, repeats or renames members of a zip file, whose check sums then agree."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        members = [(name, old.read(name)) for name in old.namelist()]
    at, change = rng.randrange(len(members)), rng.randrange(6)
    name, content = members[at]
    if change == 0:
        del members[at]
    elif change == 1:
        members[at] = (members[at - 1][0], content)
    elif change == 2:
        members[at] = (rng.choice(("../x.npy", "x", "/x.npy", "lengths.npy", name * 20)), content)
    else:
        members[at] = (name, mutate_bytes(content, rng))
    with zipfile.ZipFile(
        buffer, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    ) as new:
        for name in dict(members):
            new.writestr(name, dict(members)[name])
    return buffer.getvalue()


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Changes the header, whose size then agrees, or the numbers."""
    size = int.from_bytes(data[:8], "little")
    header, numbers = mutate_text(data[8 : 8 + size], rng), data[8 + size :]
    if rng.random() < 0.2:
        numbers = mutate_bytes(numbers, rng)
    return len(header).to_bytes(8, "little") + header + numbers


def parse(data: bytes, descriptor: Descriptor) -> list[Field]:
    """Returns the fields of a message, inner messages as lists; it drops bytes that cannot be parsed."""
    parsed: list[Field] = []
    pos = 0
    try:
        while pos < len(data):
            tag, pos = _varint(data, pos)
            number, wire = tag >> 3, tag & 7
            if wire == VARINT:
                value, pos = _varint(data, pos)
                parsed.append((number, wire, value))
            elif wire in (FIXED64, FIXED32):
                size = 8 if wire == FIXED64 else 4
                parsed.append((number, wire, data[pos : pos + size]))
                pos += size
            elif wire == LENGTH:
                size, pos = _varint(data, pos)
                piece, pos = data[pos : pos + size], pos + size
                field = descriptor.fields_by_number.get(number)
                inner = field.message_type if field is not None else None
                parsed.append((number, wire, piece if inner is None else parse(piece, inner)))
            else:
                break
    except FormatError:
        pass
    return parsed


def build(fields: Sequence[Field]) -> bytes:
    """Returns the bytes of a message."""
    out = bytearray()
    for number, wire, value in fields:
        out += _to_varint(number << 3 | wire)
        if wire == VARINT:
            out += _to_varint(value)
        else:
            piece = build(value) if isinstance(value, list) else value
            out += (_to_varint(len(piece)) if wire == LENGTH else b"") + piece
    return bytes(out)


def _lists(fields: list[Field], kind: Descriptor) -> list[tuple[list[Field], Descriptor]]:
    """Yields every list of fields in a message, with the message's type."""
    lists = [(fields, kind)]
    for number, _, value in fields:
        field = kind.fields_by_number.get(number)
        if isinstance(value, list) and field is not None and field.message_type is not None:
            lists += _lists(value, field.message_type)
    return lists


def _new_field(kind: Descriptor, rng: random.Random) -> Field:
    if not kind.fields or rng.random() < 0.1:
        return rng.choice((15, 1000, 2**28)), VARINT, rng.choice(NUMBERS)
    field = rng.choice(kind.fields)
    if field.message_type is not None:
        return field.number, LENGTH, []
    if field.type in (field.TYPE_STRING, field.TYPE_BYTES):
        return field.number, LENGTH, rng.choice(STRINGS)
    return _changed((field.number, rng.choice((VARINT, LENGTH, FIXED32, FIXED64)), b""), rng)


def _changed(field: Field, rng: random.Random) -> Field:
    number, wire, value = field
    if isinstance(value, list):
        return (
            number,
            wire,
            rng.choice(([], b"\xff", value[: len(value) // 2], [(number, wire, value)])),
        )
    if wire == VARINT:
        return number, wire, rng.choice(NUMBERS)
    if wire == LENGTH:
        return number, wire, rng.choice((*STRINGS, mutate_bytes(value, rng), value * 3))
    size = 8 if wire == FIXED64 else 4
    return (
        number,
        wire,
        rng.choice(
            (bytes(size), b"\xff" * size, b"\0" * (size - 2) + b"\xc0\x7f", rng.randbytes(size))
        ),
    )


def _varint(data: bytes, pos: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if pos >= len(data):
            break
        value |= (data[pos] & 0x7F) << shift
        pos += 1
        if data[pos - 1] < 0x80:
            return value, pos
    raise FormatError("damaged")


def _to_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
