"""The family olmo_hybrid: the gated delta rule with norms before it, and attention with norms after it."""

from __future__ import annotations

from dataclasses import dataclass

from jrnn.models.blocks import Attention, Delta, Mlp
from jrnn.models.config import DecoderKeys, Rope
from jrnn.models.family import Branch, Decoder, Family, Norm


@dataclass(frozen=True)
class OlmoHybridConfig(DecoderKeys):
    """The keys of config.json."""

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
    kinds = c.kinds(("linear_attention", "full_attention"), lambda k: otherwise[k])
    key_heads = c.linear_num_key_heads or c.num_attention_heads
    key = c.linear_key_head_dim or int(0.75 * d / key_heads)
    sizes = (key_heads, c.linear_num_value_heads or c.num_attention_heads, key, c.linear_value_head_dim or 2 * key)
    beta = 2.0 if c.linear_allow_neg_eigval else 1.0
    delta = Delta(d, *sizes, c.linear_conv_kernel_dim, c.hidden_act, 1e-5, "each", beta)
    turns = c.rope_theta is not None or dict(c.rope_parameters or ()).get("rope_theta") is not None
    rope = Rope.of(c, c.head) if turns else None
    attention = Attention.of(c, rope=rope, norm=Norm(d, c.rms_norm_eps), norm_whole=True)
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
    return Decoder.of(c, (layers[kind] for kind in kinds))


SIZES = {"vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "num_attention_heads": 30}
OLMO_HYBRID = Family("olmo_hybrid", OlmoHybridConfig, decoder, defaults=SIZES)
