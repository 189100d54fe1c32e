"""Caffe2's recurrent cells as step nets.

In: a `NetBuilder`, blobs and options of a cell. Out: blobs of outputs and states, in the net. Read `lstm.py` first.
"""

from jrnn.nets.cells.affine import LRUCell, MinGRUCell, MinLSTMCell
from jrnn.nets.cells.attention import AttentionCell, Encoder
from jrnn.nets.cells.base import Cell, CellRun, RunOptions, StateSpec, StepInputs, run_cell
from jrnn.nets.cells.gru import BasicRNNCell, GRUCell
from jrnn.nets.cells.layer_stacks import (
    GRU,
    LRU,
    LSTM,
    MILSTM,
    AttentionOptions,
    AttentionOutputs,
    BasicRNN,
    HiddenLayer,
    HiddenOutputs,
    LayerNormLSTM,
    LayerNormMILSTM,
    Layers,
    LRULayer,
    LRUOutputs,
    LSTMLayer,
    LSTMOutputs,
    LSTMWithAttention,
    MILSTMWithAttention,
    MinGRU,
    MinLSTM,
    layered_LSTM,
)
from jrnn.nets.cells.lstm import LayerNormLSTMCell, LayerNormMILSTMCell, LSTMCell, MILSTMCell
from jrnn.nets.cells.options import BasicRNNOptions, CommonOptions, GRUOptions, LayerOptions, LRUOptions, LSTMOptions
from jrnn.nets.cells.wrappers import DropoutCell, RecurrentDropoutCell, StackedCell, ZoneoutCell

__all__ = [
    "GRU",
    "LRU",
    "LSTM",
    "MILSTM",
    "AttentionCell",
    "AttentionOptions",
    "AttentionOutputs",
    "BasicRNN",
    "BasicRNNCell",
    "BasicRNNOptions",
    "Cell",
    "CellRun",
    "CommonOptions",
    "DropoutCell",
    "Encoder",
    "GRUCell",
    "GRUOptions",
    "HiddenLayer",
    "HiddenOutputs",
    "LRUCell",
    "LRULayer",
    "LRUOptions",
    "LRUOutputs",
    "LSTMCell",
    "LSTMLayer",
    "LSTMOptions",
    "LSTMOutputs",
    "LSTMWithAttention",
    "LayerNormLSTM",
    "LayerNormLSTMCell",
    "LayerNormMILSTM",
    "LayerNormMILSTMCell",
    "LayerOptions",
    "Layers",
    "MILSTMCell",
    "MILSTMWithAttention",
    "MinGRU",
    "MinGRUCell",
    "MinLSTM",
    "MinLSTMCell",
    "RecurrentDropoutCell",
    "RunOptions",
    "StackedCell",
    "StateSpec",
    "StepInputs",
    "ZoneoutCell",
    "layered_LSTM",
    "run_cell",
]
