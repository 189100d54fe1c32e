"""A Caffe2 net, fine-tuned with optax and exported again.

    python examples/caffe2_finetune.py [FOLDER with init_net.pb and predict_net.pb]

Without a folder it makes a package first: an LSTM that predicts the next value of a series. The package is read, becomes a
pure function that JAX differentiates, is trained, and is written as files that Caffe2 loads.

Shapes: T time, N batch.
"""

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jrnn
from jrnn.nets import cells

WINDOW = 8


def old_package(folder, hidden=8):
    """Writes a package as Caffe2's exporter does: x [T, N, 1] -> y [N, 1]."""
    b = jrnn.NetBuilder("forecast")
    lstm = cells.LSTM(b, b.input("x"), None, None, 1, hidden, "lstm")
    last = b.Squeeze(lstm.hidden_last, "last", dims=[0])
    b.FC(
        [last, b.param("out_w", [1, hidden]), b.param("out_b", [1], "ConstantFill", value=0.0)], "y"
    )
    params = jrnn.run_net(b.build_init(), {}, key=jax.random.key(0))
    jrnn.convert.export_package(b.build(), params, inputs=["x"], outputs=["y"]).save(folder)


def windows(steps=400):
    """Windows [T, N, 1] of a series, and the values [N, 1] that follow them."""
    t = np.arange(steps)
    series = (np.sin(0.3 * t) + 0.3 * np.sin(0.05 * t)).astype(np.float32)
    x = np.stack([series[k : k + steps - WINDOW] for k in range(WINDOW)])
    return x[..., None], series[WINDOW:, None]


def finetune(folder, out, steps=200, report_every=50):
    """Returns the mean squared error before and after, and the package that was written to `out`."""
    package = jrnn.convert.load_package(folder)
    predict = package.to_jax()  # {blob: array} -> {blob: array}; weights may be among the inputs
    weights = jax.tree.map(jnp.asarray, package.weights())
    x, y = windows()
    optimizer = optax.adam(1e-2)
    state = optimizer.init(weights)

    def loss(weights):
        return jnp.mean((predict({**weights, "x": x})["y"] - y) ** 2)

    @jax.jit
    def update(weights, state):
        value, gradient = jax.value_and_grad(loss)(weights)
        change, state = optimizer.update(gradient, state)
        return optax.apply_updates(weights, change), state, value

    before = float(loss(weights))
    for k in range(steps):
        weights, state, value = update(weights, state)
        if (k + 1) % report_every == 0:
            print(f"step {k + 1}: mean squared error {float(value):.4f}")
    tuned = jrnn.convert.export_package(
        package.predict_net, jax.tree.map(np.asarray, weights), inputs=["x"], outputs=["y"]
    )
    tuned.save(out)
    served = jrnn.convert.Predictor(jrnn.convert.load_package(out))  # what was written, read again
    after = float(np.mean((served(x=x)["y"] - y) ** 2))
    return before, after, tuned


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        if len(sys.argv) == 1:
            old_package(folder)
        before, after, _ = finetune(folder, "tuned")
    print(
        f"mean squared error: {before:.4f} before, {after:.4f} after; wrote tuned/init_net.pb and tuned/predict_net.pb"
    )
