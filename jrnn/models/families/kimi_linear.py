"""The family kimi_linear: Kimi delta attention, latent attention now and then, and experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jrnn.errors import ConfigError
from jrnn.models.blocks import Experts, Kda, Latent, Mlp, Router
from jrnn.models.config import ScoreKeys
from jrnn.models.family import Branch, Decoder, Family, Norm, Part


@dataclass(frozen=True)
class KimiLinearConfig(ScoreKeys):
    """The keys of config.json."""

    n_shared_experts: int = 1
    kv_lora_rank: int = 512
    q_lora_rank: int | None = None
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    qk_nope_head_dim: int = 128
    mlp_layer_types: tuple[str, ...] | None = None
    first_k_dense_replace: int = 1
    linear_head_dim: int = 128
    linear_num_heads: int = 32
    linear_conv_kernel_dim: int = 4
    linear_attn_config: tuple[tuple[str, Any], ...] | None = ()  # the last four, in the files of its authors


def decoder(c: KimiLinearConfig) -> Decoder:
    d, count, own = c.hidden_size, c.num_hidden_layers, dict(c.linear_attn_config or ())
    heads, size = own.get("num_heads", c.linear_num_heads), own.get("head_dim", c.linear_head_dim)
    kda = Kda(d, heads, size, own.get("short_conv_kernel_size", c.linear_conv_kernel_dim), c.hidden_act, c.rms_norm_eps)
    sizes = (c.kv_lora_rank, c.q_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim)
    latent = Latent(d, c.num_attention_heads, *sizes, bias=c.attention_bias)
    attends = [k - 1 for k in own["full_attn_layers"]] if "full_attn_layers" in own else range(4, count, 4)
    mixers: dict[str, Part] = {"linear_attention": kda, "full_attention": latent}
    kinds = c.kinds(mixers, lambda k: "full_attention" if k in attends else "linear_attention")
    experts = Experts(
        Mlp(d, c.moe_intermediate_size, c.hidden_act, ("w1", "w3", "w2")),
        Router.of_scores(c),
        shared=Mlp(d, c.moe_intermediate_size * c.n_shared_experts, c.hidden_act),
        shared_name="shared_experts",
    )
    feeds: dict[str, Part] = {"dense": Mlp(d, c.intermediate_size, c.hidden_act), "sparse": experts}
    chosen = c.mlp_layer_types or ["dense" if k < c.first_k_dense_replace else "sparse" for k in range(count)]
    if len(chosen) != count or set(chosen) - set(feeds):
        raise ConfigError(f"mlp_layer_types is {chosen!r:.80}; it must have 'dense' or 'sparse' for each layer")
    layers = tuple(
        (
            Branch("self_attn", mixers[kind], "input_layernorm"),
            Branch("block_sparse_moe", feeds[feed], "post_attention_layernorm"),
        )
        for kind, feed in zip(kinds, chosen)
    )
    return Decoder(d, c.vocab_size, layers, Norm(d, c.rms_norm_eps))


SIZES = {"vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27}
SIZES |= {"rms_norm_eps": 1e-5, "routed_scaling_factor": 2.446}
KIMI_LINEAR = Family(
    "kimi_linear",
    KimiLinearConfig,
    decoder,
    renamed=((".mlp.", ".block_sparse_moe."),),  # in the files of its authors, of layers without experts
    aliases={
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "num_local_experts",
        "n_routed_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
    defaults=SIZES,
)
