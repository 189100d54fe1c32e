"""cells.LSTM: the operators that Caffe2 builds, gradients three ways, lengths, options, padding."""

import itertools
import pathlib

import jax
import numpy as np
import pytest

import jrnn
from jrnn.nets import cells
from jrnn.nets.ir import Net

pytestmark = pytest.mark.usefixtures("little_compilation")

GOLDEN = np.load(pathlib.Path(__file__).parents[2] / "golden" / "gradients.npz")
BREW = (
    "order",
    "use_cudnn",
    "cudnn_exhaustive_search",
)  # set by Caffe2's helper on every operator, read by none here
T, N, D = 5, 4, 3
LENGTHS = np.array([0, 1, 3, T], np.int32)


def _build(sizes, *, lengths=True, learned=False, **options):
    """A net with an LSTM and a loss that depends on the outputs that pass gradients on."""
    b = jrnn.NetBuilder("net")
    x = b.input("input")
    seq = b.input("lengths") if lengths else None
    sizes = [sizes] if isinstance(sizes, int) else sizes
    states = (
        None if learned else [b.input(f"{kind}{k}") for k in range(len(sizes)) for kind in "hc"]
    )
    options = cells.LSTMOptions(**options)
    out = cells.LSTM(b, x, seq, states, D, sizes if len(sizes) > 1 else sizes[0], "lstm", options)
    terms = []
    for k in options.outputs_with_grads or (0,):
        weighted = b.Mul([tuple(out)[k], b.input(f"weight{k}")], f"weighted{k}")
        terms.append(b.SumElements(weighted, f"term{k}"))
    b.Sum(terms, "loss")
    return b, out


def _blobs(b: jrnn.NetBuilder, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    blobs = {}
    for name in b.external_inputs:
        if name == "lengths":
            blobs[name] = LENGTHS
            continue
        if name in b.params:
            shape = b.params[name].shape
        elif name == "input":
            shape = (T, N, D)
        elif name.startswith("weight"):
            size = (
                next(p.shape[0] for n, p in reversed(b.params.items()) if n.endswith("gates_t_b"))
                // 4
            )
            shape = (1 if name[-1] in "13" else T, N, size)
        else:
            layer = [p.shape[0] // 4 for n, p in b.params.items() if n.endswith("gates_t_b")][
                int(name[1:])
            ]
            shape = (N, layer)
        blobs[name] = rng.standard_normal(shape).astype(dtype)
    return blobs


def _rows(net: Net):
    return [
        (
            op.type,
            op.inputs,
            op.outputs,
            {
                a.name: a.value
                for a in op.args
                if a.name not in BREW and not isinstance(a.value, Net)
            },
            [_rows(n) for _, n in op.sub_nets()],
        )
        for op in net.ops
    ]


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("lstm", [4], {}),
        ("lstm_two_layers", [4, 3], {}),
        ("lstm_three_outputs", [4], {"outputs_with_grads": (0, 1, 3)}),
        ("lstm_memory", [4], {"memory_optimization": True}),
    ],
)
def test_operators_arguments_and_names_are_caffe2s(name, sizes, options):
    want = jrnn.read_net(GOLDEN[name + "|forward"].tobytes())
    b = jrnn.NetBuilder("net")
    states = [b.input(f"{kind}{k}") for k in range(len(sizes)) for kind in "hc"]
    cells.LSTM(
        b,
        b.input("input"),
        b.input("lengths"),
        states,
        3,
        sizes if len(sizes) > 1 else sizes[0],
        "lstm",
        cells.LSTMOptions(mask_padding=False, **{"outputs_with_grads": (0,), **options}),
    )
    assert _rows(b.build()) == _rows(want)


CASES = list(itertools.product([4, [4, 3]], [True, False], [True, False]))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("sizes", "lengths", "drop"), CASES)
def test_three_gradients_agree(sizes, lengths, drop):
    b, _ = _build(
        sizes,
        lengths=lengths,
        drop_states=drop,
        forget_bias=0.5,
        outputs_with_grads=(0, 1, 2, 3),
        learned=not lengths,
    )
    report = jrnn.check_gradients(b.build(), _blobs(b), "loss", max_elements=12)
    assert report.agrees, str(report)
    assert {a.name for a in report.blobs} >= {"input", *b.params}


def test_memory_optimization_changes_no_number():
    nets = [_build([4, 3], memory_optimization=m)[0] for m in (False, True)]
    grads = []
    for b in nets:
        full, gradients = jrnn.add_gradients(b.build(), ["loss"])
        names = {n: str(gradients[n]) for n in b.params}
        got = jax.jit(jrnn.to_jax(full, names.values()))(_blobs(b))
        grads.append({n: got[g] for n, g in names.items()})
    for name in grads[0]:
        np.testing.assert_allclose(grads[0][name], grads[1][name], rtol=1e-5, atol=1e-6)
    again = jrnn.add_gradients(nets[1].build(), ["loss"])[0]
    rnn = next(op for op in again.ops if op.type == "RecurrentNetwork")
    assert [op.type for op in rnn.arg("backward_step_net").ops].count(
        "FC"
    ) == 2  # both layers' gates are recomputed


@pytest.fixture(scope="module")
def padded():
    """The loss and every gradient of a padded batch, both ways, as one jitted function of the input."""
    b, _ = _build([4, 3], outputs_with_grads=(0, 1, 3))
    net, blobs = b.build(), _blobs(b)
    wrt = [n for n in blobs if n != "lengths"]
    full, gradients = jrnn.add_gradients(net, ["loss"])
    by_net = jrnn.to_jax(full, ["loss", *(str(gradients[n]) for n in wrt)])
    loss = jrnn.to_jax(net, ["loss"])

    @jax.jit
    def both(x):
        given = {n: blobs[n] for n in wrt} | {"input": x}
        by_jax = jax.value_and_grad(lambda p: loss({**p, "lengths": LENGTHS})["loss"])(given)
        return by_jax, by_net({**given, "lengths": LENGTHS})

    return both


@pytest.mark.sample("inf")
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_padding_never_shows(padded, poison):
    clean = np.random.default_rng(1).standard_normal((T, N, D)).astype(np.float32)
    dirty = clean.copy()
    for n, length in enumerate(LENGTHS):
        dirty[length:, n] = poison
    for one, two in zip(jax.tree.leaves(padded(clean)), jax.tree.leaves(padded(dirty))):
        assert np.isfinite(two).all()
        np.testing.assert_array_equal(one, two)


def test_lengths_hold_or_drop_the_state():
    for drop in (False, True):
        b, out = _build(4, drop_states=drop)
        got = jrnn.run_net(b.build(), _blobs(b))
        every, last = got[out.hidden_all], got[out.hidden_last]
        for n, length in enumerate(LENGTHS):
            held = np.zeros(4) if drop else (every[length - 1, n] if length else _blobs(b)["h0"][n])
            if length < T:
                np.testing.assert_array_equal(
                    every[length:, n], np.broadcast_to(held, (T - length, 4))
                )
            np.testing.assert_array_equal(last[0, n], every[-1, n])


def test_a_sample_does_not_depend_on_its_neighbors():
    b, out = _build([4, 3])
    fn = jax.jit(jrnn.to_jax(b.build(), [out.hidden_all]))
    blobs = _blobs(b)
    whole = fn(blobs)[out.hidden_all]
    batched = ("input", "lengths", "h0", "c0", "h1", "c1")
    alone = {
        k: (v[:, 2:3] if k == "input" else v[2:3]) if k in batched else v for k, v in blobs.items()
    }
    np.testing.assert_allclose(fn(alone)[out.hidden_all][:, 0], whole[:, 2], atol=1e-6)


def test_no_steps_at_all():
    b, out = _build(4, lengths=False, outputs_with_grads=(1,))
    blobs = _blobs(b) | {"input": np.zeros((0, N, D), np.float32)}
    full, gradients = jrnn.add_gradients(b.build(), ["loss"])
    got = jrnn.run_net(full, blobs)
    assert got[out.hidden_all].shape == (0, N, 4)
    np.testing.assert_array_equal(got[out.hidden_last][0], blobs["h0"])
    np.testing.assert_array_equal(got[str(gradients["h0"])], blobs["weight1"][0])
    assert not got[str(gradients["lstm/gates_t_w"])].any()


def test_forward_only_has_no_backward_step():
    b, _ = _build(4, forward_only=True)
    rnn = next(op for op in b.ops if op.type == "RecurrentNetwork")
    assert rnn.arg("backward_step_net") is None and rnn.arg("param") is None
    with pytest.raises(jrnn.errors.GradientError, match="built forward_only"):
        jrnn.add_gradients(b.build(), ["loss"])


def test_wrong_number_of_initial_states_is_explained():
    b = jrnn.NetBuilder("net")
    with pytest.raises(jrnn.errors.NetError, match="has 4 states.*was given 2"):
        cells.LSTM(b, b.input("x"), None, [b.input("h"), b.input("c")], 3, [4, 4], "lstm")
