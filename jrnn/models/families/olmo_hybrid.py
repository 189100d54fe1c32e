"""The family olmo_hybrid: the gated delta rule with norms before it, and attention with norms after it."""

from __future__ import annotations

from dataclasses import dataclass

from jrnn.models.blocks import Attention, Delta, Mlp
from jrnn.models.config import Rope, RopeKeys, divides, layer_types
from jrnn.models.family import Branch, Decoder, Family, Norm


@dataclass(frozen=True)
class OlmoHybridConfig(RopeKeys):
    """The keys of config.json, with the defaults of transformers."""

    vocab_size: int = 100352
    hidden_size: int = 3840
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 30
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    layer_types: tuple[str, ...] | None = None
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int = 4
    linear_allow_neg_eigval: bool = True


def decoder(c: OlmoHybridConfig) -> Decoder:
    d, count = c.hidden_size, c.num_hidden_layers
    otherwise = ["full_attention" if k % 4 == 3 else "linear_attention" for k in range(count)]
    if "full_attention" not in otherwise:
        otherwise[-1] = "full_attention"
    kinds = layer_types(c.layer_types, count, ("linear_attention", "full_attention"), lambda k: otherwise[k])
    key_heads = c.linear_num_key_heads or c.num_attention_heads
    key = c.linear_key_head_dim or int(0.75 * d / key_heads)
    sizes = (key_heads, c.linear_num_value_heads or c.num_attention_heads, key, c.linear_value_head_dim or 2 * key)
    beta = 2.0 if c.linear_allow_neg_eigval else 1.0
    delta = Delta(d, *sizes, c.linear_conv_kernel_dim, c.hidden_act, 1e-5, "each", beta)
    size = divides("num_attention_heads", c.num_attention_heads, "hidden_size", d)
    turns = c.rope_theta is not None or dict(c.rope_parameters or ()).get("rope_theta") is not None
    attention = Attention(
        d,
        c.num_attention_heads,
        c.num_key_value_heads or c.num_attention_heads,
        size,
        c.attention_bias,
        c.attention_bias,
        rope=Rope.of(c, size) if turns else None,
        norm=Norm(d, c.rms_norm_eps),
        norm_whole=True,
    )
    mlp = Mlp(d, c.intermediate_size, c.hidden_act)
    layers = {
        "linear_attention": (
            Branch("linear_attn", delta, before="attention_layer_norm"),
            Branch("mlp", mlp, before="feedforward_layer_norm"),
        ),
        "full_attention": (
            Branch("self_attn", attention, after="feedforward_layer_norm"),
            Branch("mlp", mlp, after="post_feedforward_layernorm"),
        ),
    }
    norm = Norm(d, c.rms_norm_eps)
    return Decoder(d, c.vocab_size, tuple(layers[kind] for kind in kinds), norm, c.tie_word_embeddings)


OLMO_HYBRID = Family("olmo_hybrid", OlmoHybridConfig, decoder)
