"""RecurrentNetwork from the wire: recorded Caffe2 cases that no builder makes, gradients of windows, errors."""

import pathlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn.errors import GradientError, GradientWarning, OpError
from jrnn.nets import autodiff

pytestmark = pytest.mark.usefixtures("little_compilation")

GOLDEN = np.load(pathlib.Path(__file__).parents[2] / "golden" / "recurrent.npz")
NAMES = sorted({k.split("|")[0] for k in GOLDEN.files})


def _case(name):
    parts = {kind: {} for kind in ("in", "out")}
    for key in GOLDEN.files:
        case, kind, *blob = key.split("|")
        if case == name and kind in parts:
            parts[kind][blob[0]] = GOLDEN[key]
    return jrnn.read_net(GOLDEN[name + "|net"].tobytes()), parts["in"], parts["out"]


@pytest.mark.parametrize("name", NAMES)
def test_recorded_case(name):
    net, blobs, want = _case(name)
    got = jrnn.run_net(net, blobs)
    for blob, value in want.items():
        np.testing.assert_allclose(got[blob], value, atol=1e-6, err_msg=blob)
    jitted = jax.jit(jrnn.to_jax(net, list(want)))(blobs)
    for blob, value in want.items():
        np.testing.assert_allclose(jitted[blob], value, atol=1e-6, err_msg=blob)


def _loss_gradients(net, blobs, given):
    """The net's gradient and JAX's of the output `all` weighted by `given`."""
    full, gradients = jrnn.add_gradients(net, {"all": "all_given"})
    got = jrnn.run_net(full, {**blobs, "all_given": given})
    fn = jrnn.to_jax(net, ["all"])
    want = jax.grad(lambda p: jnp.sum(fn(p)["all"] * given))(
        {k: jnp.asarray(v) for k, v in blobs.items()}
    )
    return {k: (got[gradients[k]], want[k]) for k in blobs if k in gradients}


def test_gradient_of_a_state_that_looks_two_steps_back(x64):
    net, blobs, _ = _case("window_of_states")
    blobs = {k: v.astype(np.float64) for k, v in blobs.items()}
    op = net.ops[0]
    gradient_pass = autodiff.backward_pass(op.arg("step_net").ops, {"h": "h_grad"})
    backward = jrnn.Net("backward", gradient_pass.ops)
    op = op.with_args(
        {
            "backward_step_net": backward,
            "backward_link_internal": [
                "h_grad",
                gradient_pass.gradients["before"],
                gradient_pass.gradients["x_t"],
            ],
            "backward_link_external": ["states_grad", "states_grad", "x_grad"],
            "backward_link_offset": [2, 0, 0],
            "backward_link_window": [1, 2, 1],
            "alias_offset": [1, -1],
            "outputs_with_grads": [0],
        }
    )
    net = replace(net, ops=(op,))
    given = np.random.default_rng(0).standard_normal((6, 2, 3))
    for name, (got, want) in _loss_gradients(net, blobs, given).items():
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12, err_msg=name)


def test_one_initial_value_for_two_states_gets_both_gradients(x64):
    b = jrnn.NetBuilder("n")
    step = jrnn.NetBuilder("step", parent=b)
    x, h, c = (step.input(n) for n in ("x_t", "h_prev", "c_prev"))
    new_h, new_c = step.Tanh(step.Add([h, x]), "h"), step.Sigmoid(step.Add([c, h]), "c")
    out = jrnn.recurrent_net(
        b,
        step.build(outputs=[new_h, new_c]),
        [("x_t", b.input("x"))],
        [("h_prev", b.input("first")), ("c_prev", "first")],
        {"h_prev": "h", "c_prev": "c"},
        outputs_with_grads=(0, 2),
    )
    b.Add([out[0].all, out[1].all], "all")
    rng = np.random.default_rng(0)
    blobs = {"x": rng.standard_normal((4, 2, 3)), "first": rng.standard_normal((2, 3))}
    for name, (got, want) in _loss_gradients(
        b.build(), blobs, rng.standard_normal((4, 2, 3))
    ).items():
        np.testing.assert_allclose(got, want, rtol=1e-10, err_msg=name)


def test_step_of_operators_that_only_pass_gradients_through(x64):
    b = jrnn.NetBuilder("n")
    step = jrnn.NetBuilder("step", parent=b)
    h = step.Sum([step.input("h_prev"), step.input("x_t")], "h")
    out = jrnn.recurrent_net(
        b,
        step.build(outputs=[h]),
        [("x_t", b.input("x"))],
        [("h_prev", b.input("h0"))],
        {"h_prev": "h"},
    )
    b.Copy(out[0].all, "all")
    rng = np.random.default_rng(0)
    blobs = {"x": rng.standard_normal((4, 2, 3)), "h0": rng.standard_normal((2, 3))}
    actual = _loss_gradients(b.build(), blobs, rng.standard_normal((4, 2, 3)))
    assert set(actual) == {"x", "h0"}
    for name, (got, want) in actual.items():
        np.testing.assert_allclose(got, want, rtol=1e-10, err_msg=name)


def test_reference_in_the_first_sum(x64):
    # Caffe2 renames the bias's gradient and with it the linked one: input, state and bias gradients are all wrong there
    b = jrnn.NetBuilder("n")
    step = jrnn.NetBuilder("step", parent=b)
    bias = b.input("bias")
    h = step.Tanh(step.Sum([step.input("h_prev"), step.input("x_t"), bias], "s"), "h")
    out = jrnn.recurrent_net(
        b,
        step.build(outputs=[h]),
        [("x_t", b.input("x"))],
        [("h_prev", b.input("h0"))],
        {"h_prev": "h"},
    )
    b.Copy(out[0].all, "all")
    rng = np.random.default_rng(0)
    blobs = {
        n: rng.standard_normal(s)
        for n, s in (("x", (4, 2, 3)), ("h0", (2, 3)), ("bias", (1, 2, 3)))
    }
    actual = _loss_gradients(b.build(), blobs, rng.standard_normal((4, 2, 3)))
    assert set(actual) == {"x", "h0", "bias"}
    for name, (got, want) in actual.items():
        np.testing.assert_allclose(got, want, rtol=1e-10, err_msg=name)


def test_gradient_of_an_output_that_is_not_listed_stops():
    net, blobs, _ = _case("initial_state_for_every_sequence")
    b = jrnn.NetBuilder("n")
    step = net.ops[0].arg("step_net")
    step = replace(step, external_inputs=("h_prev", "x_t"), external_outputs=("h",))
    out = jrnn.recurrent_net(
        b,
        step,
        [("x_t", b.input("x"))],
        [("h_prev", b.input("h0"))],
        {"h_prev": "h"},
        outputs_with_grads=(1,),
    )
    fn = jrnn.to_jax(b.build(), [out[0].all, out[0].last])
    x = jnp.asarray(blobs["x"])

    def loss(x, *names):
        outputs = fn({**blobs, "x": x})
        return sum((outputs[n] ** 2).sum() for n in names)

    slope = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    by_last = slope(x, out[0].last)
    assert by_last.any()
    np.testing.assert_array_equal(
        slope(x, out[0].last, out[0].all), by_last
    )  # no warning: some gradients pass
    tangent = jax.jvp(lambda x: loss(x, out[0].all), (x,), (x,))[1]
    assert tangent == 0
    with pytest.warns(
        GradientWarning,
        match=r"writes 'h_all' stops all .* only gradients of output 1 \('h_last'\) pass",
    ):
        assert not jax.vmap(slope, (0, None))(x[None], out[0].all).any()
    b.SumElements(out[0].all, "loss")
    with pytest.warns(
        GradientWarning, match=r"list these too, of \{0: 'h_all', 1: 'h_last'\}, or build"
    ):
        assert "x" not in jrnn.add_gradients(b.build(), ["loss"])[1]


def test_errors_name_the_operator_and_the_rule():
    net, blobs, _ = _case("window_of_inputs")
    op = net.ops[0]

    def run(changes, **given):
        jrnn.run_net(replace(net, ops=(op.with_args(changes),)), {**blobs, **given})

    with pytest.raises(
        OpError, match=r"op #0 RecurrentNetwork.*lists of links must have one length"
    ):
        run({"link_offset": [0, 1]})
    with pytest.raises(OpError, match=r"'window' reads steps 0 to 6 of 'padded', which has 6"):
        run({}, padded=blobs["padded"][1:])
    with pytest.raises(
        OpError, match=r"initial state 'h0' is \[3, 3\], but the batch has 2 sequences"
    ):
        run({}, h0=np.zeros((3, 3), np.float32))
    with pytest.raises(
        OpError, match=r"state 'states' is float32\[1,2,1\], but the step net writes 'h'"
    ):
        run({}, h0=np.zeros((2, 1), np.float32))
    with pytest.raises(
        OpError, match=r"'initial_recurrent_state_ids' holds 9, but there are 3 to choose from"
    ):
        run({"initial_recurrent_state_ids": [9]})
    with pytest.raises(OpError, match=r"alias 'all' is of 'nowhere'"):
        run({"alias_src": ["nowhere", "states"]})
    with pytest.raises(OpError, match=r"argument 'step_net' \(Net\) is required"):
        run({"step_net": None})
    with pytest.raises(GradientError, match="built forward_only"):
        jrnn.add_gradients(net, ["all"])
