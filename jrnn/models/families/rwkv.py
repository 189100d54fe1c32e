"""The family rwkv (version 4): blocks of time mixing, a weighted mean over the past, and channel mixing.

Shapes: T time, N batch, D width, A width of the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from jrnn.files import AtLeast
from jrnn.models.family import Family, Shapes, State, Weights, in_layer, of_layer
from jrnn.nn.span import Span, layer_norm

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
    rescale_every: Annotated[int, AtLeast(-1)] = 6
    tie_word_embeddings: bool = False

    @property
    def width(self) -> int:
        return self.attention_hidden_size or self.hidden_size

    @property
    def inner(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size

    def halvings(self, block: int) -> int:
        """How often transformers has halved the values before a block when it does not train."""
        return block // self.rescale_every if self.rescale_every > 0 else 0


def tensors(c: RwkvConfig) -> Shapes:
    d, a = c.hidden_size, c.width
    shapes: Shapes = {"rwkv.embeddings.weight": (c.vocab_size, d)}
    for k in range(c.num_hidden_layers):
        block = {f"attention.{name}.weight": (a, d) for name in ("key", "value", "receptance")}
        block |= {"attention.output.weight": (d, a), "attention.time_decay": (a,), "attention.time_first": (a,)}
        block |= {f"attention.time_mix_{name}": (1, 1, d) for name in ("key", "value", "receptance")}
        block |= {f"feed_forward.time_mix_{name}": (1, 1, d) for name in ("key", "receptance")}
        block |= {"feed_forward.key.weight": (c.inner, d), "feed_forward.value.weight": (d, c.inner)}
        block["feed_forward.receptance.weight"] = (d, d)
        for norm in ("pre_ln", "ln1", "ln2")[0 if k == 0 else 1 :]:
            block |= {f"{norm}.weight": (d,), f"{norm}.bias": (d,)}
        shapes |= {f"rwkv.blocks.{k}.{name}": shape for name, shape in block.items()}
    return shapes | {"rwkv.ln_out.weight": (d,), "rwkv.ln_out.bias": (d,)}


def fresh(c: RwkvConfig, batch: int, dtype: Any) -> State:
    state: State = {}
    for k in range(c.num_hidden_layers):
        state |= {f"{k}.{name}": jnp.zeros((batch, 1, c.hidden_size), dtype) for name in ("time", "channel")}
        state |= {f"{k}.{name}": jnp.zeros((batch, c.width), dtype) for name in ("sum", "weight")}
        state[f"{k}.top"] = jnp.full((batch, c.width), NOTHING, dtype)
    return state


def run(c: RwkvConfig, w: Weights, x: jax.Array, state: State, span: Span) -> tuple[jax.Array, State]:
    after: State = {}
    for k in range(c.num_hidden_layers):
        block = w.at(f"rwkv.blocks.{k}")
        # Values that are halved h times, as transformers does for float16, change a layer norm by its epsilon only.
        epsilon = c.layer_norm_epsilon * 4.0 ** c.halvings(k)
        if k == 0:
            x = _norm(block.at("pre_ln"), x, c.layer_norm_epsilon)
        y, own = _time_mixing(block.at("attention"), _norm(block.at("ln1"), x, epsilon), in_layer(k, state), span)
        x = x + y
        y, own = _channel_mixing(block.at("feed_forward"), _norm(block.at("ln2"), x, epsilon), own, span)
        x = x + y
        after |= of_layer(k, own)
    return _norm(w.at("rwkv.ln_out"), x, 1e-5 * 4.0 ** c.halvings(c.num_hidden_layers)), after


def _norm(w: Weights, x: jax.Array, epsilon: float) -> jax.Array:
    return layer_norm(x, w["weight"], w["bias"], epsilon)


def _mixed(w: Weights, name: str, now: jax.Array, earlier: jax.Array) -> jax.Array:
    share = w[f"time_mix_{name}"]
    return now * share + earlier * (1 - share)


def _time_mixing(w: Weights, x: jax.Array, state: State, span: Span) -> tuple[jax.Array, State]:
    (earlier, now), window = span.taps(x, state["time"])
    key, value, r = (
        span.linear(_mixed(w, name, now, earlier), w[f"{name}.weight"]) for name in ("key", "value", "receptance")
    )
    step = wkv(-jnp.exp(w["time_decay"].astype(x.dtype)), w["time_first"].astype(x.dtype))
    start = (state["sum"], state["weight"], state["top"])
    nothing = (jnp.zeros_like(start[0]), jnp.zeros_like(start[1]), jnp.full_like(start[2], NOTHING))
    (total, weight, top), y = span.scan(step, start, (key, value), nothing)
    y = span.linear(jax.nn.sigmoid(r) * y, w["output.weight"])
    return y, {"time": window, "channel": state["channel"], "sum": total, "weight": weight, "top": top}


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


def _channel_mixing(w: Weights, x: jax.Array, state: State, span: Span) -> tuple[jax.Array, State]:
    (earlier, now), window = span.taps(x, state["channel"])
    key, r = (span.linear(_mixed(w, name, now, earlier), w[f"{name}.weight"]) for name in ("key", "receptance"))
    y = jax.nn.sigmoid(r) * span.linear(jnp.square(jax.nn.relu(key)), w["value.weight"])
    return y, state | {"channel": window}


RWKV = Family(
    name="rwkv",
    config=RwkvConfig,
    ignored="context_length max_position_embeddings",
    tensors=tensors,
    embedding="rwkv.embeddings.weight",
    head="head.weight",
    fresh=fresh,
    run=run,
)
