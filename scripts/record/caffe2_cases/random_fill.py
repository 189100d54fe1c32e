"""Random fills, of which only shapes and types can be compared."""

from caffe2_cases import case, f32, i32, i64, normal

CASES = []
for type in ("XavierFill", "MSRAFill", "GaussianFill", "UniformFill", "UniformIntFill"):
    CASES += [
        case(type, {}, ["out"], shape=[2, 3]),
        case(type, {"x": normal(2, 3)}, ["out"]),
        case(type, {"x": i64(2, 3)}, ["out"], input_as_shape=1),
    ]
CASES += [
    case("GaussianFill", {}, ["out"], mean=2.0, std=0.5),
    case("UniformFill", {}, ["out"], shape=[4], min=2.0, max=3.0),
    case("UniformFill", {"x": i64(3), "a": f32(2), "b": f32(3)}, ["out"], input_as_shape=1),
    case("UniformIntFill", {}, ["out"], shape=[4], min=2, max=3),
    case("UniqueUniformFill", {}, ["out"], shape=[4], min=2, max=5),
    case("UniqueUniformFill", {}, ["out"], shape=[4], min=2, max=9, dtype=10),
    case(
        "UniqueUniformFill",
        {"x": i64(3), "avoid": i32(4, 7)},
        ["out"],
        input_as_shape=1,
        min=2,
        max=9,
    ),
]
