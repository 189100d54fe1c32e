"""Dense updates of jrnn/nets/ops/optimizers/updates.py."""

from caffe2_cases import case, f32, i64, normal, positive

PARAM, GRAD, LR = normal(3, 2), normal(3, 2, seed=1), f32(-0.1)
M1, M2 = normal(3, 2, seed=2), positive(3, 2)


def update(type, outputs, args=None, **inputs):
    return case(type, inputs, outputs, **(args or {}))


CASES = [
    update("MomentumSGD", ["grad", "m"], grad=GRAD, m=M1, lr=LR),
    update("MomentumSGD", ["grad", "m"], dict(momentum=0.9, nesterov=1), grad=GRAD, m=M1, lr=LR),
    update(
        "MomentumSGDUpdate", ["grad", "m", "p"], dict(momentum=0.9), grad=GRAD, m=M1, lr=LR, p=PARAM
    ),
    update(
        "MomentumSGDUpdate",
        ["grad", "m", "p"],
        dict(momentum=0.8, nesterov=1),
        grad=GRAD,
        m=M1,
        lr=LR,
        p=PARAM,
    ),
    update("Adagrad", ["p", "h"], p=PARAM, h=M2, grad=GRAD, lr=LR),
    update(
        "Adagrad",
        ["p", "h", "rate", "step"],
        dict(epsilon=0.01, decay=0.9, weight_decay=0.5),
        p=PARAM,
        h=M2,
        grad=GRAD,
        lr=LR,
    ),
    update("Adagrad", ["p", "h", "rate"], p=PARAM, h=M2, grad=GRAD, lr=LR),
    *(
        update(
            "Adam",
            ["p", "m1", "m2", "scaled"][:n],
            args,
            p=PARAM,
            m1=M1,
            m2=M2,
            grad=GRAD,
            lr=LR,
            it=i64(t),
        )
        for n, t, args in (
            (3, 0, {}),
            (4, 1, dict(beta1=0.8, beta2=0.95, epsilon=0.01)),
            (3, 20000, {}),
        )
    ),
    update("RmsProp", ["grad", "ms", "mom"], grad=GRAD, ms=M2, mom=M1, lr=LR),
    update(
        "RmsProp",
        ["grad", "ms", "mom"],
        dict(decay=0.7, momentum=0.8, epsilon=0.1),
        grad=GRAD,
        ms=M2,
        mom=M1,
        lr=LR,
    ),
    update("Adadelta", ["p", "h", "d"], p=PARAM, h=M2, d=positive(3, 2, seed=1), grad=GRAD, lr=LR),
    update(
        "Adadelta",
        ["p", "h", "d"],
        dict(epsilon=0.01, decay=0.5),
        p=PARAM,
        h=M2,
        d=positive(3, 2, seed=1),
        grad=GRAD,
        lr=LR,
    ),
    update("Ftrl", ["p", "nz"], p=PARAM, nz=positive(3, 2, 2), grad=GRAD),
    update(
        "Ftrl",
        ["p", "nz"],
        dict(alpha=0.1, beta=0.5, lambda1=1.0, lambda2=0.1),
        p=PARAM,
        nz=positive(3, 2, 2),
        grad=GRAD,
    ),
    update("Ftrl", ["p", "nz"], p=PARAM, nz=positive(3, 2, 2), grad=GRAD, alpha=f32(0.2)),
    update(
        "Wngrad", ["p", "b", "rate", "step"], dict(epsilon=0.3), p=PARAM, b=f32(2), grad=GRAD, lr=LR
    ),
    update("Wngrad", ["p", "b"], p=PARAM, b=f32(2), grad=GRAD, lr=LR),
    update("Storm", ["p", "m", "s"], p=PARAM, m=M1, s=f32(2), grad=GRAD, lr=LR),
    update(
        "Storm",
        ["p", "m", "s"],
        dict(momentum=5.0, beta=0.3),
        p=PARAM,
        m=M1,
        s=f32(2),
        grad=GRAD,
        lr=LR,
    ),
    update("Lars", ["rate"], x=PARAM, dx=GRAD, wd=f32(0.1), trust=f32(0.2), most=f32(9)),
    update("Lars", ["rate"], x=0 * PARAM, dx=GRAD, wd=f32(0.1), trust=f32(0.2), most=f32(9)),
    update(
        "Lars",
        ["rate"],
        dict(offset=0.1, lr_min=0.3),
        x=PARAM,
        dx=GRAD,
        wd=f32(0.1),
        trust=f32(0.2),
        most=f32(0.01),
    ),
    update("LearningRateAdaption", ["lr"], lr=f32(0.5), grad=GRAD, last=M1),
    update(
        "LearningRateAdaption",
        ["new"],
        dict(lr_alpha=0.2, normalized_lr_adaption=0),
        lr=f32(0.5),
        grad=GRAD,
        last=M1,
    ),
    update("ClipTensorByScaling", ["x"], dict(threshold=1.0), x=GRAD, norm=f32(2)),
    update("ClipTensorByScaling", ["out"], dict(threshold=1.0), x=GRAD, norm=f32(0.5)),
    update(
        "ClipTensorByScaling", ["out"], dict(threshold=1.0), x=GRAD, norm=f32(0.5), more=f32(0.2)
    ),
    *(
        update(
            "WeightScale",
            ["p"],
            dict(stepsize=3, upper_bound_iter=6, scale=0.5),
            p=PARAM,
            it=i64(t),
        )
        for t in (1, 2, 5)
    ),
]
