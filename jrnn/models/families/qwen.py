"""The families qwen3_next, qwen3_5_text and qwen3_5_moe_text: the gated delta rule and gated attention, some with experts.

Layers are linear_attention or full_attention; each ends with a feed-forward part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jrnn.models.blocks import Attention, Delta, Experts, Mlp, Router
from jrnn.models.config import Rope, RopeKeys, layer_types
from jrnn.models.family import Branch, Decoder, Family, Norm, Part


@dataclass(frozen=True)
class QwenConfig(RopeKeys):
    """The keys that all three read, with the defaults of transformers for qwen3_5_text."""

    vocab_size: int = 248320
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    head_dim: int = 256
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    layer_types: tuple[str, ...] | None = None
    full_attention_interval: int = 4


@dataclass(frozen=True)
class MoeConfig(QwenConfig):
    """With experts; the defaults of qwen3_5_moe_text."""

    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_key_value_heads: int = 2
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts_per_tok: int = 8
    num_experts: int = 256


@dataclass(frozen=True)
class NextConfig(MoeConfig):
    """With experts in some layers; the defaults of qwen3_next."""

    vocab_size: int = 151936
    intermediate_size: int = 5632
    num_hidden_layers: int = 48
    decoder_sparse_step: int = 1
    num_experts_per_tok: int = 10
    num_experts: int = 512
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[int, ...] = ()

    def has_experts(self, layer: int) -> bool:
        if layer in self.mlp_only_layers or not self.num_experts:
            return False
        return (layer + 1) % self.decoder_sparse_step == 0


def _experts(c: MoeConfig, normalize: bool) -> Experts:
    return Experts(
        Mlp(c.hidden_size, c.moe_intermediate_size, c.hidden_act),
        Router(c.num_experts, c.num_experts_per_tok, normalize=0.0 if normalize else None),
        shared=Mlp(c.hidden_size, c.shared_expert_intermediate_size, c.hidden_act),
        shared_gate="shared_expert_gate",
    )


def _decoder(c: QwenConfig, products: str, feed_forward: Any) -> Decoder:
    """`feed_forward` gives the part of each layer."""
    d, norm = c.hidden_size, Norm(c.hidden_size, c.rms_norm_eps, offset=True)
    kinds = layer_types(
        c.layer_types,
        c.num_hidden_layers,
        ("linear_attention", "full_attention"),
        lambda k: "linear_attention" if (k + 1) % c.full_attention_interval else "full_attention",
    )
    sizes = (c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
    delta = Delta(d, *sizes, c.linear_conv_kernel_dim, c.hidden_act, c.rms_norm_eps, products)
    attention = Attention(
        d,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        c.attention_bias,
        c.attention_bias,
        rope=Rope.of(c, c.head_dim, 0.25),
        norm=Norm(c.head_dim, c.rms_norm_eps, offset=True),
        gated=True,
    )
    mixers: dict[str, tuple[str, Part]] = {
        "linear_attention": ("linear_attn", delta),
        "full_attention": ("self_attn", attention),
    }
    layers = tuple(
        (Branch(*mixers[kind], "input_layernorm"), Branch("mlp", feed_forward(k), "post_attention_layernorm"))
        for k, kind in enumerate(kinds)
    )
    return Decoder(d, c.vocab_size, layers, norm, c.tie_word_embeddings)


def qwen3_next(c: NextConfig) -> Decoder:
    experts = _experts(c, c.norm_topk_prob) if c.num_experts else None
    mlp = Mlp(c.hidden_size, c.intermediate_size, c.hidden_act)
    return _decoder(c, "by head", lambda k: experts if c.has_experts(k) else mlp)


def qwen3_5(c: QwenConfig) -> Decoder:
    mlp = Mlp(c.hidden_size, c.intermediate_size, c.hidden_act)
    return _decoder(c, "together", lambda k: mlp)


def qwen3_5_moe(c: MoeConfig) -> Decoder:
    experts = _experts(c, normalize=True)
    return _decoder(c, "together", lambda k: experts)


UNUSED = ("mtp.", "model.visual.", "visual.")
PREFIX = (("model.language_model.", "model."), ("language_model.", "model."))
QWEN3_NEXT = Family("qwen3_next", NextConfig, qwen3_next, unused=UNUSED)
QWEN3_5 = Family("qwen3_5_text", QwenConfig, qwen3_5, unused=UNUSED, renamed=PREFIX)
QWEN3_5_MOE = Family("qwen3_5_moe_text", MoeConfig, qwen3_5_moe, unused=UNUSED, renamed=PREFIX)
