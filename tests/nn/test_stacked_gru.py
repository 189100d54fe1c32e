"""Arraymancer's `nnp_gru` by numpy, with its gradient written by hand: `nn.functional.gru` equals both on converted weights.

r, z = sigmoid(W_{r,z} x + bW + U_{r,z} h + bU)
Uh   = U_n h + bU_n
n    = tanh(W_n x + bW_n + r Uh)
h'   = (1 - z) n + z h
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrnn import interop, nn

T, N, D, H = 4, 3, 2, 5


def normal(seed, *shape):
    return np.random.RandomState(seed).standard_normal(shape)


def make(layers):
    return interop.StackWeights(
        normal(0, 3 * H, D),
        normal(1, layers - 1, 3 * H, H),
        normal(2, layers, 3 * H, H),
        normal(3, layers, 1, 3 * H),
        normal(4, layers, 1, 3 * H),
    )


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def forward(x, W3, U3, bW3, bU3, hidden):
    """x [T, N, D or H] -> the hidden states after each step [T, N, H], and for each step what `backward` reads."""
    outputs, kept = [], []
    for wx in x @ W3.T + bW3:
        wr, wz, wn = np.split(wx, 3, axis=-1)
        ur, uz, Uh = np.split(hidden @ U3.T + bU3, 3, axis=-1)
        r, z = sigmoid(wr + ur), sigmoid(wz + uz)
        n = np.tanh(wn + r * Uh)
        kept.append((hidden, r, z, n, Uh))
        hidden = (1 - z) * n + z * hidden
        outputs.append(hidden)
    return np.stack(outputs), kept


def backward(x, W3, U3, kept, d_output, dh):
    """The gradients of x, of the initial hidden state, and of W3, U3, bW3 and bU3."""
    dwxs, duhs = [], []
    for (h, r, z, n, Uh), dy in zip(kept[::-1], d_output[::-1]):
        dnext = dh + dy
        dn = dnext * (1 - z) * (1 - n * n)
        dz = dnext * (h - n) * z * (1 - z)
        dr = dn * Uh * r * (1 - r)
        dwxs.append(np.concatenate([dr, dz, dn], axis=-1))
        duhs.append(np.concatenate([dr, dz, dn * r], axis=-1))
        dh = dnext * z + duhs[-1] @ U3
    dwx, duh, hiddens = np.stack(dwxs[::-1]), np.stack(duhs[::-1]), np.stack([h for h, *_ in kept])
    dW3, dU3 = np.einsum("tng,tnd->gd", dwx, x), np.einsum("tng,tnh->gh", duh, hiddens)
    return dwx @ W3, dh, dW3, dU3, dwx.sum((0, 1))[None], duh.sum((0, 1))[None]


@pytest.mark.parametrize("layers", [1, 3])
def test_a_gru_equals_it_on_the_same_weights(layers, x64):
    weights, x, hidden = make(layers), normal(5, T, N, D), normal(6, layers, N, H)
    d_output, d_hidden = normal(7, T, N, H), normal(8, layers, N, H)

    @jax.jit
    def by_module(params, x, hidden):
        results, pull = jax.vjp(nn.functional.gru, params, x, hidden)
        return results, pull((d_output, d_hidden))

    (output, last), (d_params, d_x, d_start) = by_module(
        interop.from_arraymancer(weights), jnp.array(x), jnp.array(hidden)
    )

    y, inputs, kept = x, [], []
    for k in range(layers):
        W3 = weights.W3sN[k - 1] if k else weights.W3s0
        inputs.append(y)
        y, of_layer = forward(y, W3, weights.U3s[k], weights.bW3s[k], weights.bU3s[k], hidden[k])
        kept.append(of_layer)
        np.testing.assert_allclose(last[k], y[-1], rtol=0, atol=1e-10)
    np.testing.assert_allclose(output, y, rtol=0, atol=1e-10)

    gradients = interop.to_arraymancer(d_params)
    for k in reversed(range(layers)):
        W3 = weights.W3sN[k - 1] if k else weights.W3s0
        d_output, d_first, *others = backward(inputs[k], W3, weights.U3s[k], kept[k], d_output, d_hidden[k])
        of_module = gradients.W3sN[k - 1] if k else gradients.W3s0, *(g[k] for g in gradients[2:])
        for a, b in zip((d_start[k], *of_module), (d_first, *others), strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)
    np.testing.assert_allclose(d_x, d_output, rtol=0, atol=1e-10)
