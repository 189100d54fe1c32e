"""What cells promise besides their operators: padding, lengths, noise, memory, named outputs, errors."""

import jax
import numpy as np
import pytest

import jrnn
from jrnn.errors import NetError
from jrnn.nets import cells, registry

T, N, D, H = 4, 4, 3, 2
LENGTHS = np.array([0, 1, 3, T], np.int32)


def _blobs(b, **given):
    rng = np.random.default_rng(0)
    shapes = {"x": (T, N, D)}
    drawn = {
        n: rng.standard_normal(b.params[n].shape if n in b.params else shapes[n])
        for n in _floats(b, given)
    }
    return {n: v.astype(np.float32) for n, v in drawn.items()} | given


def _floats(b, given):
    return [n for n in b.external_inputs if n not in given]


def _attention(b, x, lengths):
    encoder = cells.Encoder(b.input("encoder"), D, b.input("encoder_lengths"))
    out = cells.MILSTMWithAttention(b, x, lengths, None, D, H, encoder, "cell")
    return out.hidden_all, out.combined


def _stack(b, x, lengths):
    layers = (
        cells.ZoneoutCell(cells.LSTMCell(D, H), (0.2, 0.2), True),
        cells.GRUCell(H, H),
        cells.BasicRNNCell(H, H),
    )
    run = cells.run_cell(cells.StackedCell(layers, (1, 2)), b, x, lengths, None, scope="cell")
    return run.states[-1].all, run.output


def _layer_norm(b, x, lengths):
    out = cells.LayerNormMILSTM(b, x, lengths, None, D, H, "cell")
    return out.hidden_all, out.hidden_all


@pytest.mark.exhaustive
@pytest.mark.parametrize("build", [_attention, _stack, _layer_norm])
def test_padding_never_shows(build):
    b = jrnn.NetBuilder("net")
    state, output = build(b, b.input("x"), b.input("lengths"))
    b.SumElements(b.Tanh(output), "loss")
    given = {"lengths": LENGTHS}
    dirty = {}
    if build is _attention:
        given |= {
            "encoder": np.ones((5, N, D), np.float32),
            "encoder_lengths": np.array([0, 2, 3, 5], np.int32),
        }
    blobs = _blobs(b, **given)
    for name, ends in (("x", LENGTHS), ("encoder", given.get("encoder_lengths", ()))):
        if name in blobs:
            dirty[name] = blobs[name].copy()
            for n, end in enumerate(ends):
                dirty[name][end:, n] = np.nan
    full, gradients = jrnn.add_gradients(b.build(), ["loss"])
    names = [
        state,
        "loss",
        *(str(gradients[n]) for n in b.params if n in gradients),
        str(gradients["x"]),
    ]
    fn = jax.jit(lambda p: jrnn.to_jax(full, names)({**blobs, **p}))
    loss = jax.jit(
        jax.grad(lambda p: jrnn.to_jax(full, ["loss"])({**blobs, **p})["loss"].reshape(()))
    )
    clean = {n: blobs[n] for n in dirty}
    results = [(fn(p), loss(p)) for p in (clean, dirty)]
    for one, two in zip(*map(jax.tree.leaves, results)):
        assert np.isfinite(two).all()
        np.testing.assert_array_equal(one, two)
    held = np.asarray(results[0][0][state])
    for n, end in enumerate(LENGTHS):
        np.testing.assert_array_equal(
            held[end:, n], np.broadcast_to(held[max(end - 1, 0), n], held[end:, n].shape)
        )


@pytest.mark.sample("dot")
@pytest.mark.parametrize("kind", ["regular", "recurrent", "dot", "coverage"])
def test_an_encoder_of_length_zero_gives_no_context(kind):
    b = jrnn.NetBuilder("net")
    encoder = cells.Encoder(b.input("encoder"), 3, b.input("encoder_lengths"))
    x, states = b.input("x"), [b.input(f"s{k}") for k in range(3)]
    out = cells.LSTMWithAttention(
        b, x, None, states, D, H, encoder, "cell", cells.AttentionOptions(kind=kind)
    )
    given = {f"s{k}": np.zeros((1, N, size), np.float32) for k, size in enumerate((H, H, 3))}
    given |= {
        "encoder": np.full((5, N, 3), np.nan, np.float32),
        "encoder_lengths": np.zeros(N, np.int32),
    }
    blobs = _blobs(b, **given)
    got = jrnn.run_net(b.build(), blobs)
    assert not np.any(got[out.context_all])
    if out.coverage_all:
        assert not np.any(got[out.coverage_all])
    plain = jrnn.NetBuilder(
        "plain"
    )  # the decoder alone, with what its gates have of the hidden state
    lstm = cells.LSTM(
        plain, plain.input("x"), None, [plain.input("s0"), plain.input("s1")], D, H, "lstm"
    )
    of_attention = {n.replace("lstm/", "cell/decoder/"): n for n in plain.params}
    alone = {
        n: blobs[a][..., :H] if a.endswith("gates_t_w") else blobs[a]
        for a, n in of_attention.items()
    }
    want = jrnn.run_net(plain.build(), {**given, "x": blobs["x"], **alone})
    np.testing.assert_allclose(got[out.hidden_all], want[lstm.hidden_all], rtol=1e-6, atol=1e-7)


def test_dropped_states_are_zero_after_the_end():
    b = jrnn.NetBuilder("net")
    options = {"drop_states": True, "forward_only": True}
    x, lengths = b.input("x"), b.input("lengths")
    outs = [
        cells.BasicRNN(
            b, x, lengths, None, D, H, "basic", cells.BasicRNNOptions(**options)
        ).hidden_all,
        cells.GRU(b, x, lengths, None, D, H, "gru", cells.GRUOptions(**options)).hidden_all,
        cells.LayerNormLSTM(
            b, x, lengths, None, D, H, "ln", cells.LSTMOptions(**options)
        ).hidden_all,
    ]
    got = jrnn.run_net(b.build(), _blobs(b, lengths=LENGTHS))
    for name in outs:
        for n, end in enumerate(LENGTHS):
            assert not got[name][end:, n].any() and got[name][:end, n].all()


@pytest.fixture(scope="module")
def noisy():
    """The states of a cell under noise, as a function of the key, and without noise."""
    nets = {}
    for is_test in (False, True):
        b = jrnn.NetBuilder("net")
        x = b.input("x")
        zoneout = cells.ZoneoutCell(cells.BasicRNNCell(D, 40), (0.4,), is_test)
        recurrent = cells.RecurrentDropoutCell(cells.BasicRNNCell(D, 40), 0.4, is_test)
        runs = [
            cells.run_cell(cell, b, x, None, None, scope=scope)
            for cell, scope in (
                (cells.DropoutCell(zoneout, 0.3, is_test), "zoneout"),
                (recurrent, "recurrent"),
            )
        ]
        names = [runs[0].states[0].all, runs[0].output, runs[1].states[0].all]
        blobs = _blobs(b)
        blobs |= {
            n: np.zeros_like(v) for n, v in blobs.items() if n.endswith("initial_hidden_state")
        }
        fn = jax.jit(
            jrnn.to_jax(b.build(), [*names, *([] if is_test else ["recurrent/recurrent_mask"])])
        )
        nets[is_test] = (
            b.build(),
            lambda key, fn=fn, blobs=blobs: jax.device_get(fn(blobs, key=key)),
            names,
            blobs,
        )
    return nets


def test_noise_keeps_and_drops_as_it_says(noisy):
    _, run, (state, output, recurrent), _ = noisy[False]
    got = [run(jax.random.key(k)) for k in (0, 0, 1)]
    np.testing.assert_array_equal(got[0][state], got[1][state])  # a function of the key
    assert (got[0][state] != got[2][state]).any() and (got[0][recurrent] != got[2][recurrent]).any()
    states = got[0][state]
    kept = (states[1:] == states[:-1]).mean()
    assert 0.3 < kept < 0.5  # zoneout keeps 40 % of the units from one step to the next
    dropped = got[0][output] == 0
    assert 0.2 < dropped[states != 0].mean() < 0.4
    np.testing.assert_allclose(got[0][output][~dropped], (states / 0.7)[~dropped], rtol=1e-6)
    mask = got[0]["recurrent/recurrent_mask"]
    assert set(np.unique(mask.round(4))) == {0, np.float32(1 / 0.6).round(4)} and mask.shape == (
        1,
        N,
        40,
    )


def test_without_noise_states_have_their_expected_values(noisy):
    net, run, (state, output, recurrent), blobs = noisy[True]
    got = run(None)
    np.testing.assert_array_equal(got[output], got[state])
    plain = jrnn.NetBuilder("net")
    out = cells.BasicRNN(plain, plain.input("x"), None, None, D, 40, "recurrent")
    np.testing.assert_allclose(
        jrnn.run_net(plain.build(), blobs)[out.hidden_all], got[recurrent], atol=1e-6
    )
    first = jrnn.nets.retrieve_step_blobs(net, blobs)
    np.testing.assert_allclose(
        got[state][0], 0.6 * first["rnn_zoneout/hidden_t0"][0], atol=1e-6
    )  # from a state of zeros


@pytest.mark.exhaustive
def test_memory_optimization_changes_memory_and_no_number():
    sizes, results = [], []
    for optimize in (False, True):
        b = jrnn.NetBuilder("net")
        options = cells.LSTMOptions(memory_optimization=optimize)
        out = cells.LayerNormLSTM(b, b.input("x"), None, None, D, 8, "cell", options)
        b.SumElements(b.Tanh(out.hidden_all), "loss")
        full, gradients = jrnn.add_gradients(b.build(), ["loss"])
        names = [str(gradients[n]) for n in b.params]
        rng = np.random.default_rng(0)
        blobs = {n: rng.standard_normal(p.shape).astype(np.float32) for n, p in b.params.items()}
        blobs["x"] = rng.standard_normal((50, 16, D)).astype(np.float32)
        compiled = jax.jit(jrnn.to_jax(full, names)).lower(blobs).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
        results.append(compiled(blobs))
    for one, two in zip(*map(jax.tree.leaves, results)):
        np.testing.assert_allclose(one, two, rtol=2e-4, atol=1e-5)
    gates = 50 * 16 * 4 * 8 * 4  # bytes of the gates of all steps
    assert sizes[1] < sizes[0] - gates / 2


def test_outputs_are_named_and_iterate_in_caffe2s_order():
    b = jrnn.NetBuilder("net")
    x = b.input("x")
    gru = cells.GRU(b, x, None, None, D, [H, 3], "gru")
    assert list(gru) == ["gru/layer_1/hidden_t_all", "gru/layer_1/hidden_t_last"]
    assert [layer.hidden_all for layer in gru.layers] == [
        "gru/layer_0/hidden_t_all",
        "gru/layer_1/hidden_t_all",
    ]
    mi = cells.MILSTM(b, x, None, None, D, H, "mi")
    assert list(mi) == [mi.hidden_all, mi.hidden_last, mi.cell_all, mi.cell_last]
    encoder = cells.Encoder(b.input("encoder"), 3)
    regular = cells.LSTMWithAttention(b, x, None, None, D, H, encoder, "one")
    assert len(list(regular)) == 6 and list(regular)[4] == regular.context_all
    coverage = cells.LSTMWithAttention(
        b, x, None, None, D, H, encoder, "two", cells.AttentionOptions(kind="coverage")
    )
    assert list(coverage)[6:] == [coverage.coverage_all, coverage.coverage_last]


@pytest.mark.parametrize(
    "layers", ["BasicRNN", "GRU", "LSTM", "MILSTM", "MinGRU", "LRU", "attention", "unrolled"]
)
def test_a_loss_on_any_output_trains_the_weights_by_default(layers):
    for k in range(2 if layers in ("BasicRNN", "GRU", "MinGRU") else 4):
        b = jrnn.NetBuilder("net")
        x = b.input("x")
        if layers == "attention":
            outputs = cells.LSTMWithAttention(
                b, x, None, None, D, H, cells.Encoder(b.input("encoder"), D), "cell"
            )
        else:
            options = cells.LSTMOptions(unroll_steps=2) if layers == "unrolled" else None
            build = cells.LSTM if layers == "unrolled" else getattr(cells, layers)
            outputs = build(b, x, None, None, D, [H, H], "cell", options)
        b.SumElements(list(outputs)[k], "loss")
        net, gradients = jrnn.add_gradients(b.build(), ["loss"])
        read = {n for op in net.ops[: len(b.ops)] for n in op.inputs}
        assert {
            n for n in b.params if n in read and not n.endswith("output_w") and "output_b" not in n
        } <= set(gradients)
        for op in (op for op in net.ops if op.type == "RecurrentNetwork"):
            assert op.arg("outputs_with_grads") == tuple(range(len(op.outputs) - 1))


@pytest.mark.exhaustive
def test_a_loss_on_the_last_state_has_the_gradient_that_differences_have():
    b = jrnn.NetBuilder("net")
    b.SumElements(b.Tanh(cells.LSTM(b, b.input("x"), None, None, D, H, "cell").hidden_last), "loss")
    report = jrnn.check_gradients(b.build(), _blobs(b), "loss", max_elements=3)
    assert report.agrees and all(any(blob.values) for blob in report.blobs)
    rnn = next(op for op in b.ops if op.type == "RecurrentNetwork")
    assert registry.lookup(rnn.type).cuts(rnn) is None


@pytest.mark.exhaustive
def test_unrolled_steps_equal_the_recurrent_network():
    results = []
    for steps in (None, T):
        b = jrnn.NetBuilder("net")
        states = [b.input("h0"), b.input("c0")]
        out = cells.LSTM(
            b,
            b.input("x"),
            b.input("lengths"),
            states,
            D,
            H,
            "cell",
            cells.LSTMOptions(unroll_steps=steps),
        )
        first = np.full((1, N, H), 0.5, np.float32)
        got = jrnn.run_net(b.build(), _blobs(b, lengths=LENGTHS, h0=first, c0=first))
        results.append([got[name] for name in out])
    for one, two in zip(*results):
        np.testing.assert_allclose(one, two, atol=1e-6)


def test_mistakes_are_explained():
    b = jrnn.NetBuilder("net")
    x = b.input("x")
    with pytest.raises(
        NetError, match="activation must be one of 'tanh', 'relu', is 'tanhh'.*'tanh'"
    ):
        cells.BasicRNN(b, x, None, None, D, H, "a", cells.BasicRNNOptions(activation="tanhh"))
    with pytest.raises(NetError, match="attention must be one of regular.*is 'dott'.*'dot'"):
        cells.AttentionCell(cells.LSTMCell(D, H), cells.Encoder("e", 3), "dott")
    with pytest.raises(NetError, match="residual layer 1 has size 3, the layer below 2"):
        cells.StackedCell((cells.GRUCell(D, 2), cells.GRUCell(2, 3)), (1,))
    with pytest.raises(NetError, match="residual layer 0 is not one of the layers 1 to 0"):
        cells.StackedCell((cells.GRUCell(D, 2),), (0,))
    with pytest.raises(NetError, match="zoneout needs one ratio for each state"):
        cells.ZoneoutCell(cells.LSTMCell(D, H), (0.1,))
    with pytest.raises(NetError, match="zoneout keeps what drop_states drops"):
        cells.ZoneoutCell(cells.GRUCell(D, H, cells.GRUOptions(drop_states=True)), (0.1,))
    with pytest.raises(NetError, match="takes 2 or 6 initial states, was given 3"):
        cells.layered_LSTM(b, x, None, ["a", "b", "c"], D, [H, H, H], "layered")
    with pytest.raises(NetError, match="dim_out is empty"):
        cells.GRU(b, x, None, None, D, [], "empty")
    with pytest.raises(NetError, match="steps is 0; it must be at least 1"):
        cells.GRU(b, x, None, [b.input("h0")], D, H, "none", cells.GRUOptions(unroll_steps=0))
