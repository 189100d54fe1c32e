"""Tables of few bits a number, and bags over them: jrnn/nets/ops/contrib/low_precision.py."""

import numpy as np

from caffe2_cases import case, f32, i32, i64, integers, normal, positive

INDICES, LENGTHS, WEIGHTS = (
    i64(4, 0, 0, 3, 2, 1),
    i32(2, 0, 3, 1),
    f32(0.5, -1.0, 2.0, 0.25, 1.5, -3.0),
)


def fused(bits, rows, size):
    """Rows of random numbers of `bits` bits, with their scales and biases."""
    wide = np.float32 if bits == 8 else np.float16
    stored = integers(0, 256, rows, size * bits // 8, seed=bits).astype(np.uint8)
    ends = np.concatenate([positive(rows, 1), normal(rows, 1)], 1).astype(wide)
    return np.concatenate([stored, ends.view(np.uint8).reshape(rows, -1)], 1)


ROWS = np.concatenate([normal(4, 8), np.full((1, 8), 0.25, np.float32), positive(2, 8) * 1e4])
CASES = []
for bits in (8, 4, 2):
    data = fused(bits, 5, 12)
    for kind in ("Sum", "Mean"):
        type = f"SparseLengths{kind}Fused{bits}BitRowwise"
        CASES += [
            case(type, {"data": data, "indices": INDICES, "lengths": LENGTHS}, ["out"]),
            case(
                type,
                {"data": data, "indices": INDICES.astype(np.int32), "lengths": i32(6)},
                ["out"],
            ),
            case(type, {"data": data, "indices": i64(), "lengths": i32(0, 0)}, ["out"]),
        ]
    weighted = {"data": data, "weights": WEIGHTS, "indices": INDICES, "lengths": LENGTHS}
    CASES += [
        case(f"SparseLengthsWeightedSumFused{bits}BitRowwise", weighted, ["out"]),
        case(f"FloatToFused{bits}BitRowwiseQuantized", {"x": ROWS}, ["out"]),
        case(f"Fused{bits}BitRowwiseQuantizedToFloat", {"x": data}, ["out"]),
    ]
APART, SCALES = (
    integers(0, 256, 5, 6, dtype=np.uint8),
    np.concatenate([positive(5, 1), normal(5, 1)], 1),
)
CUBE = integers(0, 256, 5, 2, 3, dtype=np.uint8)
for kind in ("Sum", "Mean"):
    blobs = {"indices": INDICES, "lengths": LENGTHS, "scale_bias": SCALES}
    CASES += [
        case(f"SparseLengths{kind}8BitsRowwise", {"data": APART, **blobs}, ["out"]),
        case(
            f"SparseLengths{kind}8BitsRowwise",
            {"data": CUBE, **blobs, "indices": INDICES.astype("i4")},
            ["out"],
        ),
        case(
            f"SparseLengthsWeighted{kind}8BitsRowwise",
            {"data": APART, "weights": WEIGHTS, **blobs},
            ["out"],
        ),
    ]
CASES += [
    case("FloatToRowwiseQuantized8Bits", {"x": ROWS}, ["out", "scale_bias"]),
    case("FloatToRowwiseQuantized8Bits", {"x": normal(3, 2, 4)}, ["out", "scale_bias"]),
    case("Rowwise8BitQuantizedToFloat", {"x": APART, "scale_bias": SCALES}, ["out"]),
    case("Rowwise8BitQuantizedToFloat", {"x": CUBE, "scale_bias": SCALES}, ["out"]),
]
