"""Steps of layers with matrix states, for `jrnn scripts/benchmarks linear`, and their inputs.

Each is the recurrence of its paper for one token, `(S, x) -> (S, output)`, with x a dict of this token's vectors.

Shapes: T time, N heads, D keys, H values; S [N, D, H].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.bench.sizes import Size


def outer(k: Any, v: Any) -> Any:
    return k[..., :, None] * v[..., None, :]


def read(S: Any, q: Any) -> Any:
    return jnp.einsum("nd,ndh->nh", q, S)


def linear_attention(S: Any, x: Any) -> Any:
    S = S + outer(x["k"], x["v"])
    return S, read(S, x["q"])


def retention(S: Any, x: Any) -> Any:
    decay = 1 - 2.0 ** (-5 - jnp.arange(S.shape[0], dtype=S.dtype))
    S = decay[:, None, None] * S + outer(x["k"], x["v"])
    return S, read(S, x["q"])


def mamba2(S: Any, x: Any) -> Any:
    dt = jax.nn.softplus(x["i"])
    S = jnp.exp(dt * x["g"])[:, None, None] * S + outer(x["k"] * dt[:, None], x["v"])
    return S, (read(S, x["q"]) + 0.5 * x["v"]) * jax.nn.silu(x["v2"])


def gla(S: Any, x: Any) -> Any:
    S = jnp.exp(x["gk"])[..., None] * S + outer(x["k"], x["v"])
    return S, read(S, x["q"])


def hgrn2(S: Any, x: Any) -> Any:
    f = jax.nn.sigmoid(x["i_k"] + 3)
    S = f[..., None] * S + outer(1 - f, x["v"])
    return S, read(S, x["q"])


def rwkv6(S: Any, x: Any) -> Any:
    kv = outer(x["k"], x["v"])
    return jnp.exp(x["gk"])[..., None] * S + kv, read(S + 0.3 * kv, x["q"])


def delta_rule(S: Any, x: Any) -> Any:
    S = S + outer(x["k"], (x["v"] - read(S, x["k"])) * x["b"][:, None])
    return S, read(S, x["q"])


def gated_delta_rule(S: Any, x: Any) -> Any:
    return delta_rule(jnp.exp(x["g"])[:, None, None] * S, x)


def kda(S: Any, x: Any) -> Any:
    return delta_rule(jnp.exp(x["gk"])[..., None] * S, x)


def gated_delta_product(S: Any, x: Any) -> Any:
    S, _ = gated_delta_rule(S, x)
    return delta_rule(S, {"q": x["q"], "k": x["k2"], "v": x["v2"], "b": x["b2"]})


def dplr(S: Any, x: Any) -> Any:
    along = outer(-x["b"][:, None] * x["a"], read(S, x["a"]))
    S = jnp.exp(x["gk"])[..., None] * S + along + outer(x["k"], x["v"])
    return S, read(S, x["q"])


def rwkv7(S: Any, x: Any) -> Any:  # S[N, H, D]
    w = jnp.exp(-0.606531 * jax.nn.sigmoid(x["i_k"]))
    removed = jnp.einsum("nhd,nd->nh", S, -x["k"])
    S = S * w[:, None, :] + outer(removed, x["k"] * x["b"][:, None]) + outer(x["v"], x["k2"])
    return S, jnp.einsum("nhd,nd->nh", S, x["q"])


def mlstm(carry: Any, x: Any) -> Any:
    S, n, m = carry
    f = jax.nn.log_sigmoid(x["i2"] + 2)
    new = jnp.maximum(f + m, x["i"])
    keep, add = jnp.exp(f + m - new), jnp.exp(x["i"] - new)
    S = keep[:, None, None] * S + add[:, None, None] * outer(x["k"], x["v"])
    n = keep[:, None] * n + add[:, None] * x["k"]
    scale = jnp.maximum(jnp.abs(jnp.sum(n * x["q"], -1)), jnp.exp(-new))
    return (S, n, new), read(S, x["q"]) / scale[:, None]


def titans_momentum(carry: Any, x: Any) -> Any:
    M, P = carry
    P = x["b2"][:, None, None] * P - x["b"][:, None, None] * outer(x["k"], read(M, x["k"]) - x["v"])
    M = jnp.exp(x["g"])[:, None, None] * M + P
    return (M, P), read(M, x["q"])


class LayerStep(NamedTuple):
    """A step, the names of its inputs, and how many matrices and other arrays it carries."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    inputs: str
    kind: str = "S"


LAYERS: Mapping[str, LayerStep] = {
    "linear_attention": LayerStep(linear_attention, "q k v"),
    "retention": LayerStep(retention, "q k v"),
    "mamba2": LayerStep(mamba2, "q k v v2 g i"),
    "gla": LayerStep(gla, "q k v gk"),
    "hgrn2": LayerStep(hgrn2, "q v i_k"),
    "rwkv6": LayerStep(rwkv6, "q k v gk"),
    "delta_rule": LayerStep(delta_rule, "q k v b"),
    "gated_delta_rule": LayerStep(gated_delta_rule, "q k v b g"),
    "kda": LayerStep(kda, "q k v b gk"),
    "mlstm": LayerStep(mlstm, "q k v i i2", "S n m"),
    "rwkv7": LayerStep(rwkv7, "q k k2 v b i_k", "S.T"),
    "gated_delta_product": LayerStep(gated_delta_product, "q k v b k2 v2 b2 g"),
    "dplr": LayerStep(dplr, "q k v a b gk"),
    "titans_momentum": LayerStep(titans_momentum, "q k v b b2 g", "M P"),
}


def problem(name: str, size: Size, dtype: Any = np.float32) -> tuple[Any, dict[str, Any]]:
    """Returns the first carry of a layer, and its inputs [T, N, ...]."""
    T, N, D, H = size.steps, size.batch, size.features, size.hidden
    rng = np.random.RandomState(0)

    def vectors(*shape: int) -> Any:
        return rng.randn(T, N, *shape)

    def unit(x: Any) -> Any:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def softplus(x: Any) -> Any:
        return np.logaddexp(0, x)

    every = {
        "q": vectors(D) * 0.3,
        "k": unit(vectors(D)),
        "k2": unit(vectors(D)),
        "a": unit(vectors(D)),
        "v": vectors(H),
        "v2": vectors(H),
        "g": -softplus(vectors() - 3),
        "gk": -softplus(vectors(D) - 3),
        "b": np.exp(-softplus(-vectors())),
        "b2": np.exp(-softplus(-vectors())),
        "i": vectors(),
        "i2": vectors(),
        "i_k": vectors(D),
    }
    layer, S = LAYERS[name], rng.randn(N, D, H) * 0.1
    carry = {
        "S": S,
        "S.T": S.swapaxes(1, 2),
        "S n m": (S, S[..., 0] + 1, S[:, 0, 0] * 0),
        "M P": (S, S * 0),
    }[layer.kind]
    xs = {key: every[key] for key in layer.inputs.split()}
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), (carry, xs))
