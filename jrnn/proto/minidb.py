"""Caffe2's minidb files: records of a key and a value, one after the other, each headed by two little-endian int32 sizes."""

import struct
from collections.abc import Iterable

from jrnn.errors import FormatError
from jrnn.proto.wire import DEFAULT_LIMITS, Limits

_SIZES = struct.Struct("<ii")


def parse_minidb(data: bytes, limits: Limits = DEFAULT_LIMITS) -> list[tuple[bytes, bytes]]:
    """The records of a minidb file, in order; raises FormatError where sizes and bytes do not fit.

    >>> parse_minidb(format_minidb([(b"k", b"value")]))
    [(b'k', b'value')]
    """
    found: list[tuple[bytes, bytes]] = []
    pos = 0
    while pos < len(data):
        if len(found) >= limits.messages:
            raise FormatError(f"minidb: more than the limit of {limits.messages} records")
        if len(data) - pos < _SIZES.size:
            raise FormatError(
                f"minidb: truncated: {len(data) - pos} bytes remain at byte {pos}, a record's sizes take 8"
            )
        key_size, value_size = _SIZES.unpack_from(data, pos)
        start = pos + _SIZES.size
        if key_size <= 0 or value_size < 0 or key_size + value_size > len(data) - start:
            raise FormatError(
                f"minidb: the record at byte {pos} has a key of {key_size} bytes and a value of {value_size}, and "
                f"{len(data) - start} bytes remain"
            )
        split, pos = start + key_size, start + key_size + value_size
        found.append((data[start:split], data[split:pos]))
    return found


def format_minidb(records: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The bytes of a minidb file.

    >>> format_minidb([(b"k", b"v")])
    b'\\x01\\x00\\x00\\x00\\x01\\x00\\x00\\x00kv'
    """
    return b"".join(_SIZES.pack(len(key), len(value)) + key + value for key, value in records)
