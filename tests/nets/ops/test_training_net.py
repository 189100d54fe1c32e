"""Whole nets that Caffe2 wrote and ran: training steps with their updates, and a convolutional predictor."""

from __future__ import annotations

import io
import lzma
import pathlib

import jax
import numpy as np
import pytest

import jrnn

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "nets"


def read(name):
    with np.load(io.BytesIO(lzma.decompress((GOLDEN / f"{name}.npz.xz").read_bytes()))) as z:
        return dict(z)


def entries(golden, kind):
    return {k.removeprefix(kind + "|"): v for k, v in golden.items() if k.startswith(kind + "|")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_caffe2_training_net_is_one_jitted_step(optimizer):
    """100 steps of forward, backward and updates, dense and sparse, follow Caffe2's losses and end at its parameters."""
    golden = read(f"train_{optimizer}")
    net = jrnn.read_net(golden["train_net"].tobytes())
    state = jrnn.run_net(jrnn.read_net(golden["init_net"].tobytes()), {})
    written = {o for op in net.ops for o in op.outputs}
    updated = [name for name in state if name in written]
    fn = jrnn.to_jax(net, ["loss", *updated])
    batches = entries(golden, "batch")

    @jax.jit
    def train(state):
        def step(state, k):
            outputs = fn(
                {**state, **{name: jax.numpy.asarray(v)[k % len(v)] for name, v in batches.items()}}
            )
            return {**state, **{name: outputs[name] for name in updated}}, outputs["loss"]

        return jax.lax.scan(step, state, jax.numpy.arange(len(golden["losses"])))

    with jax.enable_x64(True):  # the counter of iterations has 64 bits
        state, losses = train(state)
    assert golden["losses"][-1] < 0.5 * golden["losses"][0]
    np.testing.assert_allclose(losses, golden["losses"], rtol=1e-3, atol=1e-4)
    final = entries(golden, "final")
    assert set(updated) <= set(final)
    for name in updated:
        np.testing.assert_allclose(state[name], final[name], rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.exhaustive
def test_exported_image_net_predicts_as_caffe2_does():
    golden = read("image_net")
    net = jrnn.read_net(golden["predict_net"].tobytes())
    weights = jrnn.run_net(jrnn.read_net(golden["init_net"].tobytes()), {})
    assert len(net.ops) >= 30
    wanted = entries(golden, "out")
    actual = jax.jit(jrnn.to_jax(net, list(wanted)))({**weights, "data": golden["data"]})
    for name, want in wanted.items():
        np.testing.assert_allclose(actual[name], want, rtol=1e-4, atol=1e-4, err_msg=name)
    eager = jrnn.run_net(net, {**weights, "data": golden["data"]})
    np.testing.assert_allclose(eager["prob"], wanted["prob"], rtol=1e-4, atol=1e-5)
