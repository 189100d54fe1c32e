"""A cell of one's own: written as a formula, checked by `jrnn.testing`, inspected by `jrnn.explain`, and trained.

    python examples/own_cell.py

The cell mixes its state with a candidate, and normalizes the product with the state. It learns the adding problem: the sum
of the two numbers of a sequence that are marked.

Shapes: T time, N batch, H hidden.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jrnn
from jrnn import testing

LENGTH, BATCH, HIDDEN = 20, 32, 32


def init(key, hidden=HIDDEN):
    keys = jax.random.split(key, 3)
    return {
        "w": jax.random.normal(keys[0], (2, 2 * hidden)) / 2**0.5,
        "u": jax.random.normal(keys[1], (hidden, 2 * hidden)) / hidden**0.5,
        "gain": jnp.ones((1, 2 * hidden)),
        "out": jax.random.normal(keys[2], (hidden, 1)) / hidden**0.5,
    }


def cell(params, h, x):
    """`(params, h, x) -> (h, h)`: [N, H], [N, 2] -> [N, H]."""
    z = h @ params["u"]
    z = params["gain"] * z / jnp.sqrt(jnp.mean(z * z, axis=-1, keepdims=True) + 1e-3)
    f, n = jnp.split(x @ params["w"] + z, 2, axis=-1)
    f = jax.nn.sigmoid(f + 1)
    h = f * h + (1 - f) * jnp.tanh(n)
    return h, h


def check(hidden=3):
    """Raises AssertionError if the gradient of the cell is wrong, or depends on the padding."""
    params = init(jax.random.key(1), hidden)
    h, xs = (
        np.full((2, hidden), 0.5, np.float32),
        np.asarray(jax.random.normal(jax.random.key(2), (3, 2, 2))),
    )
    used = {name: params[name] for name in ("w", "u", "gain")}
    testing.assert_gradients_agree(cell, h, xs, params=used)
    testing.assert_padding_invariant(cell, h, xs, params=used, lengths=[2, 0], fills=[np.nan])


def batch(rng):
    """Sequences [T, N, 2] of numbers and marks, and the sums [N] of the two marked numbers."""
    numbers, marks = rng.random((LENGTH, BATCH), np.float32), np.zeros((LENGTH, BATCH), np.float32)
    half = LENGTH // 2
    marks[rng.integers(0, half, BATCH), np.arange(BATCH)] = 1
    marks[rng.integers(half, LENGTH, BATCH), np.arange(BATCH)] = 1
    return np.stack([numbers, marks], axis=-1), (numbers * marks).sum(axis=0)


def loss(params, xs, sums):
    h, _ = jrnn.scan(partial(cell, params), jnp.zeros((xs.shape[1], params["u"].shape[0])), xs)
    return jnp.mean(((h @ params["out"])[:, 0] - sums) ** 2)


def train(steps=1000, hidden=HIDDEN, report_every=200):
    """Returns the mean squared errors of all steps; always to answer 1 has an error of 1/6."""
    rng, params = np.random.default_rng(0), init(jax.random.key(0), hidden)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3))
    state, losses = optimizer.init(params), []

    @jax.jit
    def update(params, state, xs, sums):
        value, gradient = jax.value_and_grad(loss)(params, xs, sums)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, value

    for k in range(steps):
        params, state, value = update(params, state, *batch(rng))
        losses.append(float(value))
        if (k + 1) % report_every == 0:
            print(f"step {k + 1}: mean squared error {np.mean(losses[-report_every:]):.4f}")
    return losses


if __name__ == "__main__":
    check()
    print("the gradients agree, in three ways")
    params = init(jax.random.key(0))
    print(jrnn.explain(jax.grad(loss), params, *batch(np.random.default_rng(0))))
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
