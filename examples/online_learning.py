"""A stream that is learned as it comes: after every step the weights change, and no step is kept.

A gated unit with diagonal recurrent weights forecasts a signal of which it sees one number at a time. Its gradient through
all earlier steps is known at once, by real-time recurrent learning (`jrnn.online_gradient`): memory does not grow with the
stream. Halfway the signal changes, the error jumps, and the learner follows. `truncated` is the same learner with the
gradient of one step alone: to it, the state is a constant.

    python examples/online_learning.py --steps 20000
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jrnn

HIDDEN, AHEAD = 24, 5


def signal(steps, seed=0):
    """Two waves with noise; in the second half they are others. [steps + AHEAD]"""
    t = np.arange(steps + AHEAD)
    first, second = (np.sin(a * t) + 0.5 * np.sin(b * t) for a, b in ((0.31, 0.83), (0.47, 0.19)))
    noise = 0.02 * np.random.default_rng(seed).standard_normal(len(t))
    return jnp.asarray(np.where(t < steps // 2, first, second) + noise, jnp.float32)


def init(key):
    keys = iter(jax.random.split(key, 8))

    def normal(*shape, scale):
        return scale * jax.random.normal(next(keys), shape)

    # time constants from 1 to about 50 steps
    bias = -jnp.linspace(-1.0, 4.0, HIDDEN)
    return {
        "z": {"w": normal(HIDDEN, scale=0.3), "u": normal(HIDDEN, scale=0.3), "b": bias},
        "n": {
            "w": normal(HIDDEN, scale=1.0),
            "u": normal(HIDDEN, scale=0.5),
            "b": normal(HIDDEN, scale=0.5),
        },
        "out": normal(HIDDEN, scale=0.1),
        "b": jnp.zeros(()),
    }


def step(params, h, pair):
    """One step of the stream: what is seen, and what it should have been; the loss is the squared error."""
    seen, wanted = pair
    z, n = (p["w"] * seen + p["u"] * h + p["b"] for p in (params["z"], params["n"]))
    z = jax.nn.sigmoid(z)
    h = (1 - z) * h + z * jnp.tanh(n)
    return h, (h @ params["out"] + params["b"] - wanted) ** 2


def truncated(params, h, pair):
    return step(params, jax.lax.stop_gradient(h), pair)


def learn(step, stream, rate=3e-3, seed=0):
    """Returns the parameters at the end, and the squared error of each step before the weights knew of it, [T]."""
    params = init(jax.random.key(seed))
    optimizer = optax.adam(rate)
    learner = jrnn.online_gradient(step)
    pairs = stream[:-AHEAD], stream[AHEAD:]
    state = learner.init(params, jnp.zeros(HIDDEN), jax.tree.map(lambda s: s[0], pairs))

    def one(carried, pair):
        params, state, moments = carried
        loss, gradient, state = learner(params, state, pair)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, updates), state, moments), loss

    (params, *_), losses = jax.jit(partial(jax.lax.scan, one))(
        (params, state, optimizer.init(params)), pairs
    )
    return params, losses


def windows(losses, count=10):
    """Mean losses of equal parts of the stream."""
    return [float(part.mean()) for part in np.array_split(np.asarray(losses), count)]


def main():
    parser = argparse.ArgumentParser(description="Learns to forecast a stream while it comes.")
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    stream = signal(steps)
    exact, short = (windows(learn(which, stream)[1]) for which in (step, truncated))
    print(
        f"variance of the signal {float(stream.var()):.3f}; mean squared errors of the forecast {AHEAD} steps ahead:"
    )
    for k, (a, b) in enumerate(zip(exact, short)):
        print(
            f"steps {k * steps // 10:>6} to {(k + 1) * steps // 10:>6}: {a:.4f}, with the gradient of one step {b:.4f}"
        )


if __name__ == "__main__":
    main()
