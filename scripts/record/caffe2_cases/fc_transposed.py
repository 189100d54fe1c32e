"""FCTransposed of jrnn/nets/ops/matmul.py."""

from caffe2_cases import case, normal

CASES = [
    case(
        "FCTransposed",
        {"x": normal(2, 3), "w": normal(3, 4), "b": normal(4)},
        ["out"],
        gradient=True,
    ),
    case(
        "FCTransposed",
        {"x": normal(2, 3, 2), "w": normal(6, 4), "b": normal(4)},
        ["out"],
        gradient=True,
    ),
    case(
        "FCTransposed",
        {"x": normal(2, 3, 2), "w": normal(2, 4), "b": normal(4)},
        ["out"],
        gradient=True,
        axis=2,
    ),
    case(
        "FCTransposed",
        {"x": normal(2, 6), "w": normal(3, 2, 4), "b": normal(4)},
        ["out"],
        gradient=True,
        axis_w=2,
    ),
]
