"""Powers, and products of rows."""

from caffe2_cases import case, f32, normal, positive

CASES = [
    case("Pow", {"x": positive(2, 3)}, ["out"], gradient=True, exponent=2.5),
    case("Pow", {"x": f32(-2, 0, 3)}, ["out"], gradient=True, exponent=2.0),
    case("Pow", {"x": positive(2, 3), "y": normal(2, 3)}, ["out"], gradient=True),
    case("Pow", {"x": positive(2, 3), "y": normal(3)}, ["out"], gradient=True, broadcast=1),
    case("Pow", {"x": positive(2, 3), "y": normal(2)}, ["out"], gradient=True, broadcast=1, axis=0),
    case("Pow", {"x": positive(2, 3), "y": normal(1)}, ["out"], broadcast=1),
    case("SumReduceLike", {"x": normal(2, 3, 4), "y": normal(3, 4)}, ["out"]),
    case("SumReduceLike", {"x": normal(2, 3, 4), "y": normal(3)}, ["out"], axis=1),
    case("SumReduceLike", {"x": normal(2, 3, 4), "y": normal(1)}, ["out"]),
    case("SumReduceLike", {"x": normal(2, 3), "y": normal(1, 3)}, ["out"], axis=0),
    case("RowMul", {"x": normal(2, 3), "w": normal(2)}, ["out"], gradient=True),
    case("RowMul", {"x": normal(2, 3, 2), "w": normal(2)}, ["out"]),
    case("ReduceTailSum", {"x": normal(2, 3, 2)}, ["out"]),
    case("ReduceTailSum", {"x": normal(3)}, ["out"]),
]
