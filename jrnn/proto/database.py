"""Caffe2's databases: records of a key and a value, in a minidb or an LMDB. Reading one runs no code of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jrnn.errors import FormatError
from jrnn.proto.codec import file_bytes
from jrnn.proto.minidb import parse_minidb
from jrnn.proto.schema import message_class
from jrnn.proto.tensors import tensor_from_numpy, tensor_to_numpy
from jrnn.proto.wire import DEFAULT_LIMITS, Limits, parse_binary

Records = list[tuple[bytes, bytes]]


def read_database(path: Path, db_type: str, limits: Limits = DEFAULT_LIMITS) -> Records:
    """The records of a database, in order.

    Raises:
        FormatError: no such file, one that is damaged or larger than `limits`, a type that is not minidb or lmdb, or an LMDB
            where the package `lmdb` is not installed.
    """
    reader = _READERS.get(db_type)
    if reader is None:
        raise FormatError(f"{path}: the database type is {db_type!r}; it must be one of {', '.join(_READERS)}")
    try:
        return reader(path, limits)
    except FormatError as e:
        raise e.at(str(path)) from None


def _read_minidb(path: Path, limits: Limits) -> Records:
    return parse_minidb(file_bytes(path, limits), limits)


def _read_lmdb(path: Path, limits: Limits) -> Records:
    try:
        import lmdb
    except ImportError:
        raise FormatError("an LMDB is read with the package lmdb: pip install 'jrnn[lmdb]'") from None
    if not path.exists():
        raise FormatError("no such file")
    found: Records = []
    size = 0
    try:
        with lmdb.open(str(path), readonly=True, lock=False, subdir=path.is_dir()) as env, env.begin() as transaction:
            for key, value in transaction.cursor():
                size += len(key) + len(value)
                if size > limits.bytes or len(found) >= limits.messages:
                    raise FormatError(f"is larger than the limit of {limits.bytes} bytes or {limits.messages} records")
                found.append((bytes(key), bytes(value)))
    except lmdb.Error as e:
        raise FormatError(f"is not an LMDB: {e}") from None
    return found


_READERS: dict[str, Callable[[Path, Limits], Records]] = {"minidb": _read_minidb, "lmdb": _read_lmdb}


def tensors_of(record: bytes, limits: Limits = DEFAULT_LIMITS) -> list[np.ndarray]:
    """The arrays of a serialized TensorProtos.

    >>> tensors_of(b"")
    []
    """
    protos: Any = parse_binary(record, "TensorProtos", limits)
    return [tensor_to_numpy(t.SerializePartialToString(), limits=limits) for t in protos.protos]


def format_tensors(arrays: list[Any]) -> bytes:
    """The serialized TensorProtos of arrays, as a record of a database holds it.

    >>> tensors_of(format_tensors([np.array([1, 2], np.int32)]))
    [array([1, 2], dtype=int32)]
    """
    protos: Any = message_class("TensorProtos")()
    for array in arrays:
        protos.protos.add().MergeFromString(tensor_from_numpy(array).data)
    return bytes(protos.SerializeToString(deterministic=True))
