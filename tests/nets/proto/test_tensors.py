"""TensorProtos and BlobProtos to numpy arrays and back."""

import numpy as np
import pytest

from jrnn.errors import FormatError
from jrnn.nets.ir import Message
from jrnn.nets.proto import blob_to_numpy, message_class, tensor_from_numpy, tensor_to_numpy

TensorProto, BlobProto = message_class("TensorProto"), message_class("BlobProto")
NAMES = ["float32", "float64", "float16", "bool", "scalar", "empty", "string"]
NAMES += ["int8", "int16", "int32", "int64", "uint8", "uint16"]


@pytest.fixture
def recorded(golden):
    with np.load(golden / "blobs.npz") as arrays:
        return dict(arrays)


def read(**fields):
    return tensor_to_numpy(TensorProto(**fields).SerializePartialToString())


def blob_from_numpy(name, array):
    blob = BlobProto(name=name, type="Tensor")
    blob.tensor.MergeFromString(tensor_from_numpy(array, name).data)
    return blob.SerializeToString(deterministic=True)


@pytest.mark.parametrize("name", NAMES)
def test_blobs_that_caffe2_serialized(recorded, name):
    data, want = recorded[f"{name}|blob"].tobytes(), recorded[f"{name}|value"]
    want = want.astype(object) if name == "string" else want
    found_name, actual = blob_to_numpy(data)
    assert (found_name, actual.dtype, actual.shape) == (name, want.dtype, want.shape)
    np.testing.assert_array_equal(actual, want)
    # What jrnn writes differs only in the fields that say where the tensor was and that it is whole.
    blob = BlobProto.FromString(data)
    blob.tensor.ClearField("segment")
    blob.tensor.ClearField("device_detail")
    assert BlobProto.FromString(blob_from_numpy(name, actual)) == blob


def test_every_recorded_blob_has_a_case(recorded):
    assert {key.split("|")[0] for key in recorded} == {*NAMES, "chunked"}


def test_chunks_that_caffe2_saved(recorded):
    chunks = [v.tobytes() for k, v in recorded.items() if k.startswith("chunked|blob")]
    assert len(chunks) == 3
    for order in (chunks, chunks[::-1]):
        name, value = blob_to_numpy(*order)
        assert name == "chunked"
        np.testing.assert_array_equal(value, recorded["chunked|value"])
    with pytest.raises(
        FormatError, match=r"blob 'chunked': segments must .*: 3 comes before 6\.\.8"
    ):
        blob_to_numpy(chunks[0], chunks[2])
    with pytest.raises(FormatError, match=r"elements 6\.\.8 of dims \(2, 4\) are in other chunks"):
        blob_to_numpy(*chunks[:2])
    with pytest.raises(FormatError, match=r"segments must .*: 3 comes before 0\.\.3"):
        blob_to_numpy(chunks[0], chunks[0])
    with pytest.raises(FormatError, match="chunks of one blob must have one name"):
        blob_to_numpy(chunks[0], blob_from_numpy("other", np.zeros(3, np.float32)))


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (2, 0, 3)])
@pytest.mark.parametrize(
    "dtype", ["f4", "f8", "f2", "?", "i1", "i2", "i4", "i8", "u1", "u2", ">f4", ">i2"]
)
def test_arrays_survive(dtype, shape):
    bits = np.random.default_rng(0).integers(0, 256, 64, np.uint8)
    array = np.resize(
        bits[:48] & 1 if dtype == "?" else bits[:48],
        (int(np.prod(shape)) or 1) * np.dtype(dtype).itemsize,
    )
    array = array.view(dtype)[: int(np.prod(shape))].reshape(shape)
    back = tensor_to_numpy(tensor_from_numpy(array, "t"))
    assert back.dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(back, array)


def test_strings_survive():
    array = np.array([[b"a", "é"], [b"\xff\x00", ""]], object)
    back = tensor_to_numpy(tensor_from_numpy(array))
    assert back.tolist() == [[b"a", "é".encode()], [b"\xff\x00", b""]]
    assert tensor_to_numpy(tensor_from_numpy(np.array(["x", "yz"]))).tolist() == [b"x", b"yz"]
    assert tensor_to_numpy(tensor_from_numpy(np.array([b"x", b"yz"]))).tolist() == [b"x", b"yz"]


@pytest.mark.parametrize("dtype", ["f2", "?", "i1", "i2", "u1", "u2"])
def test_small_elements_held_as_bytes(dtype):
    array = np.array([0, 1, 1], dtype)
    kind = TensorProto.FromString(tensor_from_numpy(array).data).data_type
    back = read(dims=[3], data_type=kind, byte_data=array.tobytes())
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    with pytest.raises(FormatError, match="need 4 elements, byte_data has 3"):
        read(dims=[4], data_type=kind, byte_data=array.tobytes())


def test_bytes_and_raw_data():
    np.testing.assert_array_equal(
        read(dims=[2], data_type=TensorProto.BYTE, byte_data=b"a\xff"), np.uint8([97, 255])
    )
    raw = np.array([[1.5, -2.0]], "<f8")
    back = read(
        dims=[1, 2],
        data_type=TensorProto.DOUBLE,
        storage_type=TensorProto.RAW,
        raw_data=raw.tobytes(),
    )
    np.testing.assert_array_equal(back, raw)
    back += 1  # is the reader's own, not a view of the message
    with pytest.raises(FormatError, match="raw_data has 1.5"):
        read(dims=[2], storage_type=TensorProto.RAW, raw_data=b"123456")


@pytest.mark.parametrize(
    "fields, rule",
    [
        (dict(dims=[2, 3], float_data=[1.0]), r"dims \(2, 3\) need 6 elements, float_data has 1"),
        (
            dict(dims=[2], name="w", data_type=2, float_data=[1.0, 2.0]),
            "tensor 'w': .* int32_data has 0",
        ),
        (dict(dims=[2], data_type=4, string_data=[b"a"]), "string_data has 1"),
        (dict(float_data=[1.0, 2.0]), r"dims \(\) need 1 elements"),
        (dict(dims=[-1, -1], float_data=[1.0]), "none negative"),
        (dict(dims=[1] * 65, float_data=[1.0]), "at most 64 numbers"),
        (
            dict(dims=[2**62, 2**62, 4], float_data=[1.0]),
            "need 85070591730234615865843651857942052864 elements",
        ),
        (dict(dims=[2**62, 2**62, 0]), "dims .*4611686018427387904"),
        (dict(dims=[1], data_type=7, int32_data=[128]), "numbers that are not int8"),
        (dict(dims=[1], data_type=12, int32_data=[65536]), "numbers that are not uint16"),
        (dict(dims=[0], data_type=0), "data type UNDEFINED, which numpy lacks"),
        (dict(dims=[1], data_type=14), "ZERO_COLLISION_HASH"),
        (dict(dims=[1], storage_type=3), "stored as EXTERNAL"),
        (dict(dims=[1], storage_type=4), "stored as NO_CONTENT"),
        (
            dict(dims=[2], segment=dict(begin=-1, end=2), float_data=[1.0]),
            r"segment -1\.\.2 lies outside the 2",
        ),
        (
            dict(dims=[2], segment=dict(begin=1, end=3), float_data=[1.0]),
            r"segment 1\.\.3 lies outside",
        ),
        (
            dict(dims=[2], segment=dict(begin=0, end=2), float_data=[1.0]),
            "need 2 elements, float_data has 1",
        ),
    ],
)
def test_tensors_that_cannot_be_read(fields, rule):
    with pytest.raises(FormatError, match=rule):
        read(**fields)


def test_data_types_of_the_future_are_not_taken_for_floats():
    data = TensorProto(dims=[1], float_data=[1.0]).SerializeToString()
    with pytest.raises(FormatError, match="data_type 99 is unknown"):
        tensor_to_numpy(data + b"\x10\x63")
    with pytest.raises(FormatError, match="storage_type 9 is unknown"):
        tensor_to_numpy(data + b"\x60\x09")


@pytest.mark.parametrize(
    "blob, rule",
    [
        (
            BlobProto(name="b", type="int", content=b"\x01"),
            "blob 'b' holds a 'int', and only tensors can be read",
        ),
        (BlobProto(name="b", qtensor=dict(precision=8)), "blob 'b' holds a quantized tensor"),
        (BlobProto(name="b", tensor=dict(dims=[2])), "blob 'b': tensor '': dims"),
    ],
)
def test_blobs_that_cannot_be_read(blob, rule):
    with pytest.raises(FormatError, match=rule):
        blob_to_numpy(blob.SerializePartialToString())


def test_nothing_and_other_messages_are_refused():
    for read_chunks in (tensor_to_numpy, blob_to_numpy):
        with pytest.raises(FormatError, match="at least one chunk"):
            read_chunks()
    with pytest.raises(FormatError, match="a QTensorProto is not a TensorProto"):
        tensor_to_numpy(Message("QTensorProto", b""))
    with pytest.raises(FormatError, match="name is not UTF-8"):
        blob_to_numpy(blob_from_numpy("b", np.float32(1)) + b"\x0a\x01\xff")


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(1, np.uint32),
        np.zeros(1, np.complex64),
        np.array([object()]),
        np.array([1, "a"], object),
    ],
)
def test_arrays_that_caffe2_has_no_tensor_for(array):
    with pytest.raises(FormatError, match="tensor 't': "):
        tensor_from_numpy(array, "t")
