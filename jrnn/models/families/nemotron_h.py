"""The family nemotron_h: layers of one part each, Mamba-2, attention, experts or a feed-forward part."""

from __future__ import annotations

from dataclasses import dataclass

from jrnn.errors import ConfigError
from jrnn.models.blocks import Attention, Experts, Mamba2, Mlp, Router
from jrnn.models.config import ScoreKeys, layer_types
from jrnn.models.family import Branch, Decoder, Family, Names, Norm, Part

PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


@dataclass(frozen=True)
class NemotronHConfig(ScoreKeys):
    """The keys of config.json."""

    hybrid_override_pattern: str | None = None  # the types of layers, a letter for each
    mlp_bias: bool = False
    ssm_state_size: int = 128
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    mamba_hidden_act: str = "silu"
    n_groups: int = 8
    conv_kernel: int = 4
    time_step_min: float = 0.001
    use_conv_bias: bool = True
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None
    use_bias: bool = False


def decoder(c: NemotronHConfig) -> Decoder:
    d, given = c.hidden_size, c.layer_types
    if given is None and c.hybrid_override_pattern is not None:
        if wrong := set(c.hybrid_override_pattern) - set(PATTERN):
            raise ConfigError(f"hybrid_override_pattern has {sorted(wrong)[0]!r}; there are {', '.join(PATTERN)}")
        given = tuple(PATTERN[letter] for letter in c.hybrid_override_pattern)
    given = ("linear_attention", "moe", "full_attention", "mlp") if given is None else given
    names = ("", "up_proj", "down_proj")

    def plain(inner: int) -> Mlp:
        return Mlp(d, inner, c.hidden_act, names, c.mlp_bias)

    sizes = (d, c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size, c.n_groups, c.conv_kernel)
    limit = (c.time_step_min, float("inf"))
    mixers: dict[str, Part] = {
        "linear_attention": Mamba2(
            *sizes, c.use_bias, None, c.use_conv_bias, c.mamba_hidden_act, limit, c.rms_norm_eps
        ),
        "full_attention": Attention(d, c.num_attention_heads, c.key_heads, c.head),
        "moe": Experts(
            plain(c.moe_intermediate_size),
            Router.of_scores(c),
            shared=plain(c.moe_shared_expert_intermediate_size),
            shared_name="shared_experts",
            latent=c.moe_latent_size,
        ),
        "mlp": plain(c.intermediate_size),
    }
    kinds = layer_types(given, len(given), tuple(mixers), lambda k: "")
    layers = tuple((Branch("mixer", mixers[kind], "norm"),) for kind in kinds)
    named = Names("backbone.embeddings.weight", "backbone.layers", "backbone.norm_f")
    return Decoder(d, c.vocab_size, layers, Norm(d, c.rms_norm_eps), names=named)


SIZES = {"vocab_size": 131072, "intermediate_size": 21504, "num_key_value_heads": 8, "head_dim": 128}
SIZES |= {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "moe_intermediate_size": 7688, "num_local_experts": 8}
SIZES |= {"num_experts_per_tok": 2}
NEMOTRON_H = Family(
    "nemotron_h",
    NemotronHConfig,
    decoder,
    aliases={
        "layers_block_type": "layer_types",
        "n_routed_experts": "num_local_experts",
        "layer_norm_epsilon": "rms_norm_eps",
        "mlp_hidden_act": "hidden_act",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_min": "time_step_min",
        "mamba_conv_bias": "use_conv_bias",
    },
    renamed=(("model.embeddings.", "backbone.embeddings."), ("model.", "backbone.")),
    unused=("mtp.",),
    defaults=SIZES,
)
