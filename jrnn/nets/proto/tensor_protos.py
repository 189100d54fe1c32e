"""TensorProto and BlobProto to numpy arrays and back.

A tensor's elements are in the field of its data type; small integers, booleans and the bits of float16 are in `int32_data`,
or little-endian bytes. The number of elements is compared with the dims before anything is allocated.
"""

import math
from operator import itemgetter
from typing import Any

import numpy as np
from google.protobuf.message import Message as ProtoMessage
from google.protobuf.unknown_fields import UnknownFieldSet

from jrnn.errors import FormatError
from jrnn.nets.ir import Message
from jrnn.nets.proto.messages import DEFAULT_LIMITS, Limits, check_text, message_class, parse_binary

# data type -> (the field of the elements, their numpy type); BYTE is the older name of UINT8.
_NUMERIC: dict[str, tuple[str, np.dtype]] = {
    "FLOAT": ("float_data", np.dtype(np.float32)),
    "DOUBLE": ("double_data", np.dtype(np.float64)),
    "INT64": ("int64_data", np.dtype(np.int64)),
    "INT32": ("int32_data", np.dtype(np.int32)),
    "INT16": ("int32_data", np.dtype(np.int16)),
    "INT8": ("int32_data", np.dtype(np.int8)),
    "UINT16": ("int32_data", np.dtype(np.uint16)),
    "UINT8": ("int32_data", np.dtype(np.uint8)),
    "BYTE": ("int32_data", np.dtype(np.uint8)),
    "BOOL": ("int32_data", np.dtype(np.bool_)),
    "FLOAT16": ("int32_data", np.dtype(np.float16)),
}
_DATA_TYPES = {dtype: name for name, (_, dtype) in _NUMERIC.items() if name != "BYTE"}
_MAX_RANK = 64  # of numpy's arrays


def tensor_to_numpy(*chunks: Message | bytes, limits: Limits = DEFAULT_LIMITS) -> np.ndarray:
    """Returns the array of a TensorProto, or of several TensorProtos that each hold one segment.

    Strings become an object array of bytes.

    Raises:
      FormatError: for damaged bytes, elements that do not match the dims, segments with gaps or overlaps, and tensors whose
        content is elsewhere or of a type that numpy lacks.

    >>> tensor_to_numpy(tensor_from_numpy(np.array([[1.5, 2.0]], np.float32)))
    array([[1.5, 2. ]], dtype=float32)
    """
    return _join([parse_binary(_tensor_bytes(c), "TensorProto", limits) for c in chunks])


def tensor_from_numpy(array: Any, name: str = "") -> Message:
    """Returns the TensorProto of an array, for an argument or a field. Strings may be bytes or str.

    >>> tensor_from_numpy(np.array([True, False])).type
    'TensorProto'
    """
    return Message("TensorProto", _to_tensor(array, name).SerializeToString(deterministic=True))


def blob_to_numpy(*chunks: bytes, limits: Limits = DEFAULT_LIMITS) -> tuple[str, np.ndarray]:
    """Returns the name and the array of a serialized blob, which may be in several chunks.

    >>> blob_to_numpy(message_class("BlobProto")(name="w", tensor={"dims": [0]}).SerializeToString())
    ('w', array([], dtype=float32))
    """
    blobs: list[Any] = [parse_binary(chunk, "BlobProto", limits) for chunk in chunks]
    if not blobs:
        raise FormatError("blob: a tensor needs at least one chunk")
    first_name = blobs[0].name
    tensors = []
    for blob in blobs:
        if not blob.HasField("tensor"):
            kind = f"a {blob.type or 'value without type'!r}"
            if blob.HasField("qtensor"):
                kind = "a quantized tensor"
            raise FormatError(f"blob {blob.name!r} holds {kind}, and only tensors can be read")
        if blob.name != first_name:
            raise FormatError(
                f"chunks of one blob must have one name, not {first_name!r} and {blob.name!r}"
            )
        tensors.append(blob.tensor)
    try:
        return check_text(first_name, "name"), _join(tensors)
    except FormatError as e:
        raise e.at(f"blob {first_name!r}") from None


# ---- Reading ----


def _tensor_bytes(chunk: Message | bytes) -> bytes:
    if isinstance(chunk, bytes):
        return chunk
    if chunk.type != "TensorProto":
        raise FormatError(f"a {chunk.type} is not a TensorProto")
    return chunk.data


def _join(tensors: list[Any]) -> np.ndarray:
    if not tensors:
        raise FormatError("a tensor needs at least one chunk")
    dims = tuple(tensors[0].dims)
    data_type = tensors[0].data_type
    if len(dims) > _MAX_RANK or any(d < 0 for d in dims):
        raise FormatError(f"dims {dims[:8]} must be at most {_MAX_RANK} numbers, none negative")
    total = math.prod(dims)
    segments = []
    for t in tensors:
        if tuple(t.dims) != dims or t.data_type != data_type:
            raise FormatError("chunks of one tensor must have the same dims and data type")
        begin = 0
        end = total
        if t.HasField("segment"):
            begin = t.segment.begin
            end = t.segment.end
        if not 0 <= begin <= end <= total:
            raise FormatError(
                f"segment {begin}..{end} lies outside the {total} elements of dims {dims}"
            )
        segments.append((begin, end, t))
    segments.sort(key=itemgetter(0, 1))
    covered = 0
    for begin, end, _ in segments:
        if begin != covered:
            raise FormatError(
                f"segments must cover all elements in order: {covered} comes before {begin}..{end}"
            )
        covered = end
    if covered != total:
        raise FormatError(
            f"elements {covered}..{total} of dims {dims} are in other chunks, which are missing"
        )
    parts = [_elements(t, end - begin) for begin, end, t in segments]
    flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
    try:
        return flat.reshape(dims)
    except ValueError as e:  # such as dims (0, 2**62)
        raise FormatError(f"dims {dims}: {e}") from None


def _elements(t: Any, count: int) -> np.ndarray:
    """Returns the `count` elements of one TensorProto, flat."""
    storage = _value_name(t, "storage_type")
    if storage in ("EXTERNAL", "NO_CONTENT"):
        raise FormatError(
            f"tensor {t.name!r} is stored as {storage}: its elements are not in this message"
        )
    data_type = _value_name(t, "data_type")
    if data_type == "STRING":
        _check_count(t, "string_data", len(t.string_data), count)
        strings = np.empty(count, object)
        strings[:] = list(t.string_data)
        return strings
    if data_type not in _NUMERIC:
        raise FormatError(f"tensor {t.name!r} has data type {data_type}, which numpy lacks")
    field, dtype = _NUMERIC[data_type]
    if storage == "RAW":
        return _from_bytes(t, "raw_data", dtype, count)
    if field == "int32_data" and t.HasField("byte_data") and not t.int32_data:
        return _from_bytes(t, "byte_data", dtype, count)
    data = getattr(t, field)
    _check_count(t, field, len(data), count)
    if field != "int32_data":
        return np.array(data, dtype)
    wide = np.array(data, np.int32)
    bits = np.dtype(np.uint16) if dtype == np.float16 else dtype
    narrow = wide.astype(bits)
    if dtype != np.bool_ and not np.array_equal(narrow, wide):
        raise FormatError(f"tensor {t.name!r}: int32_data holds numbers that are not {bits}")
    return narrow.view(dtype)


def _from_bytes(t: Any, field: str, dtype: np.dtype, count: int) -> np.ndarray:
    data = getattr(t, field)
    _check_count(t, field, len(data) / dtype.itemsize, count)
    if dtype == np.bool_:
        return np.asarray(np.frombuffer(data, np.uint8) != 0)
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype)


def _check_count(t: Any, field: str, given: float, count: int) -> None:
    if given != count:
        raise FormatError(
            f"tensor {t.name!r}: dims {tuple(t.dims)} need {count} elements, {field} has {given:g}"
        )


def _value_name(t: Any, field: str) -> str:
    """Returns the name of an enum's value. A value that the schema lacks is an unknown field, not the default."""
    described = t.DESCRIPTOR.fields_by_name[field]
    for unknown in UnknownFieldSet(t):
        if unknown.field_number == described.number:
            raise FormatError(f"tensor {t.name!r}: {field} {unknown.data} is unknown")
    return str(described.enum_type.values_by_number[getattr(t, field)].name)


# ---- Writing ----


def _to_tensor(array: Any, name: str) -> ProtoMessage:
    array = np.asarray(array)
    t: Any = message_class("TensorProto")(dims=array.shape)
    if name:
        t.name = name
    if array.dtype.kind in "OSU":
        flat = array.reshape(-1).tolist()
        if not all(isinstance(v, (str, bytes)) for v in flat):
            raise FormatError(f"tensor {name!r}: an array of objects must hold only str or bytes")
        t.data_type = t.STRING
        t.string_data.extend(v.encode() if isinstance(v, str) else v for v in flat)
        return t
    data_type = _DATA_TYPES.get(array.dtype.newbyteorder("="))
    if data_type is None:
        known = ", ".join(map(str, _DATA_TYPES))
        raise FormatError(
            f"tensor {name!r}: Caffe2 has no tensors of {array.dtype}; convert it to one of {known}"
        )
    t.data_type = t.DataType.Value(data_type)
    field, dtype = _NUMERIC[data_type]
    flat = array.astype(dtype).reshape(-1)
    if dtype == np.float16:
        flat = flat.view(np.uint16)
    if field == "int32_data":
        flat = flat.astype(np.int32)
    getattr(t, field).extend(flat.tolist())
    return t
