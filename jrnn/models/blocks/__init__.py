"""The parts that families of models share, one file for each kind of part.

In: parameters, activations [N, T, D] and a state. Out: activations and the next state. Read `attention.py` first.
"""

from jrnn.models.blocks.attention import Attention, Indexed, Indexer, Latent
from jrnn.models.blocks.delta import Delta, Kda, Lightning
from jrnn.models.blocks.feed_forward import Experts, Mlp, Router
from jrnn.models.blocks.small import (
    Both,
    ChannelMixing,
    HyperStreams,
    MatrixMixing,
    MeanNorm,
    ShortConv,
    Side,
)
from jrnn.models.blocks.state_space import Mamba1, Mamba2
