"""FC, ElementwiseLinear, MatMul and BatchMatMul."""

from caffe2_cases import case, normal

CASES = [
    case("FC", {"x": normal(2, 3), "w": normal(4, 3), "b": normal(4)}, ["y"], gradient=True),
    case(
        "FC",
        {"x": normal(1, 2, 3), "w": normal(4, 3), "b": normal(4)},
        ["y"],
        gradient=True,
        axis=2,
    ),
    case("FC", {"x": normal(2, 3, 2), "w": normal(4, 6), "b": normal(4)}, ["y"], gradient=True),
    case("FC", {"x": normal(2, 3, 2), "w": normal(4, 3, 2), "b": normal(4)}, ["y"], gradient=True),
    case(
        "FC",
        {"x": normal(2, 2), "w": normal(2, 2, 2), "b": normal(4)},
        ["y"],
        gradient=True,
        axis_w=2,
    ),
    case("FC", {"x": normal(3), "w": normal(4, 3), "b": normal(4)}, ["y"], axis=0),
    case("FC", {"x": normal(0, 3), "w": normal(4, 3), "b": normal(4)}, ["y"], gradient=True),
    case(
        "FC",
        {"x": normal(2, 1, 3), "w": normal(4, 3), "b": normal(4)},
        ["y"],
        gradient=True,
        axis=-1,
    ),
    case(
        "ElementwiseLinear",
        {"x": normal(2, 3), "w": normal(3), "b": normal(3, seed=1)},
        ["y"],
        gradient=True,
    ),
    case(
        "ElementwiseLinear",
        {"x": normal(2, 2, 3), "w": normal(3), "b": normal(3)},
        ["y"],
        gradient=True,
        axis=2,
    ),
    case(
        "ElementwiseLinear",
        {"x": normal(2, 3), "w": normal(6), "b": normal(6, seed=1)},
        ["y"],
        axis=0,
    ),
    case("MatMul", {"a": normal(2, 3), "b": normal(3, 4), "like": normal(4, 2)}, ["y"]),
    case("MatMul", {"a": normal(2, 3, 2), "b": normal(2, 3, 4)}, ["y"], axis_b=2),
    case("MatMul", {"a": normal(2, 3, 2), "b": normal(2, 4)}, ["y"], axis_a=2),
    case("MatMul", {"a": normal(3), "b": normal(3, 2)}, ["y"], axis_a=0, gradient=True),
    case("BatchMatMul", {"a": normal(3), "b": normal(3, 2)}, ["y"], broadcast=1),
    case("BatchMatMul", {"a": normal(2, 3), "b": normal(3, seed=1)}, ["y"], broadcast=1),
    case("BatchMatMul", {"a": normal(3), "b": normal(3, seed=1)}, ["y"], broadcast=1),
    case("BatchMatMul", {"a": normal(2, 1, 2, 3), "b": normal(2, 3, 2)}, ["y"], broadcast=1),
    case("BatchMatMul", {"a": normal(2, 2, 1, 3), "b": normal(2, 2, 3, 2)}, ["y"], gradient=True),
]
for trans_a in (0, 1):
    for trans_b in (0, 1):
        a, b = normal(*((3, 2) if trans_a else (2, 3))), normal(*((4, 3) if trans_b else (3, 4)))
        args = {k: 1 for k, v in (("trans_a", trans_a), ("trans_b", trans_b)) if v}
        CASES.append(case("MatMul", {"a": a, "b": b}, ["y"], gradient=True, **args))
        CASES.append(
            case("BatchMatMul", {"a": a[None], "b": b[None]}, ["y"], gradient=True, **args)
        )
