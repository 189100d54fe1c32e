"""The family jamba: Mamba, and attention now and then, each with a feed-forward part or experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jrnn.models.blocks import Attention, Experts, Mamba1, Mlp, Router
from jrnn.models.config import divides
from jrnn.models.family import Branch, Decoder, Family, Names, Norm


@dataclass(frozen=True)
class JambaConfig:
    """The keys of config.json, with the defaults of transformers."""

    vocab_size: int = 65536
    tie_word_embeddings: bool = False
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
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
    size = divides("num_attention_heads", c.num_attention_heads, "hidden_size", d)
    attention = Attention(d, c.num_attention_heads, c.num_key_value_heads or c.num_attention_heads, size)
    mlp = Mlp(d, c.intermediate_size, c.hidden_act)
    experts = Experts(mlp, Router(c.num_experts, c.num_experts_per_tok, "router")) if c.num_experts > 1 else mlp
    layers = []
    for k in range(c.num_hidden_layers):
        attends = k % c.attn_layer_period == c.attn_layer_offset
        has_experts = k % c.expert_layer_period == c.expert_layer_offset
        mixer = (
            Branch("self_attn", attention, "input_layernorm") if attends else Branch("mamba", mamba, "input_layernorm")
        )
        layers.append((mixer, Branch("feed_forward", experts if has_experts else mlp, "pre_ff_layernorm")))
    norm, names = Norm(d, c.rms_norm_eps), Names(norm="model.final_layernorm")
    return Decoder(d, c.vocab_size, tuple(layers), norm, c.tie_word_embeddings, names)


JAMBA = Family("jamba", JambaConfig, decoder, aliases={"num_local_experts": "num_experts"})
