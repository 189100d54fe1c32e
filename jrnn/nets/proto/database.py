"""Caffe2's databases, records of a key and a value in a minidb or an LMDB; and the files of its predictor exporter.

A minidb file has one record after another, each with two little-endian int32 sizes before its key and value. A file of the
predictor exporter is a minidb with a MetaNetDef first, then the parameters as blobs. Reading one never runs code from it.
"""

import dataclasses
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jrnn.errors import FormatError, needs_extra
from jrnn.files import open_file, write_whole
from jrnn.nets.ir import Blobs, Names, Net
from jrnn.nets.proto.codec import read_source
from jrnn.nets.proto.messages import (
    DEFAULT_LIMITS,
    Limits,
    check_text,
    message_class,
    parse_binary,
    refuse_onnx,
)
from jrnn.nets.proto.netdef import MessageReader, to_message
from jrnn.nets.proto.tensor_protos import blob_to_numpy, tensor_from_numpy, tensor_to_numpy

DB_READER = "!!PREDICTOR_DBREADER"  # the blob that the global init net loads the parameters from
_META = b"!!META_NET_DEF"
_ELEMENTS_OF_RECORD = 1_000_000  # of a tensor
CHUNK_MARK = b"#%"
# The keys in a MetaNetDef of the fields of a PredictorFile, in the order of the file.
_LISTS = {
    "parameters": "PARAMETERS_BLOB_TYPE",
    "inputs": "INPUTS_BLOB_TYPE",
    "outputs": "OUTPUTS_BLOB_TYPE",
}
_NETS = {
    "predict_init_net": "PREDICT_INIT_NET_TYPE",
    "global_init_net": "GLOBAL_INIT_NET_TYPE",
    "predict_net": "PREDICT_NET_TYPE",
}


@dataclasses.dataclass(frozen=True)
class PredictorFile:
    """A model: `global_init_net` loads the parameters, `predict_init_net` fills inputs and outputs, once each."""

    predict_net: Net
    predict_init_net: Net
    global_init_net: Net
    inputs: Names
    outputs: Names
    parameters: Mapping[str, np.ndarray] = dataclasses.field(repr=False)


def read_predictor_file(
    source: bytes | str | os.PathLike[str], *, limits: Limits = DEFAULT_LIMITS
) -> PredictorFile:
    """Reads a predictor file, or its bytes.

    Raises:
      FormatError: for a missing file, bytes that are not a minidb, or a missing MetaNetDef, predict net or parameter.
    """
    return read_source(source, limits, _parse)


def write_predictor_file(model: PredictorFile, path: str | os.PathLike[str]) -> None:
    """Writes a predictor file, completely or not at all. Caffe2 loads it with db_type "minidb"."""
    write_records(Path(path), _records(model))


def write_records(path: Path, records: Iterable[tuple[bytes, bytes]]) -> None:
    """Writes a minidb, completely or not at all."""
    write_whole(path, format_minidb(records), FormatError)


def _parse(data: bytes, limits: Limits) -> PredictorFile:
    refuse_onnx(data)
    records: dict[bytes, list[bytes]] = {}
    for key, value in parse_minidb(data, limits):
        records.setdefault(key.partition(CHUNK_MARK)[0], []).append(value)
    if _META not in records:
        raise FormatError(
            f"minidb: has no record {_META.decode()}, with which a predictor file begins"
        )
    holder: Any = parse_binary(records[_META][0], "BlobProto", limits)
    meta: Any = parse_binary(_content(holder), "MetaNetDef", limits)
    reader = MessageReader(limits)
    nets = {_text(entry.key): entry.value for entry in meta.nets}
    blobs = {_text(entry.key): tuple(map(_text, entry.value)) for entry in meta.blobs}
    parts = {field: _of_kind(blobs, kind, ()) for field, kind in _LISTS.items()}

    for name in parts["parameters"]:
        if name.encode() not in records:
            raise FormatError(f"minidb: has no record for the parameter {name!r}")
    parameters = {}
    for name in parts["parameters"]:
        parameters[name] = blob_to_numpy(*records[name.encode()], limits=limits)[1]
    parts["parameters"] = parameters

    for field, kind in _NETS.items():
        parts[field] = reader.net(_of_kind(nets, kind, message_class("NetDef")()), 1)
    if not parts["predict_net"].ops:
        raise FormatError("its MetaNetDef has no PREDICT_NET_TYPE, or an empty one")
    return PredictorFile(**parts)


def _content(holder: Any) -> bytes:
    """Returns the string in a blob: its content, or a tensor of one string, as Python feeds it."""
    if holder.HasField("tensor") and len(holder.tensor.string_data) == 1:
        return bytes(holder.tensor.string_data[0])
    return bytes(holder.content)


def _of_kind(blobs: Blobs, kind: str, default: Any) -> Any:
    """Returns the entry under `kind`, or under `kind_NAME` if the model has a name."""
    keys = [key for key in blobs if key == kind or key.startswith(kind + "_")]
    if len(keys) > 1:
        raise FormatError(
            f"its MetaNetDef holds several models: {', '.join(keys[:8])}; a file must hold one"
        )
    return blobs[keys[0]] if keys else default


def _text(value: Any) -> str:
    return check_text(value, "a name in its MetaNetDef")


def _records(model: PredictorFile) -> Iterator[tuple[bytes, bytes]]:
    meta: Any = message_class("MetaNetDef")()
    for field, kind in _LISTS.items():
        meta.blobs.add(key=kind).value.extend(getattr(model, field))
    for field, kind in _NETS.items():
        meta.nets.add(key=kind).value.CopyFrom(to_message(getattr(model, field)))
    content = meta.SerializePartialToString(deterministic=True)
    holder: Any = message_class("BlobProto")(
        name=_META.decode(), type="std::string", content=content
    )
    yield _META, holder.SerializePartialToString(deterministic=True)
    for name, array in model.parameters.items():
        yield from named_chunks(name, np.asarray(array))


def named_chunks(name: str, array: np.ndarray) -> Iterator[tuple[bytes, bytes]]:
    """Yields the records of a blob, each with a part of it."""
    flat = array.reshape(-1)
    for number, begin in enumerate(range(0, max(flat.size, 1), _ELEMENTS_OF_RECORD)):
        part = flat[begin : begin + _ELEMENTS_OF_RECORD]
        blob: Any = message_class("BlobProto")(name=name, type="Tensor")
        blob.tensor.MergeFromString(tensor_from_numpy(part, name).data)
        blob.tensor.ClearField("dims")
        blob.tensor.dims.extend(array.shape)
        blob.tensor.segment.begin = begin
        blob.tensor.segment.end = begin + part.size
        key = name.encode() + CHUNK_MARK + str(number).encode()
        yield key, blob.SerializeToString(deterministic=True)


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
        with (
            lmdb.open(str(path), readonly=True, lock=False, subdir=path.is_dir()) as env,
            env.begin() as transaction,
        ):
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
            raise FormatError(
                f"minidb: truncated: {len(data) - pos} bytes remain at byte {pos}, sizes take 8"
            )
        key_size, value_size = _SIZES.unpack_from(data, pos)
        start = pos + _SIZES.size
        if key_size <= 0 or value_size < 0 or key_size + value_size > len(data) - start:
            raise FormatError(
                f"minidb: the record at byte {pos} has a key of {key_size} bytes and a value of {value_size}, and "
                f"{len(data) - start} bytes remain"
            )
        split = start + key_size
        pos = start + key_size + value_size
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
