"""YellowFin of jrnn/nets/ops/optimizers/rarer_updates.py: before and after its window is full."""

from caffe2_cases import case, f32, i64, normal, positive


def step(t, spread=0.3, seed=0, **args):
    inputs = {
        "p": normal(4),
        "m": normal(4, seed=1),
        "lr": f32(0.1),
        "mu": f32(0.2),
        "window": f32(0.7, 0.7 + spread, 0.7),
        "g_avg": 0.1 * normal(4, seed=2),
        "g2_avg": positive(4, seed=3),
        "scalars": f32(0.6, 1.9, 0.5, 0.5 + spread, 1.4),
        "grad": normal(4, seed=4 + seed),
        "it": i64(t),
    }
    return case("YellowFin", inputs, list(inputs)[:8], curv_win_width=3, beta=0.9, **args)


CASES = [step(1), step(2), step(9), step(9, spread=0.0), step(30, spread=0.0, seed=1, nesterov=1)]
CASES += [step(9, spread=0.0, zero_debias=0), step(1000, zero_debias=0, epsilon=5.0)]
