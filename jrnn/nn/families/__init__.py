"""Recurrent layers since 2018, one file for each family; `jrnn.nn.recurrent` has their interface.

In: x [T, N, D], a state and a `Span` of steps. Out: y [T, N, D] and the next state. Read `minimal.py` first.
"""

from jrnn.nn.families.diagonal import LRU, RGLRU, S5
from jrnn.nn.families.linear_attention_layers import GLA, DeltaNet, GatedDeltaNet, RetNet
from jrnn.nn.families.mamba_layer import Mamba, Mamba2
from jrnn.nn.families.minimal import IndRNN, MinGRU, MinLSTM
from jrnn.nn.families.rwkv_layers import RWKV7
from jrnn.nn.families.xlstm_layers import MLSTM, SLSTM
from jrnn.nn.recurrent import RecurrentLayer

# The layers by the names that configs and commands use.
CELLS: dict[str, type[RecurrentLayer]] = {
    "min_gru": MinGRU,
    "min_lstm": MinLSTM,
    "ind_rnn": IndRNN,
    "lru": LRU,
    "s5": S5,
    "rg_lru": RGLRU,
    "slstm": SLSTM,
    "mlstm": MLSTM,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "retnet": RetNet,
    "gla": GLA,
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "rwkv7": RWKV7,
}
