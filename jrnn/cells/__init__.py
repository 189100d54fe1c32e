"""The Caffe2 face: recurrent cells as step nets."""

from .lstm import LSTM, LSTMCell, LSTMLayer, LSTMOptions, LSTMOutputs
from .stack import StackedCell
