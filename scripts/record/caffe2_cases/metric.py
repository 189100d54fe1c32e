"""Metrics of classifiers."""

from caffe2_cases import case, f32, i32

TIED = f32(0.1, 0.5, 0.4, 0.3, 0.3, 0.4, 0.2, 0.2, 0.6, 1, 1, 1).reshape(4, 3)
CASES = [
    case("Accuracy", {"x": TIED, "k": i32(1, 0, 2, 0)}, ["out"]),
    case("Accuracy", {"x": TIED, "k": i32(1, 0, 2, 2)}, ["out"]),
    case("Accuracy", {"x": TIED, "k": i32(1, 0, 2, 1)}, ["out"], top_k=2),
    case("Accuracy", {"x": TIED, "k": i32(1, 0, 2, 5)}, ["out"], top_k=3),
    case("MultiClassAccuracy", {"x": TIED, "k": i32(1, 0, 2, 0)}, ["out", "amounts"]),
    case("MultiClassAccuracy", {"x": TIED, "k": i32(1, 2, 2, 1)}, ["out", "amounts"]),
    case("Perplexity", {"x": f32(0.1, 0.5, 0.2)}, ["out"]),
    case("Perplexity", {"x": f32(0.1, 0.5).reshape(2, 1)}, ["out"]),
]
