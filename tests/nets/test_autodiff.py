"""Gradients as nets: the same operators and names as Caffe2's, and right where Caffe2 raises or is wrong."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn import Net
from jrnn.nets import GradientSlice, Op

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "gradients.npz")
NAMES = sorted({k.split("|")[0] for k in GOLDEN.files})


def _seeds(full: Net, forward: Net) -> dict:
    """What the recorded net was differentiated by: the seeds after the forward part, or the gradients given from outside."""
    seeds = {}
    for op in full.ops[len(forward.ops) :]:
        if op.type != "ConstantFill":
            break
        seeds[op.inputs[0]] = None
    return seeds or {"y": "y_given"}


def _signature(op: Op) -> tuple:
    args = sorted((a.name, a.kind, a.value) for a in op.args if not isinstance(a.value, Net))
    device = op.device_option.extra_info if op.device_option else ()
    nets = [[_signature(o) for o in net.ops] for _, net in op.sub_nets()]
    return op.type, op.inputs, op.outputs, args, op.is_gradient, device, nets


@pytest.mark.parametrize("name", NAMES)
def test_backward_operators_are_caffe2s(name):
    forward = jrnn.read_net(GOLDEN[name + "|forward"].tobytes())
    want = jrnn.read_net(GOLDEN[name + "|full"].tobytes())
    full, gradients = jrnn.add_gradients(forward, _seeds(want, forward))
    assert [_signature(o) for o in full.ops] == [_signature(o) for o in want.ops]
    for line in str(GOLDEN[name + "|gradients"]).splitlines():
        blob, *names = line.split()
        assert gradients[blob] == (names[0] if len(names) == 1 else GradientSlice(*names))


def _check(net: Net, blobs: dict, ys, wrt=None):
    """The net's gradients against JAX's, in float64; returns the differentiated net and the names of its gradients."""
    with jax.enable_x64(True):
        blobs = {
            k: np.asarray(v, np.float64) if np.asarray(v).dtype.kind == "f" else v
            for k, v in blobs.items()
        }
        wrt = wrt or [
            k for k, v in blobs.items() if v.dtype.kind == "f" and not k.endswith("_given")
        ]
        full, gradients = jrnn.add_gradients(net, ys)
        got = jrnn.run_net(full, blobs)
        targets = ys if isinstance(ys, dict) else dict.fromkeys(ys)
        fn = jrnn.to_jax(net, list(targets))

        def total(p):
            out = fn({**blobs, **p})
            return sum(
                jnp.sum(out[y] * (1.0 if g is None else blobs[g])) for y, g in targets.items()
            )

        want = jax.grad(total)({k: jnp.asarray(blobs[k]) for k in wrt})
        for k in wrt:
            np.testing.assert_allclose(
                got[str(gradients[k])], want[k], rtol=1e-10, atol=1e-10, err_msg=k
            )
    return full, gradients


RNG = np.random.default_rng(0)


def _blob(*shape):
    return RNG.standard_normal(shape)


def test_gradient_whose_name_has_two_characters_is_dense():
    net = Net("n", (Op.of("Tanh", ["x"], ["y"]),))
    full, _ = jrnn.add_gradients(net, {"y": "dy"})
    assert full.ops[1].inputs == ("y", "dy")


def test_in_place_product_reads_the_value_before():
    net = Net("n", (Op.of("Mul", ["x", "z"], ["x"]),))
    _check(net, {"x": _blob(3), "z": _blob(3)}, ["x"])


def test_chain_of_in_place_operators():
    ops = [Op.of("Tanh", ["x"], ["y"])] + [
        Op.of(t, ["y"], ["y"]) for t in ("Sigmoid", "Tanh", "Relu")
    ]
    _check(Net("n", tuple(ops)), {"x": _blob(2, 3)}, ["y"])


def test_square_leaves_the_arriving_gradient_alone():
    ops = (Op.of("Sqr", ["x"], ["s"]), Op.of("Sum", ["s", "w"], ["y"]))
    _check(Net("n", ops), {"x": _blob(4), "w": _blob(4)}, ["y"])


def test_given_gradient_of_a_blob_that_is_used_further_is_added():
    ops = (Op.of("Tanh", ["x"], ["h"]), Op.of("Sigmoid", ["h"], ["l"]))
    blobs = {"x": _blob(3), "h_given": _blob(3), "l_given": _blob(3)}
    _check(Net("n", ops), blobs, {"h": "h_given", "l": "l_given"})


def test_given_gradient_under_the_usual_name_is_added():
    ops = (
        Op.of("Tanh", ["x"], ["h"]),
        Op.of("Sigmoid", ["h"], ["l"]),
        Op.of("Mul", ["l", "h"], ["y"]),
    )
    net = Net("n", ops)
    with jax.enable_x64(True):
        blobs = {"x": _blob(3), "h_grad": _blob(3), "y_given": _blob(3)}
        full, gradients = jrnn.add_gradients(net, {"h": "h_grad", "y": "y_given"})
        got = jrnn.run_net(full, blobs)[gradients["x"]]
        fn = jrnn.to_jax(net, ["h", "y"])

        def total(x):
            out = fn({"x": x})
            return jnp.sum(out["h"] * blobs["h_grad"]) + jnp.sum(out["y"] * blobs["y_given"])

        np.testing.assert_allclose(got, jax.grad(total)(jnp.asarray(blobs["x"])), rtol=1e-10)


def test_a_gradient_that_was_passed_through_is_not_overwritten():
    # the in-place sum passes x_grad on as a term of the gradient of the first x, of which Tanh writes the other term
    ops = (
        Op.of("Tanh", ["x"], ["v"]),
        Op.of("Sum", ["x"], ["x"]),
        Op.of("Sigmoid", ["x"], ["y"]),
        Op.of("Mul", ["y", "v"], ["z"]),
    )
    _check(Net("n", ops), {"x": _blob(3)}, ["z"])


def test_shared_gradient_blob_is_not_overwritten():
    # both terms of the in-place sum take over the blob x_grad, and the gradient of the first x must not overwrite it
    ops = (
        Op.of("Tanh", ["x"], ["x"]),
        Op.of("Sum", ["x", "w"], ["x"]),
        Op.of("Sigmoid", ["x"], ["y"]),
        Op.of("Tanh", ["w"], ["v"]),
        Op.of("Mul", ["y", "v"], ["z"]),
    )
    _check(Net("n", ops), {"x": _blob(3), "w": _blob(3)}, ["z"])


def test_blob_named_like_a_gradient_is_left_alone():
    ops = (
        Op.of("Mul", ["x", "x_grad"], ["h"]),
        Op.of("Tanh", ["h"], ["y"]),
        Op.of("Mul", ["y", "x_grad"], ["z"]),
    )
    full, gradients = _check(
        Net("n", ops), {"x": _blob(3), "x_grad": _blob(3)}, ["z"], ["x", "x_grad"]
    )
    assert gradients["x"] != "x_grad"


def test_overwritten_blob_without_reading_it_does_not_inherit_its_gradient():
    ops = (
        Op.of("Tanh", ["x"], ["h"]),
        Op.of("Sigmoid", ["h"], ["a"]),
        Op.of("Sigmoid", ["w"], ["h"]),
        Op.of("Mul", ["h", "a"], ["y"]),
    )
    _check(Net("n", ops), {"x": _blob(3), "w": _blob(3)}, ["y"])


def test_output_of_split_that_nothing_uses():
    ops = (Op.of("Split", ["x"], ["p", "q"], axis=1), Op.of("Tanh", ["p"], ["y"]))
    _check(Net("n", ops), {"x": _blob(2, 4)}, ["y"])


def test_sparse_gradients_of_one_table_are_joined():
    ops = (
        Op.of("Gather", ["t", "i"], ["u"]),
        Op.of("Gather", ["t", "j"], ["v"]),
        Op.of("Mul", ["u", "v"], ["y"]),
    )
    blobs = {
        "t": _blob(5, 2),
        "i": np.array([1, 1, 4], np.int32),
        "j": np.array([0, 1, 2], np.int32),
    }
    net = Net("n", ops)
    full, gradients = jrnn.add_gradients(net, ["y"])
    with jax.enable_x64(True):
        got = jrnn.run_net(full, blobs)
        dense = np.zeros((5, 2))
        np.add.at(dense, got[gradients["t"].indices], got[gradients["t"].values])
        want = jax.grad(lambda t: jrnn.to_jax(net)({**blobs, "t": t})["y"].sum())(
            jnp.asarray(blobs["t"])
        )
        np.testing.assert_allclose(dense, want, rtol=1e-12)


def test_stop_gradient_ends_the_path():
    ops = (
        Op.of("Tanh", ["x"], ["h"]),
        Op.of("StopGradient", ["h"], ["s"]),
        Op.of("Mul", ["s", "w"], ["y"]),
    )
    _, gradients = jrnn.add_gradients(Net("n", ops), ["y"])
    assert "x" not in gradients and gradients["w"] == "w_grad"


def test_same_program_twice_gives_the_same_net():
    ops = tuple(Op.of("Mul", [f"x{k}", f"x{k + 1}"], [f"x{k + 2}"]) for k in range(20))
    first, second = (jrnn.add_gradients(Net("n", ops), ["x21"])[0] for _ in range(2))
    assert jrnn.nets.serialize_net(first) == jrnn.nets.serialize_net(second)


def test_unknown_blob_is_named_with_its_neighbors():
    with pytest.raises(jrnn.errors.GradientError, match="no blob 'loss'.*did you mean 'losses'"):
        jrnn.add_gradients(Net("n", (Op.of("Tanh", ["x"], ["losses"]),)), ["loss"])


def test_operator_without_gradient_is_named():
    ops = (Op.of("Tanh", ["x"], ["h"]), Op.of("ArgMax", ["h"], ["k"]))
    with pytest.raises(
        jrnn.errors.GradientError, match="op #1 ArgMax -> 'k' in net 'n'.*has no gradient"
    ):
        jrnn.add_gradients(Net("n", ops), ["k"])


def test_output_without_gradient_counts_as_zero():
    ops = (
        Op.of("LSTMUnit", ["h", "c", "g", "t"], ["h1", "c1"], sequence_lengths=0),
        Op.of("Sigmoid", ["h1"], ["y"]),
    )
    blobs = {
        "h": _blob(1, 2, 3),
        "c": _blob(1, 2, 3),
        "g": _blob(1, 2, 12),
        "t": np.zeros(1, np.int32),
    }
    _check(Net("n", ops), blobs, ["y"], ["c", "g"])


def test_gradient_that_the_operator_would_drop_is_an_error():
    ops = (
        Op.of("SoftmaxWithLoss", ["x", "labels"], ["p", "loss"]),
        Op.of("Sqr", ["p"], ["s"]),
    )
    with pytest.raises(
        jrnn.errors.GradientError, match="op #0 SoftmaxWithLoss.* a gradient arrives at 'p'"
    ):
        jrnn.add_gradients(Net("n", ops), ["s"])


def test_mixed_sparse_and_dense_gradients_are_refused():
    ops = (
        Op.of("Gather", ["t", "i"], ["u"]),
        Op.of("Tanh", ["t"], ["v"]),
        Op.of("Mul", ["u", "v"], ["y"]),
    )
    with pytest.raises(
        jrnn.errors.GradientError, match="'t' are partly sparse and partly dense.*dense_gradient=1"
    ):
        jrnn.add_gradients(Net("n", ops), ["y"])


def test_forward_operators_are_kept_as_they_are():
    ops = (dataclasses.replace(Op.of("Tanh", ["x"], ["y"]), engine="E", name="op"),)
    full, _ = jrnn.add_gradients(Net("n", ops), ["y"])
    assert full.ops[0] == ops[0]
    assert full.ops[-1].engine == "E" and full.ops[-1].is_gradient
