"""PyTorch's RNN, LSTM and GRU as flax.nnx modules and as pure functions, and packed sequences; see docs/nn.md."""

from jrnn.nn import functional
from jrnn.nn.modules import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from jrnn.nn.packing import (
    PackedSequence,
    bucket,
    bucketed,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
)
from jrnn.nn.params import Layout
from jrnn.nn.settings import Settings
from jrnn.nn.streaming import chunked, compiled_step

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "GRUCell",
    "LSTMCell",
    "Layout",
    "PackedSequence",
    "RNNCell",
    "Settings",
    "bucket",
    "bucketed",
    "chunked",
    "compiled_step",
    "functional",
    "pack_padded_sequence",
    "pack_sequence",
    "pad_packed_sequence",
    "pad_sequence",
]
