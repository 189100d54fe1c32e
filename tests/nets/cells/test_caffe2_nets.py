"""Every cell against the net that the real Caffe2 builds for it: operators, arguments, blob and parameter names.

By default, gradients pass Caffe2's cells at the sequence of outputs alone: here that is asked for.
"""

import functools
import pathlib
import re

import numpy as np
import pytest

import jrnn
from jrnn.nets import cells
from jrnn.nets.ir import Net

GOLDEN = np.load(pathlib.Path(__file__).parents[2] / "golden" / "rnn_cells.npz")
D, H, E = 3, 4, 5
# set by Caffe2's helpers and read by no operator here, or left at the default there
IGNORED = ("order", "use_cudnn", "cudnn_exhaustive_search", "use_grad_hack", "sequence_lengths")


def _states(b, n):
    return [b.input(f"s{k}") for k in range(n)]


def _layer(build, count, size=H, lengths="lengths", **options):
    def run(b):
        record = cells.LSTMOptions if build is cells.layered_LSTM else type(build.default_options)
        build(
            b,
            "input",
            lengths,
            _states(b, count),
            D,
            size,
            "cell",
            record(mask_padding=False, outputs_with_grads=(0,), **options),
        )

    return run


def _cell(make, count, output):
    def run(b):
        options = cells.RunOptions((output,), mask_padding=False)
        cells.run_cell(
            make(), b, "input", "lengths", _states(b, count), scope="cell", options=options
        )

    return run


def _attention(kind, lengths="encoder_lengths", size=H, **options):
    def run(b):
        encoder = cells.Encoder("encoder", E, lengths, mask_padding=False)
        record = cells.AttentionOptions(
            kind=kind, mask_padding=False, outputs_with_grads=(0, 4), **options
        )
        cells.LSTMWithAttention(
            b, "input", "lengths", _states(b, 3), D, size, encoder, "cell", record
        )

    return run


def _stack(*layers, **options):
    return lambda: cells.StackedCell(layers, **options)


def _lstm(d):
    return cells.LSTMCell(d, H)


CASES = {
    "basic": _layer(cells.BasicRNN, 1, lengths=None),
    "basic_relu": _layer(cells.BasicRNN, 1, lengths=None, activation="relu"),
    "gru": _layer(cells.GRU, 1),
    "gru_linear_before_reset": _layer(cells.GRU, 1, linear_before_reset=True, drop_states=True),
    "milstm": _layer(cells.MILSTM, 2, memory_optimization=True, forget_bias=0.5),
    "milstm_two_layers": _layer(cells.MILSTM, 4, size=[H, H]),
    "layer_norm_lstm": _layer(cells.LayerNormLSTM, 2),
    "layer_norm_milstm": _layer(cells.LayerNormMILSTM, 2),
    "layered": _layer(cells.layered_LSTM, 2, size=[H, H]),
    "unrolled": _layer(cells.LSTM, 4, size=[H, H], lengths=None, unroll_steps=2),
    "residual": _cell(_stack(_lstm(D), _lstm(H), _lstm(H), residual=(1, 2)), 6, 8),
    "mixed": _cell(_stack(_lstm(D), cells.GRUCell(H, H)), 3, 4),
    "dropout": _cell(_stack(*(cells.DropoutCell(_lstm(d), 0.5) for d in (D, H))), 4, 4),
    "attention_dot_same_size": _attention("dot", lengths=None, size=E),
} | {
    f"attention_{kind}{suffix}": _attention(kind, attention_memory_optimization=bool(suffix))
    for kind in ("regular", "recurrent", "dot", "coverage")
    for suffix in ("", "_memory")
}


def _rows(net: Net, rename, depth=0):
    """The operators of a net and of its sub-nets as lines of text; blobs by name, arguments in the alphabet's order."""
    for op in net.ops:
        args = {
            a.name: [rename(v.decode()) for v in a.value] if a.kind == "strings" else a.value
            for a in sorted(op.args, key=lambda a: a.name)
            if a.name not in IGNORED and not isinstance(a.value, Net) and a.value not in (0, 0.0)
        }
        yield f"{depth} {op.type} {[*map(rename, op.inputs)]} -> {[*map(rename, op.outputs)]} {args}"
        for _, inner in op.sub_nets():
            yield from _rows(inner, rename, depth + 1)


def _rename(name: str, table: dict[str, str]) -> str:
    """Blobs that Caffe2 names after a scope twice, or with a counter, under the names of here."""
    name = re.sub(r"net(_\d+)?/", "net/", name.replace("//", "/"))
    for old, new in table.items():
        name = name.replace(old, new)
    return name


DOUBLED = {
    "layer_1/cell/residual_output_1": "layer_1/residual_output_1",
    "masked_attention_logits": "cell/masked_attention_logits",
    "net/Shape": "cell/encoder_outputs_shape",
    "net/Slice": "cell/encoder_steps",
    **{f"timestep_0/s{k}": f"s{k}" for k in range(4)},
}
DROPPED = {}
for layer in (0, 1):
    for where, blob in ((f"cell/layer_{layer}/", ""), ("", "_all")):
        old = f"drop{layer}/cell/layer_{layer}/hidden_state{blob}_with_dropout_mask0"
        new = f"cell/layer_{layer}/hidden_state{blob}_dropped"
        DROPPED[where + old] = new
        DROPPED[where + old.replace("cell/layer", "_cell/layer") + "_mask"] = new + "_mask"


SPREAD = {  # before unrolled steps, initial states of any rank are brought to that of Caffe2's
    f"cell/layer_{k // 2}/initial_{state}_state_spread": f"s{k}"
    for k, state in enumerate(("hidden", "cell") * 2)
}

# Where Caffe2 is wrong: gradients of a layer below that arrive at its last states are lost in layered networks, and those
# of a residual layer's own state within a stack; where it makes a blob in the init net; and what SPREAD is made by.
DIFFERENT = {
    "layered": "outputs_with_grads",
    "residual": "outputs_with_grads|_grad",
    "unrolled": r"ConstantFill|-> \['s\d",
}


@pytest.mark.parametrize("name", CASES)
def test_operators_arguments_and_names_are_caffe2s(name):
    want = jrnn.read_net(GOLDEN[name].tobytes())
    b = jrnn.NetBuilder("net")
    for blob in ("input", "lengths", "encoder", "encoder_lengths"):
        b.input(blob)
    CASES[name](b)
    differs = re.compile(DIFFERENT.get(name, "(?!)"))
    rename = functools.partial(_rename, table={**DOUBLED, **DROPPED})
    got = sorted(
        row
        for row in _rows(b.build(), functools.partial(_rename, table=SPREAD))
        if not differs.search(row)
    )
    assert got == sorted(row for row in _rows(want, rename) if not differs.search(row))
    assert len(got) > 3
    assert sorted(b.params) == sorted(map(rename, GOLDEN[name + "|params"]))
