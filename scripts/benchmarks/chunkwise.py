"""Chunkwise forms of two layers as they are written by hand, to compare with what `jrnn.scan` derives from a step.

All chunks are prepared at once, and a loop over chunks carries S. Decays are sums of logarithms: the form of gated linear
attention divides by the decay since the start of the chunk, so it overflows where that is below 1e-38.

Shapes: T time, N heads, C steps of a chunk, D keys, H values; S [N, D, H].
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

C = 32


def gla(S: Any, xs: dict[str, Any]) -> tuple[Any, Any]:
    """Returns what scanning `linear_layers.gla` returns; T is a multiple of C."""
    q, k, v, g = (_chunks(xs[name]) for name in ("q", "k", "v", "gk"))
    g = jnp.cumsum(g, -2)
    last = g[..., -1:, :]
    q, within, to_end = q * jnp.exp(g), k * jnp.exp(-g), k * jnp.exp(last - g)
    scores = jnp.einsum("xncd,xnsd->xncs", q, within)
    inside = jnp.where(np.tril(np.ones((C, C), bool)), scores, 0) @ v

    def chunk(S: Any, x: Any) -> tuple[Any, Any]:
        q, to_end, v, last, inside = x
        return jnp.exp(last).swapaxes(-1, -2) * S + to_end.swapaxes(-1, -2) @ v, q @ S + inside

    S, out = jax.lax.scan(chunk, S, (q, to_end, v, last, inside))
    return S, _steps(out)


def gated_delta_rule(S: Any, xs: dict[str, Any]) -> tuple[Any, Any]:
    """Returns what scanning `linear_layers.gated_delta_rule` returns; T is a multiple of C."""
    q, k, v = (_chunks(xs[name]) for name in ("q", "k", "v"))
    g, b = (_chunks(xs[name][..., None]) for name in ("g", "b"))
    g = jnp.cumsum(g, -2)
    between = jnp.exp(jnp.where(np.tril(np.ones((C, C), bool)), g - g.swapaxes(-1, -2), -jnp.inf))
    kt = k.swapaxes(-1, -2)
    inverse = _inverse(-b * jnp.where(np.tril(np.ones((C, C), bool), -1), k @ kt * between, 0))
    u, w = inverse @ (b * v), inverse @ (b * jnp.exp(g) * k)
    scores, last = q @ kt * between, g[..., -1:, :]
    q, to_end = q * jnp.exp(g), (k * jnp.exp(last - g)).swapaxes(-1, -2)

    def chunk(S: Any, x: Any) -> tuple[Any, Any]:
        q, to_end, u, w, scores, last = x
        written = u - w @ S
        return jnp.exp(last) * S + to_end @ written, q @ S + scores @ written

    S, out = jax.lax.scan(chunk, S, (q, to_end, u, w, scores, last))
    return S, _steps(out)


def _chunks(x: Any) -> Any:
    """[T, N, D] -> [T / C, N, C, D]."""
    return x.reshape(-1, C, *x.shape[1:]).swapaxes(1, 2)


def _steps(x: Any) -> Any:
    """[T / C, N, C, H] -> [T, N, H]."""
    x = x.swapaxes(1, 2)
    return x.reshape(-1, *x.shape[2:])


def _inverse(n: Any) -> Any:
    """Inverts `I - n`, for n below the diagonal: `(I + n)(I + n^2)(I + n^4)...`, as n^C is 0."""
    inverse, power = jnp.broadcast_to(jnp.eye(C, dtype=n.dtype), n.shape) + n, n
    for _ in range(C.bit_length() - 2):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse
