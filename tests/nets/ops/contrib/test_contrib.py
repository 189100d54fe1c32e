"""Operators of jrnn/nets/ops/contrib that the recorded cases cannot show: those that Caffe2 1.8.1 lacks, and refusals."""

import jax
import numpy as np
import pytest

import jrnn
from jrnn.errors import OpError

pytestmark = pytest.mark.usefixtures("little_compilation")


def run(type, blobs, outputs=("y",), **args):
    return jrnn.run_net(
        jrnn.Net("n", (jrnn.nets.Op.of(type, list(blobs), list(outputs), **args),)), blobs
    )


def test_log1p_is_exact_near_zero():
    x = np.array([1e-10, 0.0, 2.0], np.float32)
    np.testing.assert_allclose(run("Log1p", {"x": x})["y"], np.log1p(x), rtol=1e-6)


def test_fills_of_half_precision():
    got = run("GivenTensorFp16Fill", {}, shape=[2, 2], values=[0.1, 1.0, 2049.0, -3.0])["y"]
    assert got.dtype == np.float16 and got.tolist() == [[np.float16(0.1), 1], [2048, -3]]


def test_labels_are_split():
    blobs = {
        "lengths": np.array([1, 3, 0, 2], np.int32),
        "indices": np.array([1, 0, 1, 0, 2, 1], np.int64),
        "values": np.array([5, 6, 7, 8, 9, 10], np.float32),
    }
    outputs = ["v0", "v1", "v2", "e0", "e1", "e2", "map"]
    got = run("SparseLabelSplit", blobs, outputs, num_labels=3, keep_gradient_offset_map=1)
    assert {k: v.tolist() for k, v in got.items()} == {
        "v0": [6, 8],
        "v1": [5, 7, 10],
        "v2": [9],
        "e0": [1, 1],
        "e1": [0, 1, 3],
        "e2": [3],
        "map": [0, 0, 1, 1, 0, 2],
    }


BYTES = np.zeros((3, 9), np.uint8)
INDICES, LENGTHS = np.array([0, 2], np.int64), np.array([2], np.int32)


@pytest.mark.parametrize(
    "type, blobs, args, message",
    [
        (
            "SparseLengthsSumFused8BitRowwise",
            (BYTES[:, :8], INDICES, LENGTHS),
            {},
            "ends in 8 bytes",
        ),
        (
            "SparseLengthsSumFused4BitRowwise",
            (BYTES.astype("f4"), INDICES, LENGTHS),
            {},
            r"must hold bytes \(uint8\)",
        ),
        (
            "SparseLengthsSumFused4BitRowwise",
            (BYTES, INDICES + 1, LENGTHS),
            {},
            "holds 3, which is out of range",
        ),
        ("Bucketize", (np.zeros(2, np.float32),), {"boundaries": [2.0, 1.0]}, "must ascend"),
        (
            "BatchSparseToDense",
            (LENGTHS, INDICES, np.ones(2, np.float32)),
            {},
            "dense_last_dim -1 must be at least 1",
        ),
        (
            "GatherRanges",
            (np.ones(4, np.float32), np.array([[[3, 2]]])),
            {},
            r"must be within float32\[4\]",
        ),
        ("Summarize", (np.ones(4, np.float32),), {"to_file": 1}, "to_file asks for a file"),
        (
            "RoIAlign",
            (np.ones((1, 1, 2, 2), "f4"), np.array([[1, 0, 0, 1, 1]], "f4")),
            {},
            "names an image",
        ),
        (
            "BoxWithNMSLimit",
            (np.ones((2, 2), "f4"), np.ones((2, 10), "f4")),
            {"rotated": 1},
            "among upright boxes alone",
        ),
        (
            "ATen",
            (np.ones(2, "f4"),),
            {"operator": "system"},
            "names the function 'system', which is not offered",
        ),
        (
            "ATen",
            (np.ones(2, "f4"),),
            {"operator": "cumsum"},
            "'cumsum' with 1 tensors and arguments .*: missing",
        ),
        (
            "ATen",
            (np.ones(2, "f4"),),
            {"operator": "abs", "dim": 1},
            "unexpected keyword argument 'dim'|got an unexpected",
        ),
        (
            "ATen",
            (np.ones(2, "f4"),),
            {"operator": "mul"},
            "takes a second tensor, or the argument 'other'",
        ),
        ("Int8Quantize", (np.ones(2, "f4"),), {"Y_scale": 0.0}, "Y_scale 0.0 must be positive"),
        ("Int8Dequantize", (np.ones(2, "f4"),), {}, "it must be quantized, as by Int8Quantize"),
        (
            "BoxWithNMSLimit",
            (np.ones((2, 2), "f4"), np.ones((2, 4), "f4")),
            {},
            r"its shape must be \[2, 8\]",
        ),
    ],
)
def test_refusals(type, blobs, args, message):
    outputs = {"GatherRanges": 2, "BoxWithNMSLimit": 3}.get(type, 1)
    names = [f"x{k}" for k in range(len(blobs))]
    with pytest.raises(OpError, match=message):
        run(type, dict(zip(names, blobs)), [f"y{k}" for k in range(outputs)], **args)


IMAGE = np.random.default_rng(0).integers(0, 256, (1, 4, 4, 3), np.uint8)
LAYER = (
    jrnn.nets.Op.of(
        "Int8GivenTensorFill",
        [],
        ["x"],
        shape=IMAGE.shape,
        values=IMAGE.tobytes(),
        Y_scale=0.02,
        Y_zero_point=99,
    ),
    jrnn.nets.Op.of(
        "Int8GivenTensorFill",
        [],
        ["w"],
        shape=[2, 2, 2, 3],
        values=bytes(range(24)),
        Y_scale=0.1,
        Y_zero_point=9,
    ),
    jrnn.nets.Op.of(
        "Int8GivenIntTensorFill", [], ["b"], shape=[2], values=[50, -700], Y_scale=0.002
    ),
)


def layer(type, blobs=(), **args):
    op = jrnn.nets.Op.of(type, ["x", "w", "b"], ["y"], Y_scale=0.05, Y_zero_point=70, **args)
    return jrnn.run_net(
        jrnn.Net("n", (*(o for o in LAYER if o.outputs[0] not in blobs), op)), dict(blobs)
    )["y"]


def test_a_quantized_convolution_with_its_relu():
    plain, rectified = (layer(t, kernel=2, order="NHWC") for t in ("Int8Conv", "Int8ConvRelu"))
    assert (plain.stored < 70).any() and (plain.scale, plain.zero_point) == (
        rectified.scale,
        rectified.zero_point,
    )
    np.testing.assert_array_equal(rectified.stored, np.maximum(plain.stored, 70))


def test_floats_are_taken_as_they_are_by_quantized_layers():
    """A float image next to quantized weights, and biases in floats: what they stand for counts, to half a step."""
    quantized = layer("Int8Conv", kernel=2, order="NHWC")
    x = (IMAGE.astype(np.float32) - 99) * np.float32(0.02)
    floats = layer(
        "Int8Conv", {"x": x, "b": np.array([0.1, -1.4], np.float32)}, kernel=2, order="NHWC"
    )
    assert np.abs(np.asarray(floats) - np.asarray(quantized)).max() <= 0.05


def test_a_fully_connected_layer_that_gives_floats():
    x, w = np.array([[1.0, 2.0, 3.0]], np.float32), np.eye(3, dtype=np.float32)
    blobs = {"x": x, "w": w, "b": np.array([0.5, 0.25, -0.125], np.float32)}
    got = run("Int8FC", blobs, dequantize_output=1)["y"]
    np.testing.assert_array_equal(got, [[1.5, 2.25, 2.875]])
    wide = {"x": np.ones((2, 5, 3), np.float32), "w": w, "b": blobs["b"]}
    assert run("Int8FC", wide, axis=2, dequantize_output=1)["y"].shape == (2, 5, 3)


def test_quantized_tensors_pass_through_jit():
    fn = jax.jit(
        jrnn.to_jax(
            jrnn.Net("n", (*LAYER, jrnn.nets.Op.of("Int8Dequantize", ["x"], ["y"]))), ["x", "y"]
        )
    )
    got = fn({})
    assert got["x"].zero_point == 99 and got["x"].shape == (1, 4, 4, 3)
    np.testing.assert_array_equal(got["y"], np.asarray(got["x"]))
