"""Recurrent layers as flax.nnx modules and as pure functions, and packed sequences; see docs/nn.md.

In: x [T, N, D], states and parameters. Out: y [T, N, H] and the next states. Read `modules.py` first.
"""

from jrnn.nn import functional
from jrnn.nn.families.causal_convolution import CausalConv
from jrnn.nn.families.diagonal import LRU, RGLRU, S5
from jrnn.nn.families.linear_attention_layers import GLA, DeltaNet, GatedDeltaNet, RetNet
from jrnn.nn.families.mamba_layer import Mamba, Mamba2
from jrnn.nn.families.minimal import IndRNN, MinGRU, MinLSTM
from jrnn.nn.families.rwkv_layers import RWKV7
from jrnn.nn.families.xlstm_layers import MLSTM, SLSTM
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
from jrnn.nn.recurrent import Recurrent, RecurrentLayer
from jrnn.nn.sequential import Sequential
from jrnn.nn.settings import Settings
from jrnn.nn.streaming import chunked, compiled_step

__all__ = [
    "GLA",
    "GRU",
    "LRU",
    "LSTM",
    "MLSTM",
    "RGLRU",
    "RNN",
    "RWKV7",
    "S5",
    "SLSTM",
    "CausalConv",
    "DeltaNet",
    "GRUCell",
    "GatedDeltaNet",
    "IndRNN",
    "LSTMCell",
    "Layout",
    "Mamba",
    "Mamba2",
    "MinGRU",
    "MinLSTM",
    "PackedSequence",
    "RNNCell",
    "Recurrent",
    "RecurrentLayer",
    "RetNet",
    "Sequential",
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
