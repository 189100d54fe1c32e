"""Caffe2's recurrent cells as step nets.

In: a `NetBuilder`, blobs and options of a cell. Out: blobs of outputs and states, in the net. Read `lstm.py` first.
"""

import types

from jrnn.nets.cells.affine import LRUCell as LRUCell
from jrnn.nets.cells.affine import MinGRUCell as MinGRUCell
from jrnn.nets.cells.affine import MinLSTMCell as MinLSTMCell
from jrnn.nets.cells.attention_cell import AttentionCell as AttentionCell
from jrnn.nets.cells.attention_cell import Encoder as Encoder
from jrnn.nets.cells.base import Cell as Cell
from jrnn.nets.cells.base import CellRun as CellRun
from jrnn.nets.cells.base import RunOptions as RunOptions
from jrnn.nets.cells.base import StateSpec as StateSpec
from jrnn.nets.cells.base import StepInputs as StepInputs
from jrnn.nets.cells.base import run_cell as run_cell
from jrnn.nets.cells.cell_options import BasicRNNOptions as BasicRNNOptions
from jrnn.nets.cells.cell_options import CommonOptions as CommonOptions
from jrnn.nets.cells.cell_options import GRUOptions as GRUOptions
from jrnn.nets.cells.cell_options import LayerOptions as LayerOptions
from jrnn.nets.cells.cell_options import LRUOptions as LRUOptions
from jrnn.nets.cells.cell_options import LSTMOptions as LSTMOptions
from jrnn.nets.cells.gru import BasicRNNCell as BasicRNNCell
from jrnn.nets.cells.gru import GRUCell as GRUCell
from jrnn.nets.cells.layer_stacks import GRU as GRU
from jrnn.nets.cells.layer_stacks import LRU as LRU
from jrnn.nets.cells.layer_stacks import LSTM as LSTM
from jrnn.nets.cells.layer_stacks import MILSTM as MILSTM
from jrnn.nets.cells.layer_stacks import AttentionOptions as AttentionOptions
from jrnn.nets.cells.layer_stacks import AttentionOutputs as AttentionOutputs
from jrnn.nets.cells.layer_stacks import BasicRNN as BasicRNN
from jrnn.nets.cells.layer_stacks import HiddenLayer as HiddenLayer
from jrnn.nets.cells.layer_stacks import HiddenOutputs as HiddenOutputs
from jrnn.nets.cells.layer_stacks import LayerNormLSTM as LayerNormLSTM
from jrnn.nets.cells.layer_stacks import LayerNormMILSTM as LayerNormMILSTM
from jrnn.nets.cells.layer_stacks import Layers as Layers
from jrnn.nets.cells.layer_stacks import LRULayer as LRULayer
from jrnn.nets.cells.layer_stacks import LRUOutputs as LRUOutputs
from jrnn.nets.cells.layer_stacks import LSTMLayer as LSTMLayer
from jrnn.nets.cells.layer_stacks import LSTMOutputs as LSTMOutputs
from jrnn.nets.cells.layer_stacks import LSTMWithAttention as LSTMWithAttention
from jrnn.nets.cells.layer_stacks import MILSTMWithAttention as MILSTMWithAttention
from jrnn.nets.cells.layer_stacks import MinGRU as MinGRU
from jrnn.nets.cells.layer_stacks import MinLSTM as MinLSTM
from jrnn.nets.cells.layer_stacks import layered_LSTM as layered_LSTM
from jrnn.nets.cells.lstm import LayerNormLSTMCell as LayerNormLSTMCell
from jrnn.nets.cells.lstm import LayerNormMILSTMCell as LayerNormMILSTMCell
from jrnn.nets.cells.lstm import LSTMCell as LSTMCell
from jrnn.nets.cells.lstm import MILSTMCell as MILSTMCell
from jrnn.nets.cells.wrappers import DropoutCell as DropoutCell
from jrnn.nets.cells.wrappers import RecurrentDropoutCell as RecurrentDropoutCell
from jrnn.nets.cells.wrappers import StackedCell as StackedCell
from jrnn.nets.cells.wrappers import ZoneoutCell as ZoneoutCell

__all__ = sorted(
    n for n, v in globals().items() if not n.startswith("_") and not isinstance(v, types.ModuleType)
)
