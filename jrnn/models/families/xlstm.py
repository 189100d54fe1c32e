"""The family xlstm (xLSTM-7B): blocks of an mLSTM and a gated feed-forward layer.

Shapes: T time, N batch, D width, K heads, C features of a key in a head, V of a value.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import ConfigError
from jrnn.models.family import Family, Shapes, State, Weights, in_layer, of_layer, zeros
from jrnn.nn.families.xlstm import mlstm
from jrnn.nn.span import Span, along_last, heads, layer_norm, rms_norm


@dataclass(frozen=True)
class XLSTMConfig:
    """The keys of config.json, with the defaults of transformers."""

    vocab_size: int = 50304
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_heads: int = 8
    use_bias: bool = False
    tie_word_embeddings: bool = False
    add_out_norm: bool = True
    norm_eps: float = 1e-6
    qk_dim_factor: float = 0.5
    v_dim_factor: float = 1.0
    eps: float = 1e-6
    ffn_proj_factor: float = 2.667
    ffn_round_up_to_multiple_of: int = 64
    gate_soft_cap: float | None = 15.0
    output_logit_soft_cap: float | None = 30.0
    weight_mode: str = "single"

    @property
    def keys(self) -> int:
        return int(self.hidden_size * self.qk_dim_factor)

    @property
    def values(self) -> int:
        return int(self.hidden_size * self.v_dim_factor)

    @property
    def inner(self) -> int:
        multiple = self.ffn_round_up_to_multiple_of
        return int((self.hidden_size * self.ffn_proj_factor + multiple - 1) // multiple * multiple)


def check(c: XLSTMConfig, where: str) -> None:
    if c.weight_mode not in ("single", "fused"):
        raise ConfigError(f"{where}: weight_mode is {c.weight_mode!r}; it must be 'single' or 'fused'")
    if not c.add_out_norm:
        raise ConfigError(f"{where}: add_out_norm is false, which is not supported")
    for name, size in (("keys", c.keys), ("values", c.values)):
        if size % c.num_heads:
            raise ConfigError(
                f"{where}: num_heads is {c.num_heads}, which does not divide the {size} features of {name}"
            )


def tensors(c: XLSTMConfig) -> Shapes:
    d, q, v, k = c.hidden_size, c.keys, c.values, c.num_heads
    if c.weight_mode == "single":
        matrices = {"q": (q, d), "k": (q, d), "v": (v, d), "ogate_preact": (v, d)}
        gates, up = {"igate_preact": (k, d), "fgate_preact": (k, d)}, ("proj_up_gate", "proj_up")
        ffn = dict.fromkeys(up, (c.inner, d))
    else:
        matrices, gates = {"qkv_opreact": (2 * q + 2 * v, d)}, {"ifgate_preact": (2 * k, d)}
        ffn = {"proj_up_gate_z": (2 * c.inner, d)}
    ffn["proj_down"] = (d, c.inner)
    matrices["out_proj"] = (d, v)
    block: Shapes = {}
    for prefix, found in (("mlstm_layer.", matrices | gates), ("ffn.", ffn)):
        for name, (rows, columns) in found.items():
            block[f"{prefix}{name}.weight"] = (rows, columns)
            if c.use_bias or name in gates:
                block[f"{prefix}{name}.bias"] = (rows,)
    for name, size in (("mlstm_layer.multihead_norm", v), ("norm_mlstm", d), ("norm_ffn", d)):
        block |= {f"{name}.{part}": (size,) for part in (("weight", "bias") if c.use_bias else ("weight",))}
    shapes: Shapes = {"backbone.embeddings.weight": (c.vocab_size, d), "backbone.out_norm.weight": (d,)}
    for layer in range(c.num_hidden_layers):
        shapes |= {f"backbone.blocks.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def fresh(c: XLSTMConfig, batch: int, dtype: Any) -> State:
    k, keys, values = c.num_heads, c.keys // c.num_heads, c.values // c.num_heads
    shapes = {"S": (batch, k, keys, values), "n": (batch, k, keys), "m": (batch, k)}
    return zeros(c.num_hidden_layers, shapes, dtype)


def run(c: XLSTMConfig, w: Weights, x: jax.Array, state: State, span: Span) -> tuple[jax.Array, State]:
    after: State = {}
    for k in range(c.num_hidden_layers):
        block = w.at(f"backbone.blocks.{k}")
        y, own = _mlstm(c, block.at("mlstm_layer"), _norm(c, block.at("norm_mlstm"), x), in_layer(k, state), span)
        after |= of_layer(k, own)
        x = x + y
        ffn, y = block.at("ffn"), _norm(c, block.at("norm_ffn"), x)
        if c.weight_mode == "single":
            gate, up = ffn.linear(span, "proj_up_gate", y), ffn.linear(span, "proj_up", y)
        else:
            gate, up = jnp.split(ffn.linear(span, "proj_up_gate_z", y), 2, axis=-1)
        x = x + ffn.linear(span, "proj_down", jax.nn.silu(gate) * up)
    return rms_norm(x, w["backbone.out_norm.weight"], c.norm_eps), after


def _norm(c: XLSTMConfig, w: Weights, x: jax.Array) -> jax.Array:
    y, bias = rms_norm(x, w["weight"], c.norm_eps), w.get("bias")
    return y if bias is None else y + along_last(bias, y)


def _mlstm(c: XLSTMConfig, w: Weights, x: jax.Array, state: State, span: Span) -> tuple[jax.Array, State]:
    if c.weight_mode == "single":
        q, k, v, o = (w.linear(span, name, x) for name in ("q", "k", "v", "ogate_preact"))
        i, f = (w.linear(span, name, x) for name in ("igate_preact", "fgate_preact"))
    else:
        ends = [c.keys, 2 * c.keys, 2 * c.keys + c.values]
        q, k, v, o = jnp.split(w.linear(span, "qkv_opreact", x), ends, axis=-1)
        i, f = jnp.split(w.linear(span, "ifgate_preact", x), 2, axis=-1)
    q, k, v = (heads(part, c.num_heads) for part in (q, k, v))
    i, f = soft_cap(i, c.gate_soft_cap), soft_cap(f, c.gate_soft_cap)
    step = functools.partial(mlstm, epsilon=c.eps)
    start = (state["S"], state["n"], state["m"])
    (S, n, m), y = span.scan(step, start, (q * q.shape[-1] ** -0.5, k, v, i, jax.nn.log_sigmoid(f)))
    bias = w.get("multihead_norm.bias")
    gain = heads(w["multihead_norm.weight"], c.num_heads)
    y = layer_norm(y, gain, None if bias is None else heads(bias, c.num_heads), c.norm_eps)
    return w.linear(span, "out_proj", jax.nn.sigmoid(o) * y.reshape(o.shape)), {"S": S, "n": n, "m": m}


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap tanh(x / cap), or x without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


XLSTM = Family(
    name="xlstm",
    config=XLSTMConfig,
    ignored=(
        "autocast_kernel_dtype chunk_size chunkwise_kernel embedding_dim inference_state_dtype max_inference_chunksize mode "
        "norm_reduction_force_float32 num_blocks return_last_states sequence_kernel step_kernel"
    ),
    check=check,
    tensors=tensors,
    embedding="backbone.embeddings.weight",
    head="lm_head.weight",
    fresh=fresh,
    run=run,
    logits=lambda c, logits: soft_cap(logits, c.output_logit_soft_cap),
)
