"""Reductions over the first or last dimensions."""

from caffe2_cases import case, f32, i32, i64, normal

TIED = f32(3, 3, 1, 3, 2, 3).reshape(2, 3)
CASES = []
for end in ("Front", "Back"):
    for kind in ("Sum", "Mean", "Max"):
        type = "Reduce" + end + kind
        lengths = i32(1, 2, 2) if end == "Front" else i32(3, 1)
        CASES += [
            case(type, {"x": normal(2, 3, 2)}, ["out"], gradient=True),
            case(type, {"x": normal(2, 3, 2)}, ["out"], gradient=True, num_reduce_dim=2),
            case(type, {"x": normal(2, 3)}, ["out"], gradient=True, num_reduce_dim=0),
            case(type, {"x": normal(2, 3)}, ["out"], gradient=True, num_reduce_dim=2),
            case(type, {"x": normal(2, 3), "n": lengths}, ["out"], gradient=True),
            case(type, {"x": TIED, "n": lengths}, ["out"], gradient=True),
        ]
        if kind != "Max":
            shape = {"g": normal(3 if end == "Front" else 2), "shape": i64(2, 3)}
            CASES += [
                case(type, {"x": i32(5, -2, 4, 1, 1, 1).reshape(2, 3)}, ["out"]),
                case(type + "Gradient", shape, ["out"]),
            ]
for type in ("RowwiseMax", "ColwiseMax"):
    CASES += [
        case(type, {"x": normal(2, 3, 2)}, ["out"], gradient=True),
        case(type, {"x": TIED.reshape(1, 3, 2)}, ["out"], gradient=True),
    ]
