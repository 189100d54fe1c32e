"""Operators on any number of inputs."""

from caffe2_cases import case, f32, normal

TIED = {"a": f32(1, 2, 3), "b": f32(1, 5, 0), "c": f32(1, 5, -2)}
CASES = []
for type in ("Max", "Min", "Mean"):
    CASES += [
        case(type, {"a": normal(2, 3), "b": normal(2, 3, seed=1)}, ["out"], gradient=True),
        case(type, TIED, ["out"], gradient=True),
        case(type, {"a": normal(2, 2)}, ["out"], gradient=True),
    ]
WEIGHTED = {"a": normal(2), "v": f32(2), "b": normal(2, seed=1), "w": f32(-3)}
CASES += [
    case("Mean", {"a": normal(2).astype("f8"), "b": normal(2, seed=1).astype("f8")}, ["out"]),
    case("WeightedSum", {"a": normal(2, 3), "v": normal(1)}, ["out"], gradient=True),
    case("WeightedSum", WEIGHTED, ["out"], gradient=True),
    case("WeightedSum", WEIGHTED, ["out"], gradient=True, grad_on_w=1),
    case("WeightedSum", WEIGHTED, ["a"]),
]
