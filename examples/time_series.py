"""A forecast of time series that have different lengths.

Each series is a sine of its own period with noise. They are padded to one length, and `lengths` tells the GRU where
each of them ends: the last state is the one of the last true step, and the loss counts true steps only.

    python examples/time_series.py --steps 200
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jrnn import nn

LONGEST, SERIES, AHEAD = 60, 64, 5


class Forecaster(nnx.Module):
    """At each step predicts the next AHEAD values."""

    def __init__(self, hidden, rngs):
        self.rnn = nn.GRU(1, hidden, rngs=rngs)
        self.head = nnx.Linear(hidden, AHEAD, rngs=rngs)

    def __call__(self, x, lengths):
        """x [T, N, 1], lengths [N] -> forecasts of every step [T, N, AHEAD], and of the last true one [N, AHEAD]."""
        hidden, last = self.rnn(x, lengths=lengths)
        return self.head(hidden), self.head(last[0])


def data(key):
    """Series with their next values [LONGEST + AHEAD, N], and the number of steps that are given of each [N]."""
    keys = jax.random.split(key, 4)
    period = jax.random.uniform(keys[0], (1, SERIES), minval=8, maxval=16)
    phase = jax.random.uniform(keys[1], (1, SERIES), maxval=2 * jnp.pi)
    steps = jnp.arange(LONGEST + AHEAD, dtype=jnp.float32)[:, None]
    noise = 0.05 * jax.random.normal(keys[2], (LONGEST + AHEAD, SERIES))
    return jnp.sin(2 * jnp.pi * steps / period + phase) + noise, jax.random.randint(
        keys[3], (SERIES,), 20, LONGEST + 1
    )


def prepared(values, lengths):
    """Padded inputs [T, N, 1], targets [T, N, AHEAD], and which steps are true, [T, N]."""
    true = jnp.arange(LONGEST)[:, None] < lengths[None]
    targets = jnp.stack([values[k : k + LONGEST] for k in range(1, AHEAD + 1)], axis=-1)
    return jnp.where(true, values[:LONGEST], 0.0)[..., None], targets, true


def train(steps, hidden=32, seed=0):
    """Returns the model, the losses, and the mean error of forecasts from the last true step of new series."""
    data_key, new_key = jax.random.split(jax.random.key(seed))
    graph, params = nnx.split(Forecaster(hidden, nnx.Rngs(seed)))
    values, lengths = data(data_key)
    x, targets, true = prepared(values, lengths)
    optimizer = optax.adam(1e-2)

    def loss(params):
        forecast, _ = nnx.merge(graph, params)(x, lengths)
        return jnp.sum(jnp.abs(forecast - targets) * true[..., None]) / (AHEAD * jnp.sum(true))

    @jax.jit
    def update(params, opt_state):
        value, gradient = jax.value_and_grad(loss)(params)
        change, opt_state = optimizer.update(gradient, opt_state)
        return optax.apply_updates(params, change), opt_state, value

    opt_state, losses = optimizer.init(params), []
    for _ in range(steps):
        params, opt_state, value = update(params, opt_state)
        losses.append(float(value))
    values, lengths = data(new_key)
    model = nnx.merge(graph, params)
    _, forecast = model(prepared(values, lengths)[0], lengths)
    wanted = jnp.take_along_axis(values.T, lengths[:, None] + jnp.arange(AHEAD)[None], axis=1)
    return model, losses, float(jnp.abs(forecast - wanted).mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    _, losses, error = train(args.steps)
    print(
        f"mean error {losses[0]:.3f} at first, {losses[-1]:.3f} at the end; of new series {error:.3f}"
    )
