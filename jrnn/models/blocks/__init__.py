"""The parts that families of models share, one file for each kind of part."""

from jrnn.models.blocks.attention import Attention, Latent
from jrnn.models.blocks.delta import Delta, Kda, Lightning
from jrnn.models.blocks.feed_forward import Experts, Mlp, Router
from jrnn.models.blocks.small import Both, ShortConv
from jrnn.models.blocks.state_space import Mamba1, Mamba2

__all__ = [
    "Attention", "Both", "Delta", "Experts", "Kda", "Latent", "Lightning", "Mamba1", "Mamba2", "Mlp", "Router", "ShortConv",
]  # fmt: skip
