"""Recurrent networks of every wire version: built by hand from what each wrote, they agree with the current one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn.errors import NetError, OpError
from jrnn.nets.ir import Arg, Net, Op

T, N, D = 4, 2, 3


def _current() -> Op:
    """h = tanh(FC(h_prev) + x), with the backward step net that the builder makes."""
    b = jrnn.NetBuilder("net")
    step = jrnn.NetBuilder("step", parent=b)
    b.input("w"), b.input("bias")
    product = step.FC([step.input("h_prev"), "w", "bias"], "product", axis=2)
    step.Tanh(step.Sum([product, step.input("x_t")], "total"), "h")
    inputs, states = [("x_t", b.input("x"))], [("h_prev", b.input("h0"))]
    jrnn.recurrent_net(b, step.build(outputs=["h"]), inputs, states, {"h_prev": "h"}, scope="rnn")
    return b.ops[0]


def _text(op: Op, **changes) -> Op:
    """The operator with its step nets as text, and of type rnn."""
    nets = {
        name: Arg(name, dataclasses.replace(op.arg(name), type="rnn"), "s")
        for name in ("step_net", "backward_step_net")
    }
    return op.with_args({"enable_rnn_executor": None, **nets, **changes})


def _names_for_gradients(op: Op) -> Op:
    """Alias operators in the backward step net that give parameter gradients the names they have outside."""
    net = op.arg("backward_step_net")
    outside = [op.inputs[k] + "_grad" for k in op.arg("param")]
    renamed = {g.decode(): f"inner_{g.decode()}" for g in op.arg("param_grads")}
    net = jrnn.nets.graph.rename_blobs(net, renamed)
    aliases = tuple(
        Op.of("Alias", [renamed[g.decode()]], [o]) for g, o in zip(op.arg("param_grads"), outside)
    )
    return op.with_args(
        {"backward_step_net": dataclasses.replace(net, ops=net.ops + aliases), "param_grads": None}
    )


def version_5() -> Op:
    return _text(_current())


def version_4() -> Op:
    op = _names_for_gradients(_current())
    return _text(dataclasses.replace(op, outputs=(*op.outputs[:-1], "step_workspaces_0")))


def version_3() -> Op:
    return version_4().with_args({"recompute_blobs_on_backward": None})


def version_2() -> Op:
    """Scratch blobs of every step are linked to sequences outside; no step workspaces."""
    op = _names_for_gradients(_current())
    scratch = {"link_internal": "product", "link_external": "rnn/product", "link_offset": 0}
    backward = {"internal": "product", "external": "rnn/product", "offset": 0}
    changes = {name: [*op.arg(name), value] for name, value in scratch.items()}
    changes |= {
        f"backward_link_{k}": [*op.arg(f"backward_link_{k}"), v] for k, v in backward.items()
    }
    changes |= {
        "scratch": ["rnn/product"],
        "backward_scratch": ["rnn/product"],
        "scratch_sizes": [D],
        "recurrent_inputs": ["h0"],
        "recurrent_input_ids": op.arg("initial_recurrent_state_ids"),
        "initial_recurrent_state_ids": None,
        "outputs_with_grads": None,
        "recompute_blobs_on_backward": None,
    }
    return _text(dataclasses.replace(op, outputs=op.outputs[:-1]), **changes)


def version_1() -> Op:
    op, now = version_2(), _current()
    turned = {"alias_dst": op.arg("alias_dst")[::-1], "alias_offset": [-1, 1]}  # last before all
    return op.with_args(
        {
            **turned,
            "param": [now.inputs[k] for k in now.arg("param")],
            "param_gradient": [now.inputs[k] + "_grad" for k in now.arg("param")],
            "recurrent_sizes": [D],
            "recurrent_input_ids": None,
            "input_gradient_ids": [0],
            "backward_alias_src": ["rnn/h_prev_states_grad"],
            "backward_alias_dst": ["h0_grad"],
            "backward_alias_offset": [0],
        }
    )


VERSIONS = {f.__name__: f for f in (version_1, version_2, version_3, version_4, version_5)}


@pytest.fixture(scope="module")
def results():
    """Of a net: its outputs, the gradients of its own backward net, and JAX's."""
    rng = np.random.default_rng(0)
    shapes = {"x": (T, N, D), "h0": (1, N, D), "w": (D, D), "bias": (D,)}
    blobs = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    given = rng.standard_normal((T, N, D)).astype(np.float32)

    def run(op: Op):
        net = Net("net", (op,), tuple(blobs))
        full, gradients = jrnn.add_gradients(net, {"h_all": "given"})
        got = jrnn.run_net(full, {**blobs, "given": given})
        fn = jrnn.to_jax(net, ["h_all"])
        by_jax = jax.grad(lambda p: jnp.sum(fn(p)["h_all"] * given))(
            {n: jnp.asarray(v) for n, v in blobs.items()}
        )
        return {"all": got["h_all"], "last": got["h_last"]} | {
            n: got[gradients[n]] for n in blobs
        }, by_jax

    return run


@pytest.mark.sample("version_2")
@pytest.mark.parametrize("version", VERSIONS)
def test_old_versions_agree_with_the_current_one(version, results):
    old = Net("net", (VERSIONS[version](),))
    wire = jrnn.nets.serialize_net(old)
    assert b'type: "rnn"' in wire  # step nets really travel as text
    read = jrnn.read_net(wire)
    want, want_jax = results(_current())
    for op in (
        read.ops[0],
        jrnn.read_net(jrnn.nets.serialize_net(jrnn.nets.graph.upgrade(read))).ops[0],
    ):
        got, got_jax = results(op)
        for name in want:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)
        for name in want_jax:
            np.testing.assert_array_equal(got_jax[name], want_jax[name], err_msg=name)


@pytest.mark.parametrize("version", VERSIONS)
def test_upgraded_nets_have_the_arguments_of_the_current_version(version):
    new = jrnn.nets.graph.upgrade(Net("net", (VERSIONS[version](),))).ops[0]
    extra = {"recompute_blobs_on_backward"}  # empty where it is
    assert {a.name for a in new.args} | extra == {a.name for a in _current().args}
    assert [a.kind for a in new.args if a.name.endswith("step_net")] == ["n", "n"]
    assert len(new.outputs) == 3
    assert jrnn.nets.graph.upgrade(Net("net", (new,))).ops[0] == new


def test_current_nets_are_left_as_they_are():
    net = Net("net", (_current(), Op.of("Tanh", ["h_all"], ["y"])))
    assert jrnn.nets.graph.upgrade(net) == net


def test_gradient_operators_of_version_3_run_as_they_are():
    net = Net("net", (version_3(),), ("x", "h0", "w", "bias"))
    full, gradients = jrnn.add_gradients(net, {"h_all": "given"})
    rng = np.random.default_rng(1)
    shapes = {"x": (T, N, D), "h0": (N, D), "w": (D, D), "bias": (D,), "given": (T, N, D)}
    blobs = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    one, two = (jrnn.run_net(n, blobs) for n in (full, jrnn.nets.graph.upgrade(full)))
    np.testing.assert_array_equal(one[gradients["w"]], two[gradients["w"]])


def test_errors_say_what_is_wrong():
    op = version_1().with_args({"param": ["nowhere"]})
    with pytest.raises(
        NetError, match=r"op #0 RecurrentNetwork.*'param' names 'nowhere', which is no input"
    ):
        jrnn.nets.graph.upgrade(Net("net", (op,)))
    with pytest.raises(OpError, match="'param' names 'nowhere'"):
        jrnn.run_net(Net("net", (op,)), {n: np.zeros((1, 1, 1), np.float32) for n in op.inputs})
    old = dataclasses.replace(version_1(), type="RecurrentNetworkGradient")
    with pytest.raises(NetError, match="before 2017-03; remove it"):
        jrnn.nets.graph.upgrade(Net("net", (old,)))
    with pytest.raises(OpError, match="before 2017-03; remove it"):
        jrnn.run_net(Net("net", (old,)), {n: np.zeros((1, 1, 1), np.float32) for n in old.inputs})
