"""The families bamba, falcon_h1 and granitemoehybrid: Mamba-2 and attention, in turns or side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jrnn.errors import ConfigError
from jrnn.models.blocks import Attention, Both, Experts, Mamba2, Mlp, Router
from jrnn.models.blocks.small import Side
from jrnn.models.config import DecoderKeys, Limit, Rope, divides
from jrnn.models.family import Branch, Decoder, Family, Names, Part

NAMES = Names(norm="model.final_layernorm")


@dataclass(frozen=True)
class HybridConfig(DecoderKeys):
    """The keys that all three read."""

    mamba_n_heads: int = 128
    mamba_d_head: int | Literal["auto"] = "auto"
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_expand: float = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: Limit = (0.0, float("inf"))

    @property
    def inner(self) -> int:
        return int(self.mamba_expand * self.hidden_size)


@dataclass(frozen=True)
class BambaConfig(HybridConfig):
    attn_layer_indices: tuple[int, ...] | None = None
    mlp_bias: bool = False


@dataclass(frozen=True)
class FalconH1Config(HybridConfig):
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
        return int(self.mamba_expand * self.hidden_size) if self.mamba_d_ssm is None else self.mamba_d_ssm


@dataclass(frozen=True)
class GraniteConfig(HybridConfig):
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    shared_intermediate_size: int = 1024
    position_embedding_type: str | None = None


def _mamba(c: HybridConfig, **more: Any) -> Mamba2:
    size = divides("mamba_n_heads", c.mamba_n_heads, "the inner size", c.inner)
    if c.mamba_d_head not in ("auto", size):
        raise ConfigError(
            f"mamba_d_head is {c.mamba_d_head!r}; the inner size {c.inner} and mamba_n_heads make it {size}"
        )
    sizes = (c.hidden_size, c.mamba_n_heads, size, c.mamba_d_state, c.mamba_n_groups, c.mamba_d_conv)
    given = {"bias": c.mamba_proj_bias, "conv_bias": c.mamba_conv_bias, "act": c.hidden_act, "limit": c.time_step_limit}
    return Mamba2(*sizes, **given, epsilon=c.rms_norm_eps, **more)


def bamba(c: BambaConfig) -> Decoder:
    mixers: tuple[tuple[str, Part], ...] = (
        ("mamba", _mamba(c)),
        ("self_attn", Attention.of(c, rope=Rope.of(c, c.head, 0.5))),
    )
    mlp = Mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.mlp_bias)
    feed, attends = Branch("feed_forward", mlp, "pre_ff_layernorm"), c.attn_layer_indices or ()
    layers = ((Branch(*mixers[k in attends], "input_layernorm"), feed) for k in range(c.num_hidden_layers))
    return Decoder.of(c, layers, names=NAMES)


def falcon_h1(c: FalconH1Config) -> Decoder:
    norm = ("before" if c.mamba_norm_before_gate else "after") if c.mamba_rms_norm else None
    mamba = _mamba(c, norm=norm, out_bias=c.projectors_bias, factors=c.ssm_multipliers, scale=c.ssm_in_multiplier)
    attention = Attention.of(c, rope=Rope.of(c, c.head), key_scale=c.key_multiplier)
    mixer = Both(
        (
            Side("mamba", mamba, out=c.ssm_out_multiplier),
            Side("self_attn", attention, c.attention_in_multiplier, c.attention_out_multiplier),
        )
    )
    gate, down = c.mlp_multipliers
    mlp = Mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.mlp_bias, gate_scale=gate, down_scale=down)
    layer = (Branch("", mixer, "input_layernorm"), Branch("feed_forward", mlp, "pre_ff_layernorm"))
    return Decoder.of(
        c,
        (layer,) * c.num_hidden_layers,
        names=NAMES,
        embed=lambda x: x * c.embedding_multiplier,
        logits=lambda y: y * c.lm_head_multiplier,
    )


def granite(c: GraniteConfig) -> Decoder:
    d = c.hidden_size
    if c.position_embedding_type not in (None, "rope", "nope"):
        raise ConfigError(f"position_embedding_type is {c.position_embedding_type!r}; there are 'rope' and 'nope'")
    rope = Rope.of(c, c.head) if c.position_embedding_type == "rope" else None
    mixers: dict[str, tuple[str, Part]] = {
        "linear_attention": ("mamba", _mamba(c)),
        "full_attention": ("self_attn", Attention.of(c, rope=rope, scale=c.attention_multiplier)),
    }
    fused = ("input_linear", "input_linear", "output_linear")
    feed: Part = Mlp(d, c.shared_intermediate_size, c.hidden_act, fused)
    sides = [Side("shared_mlp", feed)]
    if c.num_local_experts:
        router = Router(c.num_local_experts, c.num_experts_per_tok, "router.layer", normalize=0.0)
        one = Mlp(d, c.intermediate_size, c.hidden_act)
        sides.insert(0, Side("block_sparse_moe", Experts(one, router, ("input_linear.weight", "output_linear.weight"))))
    scale = c.residual_multiplier
    kinds = c.kinds(mixers, lambda k: "linear_attention")
    feed_forward = Branch("", Both(tuple(sides)), "post_attention_layernorm", scale=scale)
    layers = ((Branch(*mixers[kind], "input_layernorm", scale=scale), feed_forward) for kind in kinds)
    embed, logits = (lambda x: x * c.embedding_multiplier), (lambda y: y / c.logits_scaling)
    return Decoder.of(c, layers, embed=embed, logits=logits)


SIZES = {"vocab_size": 128000, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
BAMBA = Family("bamba", BambaConfig, bamba, defaults=SIZES)
FALCON_H1 = Family("falcon_h1", FalconH1Config, falcon_h1, defaults=SIZES)
ALIASES = {"layers_block_type": "layer_types"}
GRANITE = Family("granitemoehybrid", GraniteConfig, granite, ALIASES, defaults={"intermediate_size": 11008})
