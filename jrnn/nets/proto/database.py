"""Caffe2's databases: records of a key and a value, in a minidb or an LMDB. Reading one never runs code from it.

A minidb file has one record after another, each with two little-endian int32 sizes before its key and value.
"""

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jrnn.errors import FormatError, needs_extra
from jrnn.files import open_file
from jrnn.nets.proto.codec import read_source
from jrnn.nets.proto.messages import DEFAULT_LIMITS, Limits, parse_binary
from jrnn.nets.proto.tensors import tensor_to_numpy

Records = list[tuple[bytes, bytes]]
_SIZES = struct.Struct("<ii")


def read_database(path: Path, db_type: str, limits: Limits = DEFAULT_LIMITS) -> Records:
    """Returns the records of a database, in order.

    Raises:
        FormatError: for a file that is missing, damaged or larger than `limits`, a type that is not minidb or lmdb, or an
            LMDB if the package `lmdb` is not installed.
    """
    if db_type == "minidb":
        return read_source(path, limits, parse_minidb)
    if db_type == "lmdb":
        return _read_lmdb(path, limits)
    raise FormatError(f"{path}: the database type is {db_type!r}; it must be one of minidb, lmdb")


def _read_lmdb(path: Path, limits: Limits) -> Records:
    try:
        import lmdb
    except ImportError:
        raise FormatError(needs_extra(f"{path}: an LMDB", "lmdb")) from None
    open_file(path / "data.mdb" if path.is_dir() else path, FormatError, None).close()
    records: Records = []
    size = 0
    try:
        with lmdb.open(str(path), readonly=True, lock=False, subdir=path.is_dir()) as env, env.begin() as transaction:
            for key, value in transaction.cursor():
                size += len(key) + len(value)
                if size > limits.bytes or len(records) >= limits.messages:
                    raise FormatError(
                        f"{path}: is larger than the limit of {limits.bytes} bytes or {limits.messages} records"
                    )
                records.append((bytes(key), bytes(value)))
    except lmdb.Error as e:
        raise FormatError(f"{path}: is not an LMDB: {e}") from None
    return records


def parse_minidb(data: bytes, limits: Limits = DEFAULT_LIMITS) -> Records:
    """Returns the records of a minidb file, in order; raises FormatError if the sizes do not fit the bytes.

    >>> parse_minidb(format_minidb([(b"k", b"value")]))
    [(b'k', b'value')]
    """
    records: Records = []
    pos = 0
    while pos < len(data):
        if len(records) >= limits.messages:
            raise FormatError(f"minidb: more than the limit of {limits.messages} records")
        if len(data) - pos < _SIZES.size:
            raise FormatError(f"minidb: truncated: {len(data) - pos} bytes remain at byte {pos}, sizes take 8")
        key_size, value_size = _SIZES.unpack_from(data, pos)
        start = pos + _SIZES.size
        if key_size <= 0 or value_size < 0 or key_size + value_size > len(data) - start:
            raise FormatError(
                f"minidb: the record at byte {pos} has a key of {key_size} bytes and a value of {value_size}, and "
                f"{len(data) - start} bytes remain"
            )
        split, pos = start + key_size, start + key_size + value_size
        records.append((data[start:split], data[split:pos]))
    return records


def format_minidb(records: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the bytes of a minidb file.

    >>> format_minidb([(b"k", b"v")])
    b'\\x01\\x00\\x00\\x00\\x01\\x00\\x00\\x00kv'
    """
    return b"".join(_SIZES.pack(len(key), len(value)) + key + value for key, value in records)


def tensors_of(record: bytes, limits: Limits = DEFAULT_LIMITS) -> list[np.ndarray]:
    """Returns the arrays of a serialized TensorProtos.

    >>> tensors_of(b"")
    []
    """
    protos: Any = parse_binary(record, "TensorProtos", limits)
    return [tensor_to_numpy(t.SerializePartialToString(), limits=limits) for t in protos.protos]
