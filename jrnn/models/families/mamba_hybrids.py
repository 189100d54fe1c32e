"""The families bamba, falcon_h1 and granitemoehybrid: Mamba-2 and attention, in turns or side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jrnn.errors import ConfigError
from jrnn.models.blocks import Attention, Both, Experts, Mamba2, Mlp, Router
from jrnn.models.blocks.small import Side
from jrnn.models.config import Limit, Rope, RopeKeys, divides, layer_types
from jrnn.models.family import Branch, Decoder, Family, Names, Norm, Part


@dataclass(frozen=True)
class HybridConfig(RopeKeys):
    """The keys that all three read, with the defaults of transformers for bamba."""

    vocab_size: int = 128000
    tie_word_embeddings: bool = False
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
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
    vocab_size: int = 32000
    intermediate_size: int = 11008
    num_key_value_heads: int | None = None
    rms_norm_eps: float = 1e-6
    layer_types: tuple[str, ...] | None = None
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


def _attention(c: HybridConfig, rope: float | None, **more: Any) -> Attention:
    """`rope`: the share of features that turn, or None."""
    size = divides("num_attention_heads", c.num_attention_heads, "hidden_size", c.hidden_size)
    turned = None if rope is None else Rope.of(c, size, rope)
    key_heads = c.num_key_value_heads or c.num_attention_heads
    bias = c.attention_bias
    return Attention(c.hidden_size, c.num_attention_heads, key_heads, size, bias, bias, rope=turned, **more)


def bamba(c: BambaConfig) -> Decoder:
    mixers: tuple[tuple[str, Part], ...] = (("mamba", _mamba(c)), ("self_attn", _attention(c, 0.5)))
    mlp = Branch(
        "feed_forward", Mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.mlp_bias), "pre_ff_layernorm"
    )
    layers = tuple(
        (Branch(*mixers[k in (c.attn_layer_indices or ())], "input_layernorm"), mlp) for k in range(c.num_hidden_layers)
    )
    norm = Norm(c.hidden_size, c.rms_norm_eps)
    return Decoder(
        c.hidden_size, c.vocab_size, layers, norm, c.tie_word_embeddings, Names(norm="model.final_layernorm")
    )


def falcon_h1(c: FalconH1Config) -> Decoder:
    norm = ("before" if c.mamba_norm_before_gate else "after") if c.mamba_rms_norm else None
    mamba = _mamba(c, norm=norm, out_bias=c.projectors_bias, factors=c.ssm_multipliers, scale=c.ssm_in_multiplier)
    attention = _attention(c, 1.0, key_scale=c.key_multiplier)
    mixer = Both(
        (
            Side("mamba", mamba, out=c.ssm_out_multiplier),
            Side("self_attn", attention, c.attention_in_multiplier, c.attention_out_multiplier),
        )
    )
    gate, down = c.mlp_multipliers
    mlp = Mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.mlp_bias, gate_scale=gate, down_scale=down)
    layer = (Branch("", mixer, "input_layernorm"), Branch("feed_forward", mlp, "pre_ff_layernorm"))
    return Decoder(
        c.hidden_size,
        c.vocab_size,
        (layer,) * c.num_hidden_layers,
        Norm(c.hidden_size, c.rms_norm_eps),
        c.tie_word_embeddings,
        Names(norm="model.final_layernorm"),
        embed=lambda x: x * c.embedding_multiplier,
        logits=lambda y: y * c.lm_head_multiplier,
    )


def granite(c: GraniteConfig) -> Decoder:
    d = c.hidden_size
    if c.position_embedding_type not in (None, "rope", "nope"):
        raise ConfigError(f"position_embedding_type is {c.position_embedding_type!r}; there are 'rope' and 'nope'")
    rope = 1.0 if c.position_embedding_type == "rope" else None
    mixers: dict[str, tuple[str, Part]] = {
        "linear_attention": ("mamba", _mamba(c)),
        "full_attention": ("self_attn", _attention(c, rope, scale=c.attention_multiplier)),
    }
    fused = ("input_linear", "input_linear", "output_linear")
    feed: Part = Mlp(d, c.shared_intermediate_size, c.hidden_act, fused)
    sides = [Side("shared_mlp", feed)]
    if c.num_local_experts:
        router = Router(c.num_local_experts, c.num_experts_per_tok, "router.layer", normalize=0.0)
        one = Mlp(d, c.intermediate_size, c.hidden_act)
        sides.insert(0, Side("block_sparse_moe", Experts(one, router, ("input_linear.weight", "output_linear.weight"))))
    scale = c.residual_multiplier
    kinds = layer_types(c.layer_types, c.num_hidden_layers, tuple(mixers), lambda k: "linear_attention")
    layers = tuple(
        (
            Branch(*mixers[kind], "input_layernorm", scale=scale),
            Branch("", Both(tuple(sides)), "post_attention_layernorm", scale=scale),
        )
        for kind in kinds
    )
    return Decoder(
        d,
        c.vocab_size,
        layers,
        Norm(d, c.rms_norm_eps),
        c.tie_word_embeddings,
        embed=lambda x: x * c.embedding_multiplier,
        logits=lambda y: y / c.logits_scaling,
    )


BAMBA = Family("bamba", BambaConfig, bamba)
FALCON_H1 = Family("falcon_h1", FalconH1Config, falcon_h1)
GRANITE = Family("granitemoehybrid", GraniteConfig, granite, aliases={"layers_block_type": "layer_types"})
