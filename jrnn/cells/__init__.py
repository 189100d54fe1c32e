"""The Caffe2 face: recurrent cells as step nets."""

from .attention import AttentionCell, Encoder
from .base import Cell, CellRun, RunOptions, StateSpec, StepInputs, run_cell
from .basic import BasicRNNCell
from .dropout import DropoutCell, RecurrentDropoutCell, ZoneoutCell
from .gru import GRUCell
from .layers import (
    GRU,
    LSTM,
    MILSTM,
    AttentionOptions,
    AttentionOutputs,
    BasicRNN,
    HiddenLayer,
    HiddenOutputs,
    LayerNormLSTM,
    LayerNormMILSTM,
    LSTMLayer,
    LSTMOutputs,
    LSTMWithAttention,
    MILSTMWithAttention,
    layered_LSTM,
)
from .lstm import LayerNormLSTMCell, LayerNormMILSTMCell, LSTMCell, MILSTMCell
from .options import BasicRNNOptions, GRUOptions, LSTMOptions
from .stack import StackedCell
