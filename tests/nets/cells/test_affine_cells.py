"""Cells whose steps are affine in the state: their formulas, and that executor `associative` solves them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans_of import scan_plans

import jrnn
from jrnn.errors import NetError
from jrnn.loops import scan
from jrnn.nets import cells
from jrnn.nets.ops import recurrent_network, recurrent_network_gradient

pytestmark = pytest.mark.usefixtures("little_compilation")

T, N, D, H = 4, 3, 2, 4
LENGTHS = np.array([0, 2, T], np.int32)
LAYERS = {"min_gru": cells.MinGRU, "min_lstm": cells.MinLSTM, "lru": cells.LRU}


def build(name, sizes=H, lengths=None, **options):
    """A net of the layers, its outputs over time, and values for everything it reads."""
    b = jrnn.NetBuilder("net")
    record = type(LAYERS[name].default_options)
    out = LAYERS[name](
        b,
        b.input("x"),
        b.input("lengths") if lengths else None,
        None,
        D,
        sizes,
        "c",
        record(**options),
    )
    rng = np.random.default_rng(0)
    init = jrnn.run_net(b.build_init(), {}, key=jax.random.key(0))
    blobs = {
        n: v.astype(np.float64) if "log" in n else rng.standard_normal(v.shape)
        for n, v in init.items()
    }
    blobs |= {"x": rng.standard_normal((T, N, D))} | ({"lengths": LENGTHS} if lengths else {})
    return b, [*list(out)[::2], *([out.output] if name == "lru" else [])], blobs


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


def min_gru(p, x, h):
    z, n = np.split(x @ p["c/i2h_w"].T + p["c/i2h_b"], 2, axis=-1)
    return (1 - sigmoid(z)) * h + sigmoid(z) * n


def min_lstm(p, x, h):
    f, i, n = np.split(x @ p["c/i2h_w"].T + p["c/i2h_b"], 3, axis=-1)
    f, i = sigmoid(f), sigmoid(i)
    return f / (f + i) * h + i / (f + i) * n


def lru(p, x, h):
    turn = np.exp(-np.exp(p["c/nu_log"]) + 1j * np.exp(p["c/theta_log"]))
    real, imaginary = np.split(x @ p["c/i2h_w"].T + p["c/i2h_b"], 2, axis=-1)
    return turn * h + np.exp(p["c/gamma_log"]) * (real + 1j * imaginary)


@pytest.mark.sample("min_lstm")
@pytest.mark.parametrize("name", LAYERS)
def test_formulas(name):
    b, outs, p = build(name)
    got = jrnn.run_net(b.build(), p)
    h = sum(p[n] * (1j if "imaginary" in n else 1) for n in p if "initial" in n)
    want = []
    for x in p["x"]:
        h = {"min_gru": min_gru, "min_lstm": min_lstm, "lru": lru}[name](p, x, h)
        want.append(h)
    want = np.stack(want)
    np.testing.assert_allclose(got[outs[0]], want.real, rtol=1e-12, atol=1e-12)
    if name == "lru":
        np.testing.assert_allclose(got[outs[1]], want.imag, rtol=1e-12, atol=1e-12)
        y = np.concatenate([want.real, want.imag], -1) @ p["c/output_w"].T + p["c/output_b"]
        np.testing.assert_allclose(got[outs[2]], y, rtol=1e-12, atol=1e-12)


def test_eigenvalues_start_within_their_ring():
    _, _, p = build("lru", 50, radius=(0.5, 0.9), max_phase=1.0)
    turn = np.exp(-np.exp(p["c/nu_log"]))
    assert turn.min() > 0.5 and turn.max() < 0.9 and np.ptp(turn) > 0.35
    assert 0 < np.exp(p["c/theta_log"]).min() < 0.05 and 0.95 < np.exp(p["c/theta_log"]).max() < 1
    np.testing.assert_allclose(np.exp(p["c/gamma_log"]) ** 2, 1 - turn**2, rtol=1e-4)


def test_gates_far_out_stay_numbers():
    b, (state,), p = build("min_lstm")
    p["c/i2h_b"] = np.repeat([-500.0, -500.0, 1.0], H)
    assert np.isfinite(jrnn.run_net(b.build(), p)[state]).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAYERS)
def test_the_executor_solves_them_and_agrees_with_the_loop(name, monkeypatch, x64):
    """Two layers in one step net, with lengths: forward, and the generated net's gradient."""
    b, outs, p = build(name, [H, H], lengths=True)
    b.SumElements(b.Tanh(outs[-1]), "loss")
    full, gradients = jrnn.add_gradients(b.build(), ["loss"])
    smooth = {n: v for n, v in p.items() if n != "lengths"}
    wanted = [*outs, *(str(gradients[n]) for n in smooth)]
    explained = []

    def chosen(step, carry, xs, **keywords):
        explained.append(scan_plans(step, carry, xs, **keywords, executor="associative").strategy)
        assert (
            scan_plans(step, carry, xs, **keywords).strategy != "associative"
        )  # on a CPU, sums keep their order
        return scan(step, carry, xs, **keywords, executor="associative")

    monkeypatch.setattr(recurrent_network, "scan", chosen)
    monkeypatch.setattr(recurrent_network_gradient, "scan", chosen)
    got = jax.jit(lambda q: jrnn.to_jax(full, wanted)({**q, "lengths": LENGTHS}))(smooth)
    assert explained == ["associative", "associative"]  # the backward step net is affine too

    monkeypatch.setattr(recurrent_network, "scan", functools.partial(scan, executor="scan"))

    def loss(q):
        blobs = jrnn.to_jax(full, [*outs, "loss"])({**q, "lengths": LENGTHS})
        return blobs.pop("loss").reshape(()), blobs

    expected, states = jax.jit(jax.grad(loss, has_aux=True))(smooth)
    for blob, want in (states | {str(gradients[n]): v for n, v in expected.items()}).items():
        np.testing.assert_allclose(got[blob], want, rtol=1e-10, atol=1e-10, err_msg=blob)
        assert jnp.any(want), blob


@pytest.mark.parametrize("name", LAYERS)
def test_what_has_nowhere_to_enter_is_refused(name):
    b = jrnn.NetBuilder("net")
    cell = LAYERS[name].cell(D, H)
    with pytest.raises(
        NetError, match=r"has no product of its state.*DropoutCell or ZoneoutCell around"
    ):
        cells.run_cell(
            cells.RecurrentDropoutCell(cell, 0.5), b, b.input("x"), None, None, scope="c"
        )
    with pytest.raises(NetError, match="Cell takes .*Options, was given GRUOptions"):
        LAYERS[name](b, "x", None, None, D, H, "d", cells.GRUOptions())


def test_impossible_rings_are_errors():
    with pytest.raises(NetError, match=r"radius is \(0.5, 0.5\); it must be two numbers"):
        cells.LRUCell(D, H, cells.LRUOptions(radius=(0.5, 0.5)))
    with pytest.raises(NetError, match="max_phase is 0"):
        cells.LRUCell(D, H, cells.LRUOptions(max_phase=0))
