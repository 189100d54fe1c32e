"""Elementary functions."""

from caffe2_cases import case, f32, i32, i64, normal, positive

INSIDE = f32(-0.9, -0.5, 0.0, 0.3, 0.8)
CASES = []
for type in (
    "Exp",
    "Sqr",
    "Abs",
    "Negative",
    "Sin",
    "Cos",
    "Tan",
    "Sinh",
    "Cosh",
    "Atan",
    "Cube",
    "Erf",
):
    CASES += [
        case(type, {"x": normal(2, 3)}, ["out"], gradient=True),
        case(type, {"x": f32(-1.5, -0.0, 0.0, 0.25, 2)}, ["out"], gradient=True),
    ]
for type in ("Log", "Sqrt", "Rsqrt", "Cbrt", "Reciprocal"):
    CASES += [
        case(type, {"x": positive(2, 3)}, ["out"], gradient=True),
        case(type, {"x": f32(0, 1, 4)}, ["out"]),
    ]
CASES += [
    case("Asin", {"x": INSIDE}, ["out"], gradient=True),
    case("Acos", {"x": INSIDE}, ["out"], gradient=True),
    case("Cbrt", {"x": f32(-8, -1, 27)}, ["out"], gradient=True),
    case("Reciprocal", {"x": f32(-4, -0.5, 2)}, ["x"], gradient=True),
    case("Logit", {"x": f32(0.2, 0.5, 0.7)}, ["out"], gradient=True),
    case("Logit", {"x": f32(-1, 0, 0.05, 0.3, 0.95, 1, 2)}, ["out"], gradient=True, eps=0.125),
    case("Negative", {"x": i32(1, -2)}, ["out"]),
    case("Cube", {"x": i64(3, -2)}, ["out"]),
    case("Sign", {"x": f32(-2, -0.0, 0.0, 3)}, ["out"]),
    case("Sign", {"x": i32(-2, 0, 3)}, ["out"]),
    case("Ceil", {"x": f32(-1.5, 0.2, 2)}, ["out"]),
    case("Floor", {"x": f32(-1.5, 0.2, 2)}, ["out"]),
]
