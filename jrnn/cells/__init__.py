"""The Caffe2 face: recurrent cells as step nets."""

from .attention import AttentionCell, Encoder
from .base import Cell, CellRun, RunOptions, StateSpec, StepInputs, run_cell
from .basic import BasicRNNCell
from .dropout import DropoutCell, RecurrentDropoutCell, ZoneoutCell
from .gru import GRUCell
from .layers import (
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
from .lru import LRUCell
from .lstm import LayerNormLSTMCell, LayerNormMILSTMCell, LSTMCell, MILSTMCell
from .minimal import MinGRUCell, MinLSTMCell
from .options import BasicRNNOptions, CommonOptions, GRUOptions, LayerOptions, LRUOptions, LSTMOptions
from .stack import StackedCell

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
