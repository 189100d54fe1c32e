"""Every policy of LearningRate, before, at and after the iterations where it turns; and the counters of iterations."""

from caffe2_cases import case, i64

POLICIES = [
    ((0, 7), dict(policy="fixed")),
    ((0, 2, 3, 8), dict(policy="step", stepsize=3, gamma=0.5)),
    ((0, 5), dict(policy="exp", gamma=0.9)),
    ((0, 6), dict(policy="inv", gamma=0.5, power=0.7)),
    ((0, 6), dict(policy="poly", max_iter=10, power=2.0)),
    ((3, 4), dict(policy="gate", num_iter=4, multiplier_1=0.3, multiplier_2=0.6)),
    ((1, 2, 4, 5), dict(policy="alter", active_first=1, active_period=2, inactive_period=3)),
    ((2, 3, 4, 5), dict(policy="alter", active_first=0, active_period=2, inactive_period=3)),
    ((0, 3, 5, 9), dict(policy="linearWarmup", start_multiplier=0.2, num_iter=5)),
    ((4, 5), dict(policy="constantWarmup", multiplier=0.2, num_iter=5)),
    ((1, 2, 4, 5), dict(policy="pieceWarmup", m1=0.1, n1=2, m2=0.2, n2=5, m3=0.9)),
    (
        (0, 3, 5, 6, 20),
        dict(
            policy="hill",
            start_multiplier=0.2,
            num_iter=5,
            gamma=0.5,
            power=1.0,
            end_multiplier=0.3,
        ),
    ),
    (
        (2, 3, 8, 11),
        dict(policy="slope", num_iter_1=3, multiplier_1=0.2, num_iter_2=8, multiplier_2=0.7),
    ),
    (
        (2, 3, 5, 11),
        dict(policy="slope", num_iter_1=3, multiplier_1=0.7, num_iter_2=8, multiplier_2=0.2),
    ),
    ((0, 2, 3, 6, 9, 13), dict(policy="cyclical", max_lr=3.0, stepsize=3, decay=0.5)),
    (
        (0, 3, 4, 9),
        dict(policy="cosine", max_lr=1.0, min_lr=0.1, period=4, t_mult=1.0, lr_shrink=0.5),
    ),
    (
        (0, 2, 3, 8, 9, 20, 21, 44, 45),
        dict(policy="cosine", max_lr=1.0, min_lr=0.1, period=3, t_mult=2.0),
    ),
    (
        (0, 3, 6, 7, 8, 30),
        dict(policy="cosine", max_lr=1.0, min_lr=0.1, period=3, t_mult=1.5, lr_shrink=0.7),
    ),
    ((5,), dict(policy="cosine")),
    (
        (0, 3, 5, 7, 8),
        dict(
            policy="constantThenLinearWarmup",
            start_warmup_multiplier=0.2,
            constant_warmup_num_iter=3,
            linear_warmup_num_iter=4,
        ),
    ),
    (
        (0, 3, 5, 7, 8, 12),
        dict(
            policy="compositeCyclical",
            start_warmup_multiplier=0.2,
            constant_warmup_num_iter=3,
            linear_warmup_num_iter=4,
            cyclical_max_lr=3.0,
            cyclical_step_size=2,
            cyclical_decay=0.5,
        ),
    ),
    (
        (0, 3, 4, 6, 9, 12),
        dict(
            policy="compositeCosine",
            start_warmup_multiplier=0.2,
            constant_warmup_num_iter=3,
            linear_warmup_num_iter=2,
            cosine_max_lr=1.0,
            cosine_min_lr=0.1,
            cosine_period=4,
            cosine_t_mult=1.0,
            cosine_lr_shrink=0.5,
        ),
    ),
    (
        (1, 3, 4, 8),
        dict(
            policy="composite",
            sub_policy_num_iters=[3, 4],
            sub_policy_0_policy="exp",
            sub_policy_0_gamma=0.9,
            sub_policy_0_lr_scale=2.0,
            sub_policy_1_policy="step",
            sub_policy_1_gamma=0.5,
            sub_policy_1_stepsize=2,
        ),
    ),
]

CASES = [
    case("LearningRate", {"it": i64(k)}, ["lr"], base_lr=base_lr, **policy)
    for iterations, policy in POLICIES
    for k, base_lr in zip(iterations, [-0.1, 2.0] * 5)
]
CASES += [
    case("Iter", {"it": i64(7)}, ["it"]),
    case("Iter", {}, ["it"]),
    case("CreateMutex", {}, ["mutex"]),
]
