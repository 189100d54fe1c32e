"""The families qwen3_next, qwen3_5_text and qwen3_5_moe_text: the gated delta rule and gated attention, some with experts.

Layers are linear_attention or full_attention; each ends with a feed-forward part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jrnn.models.blocks import Attention, Delta, Experts, Mlp, Router
from jrnn.models.config import DecoderKeys, Rope
from jrnn.models.family import Branch, Decoder, Family, Norm, Part


@dataclass(frozen=True)
class QwenConfig(DecoderKeys):
    """The keys that all three read."""

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    full_attention_interval: int = 4


@dataclass(frozen=True)
class MoeConfig(QwenConfig):
    """With experts."""

    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts_per_tok: int = 8
    num_experts: int = 256


@dataclass(frozen=True)
class NextConfig(MoeConfig):
    """With experts in some layers."""

    decoder_sparse_step: int = 1
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[int, ...] = ()

    def has_experts(self, layer: int) -> bool:
        if layer in self.mlp_only_layers or not self.num_experts:
            return False
        return (layer + 1) % self.decoder_sparse_step == 0


def _mlp(c: QwenConfig) -> Mlp:
    return Mlp(c.hidden_size, c.intermediate_size, c.hidden_act)


def _experts(c: MoeConfig, normalize: bool) -> Experts:
    return Experts(
        Mlp(c.hidden_size, c.moe_intermediate_size, c.hidden_act),
        Router(c.num_experts, c.num_experts_per_tok, normalize=0.0 if normalize else None),
        shared=Mlp(c.hidden_size, c.shared_expert_intermediate_size, c.hidden_act),
        shared_gate="shared_expert_gate",
    )


def _decoder(c: QwenConfig, products: str, feed_forward: Callable[[int], Part]) -> Decoder:
    """`feed_forward` gives the part of each layer."""
    sizes = (c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
    delta = Delta(c.hidden_size, *sizes, c.linear_conv_kernel_dim, c.hidden_act, c.rms_norm_eps, products)
    norm = Norm(c.head, c.rms_norm_eps, offset=True)
    attention = Attention.of(c, rope=Rope.of(c, c.head, 0.25), norm=norm, gated=True)
    mixers: dict[str, tuple[str, Part]] = {
        "linear_attention": ("linear_attn", delta),
        "full_attention": ("self_attn", attention),
    }
    kinds = c.kinds(mixers, lambda k: "linear_attention" if (k + 1) % c.full_attention_interval else "full_attention")
    layers = (
        (Branch(*mixers[kind], "input_layernorm"), Branch("mlp", feed_forward(k), "post_attention_layernorm"))
        for k, kind in enumerate(kinds)
    )
    return Decoder.of(c, layers, Norm(c.hidden_size, c.rms_norm_eps, offset=True))


def qwen3_next(c: NextConfig) -> Decoder:
    experts = _experts(c, c.norm_topk_prob) if c.num_experts else None
    return _decoder(c, "by head", lambda k: experts if experts and c.has_experts(k) else _mlp(c))


def qwen3_5(c: QwenConfig) -> Decoder:
    return _decoder(c, "together", lambda k: _mlp(c))


def qwen3_5_moe(c: MoeConfig) -> Decoder:
    return _decoder(c, "together", lambda k: _experts(c, normalize=True))


UNUSED = ("mtp.",)
DENSE = {"vocab_size": 248320, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4}
DENSE |= {"head_dim": 256}
MOE = DENSE | {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2}
NEXT = MOE | {"vocab_size": 151936, "intermediate_size": 5632, "num_hidden_layers": 48}
NEXT |= {"num_experts_per_tok": 10, "num_experts": 512}
QWEN3_NEXT = Family("qwen3_next", NextConfig, qwen3_next, unused=UNUSED, defaults=NEXT)
QWEN3_5 = Family("qwen3_5_text", QwenConfig, qwen3_5, unused=UNUSED, defaults=DENSE)
QWEN3_5_MOE = Family("qwen3_5_moe_text", MoeConfig, qwen3_5_moe, unused=UNUSED, defaults=MOE)
