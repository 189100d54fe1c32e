"""The family qwen3_next: blocks of the gated delta rule or of attention, each with experts.

Shapes: T time, N batch, D width, K key heads, H value heads, C and V features of a key and a value in a head, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from jrnn.errors import ConfigError
from jrnn.files import AtLeast
from jrnn.models.attention import attend, memory, turn
from jrnn.models.config import ACTIVATIONS, rotary
from jrnn.models.family import Family, Shapes, State, Weights, in_layer, of_layer
from jrnn.nn.families.linear_attention import gated_delta
from jrnn.nn.span import Span, along_last, heads, rms_norm, unit_length


@dataclass(frozen=True)
class Qwen3NextConfig:
    """The keys of config.json, with the defaults of transformers."""

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 48
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: tuple[tuple[str, Any], ...] = ()
    rope_theta: float = 10000.0
    rope_scaling: Any = None
    partial_rotary_factor: float | None = None
    attention_bias: bool = False
    head_dim: int = 256
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    decoder_sparse_step: int = 1
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts_per_tok: int = 10
    num_experts: Annotated[int, AtLeast(0)] = 512
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[int, ...] = ()
    layer_types: tuple[str, ...] | None = None
    full_attention_interval: int = 4

    def is_recurrent(self, layer: int) -> bool:
        if self.layer_types is None:
            return bool((layer + 1) % self.full_attention_interval)
        return self.layer_types[layer] == "linear_attention"

    def has_experts(self, layer: int) -> bool:
        return (
            layer not in self.mlp_only_layers and self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        )

    @property
    def keys(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def values(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim


def check(c: Qwen3NextConfig, where: str) -> None:
    if c.rope_scaling is not None:
        raise ConfigError(f"{where}: rope_scaling is {c.rope_scaling!r}; only null is supported")
    rotary(c, where, 0.25)
    if c.layer_types is not None:
        if len(c.layer_types) != c.num_hidden_layers:
            raise ConfigError(f"{where}: layer_types has {len(c.layer_types)} entries for {c.num_hidden_layers} layers")
        for kind in c.layer_types:
            if kind not in ("linear_attention", "full_attention"):
                raise ConfigError(f"{where}: layer_types has {kind!r}; there are linear_attention and full_attention")
    if c.linear_num_value_heads % c.linear_num_key_heads:
        raise ConfigError(f"{where}: linear_num_key_heads must divide linear_num_value_heads")


def _mlp_shapes(prefix: str, d: int, inner: int) -> Shapes:
    shapes = {"gate_proj": (inner, d), "up_proj": (inner, d), "down_proj": (d, inner)}
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def tensors(c: Qwen3NextConfig) -> Shapes:
    d = c.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (c.vocab_size, d), "model.norm.weight": (d,)}
    for k in range(c.num_hidden_layers):
        block: Shapes = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
        if c.is_recurrent(k):
            block |= {
                "linear_attn.conv1d.weight": (2 * c.keys + c.values, 1, c.linear_conv_kernel_dim),
                "linear_attn.in_proj_qkvz.weight": (2 * c.keys + 2 * c.values, d),
                "linear_attn.in_proj_ba.weight": (2 * c.linear_num_value_heads, d),
                "linear_attn.dt_bias": (c.linear_num_value_heads,),
                "linear_attn.A_log": (c.linear_num_value_heads,),
                "linear_attn.norm.weight": (c.linear_value_head_dim,),
                "linear_attn.out_proj.weight": (d, c.values),
            }
        else:
            q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
            for name, (rows, columns) in {
                "q_proj": (2 * q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q),
            }.items():  # fmt: skip
                block[f"self_attn.{name}.weight"] = (rows, columns)
                if c.attention_bias:
                    block[f"self_attn.{name}.bias"] = (rows,)
            block |= {f"self_attn.{name}_norm.weight": (c.head_dim,) for name in "qk"}
        if c.has_experts(k):
            block |= {"mlp.gate.weight": (c.num_experts, d), "mlp.shared_expert_gate.weight": (1, d)}
            block |= _mlp_shapes("mlp.shared_expert", d, c.shared_expert_intermediate_size)
            for e in range(c.num_experts):
                block |= _mlp_shapes(f"mlp.experts.{e}", d, c.moe_intermediate_size)
        else:
            block |= _mlp_shapes("mlp", d, c.intermediate_size)
        shapes |= {f"model.layers.{k}.{name}": shape for name, shape in block.items()}
    return shapes


def stacked(c: Qwen3NextConfig) -> dict[str, list[str]]:
    """The experts of a layer as one array [E, ...] for each of their three weights."""
    return {
        f"model.layers.{k}.mlp.experts.{name}": [f"model.layers.{k}.mlp.experts.{e}.{name}.weight" for e in experts]
        for k in range(c.num_hidden_layers)
        if c.has_experts(k)
        for experts in [range(c.num_experts)]
        for name in ("gate_proj", "up_proj", "down_proj")
    }


def fresh(c: Qwen3NextConfig, batch: int, dtype: Any, room: int = 0) -> State:
    """`room` is the number of tokens that attention can remember."""
    state: State = {"position": jnp.zeros(batch, jnp.int32)}
    for k in range(c.num_hidden_layers):
        if c.is_recurrent(k):
            size = (batch, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
            state[f"{k}.conv"] = jnp.zeros((batch, c.linear_conv_kernel_dim - 1, 2 * c.keys + c.values), dtype)
            state[f"{k}.S"] = jnp.zeros(size, dtype)
        else:
            state |= of_layer(k, memory(batch, room, c.num_key_value_heads, c.head_dim, dtype))
    return state


def run(c: Qwen3NextConfig, w: Weights, x: jax.Array, state: State, span: Span) -> tuple[jax.Array, State]:
    positions, position = span.positions(state["position"])
    after: State = {"position": position}
    for k in range(c.num_hidden_layers):
        block = w.at(f"model.layers.{k}")
        own = in_layer(k, state)
        y = _norm(c, block["input_layernorm.weight"], x)
        if c.is_recurrent(k):
            y, own = _delta(c, block.at("linear_attn"), y, own, span)
        else:
            y, own = _attention(c, block.at("self_attn"), y, own, span, positions)
        after |= of_layer(k, own)
        x = x + y
        y = _norm(c, block["post_attention_layernorm.weight"], x)
        x = x + (_experts if c.has_experts(k) else _mlp)(c, block.at("mlp"), y, span)
    return _norm(c, w["model.norm.weight"], x), after


def _norm(c: Qwen3NextConfig, weight: jax.Array, x: jax.Array) -> jax.Array:
    return rms_norm(x, 1.0 + weight.astype(x.dtype), c.rms_norm_eps)


def _delta(c: Qwen3NextConfig, w: Weights, x: jax.Array, state: State, span: Span) -> tuple[jax.Array, State]:
    keys, size, value = c.linear_num_key_heads, c.linear_key_head_dim, c.linear_value_head_dim
    each = c.linear_num_value_heads // keys  # value heads of a key head, which the projections hold together
    parts = heads(span.linear(x, w["in_proj_qkvz.weight"]), keys)
    q, k, v, z = jnp.split(parts, [size, 2 * size, 2 * size + each * value], axis=-1)
    b, a = jnp.split(heads(span.linear(x, w["in_proj_ba.weight"]), keys), 2, axis=-1)
    flat = (*x.shape[:2], -1)
    qkv = jnp.concatenate([part.reshape(flat) for part in (q, k, v)], axis=-1)
    qkv, conv = span.convolve(qkv, state["conv"], w["conv1d.weight"][:, 0])
    q, k, v = jnp.split(ACTIVATIONS[c.hidden_act](qkv), [c.keys, 2 * c.keys], axis=-1)
    q, k = (jnp.repeat(unit_length(heads(part, keys)), each, axis=-2) for part in (q, k))
    v, z = heads(v, c.linear_num_value_heads), z.reshape(*x.shape[:2], c.linear_num_value_heads, value)
    beta, a = jax.nn.sigmoid(b.reshape(flat)), a.reshape(flat)
    rate = along_last(jnp.exp(w["A_log"].astype(a.dtype)), a) * jax.nn.softplus(a + along_last(w["dt_bias"], a))
    S, y = span.scan(gated_delta, state["S"], (q * size**-0.5, k, v, beta, jnp.exp(-rate)))
    y = rms_norm(y, w["norm.weight"], c.rms_norm_eps) * jax.nn.silu(z)
    return w.linear(span, "out_proj", y.reshape(flat)), {"conv": conv, "S": S}


def _attention(
    c: Qwen3NextConfig, w: Weights, x: jax.Array, state: State, span: Span, positions: jax.Array
) -> tuple[jax.Array, State]:
    base, size = rotary(c, "config", 0.25)
    q, gate = jnp.split(heads(w.linear(span, "q_proj", x), c.num_attention_heads), 2, axis=-1)
    k, v = (heads(w.linear(span, name, x), c.num_key_value_heads) for name in ("k_proj", "v_proj"))
    q, k = (_norm(c, w[f"{name}_norm.weight"], part) for name, part in (("q", q), ("k", k)))
    q, k = turn(q, positions, base, size), turn(k, positions, base, size)
    y, after = attend(q, k, v, state, span, positions, None)
    y = (y * jax.nn.sigmoid(gate)).reshape(*x.shape[:2], -1)
    return w.linear(span, "o_proj", y), after


def _mlp(c: Qwen3NextConfig, w: Weights, x: jax.Array, span: Span) -> jax.Array:
    gate = ACTIVATIONS[c.hidden_act](w.linear(span, "gate_proj", x))
    return w.linear(span, "down_proj", gate * w.linear(span, "up_proj", x))


def _experts(c: Qwen3NextConfig, w: Weights, x: jax.Array, span: Span) -> jax.Array:
    """The best experts of each token, weighted by the router, and an expert that all tokens share."""
    tokens = x.reshape(-1, x.shape[-1])
    chances = jax.nn.softmax(span.linear(tokens, w["gate.weight"]), axis=-1)
    weights, chosen = jax.lax.top_k(chances, c.num_experts_per_tok)
    if c.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdims=True)
    order = jnp.argsort(chosen.reshape(-1))  # the choices of all tokens, sorted by expert
    sizes = jnp.bincount(chosen.reshape(-1), length=c.num_experts)
    given = tokens[order // c.num_experts_per_tok]

    def product(x: jax.Array, name: str) -> jax.Array:
        weight = jnp.swapaxes(w[f"experts.{name}"], 1, 2).astype(span.dtype)
        return jax.lax.ragged_dot(x.astype(span.dtype), weight, sizes, preferred_element_type=tokens.dtype)

    y = product(ACTIVATIONS[c.hidden_act](product(given, "gate_proj")) * product(given, "up_proj"), "down_proj")
    y = y * weights.reshape(-1)[order][:, None]
    y = jnp.zeros_like(tokens).at[order // c.num_experts_per_tok].add(y)
    shared = _mlp(c, w.at("shared_expert"), x, span) * jax.nn.sigmoid(w.linear(span, "shared_expert_gate", x))
    return y.reshape(x.shape) + shared


QWEN3_NEXT = Family(
    name="qwen3_next",
    config=Qwen3NextConfig,
    ignored="attention_dropout max_position_embeddings output_router_logits router_aux_loss_coef",
    check=check,
    tensors=tensors,
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
    fresh=fresh,
    run=run,
    stacked=stacked,
    unused=("mtp.",),
    remembers=True,
)
