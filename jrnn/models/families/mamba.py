"""The families mamba, falcon_mamba and mamba2: blocks of a norm and a state space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jrnn.errors import ConfigError
from jrnn.models.blocks import Mamba1, Mamba2
from jrnn.models.config import Limit
from jrnn.models.family import Branch, Decoder, Family, Names, Norm, Part

NAMES = Names("backbone.embeddings.weight", "backbone.layers", "backbone.norm_f")
RENAMED = (("backbone.embedding.", "backbone.embeddings."),)  # in the files of the first releases


@dataclass(frozen=True)
class MambaConfig:
    """The keys of config.json, with the defaults of transformers."""

    vocab_size: int = 50280
    hidden_size: int = 768
    state_size: int = 16
    num_hidden_layers: int = 32
    layer_norm_epsilon: float = 1e-5
    expand: float = 2
    intermediate_size: int | None = None
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    time_step_rank: int | Literal["auto"] = "auto"
    tie_word_embeddings: bool = True


@dataclass(frozen=True)
class FalconMambaConfig(MambaConfig):
    mixer_rms_eps: float = 1e-6


@dataclass(frozen=True)
class Mamba2Config:
    """The keys of config.json, with the defaults of transformers."""

    num_heads: int = 128
    head_dim: int = 64
    vocab_size: int = 32768
    hidden_size: int = 4096
    state_size: int = 128
    num_hidden_layers: int = 64
    layer_norm_epsilon: float = 1e-5
    expand: float = 2
    conv_kernel: int = 4
    n_groups: int = 8
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    time_step_limit: Limit = (0.0, float("inf"))
    tie_word_embeddings: bool = False


def _blocks(c: MambaConfig | Mamba2Config, mixer: Part) -> Decoder:
    layers = ((Branch("mixer", mixer, before="norm"),),) * c.num_hidden_layers
    norm = Norm(c.hidden_size, c.layer_norm_epsilon)
    return Decoder(c.hidden_size, c.vocab_size, layers, norm, c.tie_word_embeddings, NAMES)


def mamba(c: MambaConfig) -> Decoder:
    inner = c.intermediate_size or int(c.expand * c.hidden_size)
    rank = -(-c.hidden_size // 16) if c.time_step_rank == "auto" else c.time_step_rank
    epsilon = getattr(c, "mixer_rms_eps", None)
    return _blocks(
        c,
        Mamba1(
            c.hidden_size,
            inner,
            c.state_size,
            rank,
            c.conv_kernel,
            c.use_bias,
            c.use_conv_bias,
            c.hidden_act,
            epsilon,
        ),
    )


def mamba2(c: Mamba2Config) -> Decoder:
    inner = int(c.expand * c.hidden_size)
    if inner != c.num_heads * c.head_dim:
        raise ConfigError(
            f"expand times hidden_size is {inner}, but num_heads times head_dim is {c.num_heads * c.head_dim}; they must be "
            "equal"
        )
    sizes = (c.hidden_size, c.num_heads, c.head_dim, c.state_size, c.n_groups, c.conv_kernel)
    mixer = Mamba2(
        *sizes, c.use_bias, None, c.use_conv_bias, c.hidden_act, c.time_step_limit, epsilon=c.layer_norm_epsilon
    )
    return _blocks(c, mixer)


MAMBA = Family("mamba", MambaConfig, mamba, renamed=RENAMED)
FALCON_MAMBA = Family("falcon_mamba", FalconMambaConfig, mamba)
MAMBA2 = Family("mamba2", Mamba2Config, mamba2, renamed=RENAMED)
