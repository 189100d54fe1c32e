"""The family rwkv (version 4): blocks of time mixing, a weighted mean over the past, and channel mixing.

Shapes: T time, N batch, D width, A width of the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.models.family import At, Branch, Decoder, Family, Names, Norm, Part, Shapes, State, Weights, linear

NOTHING = -1e30  # the greatest exponent of a mean over nothing


@dataclass(frozen=True)
class RwkvConfig:
    """The keys of config.json, with the defaults of transformers."""

    vocab_size: int = 50277
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    attention_hidden_size: int | None = None
    intermediate_size: int | None = None
    layer_norm_epsilon: float = 1e-5
    rescale_every: int = 6
    tie_word_embeddings: bool = False

    def halvings(self, block: int) -> int:
        """How often transformers has halved the values before a block when it does not train."""
        return block // self.rescale_every if self.rescale_every > 0 else 0


def _mixed(w: Weights, name: str, now: jax.Array, earlier: jax.Array) -> jax.Array:
    share = w[f"time_mix_{name}"]
    return now * share + earlier * (1 - share)


@dataclass(frozen=True)
class TimeMixing(Part):
    """A weighted mean over the past, gated."""

    width: int
    inner: int

    def tensors(self) -> Shapes:
        d, a, names = self.width, self.inner, ("key", "value", "receptance")
        shapes: Shapes = {"time_decay": (a,), "time_first": (a,)} | {f"time_mix_{name}": (1, 1, d) for name in names}
        for name in names:
            shapes |= linear(name, a, d)
        return shapes | linear("output", d, a)

    def fresh(self, batch: int, dtype: Any, room: int) -> State:
        state = {name: jnp.zeros((batch, self.inner), dtype) for name in ("sum", "weight")}
        time = jnp.zeros((batch, 1, self.width), dtype)
        return state | {"time": time, "top": jnp.full((batch, self.inner), NOTHING, dtype)}

    def run(self, w: Weights, x: jax.Array, state: State, at: At) -> tuple[jax.Array, State]:
        span = at.span
        (earlier, now), window = span.taps(x, state["time"])
        key, value, r = (w.linear(span, name, _mixed(w, name, now, earlier)) for name in ("key", "value", "receptance"))
        step = wkv(-jnp.exp(w["time_decay"].astype(x.dtype)), w["time_first"].astype(x.dtype))
        start = (state["sum"], state["weight"], state["top"])
        nothing = (jnp.zeros_like(start[0]), jnp.zeros_like(start[1]), jnp.full_like(start[2], NOTHING))
        (total, weight, top), y = span.scan(step, start, (key, value), nothing)
        y = w.linear(span, "output", jax.nn.sigmoid(r) * y)
        return y, {"time": window, "sum": total, "weight": weight, "top": top}


def wkv(decay: jax.Array, first: jax.Array) -> Any:
    """The step of a weighted mean of values [N, A], whose weights are exp(key + age decay), and exp(key + first) for now.

    The sum and the total weight are kept divided by exp(top), so that no exponential overflows.
    """

    def step(state: Any, at: Any) -> tuple[Any, jax.Array]:
        (total, weight, top), (key, value) = state, at
        now = key + first[None]
        most = jnp.maximum(top, now)
        past, present = jnp.exp(top - most), jnp.exp(now - most)
        y = (past * total + present * value) / (past * weight + present)
        aged = top + decay[None]
        most = jnp.maximum(aged, key)
        past, present = jnp.exp(aged - most), jnp.exp(key - most)
        return (past * total + present * value, past * weight + present, most), y

    return step


@dataclass(frozen=True)
class ChannelMixing(Part):
    """A feed-forward part of the token and the one before it, gated."""

    width: int
    inner: int

    def tensors(self) -> Shapes:
        d = self.width
        shapes: Shapes = {f"time_mix_{name}": (1, 1, d) for name in ("key", "receptance")}
        return shapes | linear("key", self.inner, d) | linear("value", d, self.inner) | linear("receptance", d, d)

    def fresh(self, batch: int, dtype: Any, room: int) -> State:
        return {"channel": jnp.zeros((batch, 1, self.width), dtype)}

    def run(self, w: Weights, x: jax.Array, state: State, at: At) -> tuple[jax.Array, State]:
        span = at.span
        (earlier, now), window = span.taps(x, state["channel"])
        key, r = (w.linear(span, name, _mixed(w, name, now, earlier)) for name in ("key", "receptance"))
        y = jax.nn.sigmoid(r) * w.linear(span, "value", jnp.square(jax.nn.relu(key)))
        return y, {"channel": window}


def decoder(c: RwkvConfig) -> Decoder:
    d = c.hidden_size
    time = TimeMixing(d, c.attention_hidden_size or d)
    channel = ChannelMixing(d, c.intermediate_size or 4 * d)

    def norm(epsilon: float, halvings: int) -> Norm:
        # Values that are halved h times, as transformers does for float16, change a layer norm by its epsilon only.
        return Norm(d, epsilon * 4.0**halvings, centered=True, bias=True)

    layers = []
    for k in range(c.num_hidden_layers):
        own = norm(c.layer_norm_epsilon, c.halvings(k))
        layer = (Branch("attention", time, "ln1", norm=own), Branch("feed_forward", channel, "ln2", norm=own))
        layers.append(layer if k else (Branch("pre_ln", norm(c.layer_norm_epsilon, 0), keep=0.0), *layer))
    names = Names("rwkv.embeddings.weight", "rwkv.blocks", "rwkv.ln_out", "head.weight")
    last = norm(1e-5, c.halvings(c.num_hidden_layers))
    return Decoder(d, c.vocab_size, tuple(layers), last, c.tie_word_embeddings, names)


RWKV = Family("rwkv", RwkvConfig, decoder)
