"""Sparse updates of jrnn/nets/ops/optimizers/rarer_updates.py; an index comes twice, and none at all."""

import numpy as np

from caffe2_cases import case, f32, i32, i64, normal, positive

PARAM, LR = normal(4, 3), f32(-0.1)
M1, M2, M3 = normal(4, 3, seed=2), positive(4, 3), positive(4, 3, seed=1)
ROWS, GRAD = i64(2, 0, 2), normal(3, 3, seed=1)
NONE = {"i": np.zeros(0, np.int64), "grad": np.zeros((0, 3), np.float32)}


def update(type, outputs, args=None, **inputs):
    return case(type, inputs, outputs, **(args or {}))


CASES = [
    update(
        "SparseMomentumSGDUpdate",
        ["grad", "m", "p"],
        dict(momentum=0.9),
        grad=GRAD,
        m=M1,
        lr=LR,
        p=PARAM,
        i=ROWS,
    ),
    update(
        "SparseMomentumSGDUpdate",
        ["grad", "m", "p"],
        dict(momentum=0.9, nesterov=1),
        grad=GRAD,
        m=M1,
        lr=LR,
        p=PARAM,
        i=i32(2, 2, 2),
    ),
    update("SparseAdagrad", ["p", "h"], p=PARAM, h=M2, i=ROWS, grad=GRAD, lr=LR),
    update(
        "SparseAdagrad",
        ["p", "h"],
        dict(epsilon=0.1, weight_decay=0.5),
        p=PARAM,
        h=M2,
        i=ROWS,
        grad=GRAD,
        lr=LR,
    ),
    update("SparseAdagrad", ["p", "h"], p=PARAM, h=M2, **NONE, lr=LR),
    update("RowWiseSparseAdagrad", ["p", "h"], p=PARAM, h=positive(4), i=ROWS, grad=GRAD, lr=LR),
    update(
        "RowWiseSparseAdagrad",
        ["p", "h"],
        dict(weight_decay=0.5),
        p=normal(4, 1),
        h=positive(4),
        i=ROWS,
        grad=normal(3, 1),
        lr=LR,
    ),
    *(
        update(
            "SparseAdam",
            ["p", "m1", "m2", "scaled"][:n],
            args,
            p=PARAM,
            m1=M1,
            m2=M2,
            i=ROWS,
            grad=GRAD,
            lr=LR,
            it=i64(t),
        )
        for n, t, args in (
            (3, 0, {}),
            (4, 9, dict(beta1=0.8, beta2=0.95)),
            (4, 2, dict(enableRAdam=1)),
            (4, 30, dict(enableRAdam=1)),
        )
    ),
    update(
        "RowWiseSparseAdam",
        ["p", "m1", "m2", "scaled"],
        p=PARAM,
        m1=M1,
        m2=positive(4),
        i=ROWS,
        grad=GRAD,
        lr=LR,
        it=i64(3),
    ),
    update("SparseAdadelta", ["p", "h", "d"], p=PARAM, h=M2, d=M3, i=ROWS, grad=GRAD, lr=LR),
    update("SparseFtrl", ["p", "nz"], p=PARAM, nz=positive(4, 3, 2), i=ROWS, grad=GRAD),
    update(
        "SparseFtrl",
        ["p", "nz"],
        dict(lambda1=0.5),
        p=PARAM,
        nz=positive(4, 3, 2),
        i=ROWS,
        grad=GRAD,
        alpha=f32(0.2),
    ),
    update(
        "SparseWngrad", ["p", "b"], dict(epsilon=0.2), p=PARAM, b=f32(2), i=ROWS, grad=GRAD, lr=LR
    ),
    update("SparseStorm", ["p", "m", "s"], p=PARAM, m=M1, s=f32(2), grad=GRAD, i=ROWS, lr=LR),
]
