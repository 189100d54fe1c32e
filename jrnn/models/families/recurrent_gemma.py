"""The family recurrent_gemma (Griffin): RG-LRU blocks and blocks of attention in a window.

Shapes: T time, N batch, D width, R width of the RG-LRU, K heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import ConfigError
from jrnn.models.attention import attend, memory, turn
from jrnn.models.config import ACTIVATIONS, rotary
from jrnn.models.family import Family, Shapes, State, Weights, in_layer, of_layer
from jrnn.nn.families.diagonal import rg_lru
from jrnn.nn.span import Span, along_last, heads, rms_norm


@dataclass(frozen=True)
class RecurrentGemmaConfig:
    """The keys of config.json, with the defaults of transformers."""

    num_hidden_layers: int = 26
    vocab_size: int = 256000
    hidden_size: int = 2560
    intermediate_size: int = 7680
    num_attention_heads: int = 10
    num_key_value_heads: int | None = None
    lru_width: int | None = None
    attention_window_size: int = 2048
    conv1d_width: int = 4
    logits_soft_cap: float = 30.0
    rms_norm_eps: float = 1e-6
    hidden_activation: str = "gelu_pytorch_tanh"
    block_types: tuple[str, ...] = ("recurrent", "recurrent", "attention")
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    rope_parameters: tuple[tuple[str, Any], ...] = ()
    rope_theta: float = 10000.0
    partial_rotary_factor: float | None = None

    @property
    def width(self) -> int:
        return self.lru_width or self.hidden_size

    @property
    def key_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def is_recurrent(self, layer: int) -> bool:
        return self.block_types[layer % len(self.block_types)] == "recurrent"


def check(c: RecurrentGemmaConfig, where: str) -> None:
    if not c.block_types:
        raise ConfigError(f"{where}: block_types must name at least one kind of block")
    for kind in c.block_types:
        if kind not in ("recurrent", "attention"):
            raise ConfigError(f"{where}: block_types has {kind!r}; there are 'recurrent' and 'attention'")
    rotary(c, where, 0.5)


def tensors(c: RecurrentGemmaConfig) -> Shapes:
    d, r, heads_, inner = c.hidden_size, c.width, c.num_attention_heads, c.intermediate_size // 2
    shapes: Shapes = {"model.embed_tokens.weight": (c.vocab_size, d)}
    block: Shapes
    for k in range(c.num_hidden_layers):
        if c.is_recurrent(k):
            gate = (heads_, r // heads_, r // heads_)
            block = {
                "linear_y.weight": (r, d),
                "linear_y.bias": (r,),
                "linear_x.weight": (r, d),
                "linear_x.bias": (r,),
                "linear_out.weight": (d, r),
                "linear_out.bias": (d,),
                "conv_1d.weight": (r, 1, c.conv1d_width),
                "conv_1d.bias": (r,),
                "rg_lru.recurrent_param": (r,),
                "rg_lru.input_gate_weight": gate,
                "rg_lru.input_gate_bias": gate[:2],
                "rg_lru.recurrent_gate_weight": gate,
                "rg_lru.recurrent_gate_bias": gate[:2],
            }
        else:
            rows = {
                "q_proj": heads_ * c.head_dim,
                "k_proj": c.key_heads * c.head_dim,
                "v_proj": c.key_heads * c.head_dim,
            }
            block = {f"{name}.weight": (size, d) for name, size in rows.items()}
            block |= {f"{name}.bias": (size,) for name, size in rows.items()} if c.attention_bias else {}
            block |= {"o_proj.weight": (d, heads_ * c.head_dim), "o_proj.bias": (d,)}
        mlp = {"gate_proj": (inner, d), "up_proj": (inner, d), "down_proj": (d, inner)}
        shapes |= {f"model.layers.{k}.temporal_block.{name}": shape for name, shape in block.items()}
        for name, (rows_, columns) in mlp.items():
            shapes[f"model.layers.{k}.mlp_block.{name}.weight"] = (rows_, columns)
            shapes[f"model.layers.{k}.mlp_block.{name}.bias"] = (rows_,)
        shapes |= {f"model.layers.{k}.{name}_pre_norm.weight": (d,) for name in ("temporal", "channel")}
    return shapes | {"model.final_norm.weight": (d,)}


def fresh(c: RecurrentGemmaConfig, batch: int, dtype: Any) -> State:
    state: State = {"position": jnp.zeros(batch, jnp.int32)}
    for k in range(c.num_hidden_layers):
        if c.is_recurrent(k):
            state[f"{k}.conv"] = jnp.zeros((batch, c.conv1d_width - 1, c.width), dtype)
            state[f"{k}.lru"] = jnp.zeros((batch, c.width), dtype)
        else:
            state |= of_layer(k, memory(batch, c.attention_window_size - 1, c.key_heads, c.head_dim, dtype))
    return state


def run(c: RecurrentGemmaConfig, w: Weights, x: jax.Array, state: State, span: Span) -> tuple[jax.Array, State]:
    positions, position = span.positions(state["position"])
    after: State = {"position": position}
    x = x * jnp.asarray(c.hidden_size**0.5, jnp.bfloat16).astype(x.dtype)  # transformers rounds it to bfloat16
    for k in range(c.num_hidden_layers):
        block = w.at(f"model.layers.{k}")
        mix = _recurrent if c.is_recurrent(k) else _attention
        own = in_layer(k, state)
        y = _norm(c, block, "temporal_pre_norm", x)
        y, own = mix(c, block.at("temporal_block"), y, own, span, positions)
        after |= of_layer(k, own)
        x = x + y
        mlp, y = block.at("mlp_block"), _norm(c, block, "channel_pre_norm", x)
        gate = ACTIVATIONS[c.hidden_activation](mlp.linear(span, "gate_proj", y))
        x = x + mlp.linear(span, "down_proj", gate * mlp.linear(span, "up_proj", y))
    return _norm(c, w.at("model"), "final_norm", x), after


def _norm(c: RecurrentGemmaConfig, w: Weights, name: str, x: jax.Array) -> jax.Array:
    return rms_norm(x, 1.0 + w[f"{name}.weight"].astype(x.dtype), c.rms_norm_eps)


def _recurrent(
    c: RecurrentGemmaConfig, w: Weights, x: jax.Array, state: State, span: Span, positions: jax.Array
) -> tuple[jax.Array, State]:
    y = ACTIVATIONS[c.hidden_activation](w.linear(span, "linear_y", x))
    u = w.linear(span, "linear_x", x)
    u, conv = span.convolve(u, state["conv"], w["conv_1d.weight"][:, 0], w["conv_1d.bias"])
    parts = heads(u, c.num_attention_heads)

    def gate(name: str) -> jax.Array:
        weight = w[f"rg_lru.{name}_gate_weight"].astype(u.dtype)
        z = jnp.einsum("tnki,kio->tnko", parts, weight)
        return jax.nn.sigmoid(z + along_last(w[f"rg_lru.{name}_gate_bias"], z)).reshape(u.shape)

    decay = jax.nn.softplus(w["rg_lru.recurrent_param"].astype(u.dtype))
    log_a = -8.0 * gate("recurrent") * along_last(decay, u)
    first = (positions == 0)[..., None]
    scale = jnp.where(first, 1.0, bounded_sqrt(1 - jnp.exp(2 * log_a)))
    a = jnp.where(first, 0.0, jnp.exp(log_a))
    h, z = span.scan(rg_lru, state["lru"], (a, gate("input") * u * scale))
    return w.linear(span, "linear_out", z * y), {"conv": conv, "lru": h}


@jax.custom_jvp
def bounded_sqrt(x: jax.Array) -> jax.Array:
    """sqrt(x), with a derivative of at most 1000."""
    return jnp.sqrt(x)


@bounded_sqrt.defjvp
def _bounded_sqrt_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    return jnp.sqrt(x), dx * jax.lax.rsqrt(jnp.maximum(4.0 * x, 1e-6))


def _attention(
    c: RecurrentGemmaConfig, w: Weights, x: jax.Array, state: State, span: Span, positions: jax.Array
) -> tuple[jax.Array, State]:
    base, size = rotary(c, "config", 0.5)
    q, k, v = (
        heads(w.linear(span, name, x), count)
        for name, count in (("q_proj", c.num_attention_heads), ("k_proj", c.key_heads), ("v_proj", c.key_heads))
    )
    q, k = turn(q, positions, base, size), turn(k, positions, base, size)
    y, after = attend(q, k, v, state, span, positions, c.attention_window_size)
    return w.linear(span, "o_proj", y.reshape(*y.shape[:2], -1)), after


RECURRENT_GEMMA = Family(
    name="recurrent_gemma",
    config=RecurrentGemmaConfig,
    ignored="attention_dropout final_w_init_variance_scale head_dim w_init_variance_scale layer_types layers_block_type",
    check=check,
    tensors=tensors,
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
    fresh=fresh,
    run=run,
    logits=lambda c, logits: c.logits_soft_cap * jnp.tanh(logits / c.logits_soft_cap),
)
