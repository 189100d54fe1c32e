"""A flax.nnx model with `jrnn.nn`: sequences of different lengths, each labeled by whether its numbers sum to more than 0.

    python examples/flax_model.py

Shapes: N batch, T time, D features, H hidden.
"""

import sys

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jrnn import nn

STEPS, LONGEST, BATCH = 200, 24, 64


class Classifier(nnx.Module):
    """A bidirectional GRU, read at the end of each sequence."""

    def __init__(self, hidden, rngs):
        self.rnn = nn.GRU(1, hidden, bidirectional=True, batch_first=True, rngs=rngs)
        self.head = nnx.Linear(2 * hidden, 2, rngs=rngs)

    def __call__(self, x, lengths):
        """x [N, T, 1], lengths [N] -> logits [N, 2]."""
        _, last = self.rnn(x, lengths=lengths)  # [2, N, H]: the last state of each direction
        return self.head(jnp.concatenate([last[0], last[1]], axis=-1))


def batch(rng):
    """Sequences, with NaN as padding: what the padding holds does not matter."""
    lengths = rng.integers(0, LONGEST + 1, BATCH).astype(np.int32)
    x = rng.standard_normal((BATCH, LONGEST, 1)).astype(np.float32)
    valid = np.arange(LONGEST)[None] < lengths[:, None]
    labels = (np.where(valid, x[..., 0], 0).sum(axis=1) > 0).astype(np.int32)
    return np.where(valid[..., None], x, np.nan), lengths, labels


@nnx.jit
def train_step(model, optimizer, x, lengths, labels):
    def loss_of(model):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(x, lengths), labels))

    loss, gradient = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradient)
    return loss


def train(steps=STEPS, hidden=32, report_every=50):
    """Returns the model and the share of right answers on sequences that it has not seen."""
    rng = np.random.default_rng(0)
    model = Classifier(hidden, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for k in range(steps):
        loss = train_step(model, optimizer, *batch(rng))
        if (k + 1) % report_every == 0:
            print(f"step {k + 1}: loss {float(loss):.3f}")
    x, lengths, labels = batch(rng)
    return model, float(
        jnp.mean(nnx.jit(Classifier.__call__)(model, x, lengths).argmax(-1) == labels)
    )


if __name__ == "__main__":
    _, accuracy = train(int(sys.argv[1]) if len(sys.argv) > 1 else STEPS)
    print(f"accuracy on new sequences: {accuracy:.2f}")
