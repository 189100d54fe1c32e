"""Wrong shapes, types and arguments raise errors that name the operator and say what was expected."""

import numpy as np
import pytest

import jrnn
from jrnn.errors import GradientError, OpError


def f(*shape):
    return np.ones(shape, np.float32)


def i(*values):
    return np.array(values, np.int32)


TRUE = np.array([True])
LSTM = (f(1, 2, 3), f(1, 2, 3), f(1, 2, 12))
LAYER = (f(12, 4), f(12, 3))

# type, inputs, number of outputs, arguments, and what the message must say
REFUSED = [
    ("Sum", (f(2), f(3)), 1, {}, r"float32\[2\] and float32\[3\]; Sum does not broadcast"),
    ("Add", (f(2, 3), f(2)), 1, {}, r"a is float32\[2,3\] and b is float32\[2\]"),
    ("Add", (f(2, 3), f(2)), 1, {"broadcast": 1}, "from axis 1 on"),
    ("Add", (f(3), f(2, 3)), 1, {"broadcast": 1}, "shape of b"),
    ("Mul", (f(2, 3), f(3)), 1, {"broadcast": 1, "axis": 5}, "from axis 5 on"),
    ("Mul", (f(2, 3), f(3)), 1, {"broadcast": 1, "axis_str": "Z"}, "'axis_str' is 'Z'"),
    ("Sub", (f(2), i(1, 2)), 1, {}, "both must hold numbers, and the same type"),
    ("Div", (TRUE, TRUE), 1, {}, "both must hold numbers"),
    ("LT", (f(2), i(1, 2)), 1, {}, "the same type"),
    ("And", (f(2), f(2)), 1, {}, "both must hold booleans"),
    ("Not", (f(2),), 1, {}, "must hold booleans"),
    (
        "FC",
        (f(2, 4), f(5, 20), f(5)),
        1,
        {},
        r"has 4 features from axis 1 on, but w is float32\[5,20\]; w must be \[out, 4\]",
    ),
    ("FC", (f(2, 4), f(5, 4), f(4)), 1, {}, r"b is float32\[4\]; its shape must be \[5\]"),
    ("FC", (f(2, 4), f(5, 4), f(5)), 1, {"axis": 2}, r"axis 2"),
    ("FC", (i(1, 2), f(5, 2), f(5)), 1, {"axis": 0}, "floating-point"),
    ("ElementwiseLinear", (f(2, 3), f(2), f(3)), 1, {}, r"w is float32\[2\]; its shape must be \[3\]"),
    ("MatMul", (f(2, 3), f(2, 3)), 1, {}, "columns of a must be as many as the rows of b"),
    ("MatMul", (f(3), f(3, 2)), 1, {}, "axis_a"),
    ("BatchMatMul", (f(2, 3), f(2, 3)), 1, {}, "3 columns of a meet 2 rows of b"),
    ("BatchMatMul", (f(2, 1, 3), f(3, 1)), 1, {}, "argument broadcast 1"),
    ("BatchMatMul", (f(2, 1, 3), f(3, 3, 1)), 1, {"broadcast": 1}, "do not broadcast"),
    ("Concat", (f(2, 2), f(3, 3)), 2, {"axis": 0}, "shapes must be equal but for axis 0"),
    ("Concat", (f(2, 2), f(2)), 2, {"axis": 0}, "input 1 is"),
    ("Concat", (f(2, 2), f(2, 3)), 2, {"axis": 0, "add_axis": 1}, "shapes must be equal"),
    ("Concat", (f(2), i(1)), 2, {"axis": 0}, "data types must be equal"),
    ("Concat", (f(2, 2), f(2, 2)), 2, {"axis": 0, "order": "NCHW"}, "give one of them"),
    ("Concat", (f(2, 2), f(2, 2)), 2, {"order": "WHCN"}, "'NCHW' or 'NHWC'"),
    ("Split", (f(2, 5),), 2, {"axis": 1}, "5 along axis 1 do not split into 2"),
    ("Split", (f(2, 5),), 2, {"axis": 1, "split": [2, 2]}, r"sizes \[2, 2\] must be 2"),
    ("Split", (f(2, 5), i(1, 4)), 2, {"axis": 1, "split": [2, 3]}, "give one of them"),
    ("Reshape", (f(2, 3),), 2, {}, "give one of them"),
    ("Reshape", (f(2, 3),), 2, {"shape": [-1, -1]}, "product must be 6"),
    ("Reshape", (f(2, 3),), 2, {"shape": [4, -1]}, "do not take shape"),
    ("Reshape", (f(2, 3),), 2, {"shape": [2, 3, 0]}, "do not take shape"),
    ("Squeeze", (f(1, 2),), 1, {"dims": [1]}, "must have size 1"),
    ("Squeeze", (f(1, 2),), 1, {"dims": [-1]}, "counted from 0"),
    ("Squeeze", (f(1, 2),), 1, {}, "argument 'dims' .* is required"),
    ("ExpandDims", (f(2),), 1, {"dims": [4]}, "has no dimension 4"),
    ("Transpose", (f(2, 3),), 1, {"axes": [0, 0]}, r"permutation of 0\.\.1"),
    ("Slice", (f(4),), 1, {}, "give one of them"),
    ("Slice", (f(4),), 1, {"starts": [3], "ends": [2]}, "leave nothing of dimension 0"),
    ("Slice", (f(4),), 1, {"starts": [0, 0], "ends": [1, 1]}, "at most 1"),
    ("Shape", (f(4),), 1, {"axes": [1]}, r"dimensions 0\.\.0"),
    ("ResizeLike", (f(4), f(3)), 1, {}, "same number of elements"),
    ("Cast", (f(4),), 1, {"to": "flaot"}, "did you mean 'FLOAT'"),
    ("Cast", (f(4),), 1, {"to": 99}, "must be one of 1 FLOAT"),
    ("Scale", (i(4),), 1, {"scale": 2.0}, "floating-point"),
    ("Softmax", (f(2),), 1, {}, "axis 1"),
    ("Softmax", (i(2, 3),), 1, {"axis": 0}, "floating-point"),
    ("LayerNorm", (f(2, 3), f(2), f(2)), 3, {"elementwise_affine": 1}, "gamma must have 3 elements"),
    ("LayerNorm", (f(2, 3),), 3, {"elementwise_affine": 1}, "needs inputs 1 and 2"),
    ("Dropout", (f(2, 3),), 2, {"is_test": 0, "ratio": 1.0}, r"'ratio' is 1; it must be in \[0, 1\)"),
    ("Dropout", (f(2, 3),), 2, {"ratio": 0.5}, "argument 'is_test' .* is required"),
    ("Dropout", (f(2, 3),), 2, {"is_test": 0}, "has no key"),
    ("DropoutGrad", (f(2, 3),), 1, {"is_test": 0}, "the mask that Dropout wrote"),
    ("LSTMUnit", (*LSTM[:2], f(1, 2, 9), i(1, 2), i(0)), 2, {}, r"gates is float32\[1,2,9\], .* \[1, N, 4 \* D\]"),
    ("LSTMUnit", (f(2, 2, 3), f(2, 2, 3), f(2, 2, 12), i(1, 2), i(0)), 2, {}, r"\[1, N, D\]"),
    ("LSTMUnit", (*LSTM, i(1), i(0)), 2, {}, r"seq_lengths is int32\[1\]; its shape must be \[2\]"),
    ("LSTMUnit", (*LSTM, i(0)), 2, {}, "takes lengths and timestep"),
    ("LSTMUnit", (f(1, 2, 5), *LSTM[1:], i(0)), 2, {"sequence_lengths": 0}, "hidden is"),
    ("GRUUnit", (f(1, 2, 3), f(1, 2, 8), i(1, 2), i(0)), 1, {}, r"\[1, N, 3 \* D\]"),
    ("SequenceMask", (f(2, 3), i(1)), 1, {"mode": "sequence"}, "has 2 rows; it must have one each"),
    ("SequenceMask", (f(2, 3),), 1, {"mode": "sequence"}, "needs input 1"),
    ("SequenceMask", (f(2, 3),), 1, {"mode": "diagonal"}, "'mode' is 'diagonal'; it must be one of"),
    ("SequenceMask", (f(2, 3),), 1, {"mode": "upper", "repeat_from_axis": 1}, "mode 'sequence' only"),
    ("ReversePackedSegs", (f(3, 2), i(1, 2)), 1, {}, "must have 3 dimensions"),
    ("ReversePackedSegs", (f(3, 2, 2), i(1)), 1, {}, "there must be 2 lengths"),
    ("ReversePackedSegs", (f(3, 2, 2), i(1, 4)), 1, {}, "a length is 4"),
    ("PackSegments", (i(2, 1), f(5)), 1, {}, "adds up to 3, but the data has 5 rows"),
    ("PackSegments", (f(2), f(5)), 1, {}, "must hold integers"),
    ("UnpackSegments", (i(2, 3), f(2, 3, 1)), 1, {"max_length": 2}, "max_length=2 must be its second dimension"),
    ("UnpackSegments", (i(2), f(2, 3, 1)), 1, {}, "give 2 lengths"),
    ("UnpackSegments", (i(2, 4), f(2, 3, 1)), 1, {}, "a length is 4"),
    ("PackRNNSequence", (f(3), i(2, 1)), 1, {}, "two dimensions at least"),
    ("UnpackRNNSequence", (f(3, 2, 1), i(2, 4)), 1, {}, "at most 3"),
    ("VariableLengthSequencePadding", (f(3, 2, 1), i(2)), 1, {}, "there must be 2 lengths"),
    ("LengthsSum", (f(5, 2), i(2, 1)), 1, {}, "adds up to 3, but the data has 5 rows"),
    ("LengthsMax", (f(5, 2), i(6, -1)), 1, {}, "negative length"),
    ("LengthsMean", (i(1, 2), i(2)), 1, {}, "floating-point"),
    ("LengthsWeightedSum", (f(5, 2), f(4), i(2, 3)), 1, {}, r"weights is float32\[4\]; its shape must be \[5\]"),
    ("LengthsTile", (f(3, 2), i(2, 1)), 1, {}, "each row of data must have one"),
    ("LengthsGather", (f(5), i(2, 3), i(2)), 1, {}, "there are 2 segments, 0 to 1"),
    ("LengthsPad", (f(5), i(2, 3)), 1, {"target_length": 2}, "must be at least that"),
    ("LengthsPad", (f(5), i(2, 3)), 1, {"target_length": 0}, "at least 1"),
    ("LengthsToShape", (i(2, 3),), 1, {}, "they must be equal"),
    ("LengthsToRanges", (i(2, 3).reshape(1, 2),), 1, {}, "must have 1 dimension"),
    ("SegmentIdsToLengths", (i(2, 0),), 1, {}, "must be sorted"),
    ("SegmentIdsToLengths", (i(0, 3), f(2)), 1, {}, "name 4 segments"),
    ("AddPadding", (f(3, 2), i(1, 1)), 2, {}, "adds up to 2"),
    ("AddPadding", (f(3, 2), i(1, 2), f(3)), 2, {}, "as large as a row"),
    ("AddPadding", (f(3, 2),), 2, {"padding_width": -1}, "at least 0"),
    ("RemovePadding", (f(6, 2), i(1, 5)), 2, {}, "a segment has 1 rows, fewer than its padding"),
    ("GatherPadding", (f(6, 2), i(1, 5)), 1, {}, "fewer than its padding"),
    ("PadEmptySamples", (i(2, 0), f(3)), 2, {}, "it must have the 2 rows"),
    ("InferenceLSTM", (f(5, 2, 4), f(1, 2, 3), f(1, 2, 3), f(12, 4)), 3, {}, "take 2"),
    ("InferenceLSTM", (f(5, 2, 4), f(2, 2, 3), f(1, 2, 3), *LAYER), 3, {}, r"hidden is .* must be \[1, 2, H\]"),
    ("InferenceLSTM", (f(5, 2, 7), f(1, 2, 3), f(1, 2, 3), *LAYER), 3, {}, r"shape must be \[12, 7\]"),
]


@pytest.mark.parametrize(
    "type, inputs, outputs, args, says", REFUSED, ids=[f"{k}-{r[0]}" for k, r in enumerate(REFUSED)]
)
def test_refused(type, inputs, outputs, args, says):
    names = [f"in{k}" for k in range(len(inputs))]
    op = jrnn.Op.of(type, names, [f"out{k}" for k in range(outputs)], **args)
    with pytest.raises(OpError, match=rf"(?s)op #0 {type} .*{says}"):
        jrnn.run_net(jrnn.Net("bad", (op,)), dict(zip(names, inputs)))


def test_wrong_arity_names_the_inputs():
    with pytest.raises(OpError, match=r"FC .*takes 3 inputs \(x, w, b\), was given 2: \['x', 'w'\]"):
        jrnn.to_jax(jrnn.Net("bad", (jrnn.Op.of("FC", ["x", "w"], ["y"]),)))


@pytest.mark.parametrize(
    "op, seeds, says",
    [
        (jrnn.Op.of("BatchMatMul", ["a", "b"], ["y"], broadcast=1), ["y"], "broadcast=1 has no gradient"),
        (jrnn.Op.of("Cast", ["x"], ["y"], to=1), ["y"], "needs argument 'from_type'"),
        (jrnn.Op.of("LayerNorm", ["x"], ["y", "m", "s"]), ["m"], "output 'm', which LayerNorm does not differentiate"),
        (jrnn.Op.of("EQ", ["a", "b"], ["y"]), ["y"], "EQ has no gradient, and one arrives here; put a StopGradient"),
    ],
)  # fmt: skip
def test_refused_gradients(op, seeds, says):
    with pytest.raises(GradientError, match=f"op #0 {op.type} .*{says}"):
        jrnn.add_gradients(jrnn.Net("bad", (op,)), seeds)
