"""The families lfm2 and lfm2_moe: short convolutions, and attention now and then."""

from __future__ import annotations

from dataclasses import dataclass

from jrnn.models.blocks import Attention, Experts, Mlp, Router, ShortConv
from jrnn.models.config import DecoderKeys, Rope
from jrnn.models.family import Branch, Decoder, Family, Mixers, Names, Norm, Part

NAMES = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Lfm2Config(DecoderKeys):
    conv_bias: bool = False
    conv_L_cache: int = 3
    block_multiple_of: int = 256
    block_ffn_dim_multiplier: float | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: tuple[int, ...] | None = None

    @property
    def inner(self) -> int:
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        inner = int(2 * self.intermediate_size / 3)
        if self.block_ffn_dim_multiplier is None:
            return inner
        multiple = self.block_multiple_of
        return -(-int(self.block_ffn_dim_multiplier * inner) // multiple) * multiple


@dataclass(frozen=True)
class Lfm2MoeConfig(Lfm2Config):
    moe_intermediate_size: int = 1792
    num_dense_layers: int = 2
    num_experts_per_tok: int = 4
    num_experts: int = 32
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True


def decoder(c: Lfm2Config) -> Decoder:
    d = c.hidden_size
    rope = Rope.of(c, c.head, theta=1e6)
    options = {"norm": Norm(c.head, c.rms_norm_eps), "norms": ("q_layernorm", "k_layernorm"), "out": "out_proj"}
    conv, attention = ShortConv(d, c.conv_L_cache, c.conv_bias), Attention.of(c, rope=rope, **options)
    mixers: Mixers = {"conv": ("conv", conv), "full_attention": ("self_attn", attention)}
    attends = range(c.num_hidden_layers) if c.full_attn_idxs is None else c.full_attn_idxs
    kinds = c.kinds(mixers, lambda k: "full_attention" if k in attends else "conv")
    mlp: Part = Mlp(d, c.inner, names=NAMES)
    feeds = [mlp] * len(kinds)
    if isinstance(c, Lfm2MoeConfig):
        bias, normalize = "expert_bias" if c.use_expert_bias else None, 1e-6 if c.norm_topk_prob else None
        given = ("gate", "sigmoid", bias, 1, 1, normalize, c.routed_scaling_factor)
        router = Router(c.num_experts, c.num_experts_per_tok, *given)
        experts = Experts(Mlp(d, c.moe_intermediate_size, names=NAMES), router)
        feeds = [mlp if k < c.num_dense_layers else experts for k in range(len(kinds))]
    layers = (
        (Branch(*mixers[kind], "operator_norm"), Branch("feed_forward", feed, "ffn_norm"))
        for kind, feed in zip(kinds, feeds)
    )
    return Decoder.of(c, layers, names=Names(norm="model.embedding_norm"))


ALIASES = {"tie_embedding": "tie_word_embeddings", "norm_eps": "rms_norm_eps"}
SIZES = {"vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_key_value_heads": 8}
SIZES |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
MOE = {"hidden_size": 2048, "intermediate_size": 7168, "block_auto_adjust_ff_dim": False}
LFM2 = Family("lfm2", Lfm2Config, decoder, ALIASES | {"block_ff_dim": "intermediate_size"}, defaults=SIZES)
LFM2_MOE = Family("lfm2_moe", Lfm2MoeConfig, decoder, ALIASES, defaults=SIZES | MOE)
