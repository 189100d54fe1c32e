"""The family jamba: Mamba, and attention now and then, each with a feed-forward part or experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jrnn.models.blocks import Attention, Experts, Mamba1, Mlp, Router
from jrnn.models.config import DecoderKeys
from jrnn.models.family import Branch, Decoder, Family, Names


@dataclass(frozen=True)
class JambaConfig(DecoderKeys):
    """The keys of config.json."""

    num_experts_per_tok: int = 2
    num_experts: int = 16
    expert_layer_period: int = 2
    expert_layer_offset: int = 1
    attn_layer_period: int = 8
    attn_layer_offset: int = 4
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: float = 2
    mamba_dt_rank: int | Literal["auto"] = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False


def decoder(c: JambaConfig) -> Decoder:
    d, inner = c.hidden_size, int(c.mamba_expand * c.hidden_size)
    rank = -(-d // 16) if c.mamba_dt_rank == "auto" else c.mamba_dt_rank
    options = (c.mamba_d_conv, c.mamba_proj_bias, c.mamba_conv_bias, c.hidden_act, c.rms_norm_eps)
    mamba = Mamba1(d, inner, c.mamba_d_state, rank, *options, ("dt_layernorm", "b_layernorm", "c_layernorm"))
    mixers = (("mamba", mamba), ("self_attn", Attention.of(c)))
    mlp = Mlp(d, c.intermediate_size, c.hidden_act)
    experts = Experts(mlp, Router(c.num_experts, c.num_experts_per_tok, "router")) if c.num_experts > 1 else mlp
    layers = []
    for k in range(c.num_hidden_layers):
        mixer = mixers[k % c.attn_layer_period == c.attn_layer_offset]
        feed = experts if k % c.expert_layer_period == c.expert_layer_offset else mlp
        layers.append((Branch(*mixer, "input_layernorm"), Branch("feed_forward", feed, "pre_ff_layernorm")))
    return Decoder.of(c, layers, names=Names(norm="model.final_layernorm"))


JAMBA = Family(
    "jamba",
    JambaConfig,
    decoder,
    aliases={"num_local_experts": "num_experts"},
    defaults={"vocab_size": 65536, "num_key_value_heads": 8},
)
