"""The family minimax: lightning attention and softmax attention in turns, each with experts."""

from __future__ import annotations

from dataclasses import dataclass

from jrnn.models.blocks import Attention, Experts, Lightning, Mlp, Router
from jrnn.models.config import DecoderKeys, Rope
from jrnn.models.family import Branch, Decoder, Family


@dataclass(frozen=True)
class MiniMaxConfig(DecoderKeys):
    """The keys of config.json."""

    num_experts_per_tok: int = 2
    num_local_experts: int = 8
    full_attn_alpha_factor: float = 1
    full_attn_beta_factor: float = 1
    linear_attn_alpha_factor: float = 1
    linear_attn_beta_factor: float = 1
    mlp_alpha_factor: float = 1
    mlp_beta_factor: float = 1


def decoder(c: MiniMaxConfig) -> Decoder:
    d, count = c.hidden_size, c.num_hidden_layers
    attention = Attention.of(c, rope=Rope.of(c, c.head, theta=1e6))
    one = Mlp(d, c.intermediate_size, c.hidden_act, ("w1", "w3", "w2"))
    experts = Experts(one, Router(c.num_local_experts, c.num_experts_per_tok, normalize=0.0))
    factors = {"keep": c.mlp_alpha_factor, "scale": c.mlp_beta_factor}
    feed = Branch("block_sparse_moe", experts, "post_attention_layernorm", of_normed=True, **factors)
    kinds = ("full_attention", "linear_attention")
    layers = []
    for k, kind in enumerate(c.kinds(kinds, lambda k: kinds[k % 2])):
        if kind == "full_attention":
            mixer, keep, scale = attention, c.full_attn_alpha_factor, c.full_attn_beta_factor
        else:
            share = 1 - k / (count - 1 + 1e-5) + 1e-5
            mixer = Lightning(d, c.num_attention_heads, c.head, share, c.hidden_act)
            keep, scale = c.linear_attn_alpha_factor, c.linear_attn_beta_factor
        layers.append((Branch("self_attn", mixer, "input_layernorm", keep=keep, scale=scale, of_normed=True), feed))
    return Decoder.of(c, layers)


# transformers saves the powers of the decays, which follow from the config.
DERIVED = tuple(f".self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"))
MINIMAX = Family(
    "minimax",
    MiniMaxConfig,
    decoder,
    aliases={"num_experts": "num_local_experts"},
    unused=DERIVED,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
)
