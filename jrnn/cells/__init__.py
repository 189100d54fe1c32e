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
