"""RWKV-7: a delta rule with vectors as decays and as rates of replacement.

Source: Peng et al., RWKV-7 "Goose" with expressive dynamic state evolution, 2025.

Shapes: T time, N batch, D input and output, K heads, C = D / K features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.nn import initializers
from jax.typing import DTypeLike

from jrnn.nn.checks import Shape, check_integer
from jrnn.nn.families.diagonal import check_heads
from jrnn.nn.params import Arrays, Params
from jrnn.nn.recurrent import Outputs, Parameter, RecurrentLayer, constant, uniform
from jrnn.nn.settings import spelled_out
from jrnn.nn.span import Pair, PyTree, Span, along_last, heads, layer_norm, outer, unit_length

MIXED = "rwkvag"  # receptance, decay, key, value, in-context learning rate, gate


class RWKV7(RecurrentLayer):
    """S' = S diag(w) - (S kk) (kk a)^T + v k^T, y = S' r in each head: the time mixing of RWKV-7.

    Each of r, w, k, v, a and g sees a mixture of x and of the x before it, x + (x_before - x) mu. kk has length 1 and the
    direction of k xi. The factors of w, a and g have a low rank.

    Args:
        input_size: features of the input and output, D.
        num_heads: heads, K; it must divide D.
        rank: rank of the weights of w, a and g.
        options: keyword arguments of `RecurrentLayer`.

    >>> layer = RWKV7(8, num_heads=2, rank=4, rngs=nnx.Rngs(0))
    >>> y, (x_before, S) = layer(jnp.ones((5, 2, 8)))
    >>> y.shape, x_before.shape, S.shape
    ((5, 2, 8), (2, 8), (2, 2, 4, 4))
    """

    _leads = 1

    @spelled_out(RecurrentLayer.__init__)
    def __init__(
        self, input_size: int, *, num_heads: int = 1, rank: int = 32, rngs: nnx.Rngs, **options: Any
    ) -> None:
        self.num_heads = check_heads("RWKV7", num_heads, input_size, "input_size")
        self.rank = check_integer("RWKV7: rank", rank, 1)
        super().__init__(input_size, input_size, rngs=rngs, **options)

    def _parameters(self) -> dict[str, Parameter]:
        d = self.input_size
        rank = self.rank

        def decays(key: Array, shape: Shape, dtype: DTypeLike = jnp.float32) -> Array:
            # from slow to fast
            return (-6.0 + 5.0 * jnp.linspace(0.0, 1.0, shape[0]) ** 0.85 + 0.5).astype(dtype)

        mixtures = {f"mu_{name}": constant(0.5, d) for name in MIXED}
        weights = {f"W_{name}": uniform(d, d) for name in "rkvo"}
        low = {f"A_{name}": constant(0.0, rank, d) for name in "wa"} | {"A_g": uniform(rank, d)}
        back = {}
        for name in "wag":
            back[f"B_{name}"] = (initializers.orthogonal(0.1), (d, rank))
        biases = {"lambda_w": (decays, (d,)), "lambda_a": constant(0.0, d), "xi": constant(0.85, d)}
        ends = {
            "alpha": constant(1.0, d),
            "rho": constant(0.0, d),
            "norm": constant(1.0, d),
            "norm_bias": constant(0.0, d),
        }
        return mixtures | weights | low | back | biases | ends

    def _fresh(self, batch: int, dtype: DTypeLike) -> Pair:
        k = self.num_heads
        c = self.input_size // self.num_heads
        return jnp.zeros((batch, self.input_size), dtype), jnp.zeros((batch, k, c, c), dtype)

    def _run(self, p: Params, x: Array, state: PyTree, span: Span) -> Outputs:
        before, S = state
        (earlier, now), window = span.taps(x, before[:, None])
        mixed = {}
        for name in MIXED:
            mixed[name] = now + (earlier - now) * along_last(p[f"mu_{name}"], now)
        y, S = time_mixing(p, mixed, S, span, self.num_heads)
        return span.linear(y, p["W_o"]), (window[:, 0], S)


def time_mixing(
    p: Params,
    mixed: Arrays,
    S: Array,
    span: Span,
    count: int,
    epsilon: float = 64e-5,
    length_epsilon: float = 1e-12,
    values: Callable[[Array], Array] = lambda v: v,
) -> Pair:
    """The gated output [T, N, D] before its last product, and the next state.

    Args:
        p: parameters, with the names in `RWKV7`.
        mixed: what each of r, w, k, v, a and g sees, [T, N, D].
        S: [N, K, C, C].
        count: K.
        epsilon, length_epsilon: of the norm, and of the length of kk.
        values: what the values go through.
    """
    r, k, v = (span.linear(mixed[name], p[f"W_{name}"]) for name in "rkv")

    def low_rank(name: str, between: Callable[[Array], Array] = lambda z: z) -> Array:
        return span.linear(between(span.linear(mixed[name], p[f"A_{name}"])), p[f"B_{name}"])

    w = low_rank("w", jnp.tanh)
    a = low_rank("a")
    w = jnp.exp(-(jnp.e**-0.5) * jax.nn.sigmoid(w + along_last(p["lambda_w"], w)))
    a = jax.nn.sigmoid(a + along_last(p["lambda_a"], a))
    g = low_rank("g", jax.nn.sigmoid)
    kk = unit_length(heads(k * along_last(p["xi"], k), count), length_epsilon)
    k = k * (1 + (a - 1) * along_last(p["alpha"], k))
    r, w, k, v, a = (heads(part, count) for part in (r, w, k, values(v), a))
    S, y = span.scan(generalized_delta, S, (r, w, k, v, kk, kk * a))
    gain, bias, rho = (heads(p[name], count) for name in ("norm", "norm_bias", "rho"))
    y = layer_norm(y, gain, bias, epsilon) + bonus(r, k, v, rho)
    return g * y.reshape(g.shape), S


def bonus(r: Array, k: Array, v: Array, rho: Array) -> Array:
    """What a step's own key and value add to its output, (r . rho k) v: all [T, N, K, C], rho [K, C]."""
    return jnp.sum(r * k * along_last(rho, r), axis=-1, keepdims=True) * v


def decayed(S: Array, at: PyTree) -> Pair:
    """RWKV-6: y = S^T r with the state before the step, S' = diag(w) S + k v^T: r, k and w [N, K, C], v [N, K, V]."""
    r, k, v, w = at
    y = jnp.einsum("nkcv,nkc->nkv", S, r)
    return w[..., None] * S + outer(k, v), y


def generalized_delta(S: Array, at: PyTree) -> Pair:
    """S' = S diag(w) - (S kk) b^T + v k^T, y = S' r: all [N, K, C]; S [N, K, values, keys]."""
    r, w, k, v, kk, b = at
    removed = jnp.einsum("nkvc,nkc->nkv", S, kk)
    S = w[..., None, :] * S - outer(removed, b) + outer(v, k)
    return S, jnp.einsum("nkvc,nkc->nkv", S, r)
