"""One export for several platforms, and programs divided among devices: each loop keeps the passes of its target."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jrnn
from jrnn import nn
from jrnn.loops.ir import observers

pytestmark = pytest.mark.usefixtures("rewritten")

ALL = ("cpu", "cuda", "tpu")
DIVIDED = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jrnn import scan
from eager import eager_passes
from jrnn.loops.ir import observers

assert jax.device_count() == 8
weights = [jnp.asarray(np.random.RandomState(seed).randn(4, 4), jnp.float32) for seed in (0, 1)]
x = np.random.RandomState(1).randn(5, 8, 4).astype(np.float32)

def loss(weights, x):
    def step(h, x):
        return (h := jnp.tanh(x @ weights[0] + h @ weights[1])), h
    return jnp.sum(scan(step, jnp.zeros_like(x[0]), x)[1] ** 2)

def seen(fn, *args):
    with observers.collected() as plans, eager_passes(0):
        gradient = jax.jit(fn)(*args)
    summary = [
        [p.strategy, p.loop.reverse, p.contractions, len(p.hoisted), len(p.accumulated), p.target.devices] for p in plans
    ]
    return summary, [np.asarray(g) for g in gradient]

alone, wanted = seen(jax.grad(loss), weights, x)
mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
mapped = jax.shard_map(
    lambda w, x: jax.lax.psum(loss(w, x), "batch"), mesh=mesh, in_specs=(P(), P(None, "batch")), out_specs=P(),
    check_vma=False,  # else JAX sums the gradients of weights over the devices at each step, inside of the loop
)
in_map, first = seen(jax.grad(mapped), weights, x)
mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(mesh):
    put = lambda v, *spec: jax.device_put(v, NamedSharding(mesh, P(*spec)))
    explicit, second = seen(jax.grad(loss), [put(w) for w in weights], put(x, None, "batch"))
for found in (first, second):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)
print(json.dumps([alone, in_map, explicit]))
"""


def exported(fn, *args):
    """The plans of one export of a function for all platforms, which is called here."""
    with observers.collected() as plans:
        program = jax.export.export(jax.jit(fn), platforms=ALL)(*args)
    assert program.platforms == ALL and {plan.target.platform for plan in plans} == set(ALL)
    assert all(plan.node is not None for plan in plans), "no loop is left to jax.lax.scan"
    if jax.default_backend() == "cpu":
        for actual, wanted in zip(
            jax.tree.leaves(program.call(*args)), jax.tree.leaves(fn(*args)), strict=True
        ):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)
    return plans


@pytest.mark.exhaustive
def test_a_module_and_its_gradient_in_one_export():
    graph, state = nnx.split(nn.LSTM(3, 4, rngs=nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(state)

    def loss(leaves, x):
        return jnp.sum(nnx.merge(graph, jax.tree.unflatten(tree, leaves))(x)[0] ** 2)

    plans = exported(jax.grad(loss), leaves, jnp.ones((5, 2, 3)))
    directions = {(plan.target.platform, plan.loop.reverse) for plan in plans}
    assert directions == {(platform, reverse) for platform in ALL for reverse in (False, True)}
    assert all(plan.contractions == 1 for plan in plans)


@pytest.mark.exhaustive
def test_a_net_in_one_export():
    b = jrnn.NetBuilder("net")
    x, lengths = b.input("x"), b.input("lengths")
    jrnn.nets.cells.LSTM(b, x, lengths, None, 3, 4, "lstm")
    params = jrnn.run_net(b.build_init(), {}, key=jax.random.key(0))
    data = {"x": jnp.ones((5, 2, 3)), "lengths": jnp.array([5, 2], jnp.int32)}
    plans = exported(jrnn.to_jax(b.build()), {**params, **data})
    assert len(plans) == len(ALL)


@pytest.mark.exhaustive
def test_divided_training_keeps_the_passes():
    """Over 8 devices, by `jax.shard_map` and by explicit sharding: as many values are hoisted and summed as on one."""
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", DIVIDED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    alone, *divided = json.loads(done.stdout)
    assert [plan[:3] for plan in alone] == [["scan", False, 1], ["scan", True, 1]]
    for plans in divided:
        assert [plan[:5] for plan in plans] == [plan[:5] for plan in alone]
    assert alone[1][4] == 2, "the gradients of the weights are summed after the loop"
