"""A character model in pure JAX: an LSTM step that `jrnn.scan` runs over time, trained on Python's own documentation.

    python examples/char_model.py

Shapes: T time, N batch, V characters, H hidden.
"""

import sys
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jrnn

HIDDEN, BATCH, CHUNK = 128, 16, 64


def read(limit=200_000):
    """The text as numbers, int32 [C], and its characters."""
    text = "\n".join(topics[name] for name in sorted(topics))[:limit]
    characters = sorted(set(text))
    return np.array([characters.index(c) for c in text], np.int32), characters


def init(key, characters, hidden=HIDDEN):
    keys = jax.random.split(key, 3)
    return {
        "in": jax.random.normal(keys[0], (characters, 4 * hidden))
        / hidden**0.5,  # a row for each character
        "state": jax.random.normal(keys[1], (hidden, 4 * hidden)) / hidden**0.5,
        "bias": jnp.zeros((1, 4 * hidden)),
        "out": jax.random.normal(keys[2], (hidden, characters)) / hidden**0.5,
    }


def step(params, carry, token):
    """`((h, c), token) -> ((h, c), logits)`: [N, H], [N, H], [N] -> [N, V]."""
    h, c = carry
    i, f, g, o = jnp.split(params["in"][token] + h @ params["state"] + params["bias"], 4, axis=-1)
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h @ params["out"]


def zeros(batch, params):
    return (jnp.zeros((batch, params["state"].shape[0])),) * 2


def loss(params, carry, tokens):
    """The mean cross entropy of the next character, in nats, and the carry for the next chunk; tokens [T + 1, N]."""
    carry, logits = jrnn.scan(lambda carry, token: step(params, carry, token), carry, tokens[:-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:])
    return jnp.mean(losses), carry


def train(steps=300, hidden=HIDDEN, report_every=50):
    """Returns the parameters, the characters, and the loss of each step."""
    text, characters = read()
    streams = (
        text[: len(text) // BATCH * BATCH].reshape(BATCH, -1).T
    )  # [C / N, N]: each column is a piece of the text
    params = init(jax.random.key(0), len(characters), hidden)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3))
    state, carry, losses = optimizer.init(params), zeros(BATCH, params), []

    @jax.jit
    def update(params, state, carry, tokens):
        (value, carry), gradient = jax.value_and_grad(loss, has_aux=True)(params, carry, tokens)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, carry, value

    for k in range(steps):
        start = k * CHUNK % (len(streams) - CHUNK - 1)
        params, state, carry, value = update(
            params, state, carry, streams[start : start + CHUNK + 1]
        )
        losses.append(float(value))
        if (k + 1) % report_every == 0:
            print(f"step {k + 1}: {np.mean(losses[-report_every:]):.3f} nats a character")
    return params, characters, losses


def sample(params, characters, prompt="The ", length=200, temperature=0.7, seed=0):
    """Text that the model writes after the prompt."""
    carry, _ = jrnn.scan(
        lambda c, x: step(params, c, x),
        zeros(1, params),
        jnp.array([[characters.index(c)] for c in prompt]),
    )

    def write(carry, key):
        state, token = carry
        state, logits = step(params, state, token)
        token = jax.random.categorical(key, logits / temperature)
        return (state, token), token[0]

    first = jnp.array([characters.index(prompt[-1])])
    _, tokens = jrnn.scan(write, (carry, first), jax.random.split(jax.random.key(seed), length))
    return prompt + "".join(characters[t] for t in np.asarray(tokens))


if __name__ == "__main__":
    jrnn.loops.host.retain_memory()  # the process keeps freed memory: training is faster
    params, characters, _ = train(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
    print(sample(params, characters))
