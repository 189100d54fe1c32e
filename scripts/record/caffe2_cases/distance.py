"""Distances, similarities, and criteria that rank."""

from caffe2_cases import case, f32, i32, normal

CASES = []
for type in ("SquaredL2Distance", "L1Distance", "DotProduct", "CosineSimilarity"):
    CASES += [
        case(type, {"x": normal(2, 3), "y": normal(2, 3, seed=1)}, ["out"], gradient=True),
        case(type, {"x": normal(2, 2, 2), "y": normal(2, 2, 2, seed=1)}, ["out"], gradient=True),
        case(type, {"x": normal(3), "y": normal(3, seed=1)}, ["out"]),
        case(type, {"x": normal(0, 3), "y": normal(0, 3)}, ["out"]),
    ]
CASES += [
    case(
        "L1Distance",
        {"x": f32(2, 1, 3, 4).reshape(2, 2), "y": f32(0, 1, 5, 4).reshape(2, 2)},
        ["out"],
        gradient=True,
    ),
    case(
        "CosineSimilarityGradient",
        {"x": f32(0, 3, -4, 0).reshape(2, 2), "y": f32(0, 0, 3, 4).reshape(2, 2), "g": f32(2, -1)},
        ["dx", "dy"],
    ),
    case("CosineSimilarity", {"x": f32(0, 0).reshape(1, 2), "y": f32(0, 1).reshape(1, 2)}, ["out"]),
    case(
        "CosineEmbeddingCriterion",
        {"s": f32(0.5, -0.5, 0.1, 1), "y": i32(1, 1, -1, -1)},
        ["out"],
        gradient=True,
    ),
    case(
        "CosineEmbeddingCriterion",
        {"s": f32(0.5, 0.25, 0.1, 1), "y": i32(0, -1, -1, -1)},
        ["out"],
        gradient=True,
        margin=0.25,
    ),
]
RANKED = {"a": f32(1, 2, 3, 1), "b": f32(2, 1, 3, 0), "y": i32(1, 1, -1, -1)}
CASES += [
    case("MarginRankingCriterion", RANKED, ["out"], gradient=True),
    case("MarginRankingCriterion", RANKED, ["out"], gradient=True, margin=0.5),
]
