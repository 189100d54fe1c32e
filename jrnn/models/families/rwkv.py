"""The families rwkv (version 4), rwkv6 and rwkv7: layers of time mixing and channel mixing.

rwkv6 and rwkv7 read the files of flash-linear-attention.

Shapes: T time, N batch, D width, A width of the mean, K heads, C and V features of a key and a value in a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jrnn.errors import ConfigError
from jrnn.models.blocks import ChannelMixing, MatrixMixing
from jrnn.models.family import (
    NOTHING,
    Block,
    Branch,
    Decoder,
    Family,
    Names,
    Norm,
    Outputs,
    Scoped,
    Shapes,
    State,
    linear,
    products,
)
from jrnn.models.model_config import divides
from jrnn.nn.families.rwkv_layers import bonus, decayed, time_mixing
from jrnn.nn.span import along_last, heads, layer_norm


@dataclass(frozen=True)
class RwkvConfig:
    """The keys of version 4, with the defaults of transformers."""

    vocab_size: int = 50277
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    attention_hidden_size: int | None = None
    intermediate_size: int | None = None
    layer_norm_epsilon: float = 1e-5
    rescale_every: int = 6
    tie_word_embeddings: bool = False


@dataclass(frozen=True)
class MatrixConfig:
    """The keys that versions 6 and 7 read."""

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_heads: int | None = None
    hidden_ratio: float | None = None
    intermediate_size: int | None = None
    hidden_act: str = "sqrelu"
    norm_first: bool = True
    norm_bias: bool = True
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False


@dataclass(frozen=True)
class Rwkv6Config(MatrixConfig):
    expand_k: float = 0.5
    expand_v: float = 1.0
    proj_low_rank_dim: int = 32
    gate_low_rank_dim: int = 64


@dataclass(frozen=True)
class Rwkv7Config(MatrixConfig):
    head_dim: int | None = 64
    decay_low_rank_dim: int | None = 64
    a_low_rank_dim: int | None = 64
    v_low_rank_dim: int | None = 16
    gate_low_rank_dim: int | None = 128
    value_dim: int | tuple[int, ...] | None = None
    fuse_norm: bool = True


@dataclass(frozen=True)
class TimeMixing(Block):
    """A weighted mean over the past, gated: version 4."""

    width: int
    inner: int

    def tensors(self) -> Shapes:
        d = self.width
        a = self.inner
        names = ("key", "value", "receptance")
        shapes: Shapes = {"time_decay": (a,), "time_first": (a,)} | {
            f"time_mix_{name}": (1, 1, d) for name in names
        }
        return shapes | products(dict.fromkeys(names, a), d) | linear("output", d, a)

    def holds(self, room: int) -> Shapes:
        return {
            "sum": (self.inner,),
            "weight": (self.inner,),
            "time": (1, self.width),
            "top": (self.inner,),
        }

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        (earlier, now), window = w.span.taps(x, state["time"])
        names = ("key", "value", "receptance")
        key, value, r = (w.linear(n, earlier + (now - earlier) * w[f"time_mix_{n}"]) for n in names)
        step = wkv(-jnp.exp(w["time_decay"].astype(x.dtype)), w["time_first"].astype(x.dtype))
        start = (state["sum"], state["weight"], state["top"])
        nothing = (
            w.first.get("sum", jnp.zeros_like(start[0])),
            jnp.zeros_like(start[1]),
            jnp.full_like(start[2], 0 if "sum" in w.first else NOTHING),
        )
        (total, weight, top), y = w.span.scan(step, start, (key, value), nothing)
        y = w.linear("output", jax.nn.sigmoid(r) * y)
        return y, {"time": window, "sum": total, "weight": weight, "top": top}


def wkv(decay: Array, first: Array) -> Any:
    """The step of a weighted mean of values [N, A], whose weights are exp(key + age decay), and exp(key + first) for now.

    The sum and the total weight are kept divided by exp(top), so that no exponential overflows.
    """

    def step(state: Any, at: Any) -> tuple[Any, Array]:
        total, weight, top = state
        key, value = at
        now = key + first[None]
        most = jnp.maximum(top, now)
        past = jnp.exp(top - most)
        present = jnp.exp(now - most)
        y = (past * total + present * value) / (past * weight + present)
        aged = top + decay[None]
        most = jnp.maximum(aged, key)
        past = jnp.exp(aged - most)
        present = jnp.exp(key - most)
        return (past * total + present * value, past * weight + present, most), y

    return step


@dataclass(frozen=True)
class Time6(MatrixMixing):
    """y = (S + u k v^T)^T r, S' = diag(w) S + k v^T in each head, gated; r, w, k, v and g see mixtures of their own."""

    rank: int
    gate_rank: int

    def __post_init__(self) -> None:
        divides("num_heads", self.heads, "the features of keys", self.key)
        divides("num_heads", self.heads, "the features of values", self.value)

    def tensors(self) -> Shapes:
        d = self.width
        k = self.key
        v = self.value
        shapes: Shapes = {
            "x_bias": (5, d),
            "bonus": (self.heads, k // self.heads),
            "x_proj.0.mu": (d,),
        }
        shapes |= linear("x_proj.0.linear", 5 * self.rank, d) | linear("x_proj.2", d, 5 * self.rank)
        shapes |= products({f"{name}_proj.linear": k if name in "rk" else v for name in "rkvg"}, d)
        shapes |= self.low_rank("w_proj.linear", k, self.gate_rank) | linear("o_proj", d, v)
        return shapes | linear("g_norm", v, bias=True)

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        (earlier, now), window = w.span.taps(x, state["time"])
        delta = earlier - now
        shares = jnp.tanh(
            w.linear("x_proj.0.linear", now + delta * along_last(w["x_proj.0.mu"], now))
        )
        back = w["x_proj.2.weight"].reshape(self.width, 5, self.rank).astype(x.dtype)
        shares = (
            jnp.einsum("tnpr,dpr->ptnd", heads(shares, 5), back)
            + w["x_bias"].astype(x.dtype)[:, None, None]
        )
        mixed = dict(zip("rwkvg", now[None] + delta[None] * shares))
        r, k, v, g = (w.linear(f"{name}_proj.linear", mixed[name]) for name in "rkvg")
        decay = jnp.tanh(w.linear("w_proj.linear.lora.0", mixed["w"]))
        decay = jnp.exp(-jnp.exp(w.linear("w_proj.linear.lora.2", decay)))
        r, k, v, decay = (heads(part, self.heads) for part in (r, k, v, decay))
        S, y = w.scan(decayed, state, "S", (r, k, v, decay))
        gain, bias = (heads(w[f"g_norm.{name}"], self.heads) for name in ("weight", "bias"))
        y = layer_norm(y + bonus(r, k, v, w["bonus"]), gain, bias, self.epsilon)
        return w.linear("o_proj", y.reshape(g.shape) * jax.nn.silu(g)), {
            "time": window,
            "S": S,
        }


@dataclass(frozen=True)
class Time7(MatrixMixing):
    """`jrnn.nn.RWKV7`, whose values are mixed with the first layer's; `ranks`: of w, a, v and g."""

    ranks: tuple[int, int, int, int]
    length_epsilon: float
    first: bool

    def tensors(self) -> Shapes:
        d = self.width
        w, a, v, g = self.ranks
        shapes: Shapes = {f"x_{name}": (1, 1, d) for name in "rwkvag"} | {"k_k": (d,), "k_a": (d,)}
        shapes |= {"r_k": (self.heads, d // self.heads)} | linear("g_norm", d, bias=True)
        shapes |= products({f"{name}_proj": d for name in "rkvo"}, d)
        shapes |= (
            self.low_rank("w_lora", d, w)
            | self.low_rank("a_lora", d, a)
            | self.low_rank("g_lora", d, g, False)
        )
        return shapes if self.first else shapes | self.low_rank("v_lora", d, v)

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        (earlier, now), window = w.span.taps(x, state["time"])
        mixed = {name: now + (earlier - now) * w[f"x_{name}"].astype(x.dtype) for name in "rwkvag"}

        def values(v: Array) -> Array:
            if self.first:
                w.shared["v"] = v
                return v
            share = w.linear("v_lora.lora.2", w.linear("v_lora.lora.0", mixed["v"]))
            return v + (w.shared["v"] - v) * jax.nn.sigmoid(share)

        p = {f"W_{name}": w[f"{name}_proj.weight"] for name in "rkv"} | {
            "rho": w["r_k"].reshape(-1)
        }
        for name in "wag":
            p |= {
                f"A_{name}": w[f"{name}_lora.lora.0.weight"],
                f"B_{name}": w[f"{name}_lora.lora.2.weight"],
            }
        named = {
            "lambda_w": "w_lora.lora.2.bias",
            "lambda_a": "a_lora.lora.2.bias",
            "xi": "k_k",
            "alpha": "k_a",
            "norm": "g_norm.weight",
            "norm_bias": "g_norm.bias",
        }
        p |= {ours: w[theirs] for ours, theirs in named.items()}
        span = replace(w.span, fresh=w.first.get("S"))
        y, S = time_mixing(
            p, mixed, state["S"], span, self.heads, self.epsilon, self.length_epsilon, values
        )
        return w.linear("o_proj", y), {"time": window, "S": S}


def rwkv4(c: RwkvConfig) -> Decoder:
    d = c.hidden_size
    time = TimeMixing(d, c.attention_hidden_size or d)
    names = []
    for name in ("key", "receptance"):
        names.append((name, f"time_mix_{name}"))
    channel = ChannelMixing(d, c.intermediate_size or 4 * d, "sqrelu", *names, (1, 1, d))

    def norm(epsilon: float, block: int) -> Norm:
        # Values that are halved h times, as transformers does for float16, change a layer norm by its epsilon only.
        halvings = block // c.rescale_every if c.rescale_every > 0 else 0
        return Norm(d, epsilon * 4.0**halvings, centered=True, bias=True)

    layers = []
    for k in range(c.num_hidden_layers):
        own = norm(c.layer_norm_epsilon, k)
        layer = (
            Branch("attention", time, "ln1", norm=own),
            Branch("feed_forward", channel, "ln2", norm=own),
        )
        layers.append(
            layer if k else (Branch("pre_ln", norm(c.layer_norm_epsilon, 0), keep=0.0), *layer)
        )
    named = Names("rwkv.embeddings.weight", "rwkv.blocks", "rwkv.ln_out", "head.weight")
    return Decoder(
        d,
        c.vocab_size,
        tuple(layers),
        norm(1e-5, c.num_hidden_layers),
        c.tie_word_embeddings,
        named,
    )


def _decoder(
    c: MatrixConfig, time: Callable[[int], Block], ratio: float, *products: Any
) -> Decoder:
    """`time` gives the time mixing of each layer; `products` are the products of the channel mixing."""
    d = c.hidden_size
    norm = Norm(c.hidden_size, c.norm_eps, centered=True, bias=c.norm_bias)
    inner = c.intermediate_size or -(-int(d * (c.hidden_ratio or ratio)) // 32) * 32
    feed = Branch("ffn", ChannelMixing(d, inner, c.hidden_act, *products, (d,)), "ffn_norm")
    layers: list[tuple[Branch, ...]] = []
    for k in range(c.num_hidden_layers):
        layers.append((Branch("attn", time(k), "attn_norm"), feed))
    if c.norm_first:
        layers[0] = (Branch("pre_norm", norm, keep=0.0), *layers[0])
    return Decoder(
        d,
        c.vocab_size,
        tuple(layers),
        norm,
        c.tie_word_embeddings,
        Names("model.embeddings.weight"),
    )


def rwkv6(c: Rwkv6Config) -> Decoder:
    d = c.hidden_size
    sizes = (int(c.hidden_size * c.expand_k), int(c.hidden_size * c.expand_v))
    part = Time6(d, c.num_heads or 4, *sizes, c.norm_eps, c.proj_low_rank_dim, c.gate_low_rank_dim)
    products = (("key.linear", "key.mu"), ("receptance.linear", "receptance.mu"))
    return _decoder(c, lambda k: part, 3.5, *products)


def rwkv7(c: Rwkv7Config) -> Decoder:
    d = c.hidden_size
    values = (c.value_dim,) if isinstance(c.value_dim, int) else c.value_dim or ()
    if any(value != d for value in values):
        raise ConfigError(f"value_dim is {c.value_dim!r:.80}; only hidden_size, {d}, is supported")
    size = c.head_dim or divides("num_heads", c.num_heads or 0, "hidden_size", d)
    count = divides("head_dim", size, "hidden_size", d)
    share = size / 64
    given = (c.decay_low_rank_dim, c.a_low_rank_dim, c.v_low_rank_dim, c.gate_low_rank_dim)
    factors = (2.5 * share, 2.5 * share, 1.7 * share, 5.0)
    ranks = tuple(rank or max(32, round(f * d**0.5 / 32) * 32) for rank, f in zip(given, factors))
    options = (size * c.norm_eps, ranks, 1e-6 if c.fuse_norm else 1e-24)
    return _decoder(
        c, lambda k: Time7(d, count, d, d, *options, first=k == 0), 4.0, ("key", "x_k"), None
    )


RWKV = Family("rwkv", RwkvConfig, rwkv4)
RWKV6 = Family("rwkv6", Rwkv6Config, rwkv6, only={"attn": (None,)})
RWKV7 = Family("rwkv7", Rwkv7Config, rwkv7, only={"attn": (None,)})
