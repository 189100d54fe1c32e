"""Caffe2's recurrent cells as step nets."""

from jrnn.cells.attention import AttentionCell, Encoder
from jrnn.cells.base import Cell, CellRun, RunOptions, StateSpec, StepInputs, run_cell
from jrnn.cells.basic import BasicRNNCell
from jrnn.cells.dropout import DropoutCell, RecurrentDropoutCell, ZoneoutCell
from jrnn.cells.gru import GRUCell
from jrnn.cells.layers import (
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
from jrnn.cells.lru import LRUCell
from jrnn.cells.lstm import LayerNormLSTMCell, LayerNormMILSTMCell, LSTMCell, MILSTMCell
from jrnn.cells.minimal import MinGRUCell, MinLSTMCell
from jrnn.cells.options import BasicRNNOptions, CommonOptions, GRUOptions, LayerOptions, LRUOptions, LSTMOptions
from jrnn.cells.stack import StackedCell

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
