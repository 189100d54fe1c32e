"""The family recurrent_gemma (Griffin): RG-LRU blocks and blocks of attention in a window.

Shapes: T time, N batch, D width, R width of the RG-LRU, K heads.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jrnn.models.blocks import Attention, Mlp
from jrnn.models.family import (
    Block,
    Decoder,
    Family,
    Names,
    Norm,
    Outputs,
    Scoped,
    Shapes,
    State,
    convolution,
    linear,
    pairs,
    products,
)  # fmt: skip
from jrnn.models.model_config import ACTIVATIONS, DecoderKeys, Rope, divides
from jrnn.nn.families.diagonal import rg_lru
from jrnn.nn.span import along_last, heads


@dataclass(frozen=True)
class RecurrentGemmaConfig(DecoderKeys):
    lru_width: int | None = None
    attention_window_size: int = 2048
    conv1d_width: int = 4
    logits_soft_cap: float = 30.0
    block_types: tuple[Literal["recurrent", "attention"], ...] = (
        "recurrent",
        "recurrent",
        "attention",
    )


@dataclass(frozen=True)
class Griffin(Block):
    """A gated RG-LRU after a short convolution."""

    width: int
    inner: int
    heads: int
    taps: int
    act: str

    places = True

    def tensors(self) -> Shapes:
        d = self.width
        r = self.inner
        shapes = products({"linear_y": r, "linear_x": r}, d, True) | linear(
            "linear_out", d, r, bias=True
        )
        shapes |= convolution("conv_1d", r, self.taps, True) | {"rg_lru.recurrent_param": (r,)}
        gate = (
            self.heads,
            divides("num_attention_heads", self.heads, "lru_width", r),
            r // self.heads,
        )
        for name in ("input", "recurrent"):
            shapes |= {f"rg_lru.{name}_gate_weight": gate, f"rg_lru.{name}_gate_bias": gate[:2]}
        return shapes

    def holds(self, room: int) -> Shapes:
        return {"conv": (self.taps - 1, self.inner), "lru": (self.inner,)}

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        y = ACTIVATIONS[self.act](w.linear("linear_y", x))
        u, conv = w.convolve("conv_1d", w.linear("linear_x", x), state["conv"])
        parts = heads(u, self.heads)

        def gate(name: str) -> Array:
            z = jnp.einsum("tnki,kio->tnko", parts, w[f"rg_lru.{name}_gate_weight"].astype(u.dtype))
            return jax.nn.sigmoid(z + along_last(w[f"rg_lru.{name}_gate_bias"], z)).reshape(u.shape)

        decay = jax.nn.softplus(w["rg_lru.recurrent_param"].astype(u.dtype))
        log_a = -8.0 * gate("recurrent") * along_last(decay, u)
        # From zeros the first token is taken whole; a first state is not erased by it.
        first = (w.positions == 0)[..., None] & ("lru" not in w.first)
        scale = jnp.where(first, 1.0, bounded_sqrt(1 - jnp.exp(2 * log_a)))
        a = jnp.where(first, 0.0, jnp.exp(log_a))
        h, z = w.scan(rg_lru, state, "lru", (a, gate("input") * u * scale))
        return w.linear("linear_out", z * y), {"conv": conv, "lru": h}


@jax.custom_jvp
def bounded_sqrt(x: Array) -> Array:
    """sqrt(x), with a derivative of at most 1000."""
    return jnp.sqrt(x)


@bounded_sqrt.defjvp
def _bounded_sqrt_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (x,) = primals
    (dx,) = tangents
    return jnp.sqrt(x), dx * jax.lax.rsqrt(jnp.maximum(4.0 * x, 1e-6))


def decoder(c: RecurrentGemmaConfig) -> Decoder:
    d = c.hidden_size
    count = c.num_attention_heads
    size = d // count
    window = c.attention_window_size
    rope = Rope.of(c, size, 0.5)
    attention = Attention(d, count, c.key_heads, size, c.attention_bias, True, rope, window=window)
    griffin = Griffin(d, c.lru_width or d, count, c.conv1d_width, c.hidden_act)
    mixers: dict[str, Block] = {"recurrent": griffin, "attention": attention}
    mlp = Mlp(d, c.intermediate_size // 2, c.hidden_act, bias=True)
    kinds = (c.block_types[k % len(c.block_types)] for k in range(c.num_hidden_layers))
    names = ("temporal_pre_norm", "channel_pre_norm")
    layers = pairs(
        (("temporal_block", mixers[kind]) for kind in kinds),
        "mlp_block",
        itertools.repeat(mlp),
        *names,
    )

    def embed(x: Array) -> Array:
        """Scales the embedding; transformers rounds the factor to bfloat16."""
        return x * jnp.asarray(d**0.5, jnp.bfloat16).astype(x.dtype)

    def cap(logits: Array) -> Array:
        return c.logits_soft_cap * jnp.tanh(logits / c.logits_soft_cap)

    norm = Norm(d, c.rms_norm_eps, offset=True)
    names_of_files = Names(norm="model.final_norm")
    return Decoder.of(c, layers, norm, names=names_of_files, embed=embed, logits=cap)


SIZES = {
    "vocab_size": 256000,
    "hidden_size": 2560,
    "intermediate_size": 7680,
    "num_hidden_layers": 26,
    "num_attention_heads": 10,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
ALIASES = {"hidden_activation": "hidden_act"}
RECURRENT_GEMMA = Family("recurrent_gemma", RecurrentGemmaConfig, decoder, ALIASES, defaults=SIZES)
