"""recurrent_net beyond Caffe2: several sequences, outputs that are no states, states of any rank and type, step blobs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn.errors import NetError, OpError

T, N, D = 4, 2, 3


def _gradients(b, blobs, loss="loss"):
    """The net's gradient of a loss and JAX's, for every floating point blob."""
    net = b.build()
    full, gradients = jrnn.add_gradients(net, [loss])
    got = jrnn.run_net(full, blobs)
    floating = {n: jnp.asarray(v) for n, v in blobs.items() if v.dtype.kind == "f"}
    fn = jrnn.to_jax(net, [loss])
    want = jax.jit(jax.grad(lambda p: fn({**blobs, **p})[loss].reshape(())))(floating)
    return {n: (got[gradients[n]], want[n]) for n in floating if n in gradients}, want


def _agree(b, blobs, reached):
    actual, want = _gradients(b, blobs)
    assert set(actual) == set(reached)
    for name, (net, by_jax) in actual.items():
        np.testing.assert_allclose(net, by_jax, rtol=1e-10, atol=1e-12, err_msg=name)
        assert by_jax.any(), name
    assert not any(v.any() for n, v in want.items() if n not in reached)


@pytest.mark.exhaustive
def test_several_sequences_and_outputs_that_are_no_states(x64):
    b = jrnn.NetBuilder("net")
    step = jrnn.NetBuilder("step", parent=b)
    b.input("w"), b.input("bias")
    x, mask, before = (step.input(n) for n in ("x_t", "mask_t", "h_prev"))
    h = step.Tanh(step.Sum([step.Mul([before, mask]), x]), "h")
    y = step.FC([h, "w", "bias"], "y", axis=2)
    step.ArgMax([y], "choice", axis=2, keepdims=False)
    out = jrnn.recurrent_net(
        b,
        step.build(outputs=["h", "y", "choice"]),
        [("x_t", b.input("x")), ("mask_t", b.input("mask"))],
        [("h_prev", b.input("h0"))],
        {"h_prev": "h"},
        outputs=["y", "choice"],
        without_gradient=["choice"],
    )
    assert [(o.all, o.last) for o in out] == [
        ("h_all", "h_last"),
        ("y_all", ""),
        ("choice_all", ""),
    ]
    b.SumElements(b.Tanh(b.Mul([b.Tanh("y_all"), "y_all"])), "term")
    b.Sum(["term", b.SumElements(b.Tanh("h_all"))], "loss")
    rng = np.random.default_rng(0)
    shapes = {"x": (T, N, D), "mask": (T, N, D), "h0": (N, D), "w": (5, D), "bias": (5,)}
    blobs = {n: rng.standard_normal(s) for n, s in shapes.items()}
    _agree(b, blobs, shapes)
    got = jrnn.run_net(b.build(), blobs)
    assert got["y_all"].shape == (T, N, 5)
    np.testing.assert_array_equal(got["choice_all"], got["y_all"].argmax(-1))
    assert jrnn.read_net(jrnn.nets.serialize_net(b.build())) == b.build()


def test_an_output_without_gradient_stops_it(x64):
    b = jrnn.NetBuilder("net")
    step = jrnn.NetBuilder("step", parent=b)
    h = step.Tanh(step.Sum([step.input("h_prev"), step.input("x_t")]), "h")
    step.Sigmoid(h, "y")
    arguments = ([("x_t", b.input("x"))], [("h_prev", b.input("h0"))], {"h_prev": "h"})
    jrnn.recurrent_net(b, step.build(), *arguments, outputs=["y"], without_gradient=["y"])
    b.Sum([b.SumElements("y_all"), b.SumElements(b.Tanh("h_all"))], "loss")
    rng = np.random.default_rng(0)
    _agree(b, {"x": rng.standard_normal((T, N, D)), "h0": rng.standard_normal((N, D))}, ["x", "h0"])


def test_states_of_any_rank_and_type(x64):
    b = jrnn.NetBuilder("net")
    step = jrnn.NetBuilder("step", parent=b)
    b.input("one")
    count, image, x = (step.input(n) for n in ("count_prev", "image_prev", "x_t"))
    step.Add([count, "one"], "count")
    step.Tanh(step.Sum([image, x]), "image")
    out = jrnn.recurrent_net(
        b,
        step.build(),
        [("x_t", b.input("x"))],
        [("count_prev", b.input("zero")), ("image_prev", b.input("first"))],
        {"count_prev": "count", "image_prev": "image"},
        without_gradient=["count_prev"],
    )
    assert b.ops[-1].arg("outputs_with_grads") == (2, 3)
    b.SumElements(b.Tanh(out[1].all), "loss")
    rng = np.random.default_rng(0)
    shape = (N, D, 2, 5)
    blobs = {"x": rng.standard_normal((T, *shape)), "first": rng.standard_normal((1, *shape))}
    blobs |= {"zero": np.asarray(0, np.int32), "one": np.ones(1, np.int32)}
    _agree(b, blobs, ["x", "first"])
    got = jrnn.run_net(b.build(), blobs)
    np.testing.assert_array_equal(got["count_all"], np.arange(1, T + 1))
    assert got["count_all"].dtype == np.int32 and got["image_all"].shape == (T, *shape)


def test_no_steps():
    b = jrnn.NetBuilder("net")
    step = jrnn.NetBuilder("step", parent=b)
    h = step.Tanh(step.Sum([step.input("h_prev"), step.input("x_t")]), "h")
    step.Sigmoid(h, "y")
    arguments = ([("x_t", b.input("x"))], [("h_prev", b.input("h0"))], {"h_prev": "h"})
    jrnn.recurrent_net(b, step.build(), *arguments, outputs=["y"], outputs_with_grads=(0, 1))
    b.Sum([b.SumElements(name) for name in ("y_all", "h_all", "h_last")], "loss")
    blobs = {"x": np.zeros((0, N, D), np.float32), "h0": np.ones((N, D), np.float32)}
    both, _ = _gradients(b, blobs)
    for net, by_jax in both.values():
        np.testing.assert_array_equal(net, by_jax)
    np.testing.assert_array_equal(both["h0"][0], np.ones((N, D)))
    assert jrnn.run_net(b.build(), blobs)["y_all"].shape == (0, N, D)


def test_two_states_that_feed_each_other_and_an_unused_part(x64):
    b = jrnn.NetBuilder("net")
    step = jrnn.NetBuilder("step", parent=b)
    x, p, q = (step.input(n) for n in ("x_t", "p_prev", "q_prev"))
    used, _ = step.Split([x], 2, axis=2)  # the other part gets no gradient
    step.Tanh(step.Sum([q, used]), "p")
    step.Sigmoid(step.Sum([p, used]), "q")
    links = {"p_prev": "p", "q_prev": "q"}
    states = [("p_prev", b.input("p0")), ("q_prev", b.input("q0"))]
    out = jrnn.recurrent_net(
        b, step.build(), [("x_t", b.input("x"))], states, links, outputs_with_grads=(0, 3)
    )
    b.Sum([b.SumElements(b.Tanh(out[0].all)), b.SumElements(b.Tanh(out[1].last))], "loss")
    rng = np.random.default_rng(0)
    shapes = {"x": (T, N, 2 * D), "p0": (N, D), "q0": (D,)}
    _agree(b, {n: rng.standard_normal(s) for n, s in shapes.items()}, shapes)


def test_every_blob_of_every_step():
    b = jrnn.NetBuilder("net")
    out = jrnn.nets.cells.LSTM(
        b, b.input("x"), None, None, D, 2, "lstm", jrnn.nets.cells.LSTMOptions(forward_only=True)
    )
    rng = np.random.default_rng(0)
    blobs = {n: rng.standard_normal(p.shape).astype(np.float32) for n, p in b.params.items()}
    blobs["x"] = rng.standard_normal((T, N, D)).astype(np.float32)
    blobs_of = jrnn.nets.retrieve_step_blobs(b.build(), blobs)
    assert sorted(n for n in blobs_of if n.startswith("rnn_lstm/gates_t")) == [
        f"rnn_lstm/gates_t{t}" for t in range(T)
    ]
    assert blobs_of["rnn_lstm/gates_t0"].shape == (1, N, 8)
    every = jrnn.run_net(b.build(), blobs)[out.hidden_all]
    for t in range(T):
        np.testing.assert_allclose(blobs_of[f"rnn_lstm/hidden_state{t}"][0], every[t], atol=1e-7)


def test_mistakes_are_explained():
    b = jrnn.NetBuilder("net")
    step = jrnn.NetBuilder("step", parent=b)
    step.Tanh(step.Sum([step.input("h_prev"), step.input("x_t")], "total"), "h")
    net, x, state = step.build(), [("x_t", b.input("x"))], [("h_prev", b.input("h0"))]

    def build(inputs=x, states=state, links=None, **options):
        jrnn.recurrent_net(
            b, net, inputs, states, {"h_prev": "h"} if links is None else links, **options
        )

    with pytest.raises(NetError, match="has no sequence"):
        build(inputs=[])
    with pytest.raises(NetError, match="has no state"):
        build(states=[], links={})
    with pytest.raises(NetError, match="output 'h' of the step net is the new value of a state"):
        build(outputs=["h"])
    with pytest.raises(NetError, match="output 'totel' of the step net is not written.*'total'"):
        build(outputs=["totel"])
    with pytest.raises(NetError, match="without_gradient lists 'hprev'.*'h_prev'"):
        build(without_gradient=["hprev"])
    build(outputs=["total"])
    op = b.ops[-1]
    op = op.with_args({"link_offset": [*list(op.arg("link_offset"))[:-1], 1]})
    blobs = {"x": np.zeros((T, N, D), np.float32), "h0": np.zeros((N, D), np.float32)}
    with pytest.raises(OpError, match="collected slot by slot, with offset 0"):
        jrnn.run_net(jrnn.Net("net", (op,)), blobs)
