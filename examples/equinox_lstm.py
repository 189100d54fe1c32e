"""An Equinox LSTM that is trained with jrnn's loops, without a change to the model.

Each sequence is a wave, a sine or a square one, of its own period and with noise; the label says which.
`jrnn.optimize_scans` marks every `jax.lax.scan` that is traced inside of it, those of libraries too.

    pip install equinox
    python examples/equinox_lstm.py --steps 150

Shapes: N batch, T time, H hidden.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jrnn

LENGTH, BATCH = 60, 64


class Classifier(eqx.Module):
    """An LSTM, of whose outputs the mean is read. It knows nothing of jrnn."""

    cell: eqx.nn.LSTMCell
    head: eqx.nn.Linear

    def __init__(self, hidden, key):
        first, second = jax.random.split(key)
        self.cell = eqx.nn.LSTMCell(1, hidden, key=first)
        self.head = eqx.nn.Linear(hidden, 1, key=second)

    def __call__(self, x):
        """One sequence [T, 1] -> its logit, a number."""
        zeros = jnp.zeros(self.cell.hidden_size)

        def step(state, x):
            state = self.cell(x, state)
            return state, state[0]

        _, hs = jax.lax.scan(step, (zeros, zeros), x)
        return self.head(jnp.mean(hs, axis=0))[0]


def batch(key):
    """Waves [N, T, 1] and their labels [N]: 1 is a square wave."""
    keys = jax.random.split(key, 4)
    period = jax.random.uniform(keys[0], (BATCH, 1), minval=8, maxval=24)
    phase = jax.random.uniform(keys[1], (BATCH, 1), maxval=2 * jnp.pi)
    sine = jnp.sin(2 * jnp.pi * jnp.arange(LENGTH)[None] / period + phase)
    labels = jax.random.bernoulli(keys[2], shape=(BATCH,))
    x = jnp.where(labels[:, None], jnp.sign(sine), sine)
    return (x + 0.1 * jax.random.normal(keys[3], x.shape))[..., None], labels.astype(jnp.float32)


def loss_of(model, x, labels):
    return jnp.mean(optax.sigmoid_binary_cross_entropy(jax.vmap(model)(x), labels))


def make_step(optimizer, optimized=True):
    """A compiled training step; `optimized` puts jrnn around it. Both compute the same."""

    def step(model, state, x, labels):
        loss, gradient = eqx.filter_value_and_grad(loss_of)(model, x, labels)
        change, state = optimizer.update(gradient, state)
        return eqx.apply_updates(model, change), state, loss

    return eqx.filter_jit(jrnn.optimize_scans(step) if optimized else step)


def train(steps, hidden=32, optimized=True):
    """Returns the losses, and the share of right answers on new waves."""
    model = Classifier(hidden, jax.random.key(0))
    optimizer = optax.adam(1e-2)
    state, step = optimizer.init(eqx.filter(model, eqx.is_array)), make_step(optimizer, optimized)
    losses = []
    for k in range(steps):
        model, state, loss = step(model, state, *batch(jax.random.key(k)))
        losses.append(float(loss))
    x, labels = batch(jax.random.key(steps))
    return losses, float(jnp.mean((jax.vmap(model)(x) > 0) == (labels > 0)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    losses, right = train(args.steps)
    print(
        f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at the end; {right:.0%} of new waves are right"
    )
