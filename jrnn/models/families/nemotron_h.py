"""The family nemotron_h: layers of one part each, Mamba-2, attention, experts or a feed-forward part."""

from __future__ import annotations

from dataclasses import dataclass

from jrnn.errors import ConfigError
from jrnn.models.blocks import Attention, Experts, Mamba2, Mlp, Router
from jrnn.models.config import layer_types
from jrnn.models.family import Branch, Decoder, Family, Names, Norm, Part

PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


@dataclass(frozen=True)
class NemotronHConfig:
    """The keys of config.json, with the defaults of transformers."""

    vocab_size: int = 131072
    hidden_size: int = 4096
    layer_types: tuple[str, ...] | None = None
    hybrid_override_pattern: str | None = None  # the same, a letter for each layer
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    attention_bias: bool = False
    intermediate_size: int = 21504
    mlp_hidden_act: str = "relu2"
    mlp_bias: bool = False
    ssm_state_size: int = 128
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    mamba_hidden_act: str = "silu"
    n_groups: int = 8
    conv_kernel: int = 4
    time_step_min: float = 0.001
    use_conv_bias: bool = True
    n_routed_experts: int = 8
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    use_bias: bool = False
    layer_norm_epsilon: float = 1e-5


def decoder(c: NemotronHConfig) -> Decoder:
    d, given = c.hidden_size, c.layer_types
    if given is None and c.hybrid_override_pattern is not None:
        if wrong := set(c.hybrid_override_pattern) - set(PATTERN):
            raise ConfigError(f"hybrid_override_pattern has {sorted(wrong)[0]!r}; there are {', '.join(PATTERN)}")
        given = tuple(PATTERN[letter] for letter in c.hybrid_override_pattern)
    given = ("linear_attention", "moe", "full_attention", "mlp") if given is None else given
    names = ("", "up_proj", "down_proj")

    def plain(inner: int) -> Mlp:
        return Mlp(d, inner, c.mlp_hidden_act, names, c.mlp_bias)

    router = Router.of_scores(c.n_routed_experts, c)
    sizes = (d, c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size, c.n_groups, c.conv_kernel)
    limit = (c.time_step_min, float("inf"))
    mixers: dict[str, Part] = {
        "linear_attention": Mamba2(
            *sizes, c.use_bias, None, c.use_conv_bias, c.mamba_hidden_act, limit, c.layer_norm_epsilon
        ),
        "full_attention": Attention(d, c.num_attention_heads, c.num_key_value_heads, c.head_dim),
        "moe": Experts(
            plain(c.moe_intermediate_size),
            router,
            shared=plain(c.moe_shared_expert_intermediate_size),
            shared_name="shared_experts",
            latent=c.moe_latent_size,
        ),
        "mlp": plain(c.intermediate_size),
    }
    kinds = layer_types(given, len(given), tuple(mixers), lambda k: "")
    layers = tuple((Branch("mixer", mixers[kind], "norm"),) for kind in kinds)
    named = Names("backbone.embeddings.weight", "backbone.layers", "backbone.norm_f")
    return Decoder(d, c.vocab_size, layers, Norm(d, c.layer_norm_epsilon), names=named)


NEMOTRON_H = Family(
    "nemotron_h",
    NemotronHConfig,
    decoder,
    aliases={
        "layers_block_type": "layer_types",
        "num_local_experts": "n_routed_experts",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_min": "time_step_min",
        "mamba_conv_bias": "use_conv_bias",
    },
    renamed=(("model.embeddings.", "backbone.embeddings."), ("model.", "backbone.")),
    unused=("mtp.",),
)
