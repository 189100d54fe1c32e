"""Losses of jrnn/nets/ops/loss.py."""

import numpy as np

from caffe2_cases import case, f32, i32, normal, positive


def distributions(*shape, seed=0):
    x = positive(*shape, seed=seed)
    return x / x.sum(-1, keepdims=True)


P, LABELS = distributions(3, 4), i32(1, 0, 3)
LOGITS, IMAGE = normal(3, 4), normal(2, 3, 2, 2)
PIXELS = i32(0, 2, 1, 1, 2, 0, 0, 1).reshape(2, 2, 2)
IGNORING = i32(0, -1, 1, 1, 2, -1, 0, 1).reshape(2, 2, 2)
SOFTMAX = ["softmax", "loss"]
ZERO = f32(0, 1).reshape(1, 2)

CASES = [
    case("AveragedLoss", {"x": normal(2, 3)}, ["out"], gradient=True),
    case("AveragedLoss", {"x": np.zeros((0, 2), np.float32)}, ["out"]),
    case("LabelCrossEntropy", {"x": P, "k": LABELS}, ["out"], gradient=True),
    case("LabelCrossEntropy", {"x": P, "k": LABELS.reshape(3, 1)}, ["out"], gradient=True),
    case("LabelCrossEntropy", {"x": distributions(3, 2, 2), "k": LABELS}, ["out"], gradient=True),
    case("LabelCrossEntropy", {"x": P[0], "k": i32(2)}, ["out"]),
    case("LabelCrossEntropy", {"x": ZERO, "k": i32(0)}, ["out"]),
    case("LabelCrossEntropyGradient", {"x": ZERO, "k": i32(0), "g": f32(2)}, ["out"]),
    case("CrossEntropy", {"x": P, "k": distributions(3, 4, seed=1)}, ["out"], gradient=True),
    case("CrossEntropy", {"x": ZERO, "k": f32(0.5, 0.5).reshape(1, 2)}, ["out"]),
    case(
        "CrossEntropyGradient", {"x": ZERO, "k": f32(0.5, 0.5).reshape(1, 2), "g": f32(2)}, ["out"]
    ),
    case("SoftmaxWithLoss", {"x": LOGITS, "k": LABELS}, SOFTMAX, gradient=["loss"]),
    case(
        "SoftmaxWithLoss",
        {"x": LOGITS, "k": LABELS.reshape(3, 1)},
        SOFTMAX,
        gradient=["loss"],
        scale=2.0,
    ),
    case(
        "SoftmaxWithLoss",
        {"x": LOGITS, "k": LABELS, "w": f32(1, 2, 0.5)},
        SOFTMAX,
        gradient=["loss"],
    ),
    case(
        "SoftmaxWithLoss", {"x": LOGITS, "k": LABELS, "w": f32(0, 0, 0)}, SOFTMAX, gradient=["loss"]
    ),
    case(
        "SoftmaxWithLoss",
        {"x": LOGITS, "k": LABELS, "w": f32(1, 2, 0.5)},
        SOFTMAX,
        gradient=["loss"],
        average_by_batch_size=1,
    ),
    case(
        "SoftmaxWithLoss",
        {"x": LOGITS, "k": distributions(3, 4)},
        SOFTMAX,
        gradient=["loss"],
        label_prob=1,
    ),
    case(
        "SoftmaxWithLoss",
        {"x": LOGITS, "k": distributions(3, 4), "w": f32(1, 2, 0.5)},
        SOFTMAX,
        gradient=["loss"],
        label_prob=1,
    ),
    case(
        "SoftmaxWithLoss",
        {"x": normal(2, 2, 3), "k": i32(0, 2, 1, 1).reshape(2, 2)},
        SOFTMAX,
        gradient=["loss"],
        axis=2,
    ),
    case("SoftmaxWithLoss", {"x": f32(1000, 0).reshape(1, 2), "k": i32(1)}, SOFTMAX),
    case("SpatialSoftmaxWithLoss", {"x": IMAGE, "k": PIXELS}, SOFTMAX, gradient=["loss"]),
    case("SpatialSoftmaxWithLoss", {"x": IMAGE, "k": IGNORING}, SOFTMAX, gradient=["loss"]),
    case(
        "SpatialSoftmaxWithLoss",
        {"x": IMAGE, "k": IGNORING, "w": positive(2, 2, 2)},
        SOFTMAX,
        gradient=["loss"],
    ),
    case("SpatialSoftmaxWithLoss", {"x": IMAGE, "k": IGNORING * 0 - 1}, SOFTMAX, gradient=["loss"]),
    case("SpatialSoftmaxWithLoss", {"x": IMAGE, "k": PIXELS}, SOFTMAX, scale=2.0),
    case(
        "SpatialSoftmaxWithLossGradient",
        {"x": IMAGE, "k": PIXELS, "p": np.full((2, 3, 2, 2), 0.25, "f4"), "g": np.array(2, "f4")},
        ["out"],
        scale=3.0,
    ),
    case("MakeTwoClass", {"x": normal(2, 3)}, ["out"], gradient=True),
    case("MakeTwoClass", {"x": normal(3)}, ["out"], gradient=True),
]
PAIR = {"x": normal(2, 3), "y": positive(2, 3) / 3}
for args in ({}, {"log_D_trick": 1}, {"unjoined_lr_loss": 1}):
    CASES += [
        case("SigmoidCrossEntropyWithLogits", PAIR, ["out"], gradient=True, **args),
        case(
            "SigmoidCrossEntropyWithLogits",
            {"x": normal(3), "y": f32(1, 0, 1)},
            ["out"],
            gradient=True,
            **args,
        ),
    ]
CASES += [
    case("SigmoidCrossEntropyWithLogits", {"x": f32(200, -200), "y": f32(0, 1)}, ["out"]),
    case(
        "WeightedSigmoidCrossEntropyWithLogits", {**PAIR, "w": normal(2, 3)}, ["out"], gradient=True
    ),
    case(
        "WeightedSigmoidCrossEntropyWithLogits",
        {"x": normal(2), "y": f32(1, 0), "w": f32(1, 2)},
        ["out"],
        gradient=True,
    ),
]
