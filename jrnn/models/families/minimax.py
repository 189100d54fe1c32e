"""The family minimax: lightning attention and softmax attention in turns, each with experts."""

from __future__ import annotations

from dataclasses import dataclass

from jrnn.models.blocks import Attention, Experts, Lightning, Mlp, Router
from jrnn.models.config import Rope, RopeKeys, divides, layer_types
from jrnn.models.family import Branch, Decoder, Family, Norm


@dataclass(frozen=True)
class MiniMaxConfig(RopeKeys):
    """The keys of config.json, with the defaults of transformers."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    num_experts_per_tok: int = 2
    num_local_experts: int = 8
    layer_types: tuple[str, ...] | None = None
    full_attn_alpha_factor: float = 1
    full_attn_beta_factor: float = 1
    linear_attn_alpha_factor: float = 1
    linear_attn_beta_factor: float = 1
    mlp_alpha_factor: float = 1
    mlp_beta_factor: float = 1


def decoder(c: MiniMaxConfig) -> Decoder:
    d, count = c.hidden_size, c.num_hidden_layers
    size = c.head_dim or divides("num_attention_heads", c.num_attention_heads, "hidden_size", d)
    key_heads = c.num_key_value_heads or c.num_attention_heads
    attention = Attention(d, c.num_attention_heads, key_heads, size, rope=Rope.of(c, size, theta=1e6))
    kinds = layer_types(
        c.layer_types,
        count,
        ("linear_attention", "full_attention"),
        lambda k: "linear_attention" if k % 2 else "full_attention",
    )
    one = Mlp(d, c.intermediate_size, c.hidden_act, ("w1", "w3", "w2"))
    experts = Experts(one, Router(c.num_local_experts, c.num_experts_per_tok, normalize=0.0))
    feed = Branch(
        "block_sparse_moe",
        experts,
        "post_attention_layernorm",
        keep=c.mlp_alpha_factor,
        scale=c.mlp_beta_factor,
        of_normed=True,
    )
    layers = []
    for k, kind in enumerate(kinds):
        if kind == "full_attention":
            mixer, keep, scale = attention, c.full_attn_alpha_factor, c.full_attn_beta_factor
        else:
            share = 1 - k / (count - 1 + 1e-5) + 1e-5
            mixer = Lightning(d, c.num_attention_heads, size, share, c.hidden_act)
            keep, scale = c.linear_attn_alpha_factor, c.linear_attn_beta_factor
        layers.append((Branch("self_attn", mixer, "input_layernorm", keep=keep, scale=scale, of_normed=True), feed))
    return Decoder(d, c.vocab_size, tuple(layers), Norm(d, c.rms_norm_eps), c.tie_word_embeddings)


# transformers saves the powers of the decays, which follow from the config.
DERIVED = tuple(f".self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"))
MINIMAX = Family("minimax", MiniMaxConfig, decoder, aliases={"num_experts": "num_local_experts"}, unused=DERIVED)
