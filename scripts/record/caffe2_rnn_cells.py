#!/usr/bin/env python3
"""Records the nets that Caffe2's rnn_cell and gru_cell build, for tests/nets/cells/test_caffe2_nets.py.

Run it with the Python 3.8 that has the real Caffe2 (torch 1.8.1):

    python scripts/record/caffe2_rnn_cells.py tests/golden/rnn_cells.npz

For each net NAME the file holds `NAME`, its serialized NetDef. The blobs that it reads are `input` and `lengths`, states
`s0`, `s1`, ..., and of attention `encoder` and `encoder_lengths`. `NAME|params` are the parameters, in order.
"""

import sys

import numpy as np
from caffe2.python import gru_cell, model_helper, rnn_cell, workspace
from caffe2.python.attention import AttentionType

D, H, E = 3, 4, 5
KINDS = (
    ("regular", "Regular"),
    ("recurrent", "Recurrent"),
    ("dot", "Dot"),
    ("coverage", "SoftCoverage"),
)


def states(n):
    return tuple("s%d" % k for k in range(n))


def lstm_cell(size_in, name=""):
    return rnn_cell.LSTMCell(
        name=name, input_size=size_in, hidden_size=H, forget_bias=0.0, memory_optimization=False
    )


def residual(model):
    cells = [lstm_cell(D), lstm_cell(H), lstm_cell(H)]
    stack = rnn_cell.MultiRNNCell(cells, name="cell", residual_output_layers=[1, 2])
    stack.apply_over_sequence(model, "input", "lengths", states(6))


def mixed(model):
    gru = gru_cell.GRUCell(
        name="", input_size=H, hidden_size=H, forget_bias=0.0, memory_optimization=False
    )
    stack = rnn_cell.MultiRNNCell([lstm_cell(D), gru], name="cell")
    stack.apply_over_sequence(model, "input", "lengths", states(3))


def dropout(model):
    cells = [
        rnn_cell.DropoutCell(lstm_cell(d), name="drop%d" % k, dropout_ratio=0.5, is_test=False)
        for k, d in enumerate((D, H))
    ]
    rnn_cell.MultiRNNCell(cells, name="cell").apply_over_sequence(
        model, "input", "lengths", states(4)
    )


def layer(build, count, size=H, lengths="lengths", **options):
    return lambda model: build(model, "input", lengths, states(count), D, size, "cell", **options)


def attention(kind, lengths="encoder_lengths", size=H, **options):
    def build(model):
        rnn_cell.LSTMWithAttention(
            model, "input", "lengths", "s0", "s1", "s2", E, "encoder", lengths, D, size, "cell",
            attention_type=getattr(AttentionType, kind), **options
        )  # fmt: skip

    return build


CASES = {
    "basic": layer(rnn_cell.BasicRNN, 1, lengths=None, activation="tanh"),
    "basic_relu": layer(rnn_cell.BasicRNN, 1, lengths=None, activation="relu"),
    "gru": layer(gru_cell.GRU, 1),
    "gru_linear_before_reset": layer(gru_cell.GRU, 1, linear_before_reset=True, drop_states=True),
    "milstm": layer(rnn_cell.MILSTM, 2, memory_optimization=True, forget_bias=0.5),
    "milstm_two_layers": layer(rnn_cell.MILSTM, 4, size=[H, H]),
    "layer_norm_lstm": layer(rnn_cell.LayerNormLSTM, 2),
    "layer_norm_milstm": layer(rnn_cell.LayerNormMILSTM, 2),
    "layered": layer(rnn_cell.layered_LSTM, 2, size=[H, H]),
    "unrolled": layer(rnn_cell.LSTM, 4, size=[H, H], lengths=None, static_rnn_unroll_size=2),
    "residual": residual,
    "mixed": mixed,
    "dropout": dropout,
    "attention_dot_same_size": attention("Dot", lengths=None, size=E),
}
for name, kind in KINDS:
    CASES["attention_" + name] = attention(kind)
    CASES["attention_%s_memory" % name] = attention(kind, attention_memory_optimization=True)


def main(path):
    out = {}
    for name, build in CASES.items():
        workspace.ResetWorkspace()
        model = model_helper.ModelHelper(name="net", arg_scope={})
        model.net.AddExternalInputs("input", "lengths", "encoder", "encoder_lengths", *states(6))
        build(model)
        out[name] = np.frombuffer(model.net.Proto().SerializeToString(), np.uint8)
        out[name + "|params"] = np.array(
            [str(p) for p in model.GetParams() + model.GetComputedParams()]
        )
    np.savez_compressed(path, **out)
    print("%d nets -> %s" % (len(CASES), path))


if __name__ == "__main__":
    main(sys.argv[1])
