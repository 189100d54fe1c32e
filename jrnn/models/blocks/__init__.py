"""The parts that families of models share, one file for each kind of part."""

from jrnn.models.blocks.attention import Attention, Latent
from jrnn.models.blocks.delta import Delta, Kda, Lightning
from jrnn.models.blocks.feed_forward import Experts, Mlp, Router
from jrnn.models.blocks.indexed import Indexed, Indexer
from jrnn.models.blocks.small import Both, ShortConv, Side
from jrnn.models.blocks.state_space import Mamba1, Mamba2
from jrnn.models.blocks.streams import MeanNorm, Streams
from jrnn.models.blocks.token_shift import ChannelMixing, MatrixMixing

__all__ = [
    "Attention", "Both", "ChannelMixing", "Delta", "Experts", "Indexed", "Indexer", "Kda", "Latent", "Lightning", "Mamba1",
    "Mamba2", "MatrixMixing", "MeanNorm", "Mlp", "Router", "ShortConv", "Side", "Streams",
]  # fmt: skip
