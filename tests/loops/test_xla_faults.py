"""Programs that made XLA abort the process: each is compiled, as users compile it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrnn import jaxprs

# The reverse pass of a delta rule with momentum has products with three batch axes, of which two are the caller's.
MOMENTUM = """
import jax, jax.numpy as jnp, jrnn

T, N, H, K, D = 512, 4, 2, 16, 8
keys = jax.random.split(jax.random.key(0), 5)
weights = {n: jax.random.normal(k, (D, H * K)) / 8 for n, k in zip("qkv", keys)}
x, gates = jax.random.normal(keys[3], (T, N, D)), jax.nn.sigmoid(jax.random.normal(keys[4], (T, 3, N, H, 1)))

def loss(scan, weights, x):
    def step(carry, given):
        (S, M), (x, (a, b, m)) = carry, given
        q, k, v = ((x @ weights[n]).reshape(N, H, K) for n in "qkv")
        S = a[..., None] * S
        M = m[..., None] * M + jnp.einsum("nhk,nhv->nhkv", k, b * (v - jnp.einsum("nhkv,nhk->nhv", S, k)))
        return (S + M, M), jnp.einsum("nhkv,nhk->nhv", S + M, q)
    return jnp.mean(scan(step, (jnp.zeros((N, H, K, K)),) * 2, (x, gates))[1] ** 2)

def in_chunks(*args):
    return jrnn.scan(*args, memory=0.1)

ours, theirs = (jax.jit(jax.grad(loss, 1), static_argnums=0)(scan, weights, x) for scan in (in_chunks, jax.lax.scan))
assert all(jnp.allclose(ours[n], theirs[n], rtol=1e-4, atol=1e-7) for n in "qkv")
assert "in chunks of 32" in str(jrnn.explain(lambda w: jax.grad(loss, 1)(in_chunks, w, x), weights))
"""


def test_the_gradient_of_a_delta_rule_with_momentum_compiles():
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", MOMENTUM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "batch", [((0, 1, 2), (2, 0, 1)), ((3, 0), (0, 2)), ((1,), (1,)), ((), ())]
)
def test_products_have_one_batch_axis_at_most(batch):
    sizes, rng = {0: 2, 1: 3, 2: 4}, np.random.default_rng(0)
    shapes = [[5, 6, 7, 8], [7, 6, 5, 9]]
    for i, (a, b) in enumerate(zip(*batch)):
        shapes[0][a] = shapes[1][b] = sizes[i]
    contracted = (
        [d for d in range(4) if d not in batch[0]][:1],
        [d for d in range(4) if d not in batch[1]][-1:],
    )
    shapes[1][contracted[1][0]] = shapes[0][contracted[0][0]]
    a, b = (rng.normal(size=s) for s in shapes)
    given = (contracted, batch), jax.lax.Precision.HIGHEST, jnp.float32
    closed = jax.make_jaxpr(lambda a, b: jaxprs.product(a, b, *given))(a, b)
    (product,) = (e for e in closed.eqns if e.primitive.name == "dot_general")
    assert len(product.params["dimension_numbers"][1][0]) <= 1
    expected = jax.lax.dot_general(a, b, *given)
    np.testing.assert_allclose(jaxprs.product(a, b, *given), expected, rtol=1e-5, atol=1e-5)
