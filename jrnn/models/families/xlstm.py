"""The family xlstm (xLSTM-7B): blocks of an mLSTM and a gated feed-forward layer.

Shapes: T time, N batch, D width, K heads, C features of a key in a head, V of a value.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from jrnn.models.blocks import Mlp
from jrnn.models.family import (
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
)
from jrnn.models.model_config import DecoderKeys, divides
from jrnn.nn.families.xlstm_layers import mlstm
from jrnn.nn.span import heads, layer_norm


@dataclass(frozen=True)
class XLSTMConfig(DecoderKeys):
    num_heads: int = 8
    use_bias: bool = False
    qk_dim_factor: float = 0.5
    v_dim_factor: float = 1.0
    eps: float = 1e-6
    ffn_proj_factor: float = 2.667
    ffn_round_up_to_multiple_of: int = 64
    gate_soft_cap: float | None = 15.0
    output_logit_soft_cap: float | None = 30.0
    weight_mode: Literal["single", "fused"] = "single"

    @property
    def inner(self) -> int:
        multiple = self.ffn_round_up_to_multiple_of
        return int((self.hidden_size * self.ffn_proj_factor + multiple - 1) // multiple * multiple)


@dataclass(frozen=True)
class Mlstm(Block):
    """The mLSTM, with a norm of each head and a gate of the output; `fused`: fewer, larger products in the files."""

    width: int
    heads: int
    keys: int
    values: int
    bias: bool
    fused: bool
    epsilon: float
    norm_epsilon: float
    cap: float | None

    def __post_init__(self) -> None:
        divides("num_heads", self.heads, "the features of keys", self.keys)
        divides("num_heads", self.heads, "the features of values", self.values)

    def tensors(self) -> Shapes:
        d = self.width
        q = self.keys
        v = self.values
        k = self.heads
        rows = {"q": q, "k": q, "v": v, "ogate_preact": v, "igate_preact": k, "fgate_preact": k}
        if self.fused:
            rows = {"qkv_opreact": 2 * q + 2 * v, "ifgate_preact": 2 * k}
        shapes = linear("multihead_norm", v, bias=self.bias)
        for name, size in rows.items():
            shapes |= linear(
                name, size, d, bias=self.bias or (name.endswith("gate_preact") and name[0] in "if")
            )
        return shapes | linear("out_proj", d, v, bias=self.bias)

    def holds(self, room: int) -> Shapes:
        k = self.heads
        c = self.keys // self.heads
        v = self.values // self.heads
        return {"S": (k, c, v), "n": (k, c), "m": (k,)}

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        if self.fused:
            ends = [self.keys, 2 * self.keys, 2 * self.keys + self.values]
            q, k, v, o = jnp.split(w.linear("qkv_opreact", x), ends, axis=-1)
            i, f = jnp.split(w.linear("ifgate_preact", x), 2, axis=-1)
        else:
            q, k, v, o = (w.linear(name, x) for name in ("q", "k", "v", "ogate_preact"))
            i, f = (w.linear(name, x) for name in ("igate_preact", "fgate_preact"))
        q, k, v = (heads(part, self.heads) for part in (q, k, v))
        i = soft_cap(i, self.cap)
        f = soft_cap(f, self.cap)
        step = functools.partial(mlstm, epsilon=self.epsilon)
        start = (state["S"], state["n"], state["m"])
        nothing = (w.first.get("S", jnp.zeros_like(start[0])), *map(jnp.zeros_like, start[1:]))
        xs = (q * q.shape[-1] ** -0.5, k, v, i, jax.nn.log_sigmoid(f))
        (S, n, m), y = w.span.scan(step, start, xs, nothing)
        bias = w.get("multihead_norm.bias")
        gain = heads(w["multihead_norm.weight"], self.heads)
        y = layer_norm(
            y, gain, None if bias is None else heads(bias, self.heads), self.norm_epsilon
        )
        return w.linear("out_proj", jax.nn.sigmoid(o) * y.reshape(o.shape)), {
            "S": S,
            "n": n,
            "m": m,
        }


def soft_cap(x: Array, cap: float | None) -> Array:
    """cap tanh(x / cap), or x without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def decoder(c: XLSTMConfig) -> Decoder:
    d = c.hidden_size
    fused = c.weight_mode == "fused"
    sizes = (d, c.num_heads, int(d * c.qk_dim_factor), int(d * c.v_dim_factor))
    mixer = Mlstm(*sizes, c.use_bias, fused, c.eps, c.rms_norm_eps, c.gate_soft_cap)
    names = ("proj_up_gate_z", "proj_up_gate_z") if fused else ("proj_up_gate", "proj_up")
    ffn = Mlp(d, c.inner, names=(*names, "proj_down"), bias=c.use_bias)
    norm = Norm(d, c.rms_norm_eps, bias=c.use_bias)
    layer = (
        Branch("mlstm_layer", mixer, "norm_mlstm", norm=norm),
        Branch("ffn", ffn, "norm_ffn", norm=norm),
    )
    named = Names("backbone.embeddings.weight", "backbone.blocks", "backbone.out_norm")
    layers = (layer,) * c.num_hidden_layers
    return Decoder.of(c, layers, names=named, logits=lambda y: soft_cap(y, c.output_logit_soft_cap))


ALIASES = {"norm_eps": "rms_norm_eps"}
XLSTM = Family(
    "xlstm",
    XLSTMConfig,
    decoder,
    ALIASES,
    only={"add_out_norm": (True,)},
    defaults={"vocab_size": 50304},
)
