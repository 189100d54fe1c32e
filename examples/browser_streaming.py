"""A model that runs in a browser tab, step by step: a GRU removes noise from a signal as it arrives.

The program trains it, exports its step to ONNX, and writes a page that draws the signal. onnxruntime-web runs the step
on each value and carries the state. Nothing is sent to a server.

    python examples/browser_streaming.py
    npm install --prefix page onnxruntime-web
    python -m http.server --directory page        # then open http://localhost:8000
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jrnn
from jrnn import nn

LENGTH, BATCH = 200, 32

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>A GRU in a browser tab</title>
<h1>A GRU in a browser tab</h1>
<canvas width="600" height="200" style="max-width: 100%" role="img" aria-label="Gray: the signal. Blue: the output">
</canvas>
<p id="state">loading</p>
<script type="module">
import * as ort from "./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs";
ort.env.wasm.numThreads = 1;
const stream = await (await fetch("stream.json")).json();
const session = await ort.InferenceSession.create("step.onnx");
const draw = document.querySelector("canvas").getContext("2d");
let state = new ort.Tensor("float32", new Float32Array(stream.hidden), [1, 1, stream.hidden]);
let difference = 0;
for (const [t, value] of stream.noisy.entries()) {
  const found = await session.run({ x: new ort.Tensor("float32", [value], [1, 1]), state });
  state = found["output/1"];
  const output = found["output/0"].data[0];
  difference = Math.max(difference, Math.abs(output - stream.expected[t]));
  for (const [color, y] of [["#999", value], ["#06c", output]]) {
    draw.fillStyle = color;
    draw.fillRect(3 * t, 100 - 60 * y, 3, 3);
  }
  if (t % 4 === 0) await new Promise(requestAnimationFrame);
}
document.querySelector("#state").textContent =
  `${stream.noisy.length} steps; largest difference from JAX: ${difference.toExponential(1)}`;
</script>
"""


class Filter(nnx.Module):
    def __init__(self, hidden, rngs):
        self.rnn = nn.GRU(1, hidden, rngs=rngs)
        self.head = nnx.Linear(hidden, 1, rngs=rngs)

    def __call__(self, x):
        """[T, N, 1] -> [T, N, 1]."""
        return self.head(self.rnn(x)[0])

    def step(self, x, state):
        """One value of each signal [N, 1] and the state [1, N, H] -> its output [N, 1] and the new state."""
        y, state = self.rnn.step(x, state)
        return self.head(y), state


def signals(key):
    """Noisy waves and the waves themselves, both [T, N, 1]."""
    keys = jax.random.split(key, 3)
    period = jax.random.uniform(keys[0], (1, BATCH, 1), minval=20, maxval=60)
    phase = jax.random.uniform(keys[1], (1, BATCH, 1), maxval=2 * jnp.pi)
    clean = jnp.sin(2 * jnp.pi * jnp.arange(LENGTH)[:, None, None] / period + phase)
    return clean + 0.4 * jax.random.normal(keys[2], clean.shape), clean


def train(steps, hidden=24):
    """Returns the model, and the mean squared errors of the noisy signal and of the model's output."""
    model = Filter(hidden, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def update(model, optimizer, noisy, clean):
        loss, gradient = nnx.value_and_grad(lambda model: jnp.mean((model(noisy) - clean) ** 2))(
            model
        )
        optimizer.update(model, gradient)
        return loss

    for k in range(steps):
        loss = update(model, optimizer, *signals(jax.random.key(k)))
    noisy, clean = signals(jax.random.key(steps))
    return model, float(jnp.mean((noisy - clean) ** 2)), float(loss)


def write(model, folder):
    """Writes the page, the model's step as ONNX, and a signal with the outputs that JAX computes."""
    folder.mkdir(parents=True, exist_ok=True)
    state = model.rnn.initial_state(1)
    jrnn.to_onnx(
        lambda x, state: model.step(x, state), jnp.zeros((1, 1)), state, path=folder / "step.onnx"
    )
    noisy = signals(jax.random.key(10**6))[0][:, :1]
    stream = {
        "hidden": state.shape[-1],
        "noisy": noisy.ravel().tolist(),
        "expected": model(noisy).ravel().tolist(),
    }
    (folder / "stream.json").write_text(json.dumps(stream))
    (folder / "index.html").write_text(PAGE)
    return np.asarray(stream["expected"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("page"), help="default: page")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    model, before, after = train(args.steps)
    write(model, args.folder)
    print(
        f"mean squared error {before:.3f} of the signal, {after:.3f} of the output; wrote {args.folder}/index.html"
    )
