"""Two layers with matrix states, written as the step for one token, learn to recall the last value of a key.

    python examples/linear_attention.py

A sequence is pairs of a key and a value, and each key comes several times with different values. Before each pair the
layer must say which value the key had last. Linear attention adds every pair to its state, so old values stay in it. The
delta rule takes out what the state holds for the key, and forgets. Both are recurrences; `jrnn.scan` trains them in
chunks, as products of matrices, and nobody writes a kernel or the parallel form of the layer.

Shapes: T pairs, N sequences, H heads, K entries of a key, V values, S the state [N, H, K, K].
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jrnn

T, N, H, K = 256, 4, 1, 32
KEYS, VALUES = 8, 8  # how many there are


def sequences(rng):
    """Keys and values, int32 [T, N], and the value that each key had last; -1 where it is new."""
    keys, values = rng.integers(0, KEYS, (T, N)), rng.integers(0, VALUES, (T, N))
    last, held = np.full((T, N), -1), np.full((N, KEYS), -1)
    for t in range(T):
        last[t] = held[np.arange(N), keys[t]]
        held[np.arange(N), keys[t]] = values[t]
    return keys, values, last


def linear_attention(S, x):
    """Reads the state with the key, then adds the pair."""
    read = jnp.einsum("nhkv,nhk->nhv", S, x["k"])
    return S + jnp.einsum("nhk,nhv->nhkv", x["k"], x["v"]), read


def delta_rule(S, x):
    """Reads the state with the key, then replaces what it read by the value. `b` says how much of it."""
    read = jnp.einsum("nhkv,nhk->nhv", S, x["k"])
    new = x["b"][..., None] * (x["v"] - read)
    return S + jnp.einsum("nhk,nhv->nhkv", x["k"], new), read


def init(key):
    names = {"keys": (KEYS, H, K), "values": (VALUES, H, K), "out": (H, K, VALUES)}
    params = {
        n: jax.random.normal(jax.random.fold_in(key, k), shape)
        for k, (n, shape) in enumerate(names.items())
    }
    return params | {"b": jnp.zeros(H)}


def scores(step, params, keys, values):
    """The scores of each value before each pair, [T, N, V]."""
    k = params["keys"][keys]
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    b = jnp.broadcast_to(jax.nn.sigmoid(params["b"]), k.shape[:-1])
    S = jnp.zeros((k.shape[1], H, K, K))
    _, read = jrnn.scan(
        step, S, {"k": k, "v": params["values"][values], "b": b}
    )  # read [T, N, H, K]
    return jnp.einsum("tnhk,hkv->tnv", read, params["out"])


def loss(params, step, keys, values, last):
    """The cross-entropy where the key is not new, and how often the best score is right there."""
    logits = scores(step, params, keys, values)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(last, 0))
    right = logits.argmax(-1) == last
    return each.mean(where=last >= 0), right.mean(where=last >= 0)


def train(step, steps=100, seed=0):
    """Returns the parameters, and for each step of Adam the part of right answers."""
    optimizer = optax.adam(3e-2)

    @jax.jit
    def update(params, state, batch):
        (_, right), gradients = jax.value_and_grad(loss, has_aux=True)(params, step, *batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, right

    params = init(jax.random.key(seed))
    rng, state, rights = np.random.default_rng(seed), optimizer.init(params), []
    for _ in range(steps):
        params, state, right = update(params, state, sequences(rng))
        rights.append(float(right))
    return params, rights


def loops(step):
    """What jrnn makes of the loop of the gradient."""
    params, batch = init(jax.random.key(0)), sequences(np.random.default_rng(0))
    return jrnn.explain(jax.grad(lambda params: loss(params, step, *batch)[0]), params)


def main(steps=100):
    by_step = {}
    for step in (linear_attention, delta_rule):
        _, rights = train(step, steps)
        by_step[step.__name__] = rights
        print(f"{step.__name__}: right {rights[0]:.0%} -> {np.mean(rights[-10:]):.0%}")
    print(loops(delta_rule).loops[0])
    return by_step


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
