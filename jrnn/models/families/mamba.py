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
class Keys:
    """The keys that all three read, with the defaults of transformers for mamba."""

    vocab_size: int = 50280
    hidden_size: int = 768
    state_size: int = 16
    num_hidden_layers: int = 32
    layer_norm_epsilon: float = 1e-5
    expand: float = 2
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    tie_word_embeddings: bool = True


@dataclass(frozen=True)
class MambaConfig(Keys):
    intermediate_size: int | None = None
    time_step_rank: int | Literal["auto"] = "auto"


@dataclass(frozen=True)
class FalconMambaConfig(MambaConfig):
    mixer_rms_eps: float = 1e-6


@dataclass(frozen=True)
class Mamba2Config(Keys):
    num_heads: int = 128
    head_dim: int = 64
    n_groups: int = 8
    time_step_limit: Limit = (0.0, float("inf"))


def _blocks(c: Keys, mixer: Part) -> Decoder:
    layers = ((Branch("mixer", mixer, before="norm"),),) * c.num_hidden_layers
    norm = Norm(c.hidden_size, c.layer_norm_epsilon)
    return Decoder(c.hidden_size, c.vocab_size, layers, norm, c.tie_word_embeddings, NAMES)


def mamba(c: MambaConfig) -> Decoder:
    inner = c.intermediate_size or int(c.expand * c.hidden_size)
    rank = -(-c.hidden_size // 16) if c.time_step_rank == "auto" else c.time_step_rank
    options = (c.conv_kernel, c.use_bias, c.use_conv_bias, c.hidden_act, getattr(c, "mixer_rms_eps", None))
    return _blocks(c, Mamba1(c.hidden_size, inner, c.state_size, rank, *options))


def mamba2(c: Mamba2Config) -> Decoder:
    inner = int(c.expand * c.hidden_size)
    if inner != c.num_heads * c.head_dim:
        found = f"expand times hidden_size is {inner}, but num_heads times head_dim is {c.num_heads * c.head_dim}"
        raise ConfigError(f"{found}; they must be equal")
    sizes = (c.hidden_size, c.num_heads, c.head_dim, c.state_size, c.n_groups, c.conv_kernel)
    options = (c.use_bias, None, c.use_conv_bias, c.hidden_act, c.time_step_limit, c.layer_norm_epsilon)
    return _blocks(c, Mamba2(*sizes, *options))


SIZES = {"vocab_size": 32768, "hidden_size": 4096, "state_size": 128, "num_hidden_layers": 64}
MAMBA = Family("mamba", MambaConfig, mamba, renamed=RENAMED)
FALCON_MAMBA = Family("falcon_mamba", FalconMambaConfig, mamba)
SIZES |= {"tie_word_embeddings": False}
MAMBA2 = Family("mamba2", Mamba2Config, mamba2, renamed=RENAMED, defaults=SIZES)
