"""Every cell's gradient three ways in float64: JAX's, the generated net's, central differences."""

import itertools

import jax
import numpy as np
import pytest

import jrnn
from jrnn.nets import cells

pytestmark = pytest.mark.usefixtures("little_compilation")

T, N, D, H, S, E = 3, 3, 3, 2, 4, 3
LENGTHS = np.array([0, 1, T], np.int32)
SHAPES = {
    "state0": (H,),
    "state1": (N, H),
    "input": (T, N, D),
    "encoder": (S, N, E),
    "weighted": (S, N, E),
}
GIVEN = {"lengths": LENGTHS, "encoder_lengths": np.array([0, 3, S], np.int32)}


def _report(build):
    """Checks the loss that depends on every blob that `build(b, input, lengths)` returns."""
    b = jrnn.NetBuilder("net")
    x, lengths = b.input("input"), b.input("lengths")
    outputs = build(b, x, lengths)
    terms = [b.SumElements(b.Tanh(blob, f"tanh{k}"), f"term{k}") for k, blob in enumerate(outputs)]
    b.Sum(terms, "loss")
    rng = np.random.default_rng(0)
    blobs = {}
    for name in b.external_inputs:
        shape = b.params[name].shape if name in b.params else SHAPES.get(name, (1, N, H))
        blobs[name] = GIVEN[name] if name in GIVEN else rng.standard_normal(shape)
    report = jrnn.check_gradients(b.build(), blobs, "loss", max_elements=4, key=jax.random.key(0))
    reached = {a.name for a in report.blobs if any(a.values)}
    return report, set(b.params) - reached


SAVING = {"drop_states": True, "memory_optimization": True}
FAMILIES = {
    "basic": (cells.BasicRNN, cells.BasicRNNOptions, {"activation": "relu", **SAVING}),
    "gru": (cells.GRU, cells.GRUOptions, {"linear_before_reset": True, **SAVING}),
    "layer_norm_lstm": (cells.LayerNormLSTM, cells.LSTMOptions, SAVING),
    "milstm": (cells.MILSTM, cells.LSTMOptions, {"forget_bias": 1.0, "memory_optimization": True}),
    "layer_norm_milstm": (cells.LayerNormMILSTM, cells.LSTMOptions, {"memory_optimization": True}),
    "min_gru": (cells.MinGRU, cells.LayerOptions, SAVING),
    "min_lstm": (cells.MinLSTM, cells.LayerOptions, {"memory_optimization": True}),
    "lru": (cells.LRU, cells.LRUOptions, {"drop_states": True}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_one_and_two_layers_with_and_without_lengths(family):
    layers, record, options = FAMILIES[family]

    def build(b, x, lengths):
        some = lengths if "drop_states" in options else None
        return [
            *list(
                layers(
                    b,
                    x,
                    None if some else lengths,
                    None,
                    D,
                    [H, 3],
                    "two",
                    record(outputs_with_grads=(0, 1)),
                )
            )[:2],
            *list(
                layers(b, x, some, None, D, H, "one", record(outputs_with_grads=(0, 1), **options))
            )[:2],
        ]

    report, _ = _report(build)
    assert report.agrees, str(report)


LAYERS = {name: (layers, record) for name, (layers, record, _) in FAMILIES.items()} | {
    "lstm": (cells.LSTM, cells.LSTMOptions),
}
ENDS = {"none": (False, False), "hold": (True, False), "drop": (True, True)}


@pytest.mark.exhaustive("min_gru-sizes34-hold")
@pytest.mark.grid(every=34)
@pytest.mark.parametrize(
    ("family", "sizes", "ends"), list(itertools.product(LAYERS, [H, [H, 3]], ENDS))
)
def test_every_family_and_number_of_layers_and_kind_of_end(family, sizes, ends):
    layers, record = LAYERS[family]
    with_lengths, drop = ENDS[ends]
    grads = tuple(range(2 * len(layers.cell(D, H).states)))

    def build(b, x, lengths):
        options = record(outputs_with_grads=grads, drop_states=drop)
        out = layers(b, x, lengths if with_lengths else None, None, D, sizes, "cell", options)
        return [*out, *([out.output] if layers is cells.LRU else [])]

    report, unreached = _report(build)
    assert report.agrees, str(report)
    assert not unreached


@pytest.mark.exhaustive
def test_gradients_that_arrive_at_a_lower_layer_too():
    def build(b, x, lengths):
        stack = cells.StackedCell((cells.BasicRNNCell(D, H), cells.BasicRNNCell(H, 3)))
        options = cells.RunOptions(outputs_with_grads=(0, 1, 2))
        run = cells.run_cell(stack, b, x, lengths, None, scope="stack", options=options)
        options = cells.GRUOptions(outputs_with_grads=(0, (0, 0), (0, 1)))
        gru = cells.GRU(b, x, lengths, None, D, [H, 3], "gru", options)
        options = cells.LSTMOptions(outputs_with_grads=(0, (0, 3)))
        layered = cells.layered_LSTM(b, x, None, None, D, [H, 3], "layered", options)
        lower = [*gru.layers[0], gru.hidden_all, layered.layers[0].cell_last, layered.hidden_all]
        return [run.states[0].all, run.states[0].last, run.output, *lower]

    report, unreached = _report(build)
    assert report.agrees, str(report)
    assert not unreached


ATTENTION = {
    "regular": (
        cells.LSTMWithAttention,
        {"attention_memory_optimization": True, "memory_optimization": True},
    ),
    "recurrent": (cells.MILSTMWithAttention, {}),
    "dot": (cells.LSTMWithAttention, {"drop_states": True}),
    "coverage": (cells.MILSTMWithAttention, {"attention_memory_optimization": True}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ATTENTION)
def test_attention(kind):
    layer, options = ATTENTION[kind]

    def build(b, x, lengths):
        given = b.input("weighted") if kind == "coverage" else None
        encoder = cells.Encoder(b.input("encoder"), E, b.input("encoder_lengths"), given)
        grads = (0, 2, 4, 6) if kind == "coverage" else (0, 2, 4)
        options_ = cells.AttentionOptions(kind=kind, outputs_with_grads=grads, **options)
        out = layer(b, x, lengths, None, D, H, encoder, "attend", options_)
        return [out.combined, out.cell_all, *([out.coverage_all] if kind == "coverage" else [])]

    report, unreached = _report(build)
    assert report.agrees, str(report)
    assert unreached <= {"attend/attention_logits_b"}  # a bias that all scores share


@pytest.mark.exhaustive
def test_noise_residual_layers_and_mixed_cells():
    def build(b, x, lengths):
        lower = cells.DropoutCell(cells.ZoneoutCell(cells.LSTMCell(D, H), (0.3, 0.2)), 0.5)
        stack = cells.StackedCell(
            (lower, cells.RecurrentDropoutCell(cells.GRUCell(H, H), 0.5)), residual=(1,)
        )
        return [cells.run_cell(stack, b, x, lengths, None, scope="stack").output]

    report, _ = _report(build)
    assert report.agrees, str(report)


def test_residual_layers_whose_own_states_get_gradients():
    # Caffe2's backward step net forgets the gradient of a middle layer's own state
    def build(b, x, lengths):
        layers = tuple(cells.LSTMCell(d, H) for d in (D, H, H))
        run = cells.run_cell(cells.StackedCell(layers, (1, 2)), b, x, lengths, None, scope="stack")
        return [run.output]

    report, _ = _report(build)
    assert report.agrees, str(report)


@pytest.mark.exhaustive
def test_unrolled_and_layered():
    def build(b, x, lengths):
        given = [b.input(f"state{k}") for k in range(4)]
        unrolled = cells.LSTMOptions(unroll_steps=T, outputs_with_grads=(0, 3))
        one = cells.LSTM(b, x, lengths, given, D, [H, H], "unrolled", unrolled)
        two = cells.layered_LSTM(b, x, lengths, given[:2], D, [H, H], "layered")
        return [one.hidden_all, one.cell_last, two.hidden_all]

    report, unreached = _report(build)
    assert report.agrees, str(report)
    assert not unreached
