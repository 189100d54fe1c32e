"""Attention, in turns or side by side with Mamba or short convolutions.

The families bamba, falcon_h1, granitemoehybrid, jamba, nemotron_h, lfm2 and lfm2_moe.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from jrnn.errors import ConfigError
from jrnn.models.blocks import (
    Attention,
    Both,
    Experts,
    Mamba1,
    Mamba2,
    Mlp,
    Router,
    ShortConv,
    Side,
)
from jrnn.models.family import Block, Branch, Decoder, Family, Mixers, Names, Norm, pairs
from jrnn.models.model_config import (
    DecoderKeys,
    Mamba2Keys,
    MambaKeys,
    Rope,
    ScoreKeys,
    layer_types,
)

NAMES = Names(norm="model.final_layernorm")


@dataclass(frozen=True)
class BambaConfig(Mamba2Keys):
    attn_layer_indices: tuple[int, ...] | None = None
    mlp_bias: bool = False


@dataclass(frozen=True)
class FalconH1Config(Mamba2Keys):
    mamba_d_ssm: int | None = 1024
    mlp_bias: bool = False
    projectors_bias: bool = False
    mamba_norm_before_gate: bool = True
    mamba_rms_norm: bool = False
    lm_head_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)
    key_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    ssm_multipliers: tuple[float, float, float, float, float] = (1.0,) * 5
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0

    @property
    def inner(self) -> int:
        if self.mamba_d_ssm is None:
            return int(self.mamba_expand * self.hidden_size)
        return self.mamba_d_ssm


@dataclass(frozen=True)
class GraniteConfig(Mamba2Keys):
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    shared_intermediate_size: int = 1024
    position_embedding_type: Literal["rope", "nope"] | None = None


def bamba(c: BambaConfig) -> Decoder:
    mixers = (
        ("mamba", Mamba2.of(c)),
        ("self_attn", Attention.of(c, c.attention_bias, rope=Rope.of(c, c.head, 0.5))),
    )
    mlp = Mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.mlp_bias)
    chosen = (mixers[k in (c.attn_layer_indices or ())] for k in range(c.num_hidden_layers))
    layers = pairs(chosen, "feed_forward", itertools.repeat(mlp), between="pre_ff_layernorm")
    return Decoder.of(c, layers, names=NAMES)


def falcon_h1(c: FalconH1Config) -> Decoder:
    norm = None
    if c.mamba_rms_norm:
        norm = "before" if c.mamba_norm_before_gate else "after"
    mamba = Mamba2.of(c, norm=norm, out_bias=c.projectors_bias, factors=c.ssm_multipliers)
    scale = c.key_multiplier * c.head**-0.5
    attention = Attention.of(c, c.attention_bias, rope=Rope.of(c, c.head), scale=scale)
    side = Side("self_attn", attention, c.attention_in_multiplier, c.attention_out_multiplier)
    mixer = Both((Side("mamba", mamba, c.ssm_in_multiplier, c.ssm_out_multiplier), side))
    gate, down = c.mlp_multipliers
    mlp = Mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.mlp_bias, gate_scale=gate)
    layer = (
        Branch("", mixer, "input_layernorm"),
        Branch("feed_forward", mlp, "pre_ff_layernorm", scale=down),
    )

    def embed(x):
        return x * c.embedding_multiplier

    def logits(y):
        return y * c.lm_head_multiplier

    return Decoder.of(c, (layer,) * c.num_hidden_layers, names=NAMES, embed=embed, logits=logits)


def granite(c: GraniteConfig) -> Decoder:
    d = c.hidden_size
    rope = Rope.of(c, c.head) if c.position_embedding_type == "rope" else None
    attention = Attention.of(c, c.attention_bias, rope=rope, scale=c.attention_multiplier)
    mixers: Mixers = {
        "linear_attention": ("mamba", Mamba2.of(c)),
        "full_attention": ("self_attn", attention),
    }
    fused = ("input_linear", "input_linear", "output_linear")
    feed: Block = Mlp(d, c.shared_intermediate_size, c.hidden_act, fused)
    sides = [Side("shared_mlp", feed)]
    if c.num_local_experts:
        router = Router(c.num_local_experts, c.num_experts_per_tok, "router.layer", normalize=0.0)
        one = Mlp(d, c.intermediate_size, c.hidden_act)
        sides.insert(
            0,
            Side(
                "block_sparse_moe",
                Experts(one, router, ("input_linear.weight", "output_linear.weight")),
            ),
        )
    scale = c.residual_multiplier
    kinds = c.kinds(mixers, lambda k: "linear_attention")
    feed_forward = Branch("", Both(tuple(sides)), "post_attention_layernorm", scale=scale)
    layers = (
        (Branch(*mixers[kind], "input_layernorm", scale=scale), feed_forward) for kind in kinds
    )

    def embed(x):
        return x * c.embedding_multiplier

    def logits(y):
        return y / c.logits_scaling

    return Decoder.of(c, layers, embed=embed, logits=logits)


SIZES = {"vocab_size": 128000, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
BAMBA = Family("bamba", BambaConfig, bamba, defaults=SIZES)
FALCON_H1 = Family("falcon_h1", FalconH1Config, falcon_h1, defaults=SIZES)
ALIASES = {"layers_block_type": "layer_types"}
GRANITE = Family(
    "granitemoehybrid", GraniteConfig, granite, ALIASES, defaults={"intermediate_size": 11008}
)


@dataclass(frozen=True)
class JambaConfig(MambaKeys):
    num_experts_per_tok: int = 2
    num_experts: int = 16
    expert_layer_period: int = 2
    expert_layer_offset: int = 1
    attn_layer_period: int = 8
    attn_layer_offset: int = 4
    mamba_dt_rank: int | Literal["auto"] = "auto"


def jamba(c: JambaConfig) -> Decoder:
    d = c.hidden_size
    rank = -(-d // 16) if c.mamba_dt_rank == "auto" else c.mamba_dt_rank
    options = (c.mamba_d_conv, c.mamba_proj_bias, c.mamba_conv_bias, c.hidden_act, c.rms_norm_eps)
    mamba = Mamba1(
        d, c.inner, c.mamba_d_state, rank, *options, ("dt_layernorm", "b_layernorm", "c_layernorm")
    )
    mixers = (("mamba", mamba), ("self_attn", Attention.of(c)))
    mlp = Mlp(d, c.intermediate_size, c.hidden_act)
    if c.num_experts > 1:
        experts = Experts(mlp, Router(c.num_experts, c.num_experts_per_tok, "router"))
    else:
        experts = mlp
    count = range(c.num_hidden_layers)
    chosen = (mixers[k % c.attn_layer_period == c.attn_layer_offset] for k in count)
    feeds = (experts if k % c.expert_layer_period == c.expert_layer_offset else mlp for k in count)
    return Decoder.of(
        c, pairs(chosen, "feed_forward", feeds, between="pre_ff_layernorm"), names=NAMES
    )


SIZES = {"vocab_size": 65536, "num_key_value_heads": 8}
JAMBA = Family("jamba", JambaConfig, jamba, {"num_local_experts": "num_experts"}, defaults=SIZES)


PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


@dataclass(frozen=True)
class NemotronHConfig(ScoreKeys):
    hybrid_override_pattern: str | None = None  # the types of layers, a letter for each
    mlp_bias: bool = False
    ssm_state_size: int = 128
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    mamba_hidden_act: str = "silu"
    n_groups: int = 8
    conv_kernel: int = 4
    time_step_min: float = 0.001
    use_conv_bias: bool = True
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None
    use_bias: bool = False


def nemotron(c: NemotronHConfig) -> Decoder:
    d = c.hidden_size
    given = c.layer_types
    if given is None and c.hybrid_override_pattern is not None:
        if wrong := set(c.hybrid_override_pattern) - set(PATTERN):
            raise ConfigError(
                f"hybrid_override_pattern has {sorted(wrong)[0]!r}; there are {', '.join(PATTERN)}"
            )
        given = tuple(PATTERN[letter] for letter in c.hybrid_override_pattern)
    given = tuple(PATTERN.values()) if given is None else given

    def plain(inner: int) -> Mlp:
        return Mlp(d, inner, c.hidden_act, ("", "up_proj", "down_proj"), c.mlp_bias)

    sizes = (d, c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size, c.n_groups, c.conv_kernel)
    limit = (c.time_step_min, float("inf"))
    mamba = Mamba2(
        *sizes, c.use_bias, None, c.use_conv_bias, c.mamba_hidden_act, limit, c.rms_norm_eps
    )
    experts = Experts(plain(c.moe_intermediate_size), Router.of_scores(c), latent=c.moe_latent_size)
    sides = (
        Side("", experts),
        Side("shared_experts", plain(c.moe_shared_expert_intermediate_size)),
    )
    parts = (mamba, Both(sides), Attention.of(c), plain(c.intermediate_size))
    mixers: dict[str, Block] = dict(zip(PATTERN.values(), parts))
    kinds = layer_types(given, len(given), mixers)
    layers = tuple((Branch("mixer", mixers[kind], "norm"),) for kind in kinds)
    named = Names("backbone.embeddings.weight", "backbone.layers", "backbone.norm_f")
    return Decoder(d, c.vocab_size, layers, Norm(d, c.rms_norm_eps), names=named)


RENAMED = {
    "layers_block_type": "layer_types", "n_routed_experts": "num_local_experts", "layer_norm_epsilon": "rms_norm_eps",
    "mlp_hidden_act": "hidden_act", "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min", "mamba_conv_bias": "use_conv_bias",
}  # fmt: skip
NEMOTRON = {
    "vocab_size": 131072,
    "intermediate_size": 21504,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 7688,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
OLD = (("model.embeddings.", "backbone.embeddings."), ("model.", "backbone."))
OPTIONS = {"aliases": RENAMED, "renamed": OLD, "unused": ("mtp.",), "defaults": NEMOTRON}
NEMOTRON_H = Family("nemotron_h", NemotronHConfig, nemotron, **OPTIONS)


LFM2_NAMES = ("w1", "w3", "w2")


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


def lfm2(c: Lfm2Config) -> Decoder:
    d = c.hidden_size
    rope = Rope.of(c, c.head, theta=1e6)
    options = {
        "norm": Norm(c.head, c.rms_norm_eps),
        "norms": ("q_layernorm", "k_layernorm"),
        "out": "out_proj",
    }
    conv = ShortConv(d, c.conv_L_cache, c.conv_bias)
    attention = Attention.of(c, rope=rope, **options)
    mixers: Mixers = {"conv": ("conv", conv), "full_attention": ("self_attn", attention)}
    attends = range(c.num_hidden_layers) if c.full_attn_idxs is None else c.full_attn_idxs
    kinds = c.kinds(mixers, lambda k: "full_attention" if k in attends else "conv")
    mlp: Block = Mlp(d, c.inner, names=LFM2_NAMES)
    feeds = [mlp] * len(kinds)
    if isinstance(c, Lfm2MoeConfig):
        bias = "expert_bias" if c.use_expert_bias else None
        normalize = 1e-6 if c.norm_topk_prob else None
        given = ("gate", "sigmoid", bias, 1, 1, normalize, c.routed_scaling_factor)
        router = Router(c.num_experts, c.num_experts_per_tok, *given)
        experts = Experts(Mlp(d, c.moe_intermediate_size, names=LFM2_NAMES), router)
        feeds = [mlp if k < c.num_dense_layers else experts for k in range(len(kinds))]
    layers = pairs(
        (mixers[kind] for kind in kinds), "feed_forward", feeds, "operator_norm", "ffn_norm"
    )
    return Decoder.of(c, layers, names=Names(norm="model.embedding_norm"))


ALIASES = {"tie_embedding": "tie_word_embeddings", "norm_eps": "rms_norm_eps"}
SIZES = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
MOE = {"hidden_size": 2048, "intermediate_size": 7168, "block_auto_adjust_ff_dim": False}
LFM2 = Family(
    "lfm2", Lfm2Config, lfm2, ALIASES | {"block_ff_dim": "intermediate_size"}, defaults=SIZES
)
LFM2_MOE = Family("lfm2_moe", Lfm2MoeConfig, lfm2, ALIASES, defaults=SIZES | MOE)
