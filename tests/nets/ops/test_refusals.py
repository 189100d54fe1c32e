"""Wrong shapes, types and arguments raise errors that name the operator and say what was expected."""

import numpy as np
import pytest

import jrnn
from jrnn.errors import GradientError, OpError


def f(*shape):
    return np.ones(shape, np.float32)


def i(*values):
    return np.array(values, np.int32)


def flags(*values):
    return np.array(values, bool)


TRUE = flags(1)
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
    (
        "ElementwiseLinear",
        (f(2, 3), f(2), f(3)),
        1,
        {},
        r"w is float32\[2\]; its shape must be \[3\]",
    ),
    ("MatMul", (f(2, 3), f(2, 3)), 1, {}, "columns of a must be as many as the rows of b"),
    ("MatMul", (f(3), f(3, 2)), 1, {}, "axis_a"),
    ("BatchMatMul", (f(2, 3), f(2, 3)), 1, {}, "3 columns of a meet 2 rows of b"),
    ("BatchMatMul", (f(2, 1, 3), f(3, 1)), 1, {}, "argument broadcast 1"),
    ("BatchMatMul", (f(2, 1, 3), f(3, 3, 1)), 1, {"broadcast": 1}, "do not broadcast"),
    ("Concat", (f(2, 2), f(3, 3)), 2, {"axis": 0}, "shapes must be equal except along axis 0"),
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
    (
        "LayerNorm",
        (f(2, 3), f(2), f(2)),
        3,
        {"elementwise_affine": 1},
        "gamma must have 3 elements",
    ),
    ("LayerNorm", (f(2, 3),), 3, {"elementwise_affine": 1}, "needs inputs 1 and 2"),
    (
        "Dropout",
        (f(2, 3),),
        2,
        {"is_test": 0, "ratio": 1.0},
        r"'ratio' is 1; it must be in \[0, 1\)",
    ),
    ("Dropout", (f(2, 3),), 2, {"ratio": 0.5}, "argument 'is_test' .* is required"),
    ("Dropout", (f(2, 3),), 2, {"is_test": 0}, "has no key"),
    ("DropoutGrad", (f(2, 3),), 1, {"is_test": 0}, "the mask that Dropout wrote"),
    (
        "LSTMUnit",
        (*LSTM[:2], f(1, 2, 9), i(1, 2), i(0)),
        2,
        {},
        r"gates is float32\[1,2,9\], .* \[1, N, 4 \* D\]",
    ),
    ("LSTMUnit", (f(2, 2, 3), f(2, 2, 3), f(2, 2, 12), i(1, 2), i(0)), 2, {}, r"\[1, N, D\]"),
    ("LSTMUnit", (*LSTM, i(1), i(0)), 2, {}, r"seq_lengths is int32\[1\]; its shape must be \[2\]"),
    ("LSTMUnit", (*LSTM, i(0)), 2, {}, "takes lengths and timestep"),
    ("LSTMUnit", (f(1, 2, 5), *LSTM[1:], i(0)), 2, {"sequence_lengths": 0}, "hidden is"),
    ("GRUUnit", (f(1, 2, 3), f(1, 2, 8), i(1, 2), i(0)), 1, {}, r"\[1, N, 3 \* D\]"),
    ("SequenceMask", (f(2, 3), i(1)), 1, {"mode": "sequence"}, "has 2 rows; it must have one each"),
    ("SequenceMask", (f(2, 3),), 1, {"mode": "sequence"}, "needs input 1"),
    (
        "SequenceMask",
        (f(2, 3),),
        1,
        {"mode": "diagonal"},
        "'mode' is 'diagonal'; it must be one of",
    ),
    (
        "SequenceMask",
        (f(2, 3),),
        1,
        {"mode": "upper", "repeat_from_axis": 1},
        "mode 'sequence' only",
    ),
    ("ReversePackedSegs", (f(3, 2), i(1, 2)), 1, {}, "must have 3 dimensions"),
    ("ReversePackedSegs", (f(3, 2, 2), i(1)), 1, {}, "there must be 2 lengths"),
    ("ReversePackedSegs", (f(3, 2, 2), i(1, 4)), 1, {}, "a length is 4"),
    ("PackSegments", (i(2, 1), f(5)), 1, {}, "adds up to 3, but the data has 5 rows"),
    ("PackSegments", (f(2), f(5)), 1, {}, "must hold integers"),
    (
        "UnpackSegments",
        (i(2, 3), f(2, 3, 1)),
        1,
        {"max_length": 2},
        "max_length=2 must be its second dimension",
    ),
    ("UnpackSegments", (i(2), f(2, 3, 1)), 1, {}, "give 2 lengths"),
    ("UnpackSegments", (i(2, 4), f(2, 3, 1)), 1, {}, "a length is 4"),
    ("PackRNNSequence", (f(3), i(2, 1)), 1, {}, "two dimensions at least"),
    ("UnpackRNNSequence", (f(3, 2, 1), i(2, 4)), 1, {}, "at most 3"),
    ("VariableLengthSequencePadding", (f(3, 2, 1), i(2)), 1, {}, "there must be 2 lengths"),
    ("LengthsSum", (f(5, 2), i(2, 1)), 1, {}, "adds up to 3, but the data has 5 rows"),
    ("LengthsMax", (f(5, 2), i(6, -1)), 1, {}, "negative length"),
    ("LengthsMean", (i(1, 2), i(2)), 1, {}, "floating-point"),
    (
        "LengthsWeightedSum",
        (f(5, 2), f(4), i(2, 3)),
        1,
        {},
        r"weights is float32\[4\]; its shape must be \[5\]",
    ),
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
    (
        "InferenceLSTM",
        (f(5, 2, 4), f(2, 2, 3), f(1, 2, 3), *LAYER),
        3,
        {},
        r"hidden is .* must be \[1, 2, H\]",
    ),
    (
        "InferenceLSTM",
        (f(5, 2, 7), f(1, 2, 3), f(1, 2, 3), *LAYER),
        3,
        {},
        r"shape must be \[12, 7\]",
    ),
    ("ConstantFill", (), 1, {"shape": [2**17, 2**17]}, "an operator fills at most 2147483648"),
    ("ConstantFill", (), 1, {"shape": [2, -1]}, "negative dimension"),
    ("ConstantFill", (f(2),), 1, {"shape": [2]}, "give one of them"),
    ("ConstantFill", (), 1, {"extra_shape": [2]}, "about an input"),
    ("ConstantFill", (f(2),), 1, {"input_as_shape": 1}, "must hold integers"),
    (
        "ConstantFill",
        (),
        1,
        {"shape": [2], "value": 3.5, "dtype": 2},
        "value 3.5 is not one of int32",
    ),
    (
        "ConstantFill",
        (),
        1,
        {"shape": [2], "value": 300, "dtype": 6},
        "value 300 is not one of uint8",
    ),
    ("ConstantFill", (), 1, {"shape": [2], "dtype": 3}, "data type 3"),
    ("ConstantFill", (), 1, {"shape": [2], "value": "x"}, "set dtype to 4"),
    ("ConstantFill", (), 1, {"shape": 2.5}, "'shape' must be"),
    (
        "GivenTensorFill",
        (),
        1,
        {"values": [1.0, 2.0], "shape": [3]},
        r"2 elements, and shape \[3\] needs 3",
    ),
    ("GivenTensorStringFill", (), 1, {"values": [b"a"], "shape": [2]}, "1 elements"),
    ("DiagonalFill", (), 1, {"shape": [2, 2, 3]}, "no diagonal"),
    ("Range", (i(1), i(5), i(0)), 1, {}, "step is 0"),
    ("Range", (i(1), f(1)), 1, {}, "one type"),
    ("LabelCrossEntropy", (f(2, 3), i(0, 3)), 1, {}, r"label holds 3, .* in \[0, 3\)"),
    (
        "LabelCrossEntropy",
        (f(2, 3), i(0)),
        1,
        {},
        r"label is int32\[1\]; its shape must be \[2\] or \[2, 1\]",
    ),
    ("LabelCrossEntropy", (f(2, 3), f(2)), 1, {}, "must hold integers"),
    ("CrossEntropy", (f(2, 3), f(2, 2)), 1, {}, r"must be \[2, 3\]"),
    ("AveragedLoss", (), 1, {}, "takes 1 input"),
    ("SoftmaxWithLoss", (f(2, 3), i(0, -1)), 2, {}, "label holds -1"),
    ("SoftmaxWithLoss", (f(2, 3), f(2, 3)), 2, {"label_prob": 1}, "add up to 1"),
    ("SoftmaxWithLoss", (f(2, 3), i(0, 1), f(3)), 2, {}, "weight is"),
    ("SoftmaxWithLoss", (f(2, 3), i(0, 1)), 2, {"scale": -1.0}, "'scale' is -1"),
    ("SoftmaxWithLoss", (f(2, 3), i(0, 1)), 2, {"order": "NHWC"}, "only NCHW"),
    ("SoftmaxWithLoss", (f(2, 3), i(0, 1)), 2, {"axis": 2}, "axis 2 is outside"),
    ("SpatialSoftmaxWithLoss", (f(1, 2, 1, 1), i(0)), 2, {}, r"label is int32\[1\]"),
    ("SpatialSoftmaxWithLoss", (f(1, 2, 1, 1), i(2).reshape(1, 1, 1)), 2, {}, "label holds 2"),
    ("SigmoidCrossEntropyWithLogits", (f(2), f(3)), 1, {}, "same shape"),
    (
        "SigmoidCrossEntropyWithLogits",
        (f(2), f(2)),
        1,
        {"log_D_trick": 1, "unjoined_lr_loss": 1},
        "choose one",
    ),
    ("SquaredL2Distance", (f(2, 3), f(3)), 1, {}, r"x and y are float32\[2,3\], float32\[3\]"),
    ("CosineEmbeddingCriterion", (f(2), i(1)), 1, {}, "as many elements"),
    ("MarginRankingCriterion", (f(2), f(2), f(2)), 1, {}, "y is .* must hold integers"),
    ("Accuracy", (f(2, 3), i(0)), 1, {}, r"its shape must be \[2\]"),
    ("Accuracy", (f(2), i(0, 1)), 1, {}, "2 dimensions"),
    ("Perplexity", (f(2, 2),), 1, {}, "one probability a row"),
    ("Exp", (i(1),), 1, {}, r"x is int32\[1\]; it must hold floating-point"),
    ("Pow", (f(2),), 1, {}, "'exponent'; give one of them"),
    ("Pow", (f(2, 3), f(3)), 1, {}, "broadcast=1"),
    ("RowMul", (f(2, 3), f(3)), 1, {}, "one element for each row"),
    ("PRelu", (f(2, 3), f(2)), 1, {}, "1 per channel"),
    (
        "Max",
        (f(2, 2), f(4)),
        1,
        {},
        r"inputs #0, #1 are float32\[2,2\], float32\[4\]; they must have the same shape",
    ),
    ("Mean", (f(2), f(1)), 1, {}, "same shape"),
    ("WeightedSum", (f(2), f(1), f(2)), 1, {}, "pairs"),
    ("WeightedSum", (f(2), f(2)), 1, {}, r"weight #0 is float32\[2\]"),
    ("Where", (i(1, 0), f(2), f(2)), 1, {}, "must hold booleans"),
    ("Where", (flags(1, 0), f(2, 2), f(2, 2)), 1, {}, "same shape"),
    ("Where", (flags(1, 0, 1), f(2, 2), f(2, 2)), 1, {"broadcast_on_rows": 1}, "each row of x"),
    ("Conditional", (flags(1, 0), f(2), i(1, 2)), 1, {}, "same type"),
    ("BitwiseAnd", (f(2), f(2)), 1, {}, "integers or booleans"),
    ("Xor", (i(1), i(1)), 1, {}, "booleans"),
    ("Mod", (i(5),), 1, {"divisor": 0}, "'divisor' is 0"),
    ("Mod", (i(5),), 1, {}, "'divisor' .* is required"),
    (
        "NanCheck",
        (np.array([1, np.nan], np.float32),),
        1,
        {},
        "1 elements of x are not finite; element 1 is nan",
    ),
    ("EnforceFinite", (np.array([np.inf], np.float32),), 0, {}, "not finite"),
    ("ReduceSum", (f(2, 3),), 1, {"axes": [2]}, "axes 2 is outside"),
    ("ReduceMean", (i(1, 2),), 1, {}, "floating-point"),
    ("SumElementsInt", (f(2),), 1, {}, "must be int32"),
    ("ArgMax", (f(2, 0),), 1, {}, "must not be empty"),
    ("ReduceFrontSum", (f(2, 3),), 1, {"num_reduce_dim": 3}, r"must be in \[0, 2\]"),
    ("ReduceFrontSum", (f(2, 3), i(1, 2)), 1, {}, "must hold 3 numbers"),
    ("ReduceBackMax", (f(2, 3), i(1, 4)), 1, {}, r"each must be in \[1, 3\]"),
    (
        "ReduceBackMean",
        (f(2, 3, 2), i(1, 2)),
        1,
        {"num_reduce_dim": 2},
        "with lengths it must be 1",
    ),
    ("RowwiseMax", (f(2, 3),), 1, {}, "3 dimensions"),
    ("TopK", (f(3),), 2, {"k": 0}, "k is 0"),
    ("TopK", (f(3),), 2, {}, "at least 1"),
    ("LpNorm", (f(3),), 1, {"p": 3}, "it must be 1 or 2"),
    ("Moments", (f(3),), 2, {"axes": [1]}, "axes 1 is outside"),
    ("Tile", (f(3),), 1, {"tiles": 2}, "axis is missing"),
    ("Tile", (f(3),), 1, {"tiles": -1, "axis": 0}, "negative"),
    ("Tile", (f(3, 1000),), 1, {"tiles": 2**30, "axis": 0}, "at most"),
    ("NumpyTile", (f(2, 2), i(2)), 1, {}, "each dimension needs one number"),
    ("Expand", (f(2, 2), i(3, 2)), 1, {}, "must be equal, or one of them 1"),
    ("Flatten", (f(2),), 1, {"axis": 2}, r"it must be in \[0, 1\]"),
    ("PrependDim", (f(5),), 1, {"dim_size": 2}, "must divide"),
    ("MergeDim", (f(5),), 1, {}, "at least 2 dimensions"),
    ("Gather", (f(3, 2), i(3)), 1, {}, r"indices holds 3, .* in \[0, 3\)"),
    ("Gather", (f(3, 2), i(-4)), 1, {}, "out of range"),
    ("Gather", (f(3, 2), f(1)), 1, {}, "must hold integers"),
    ("BatchGather", (f(3, 2), i(-1)), 1, {}, "out of range"),
    (
        "BatchGather",
        (f(3, 2), i(1, 0)),
        1,
        {"match_outer": 1},
        "first 1 dimensions must equal data's",
    ),
    ("ScatterAssign", (f(3, 2), i(3), f(1, 2)), 1, {}, "out of range"),
    ("ScatterAssign", (f(3, 2), i(1), i(1, 2)), 1, {}, "same type"),
    ("ScatterWeightedSum", (f(3, 2), f(1), i(1), f(1, 2)), 1, {}, "in pairs"),
    ("Scatter", (f(3, 2), i(1), f(1)), 1, {}, "must fit in data"),
    ("OneHot", (i(0, 3), i(3)), 1, {}, "out of range"),
    ("BatchOneHot", (i(1, 2).reshape(1, 2), i(1, 1), i(1)), 1, {}, "adds? up to 2"),
    ("SegmentOneHot", (i(2), i(1), i(4)), 1, {}, "adds? up to 2"),
    ("SparseToDense", (i(2), f(1), f(2)), 1, {}, "out of range"),
    ("SparseToDense", (i(0, 1), f(1)), 1, {}, "a row for each of 2 indices"),
    ("SparseToDenseMask", (i(2), f(1), f()), 1, {"mask": [1, 1]}, "each once"),
    ("SparseToDenseMask", (i(2), f(1), f(1)), 1, {"mask": [1]}, "default_value is"),
    ("BooleanMask", (f(3), flags(1, 0)), 1, {}, "one element per row"),
    ("BooleanMask", (f(2), i(1, 0)), 1, {}, "must hold booleans"),
    ("BooleanMaskGradient", (flags(1, 0), f(2)), 1, {}, "mask selects 1 elements and has 2 values"),
    ("BooleanUnmask", (flags(1, 0), f(1)), 1, {}, "no mask is true at position 1"),
    ("BooleanUnmask", (flags(1, 1), f(1)), 1, {}, "selects 2 elements and has 1 values"),
    ("Unique", (f(2),), 1, {}, "must hold integers"),
    ("SparseLengthsSum", (f(3, 2), i(3), i(1)), 1, {}, "out of range"),
    ("SparseLengthsSum", (f(3, 2), i(1), i(2)), 1, {}, "adds up to 2"),
    ("SparseLengthsWeightedSum", (f(3, 2), f(2), i(1), i(1)), 1, {}, "weights is"),
    ("SortedSegmentSum", (f(3), i(0, 2, 2)), 1, {}, "have no gaps"),
    ("SortedSegmentMean", (f(2), i(1, 1)), 1, {}, "begin at 0"),
    ("UnsortedSegmentSum", (f(3), i(0, 1)), 1, {}, "each row must have one"),
    ("UnsortedSegmentSum", (f(2), i(0, 2)), 1, {"num_segments": 2}, "out of range"),
    ("UnsortedSegmentMean", (f(2), i(0, -1)), 1, {}, "out of range"),
    ("SparseUnsortedSegmentSum", (f(2), i(0, 5), i(0, 0)), 1, {}, "out of range"),
    ("SortedSegmentRangeMax", (f(2), i(0, 2)), 1, {}, "no gaps"),
]


@pytest.mark.parametrize(
    "type, inputs, outputs, args, says", REFUSED, ids=[f"{k}-{r[0]}" for k, r in enumerate(REFUSED)]
)
def test_refused(type, inputs, outputs, args, says):
    names = [f"in{k}" for k in range(len(inputs))]
    net = jrnn.Net(
        "refused", (jrnn.nets.Op.of(type, names, [f"out{k}" for k in range(outputs)], **args),)
    )
    with pytest.raises(OpError, match=rf"(?s)op #0 {type} -> .* in net 'refused': .*{says}"):
        jrnn.run_net(net, dict(zip(names, inputs)))


def test_wrong_arity_names_the_inputs():
    with pytest.raises(
        OpError, match=r"FC .*takes 3 inputs \(x, w, b\), was given 2: \['x', 'w'\]"
    ):
        jrnn.to_jax(jrnn.Net("bad", (jrnn.nets.Op.of("FC", ["x", "w"], ["y"]),)))


@pytest.mark.parametrize(
    "op, seeds, says",
    [
        (jrnn.nets.Op.of("BatchMatMul", ["a", "b"], ["y"], broadcast=1), ["y"], "broadcast=1 has no gradient"),
        (jrnn.nets.Op.of("Cast", ["x"], ["y"], to=1), ["y"], "needs argument 'from_type'"),
        (jrnn.nets.Op.of("LayerNorm", ["x"], ["y", "m", "s"]), ["m"], "output 'm', which LayerNorm does not differentiate"),
        (jrnn.nets.Op.of("EQ", ["a", "b"], ["y"]), ["y"], "EQ has no gradient, and one arrives here; put a StopGradient"),
    ],
)  # fmt: skip
def test_refused_gradients(op, seeds, says):
    with pytest.raises(GradientError, match=f"op #0 {op.type} .*{says}"):
        jrnn.add_gradients(jrnn.Net("bad", (op,)), seeds)


@pytest.mark.parametrize("type", ["ArgMax", "Unique", "ReplaceNaN", "Accuracy", "BitwiseOr"])
def test_gradients_that_do_not_exist(type):
    reads = {"Accuracy": "xk", "BitwiseOr": "xy"}.get(type, "x")
    net = jrnn.Net("none", (jrnn.nets.Op.of(type, list(reads), ["out"]),))
    with pytest.raises(GradientError, match=f"{type} has no gradient"):
        jrnn.add_gradients(net, ["out"])
