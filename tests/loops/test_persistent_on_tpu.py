"""Loops lowered for TPUs, on a machine that has none: what becomes a kernel, and what happens to the rest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import gru_step, lstm_step
from jax.sharding import PartitionSpec as Spec

from jrnn.loops import backends, scan
from jrnn.loops.kernels.persistent import mosaic
from jrnn.loops.loop import mark, recorder, strict_passes
from jrnn.loops.plans import Target
from jrnn.loops.rules import lowering

T, N, D, H = 20, 8, 16, 128
CHIP = "TPU v5 lite"


def params(gates, dtype=jnp.float32):
    sizes = dict(wx=(D, gates * H), wh=(H, gates * H), b=(1, gates * H))
    return {name: jnp.full(size, 0.01, dtype) for name, size in sizes.items()}


def loss(p, x, make=lstm_step, **options):
    zeros = jnp.zeros((N, H), x.dtype)
    last, ys = scan(make(p), (zeros, zeros) if make is lstm_step else zeros, x, **options)
    return jnp.sum(ys.astype(jnp.float32) ** 2)


def lowered(fn, *args, platforms=("tpu",)):
    with recorder.recorded() as plans:
        text = jax.jit(fn).trace(*args).lower(lowering_platforms=platforms).as_text()
    return text, plans


@pytest.mark.sample("float32-gru_step-3")
@pytest.mark.parametrize("make, gates", [(lstm_step, 4), (gru_step, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_train_step_is_two_kernels(make, gates, dtype):
    x, lengths = jnp.ones((T, N, D), dtype), jnp.arange(N) * 2
    train = jax.value_and_grad(lambda p, x: loss(p, x, make, lengths=lengths))
    text, plans = lowered(train, params(gates, dtype), x)
    assert [plan.executor for plan in plans] == ["persistent", "persistent"]
    assert (text.count("tpu_custom_call"), text.count("stablehlo.while")) == (2, 0)
    assert "one kernel of 2 blocks of 10 steps; on the chip stay" in str(plans[0])


def test_float32_where_64_bits_are_enabled(x64):
    text, (plan,) = lowered(loss, params(4), jnp.ones((37, N, D), jnp.float32))  # the last block is shorter
    assert plan.executor == "persistent" and "tpu_custom_call" in text


def test_one_artifact_for_several_platforms():
    exported = jax.export.export(jax.jit(loss), platforms=("cpu", "cuda", "tpu"))(params(4), jnp.ones((T, N, D)))
    text = exported.mlir_module()
    assert (text.count("tpu_custom_call"), text.count("stablehlo.while")) == (1, 2)
    given = params(4), jnp.ones((T, N, D))
    np.testing.assert_allclose(exported.call(*given), loss(*given), rtol=1e-6)


def plan_for(kind, width, rows=8, deep=1, platform="tpu", **options):
    def step(w, h, x):
        for _ in range(deep):
            h = jnp.tanh(h @ w + x)
        return h, h

    w, x = jax.ShapeDtypeStruct((width, width), jnp.float32), jax.ShapeDtypeStruct((T, rows, width), jnp.float32)
    (loop,) = lowering.steps_of(lambda w, x: scan(lambda h, x: step(w, h, x), x[0], x), w, x)
    return backends.plan(loop, Target(platform, kind=kind), mark.Options(**options))


def test_the_plan_says_what_does_not_fit():
    assert plan_for(CHIP, 5000).executor == "persistent"
    assert plan_for("", 1000).executor == "persistent"
    for plan in (plan_for("", 5000), plan_for("TPU v4", 5000)):
        assert plan.executor == "scan"
        assert "not persistent: it needs 5" in str(plan) and "has 12,582,912 for it" in str(plan)
    assert "a TPU v3 is too old" in str(plan_for("TPU v3", 128))
    assert "a step computes" in str(plan_for(CHIP, 256, rows=2048, deep=6))


def test_where_auto_takes_it():
    assert plan_for(CHIP, 128, executor="scan").executor == "scan"
    assert plan_for(CHIP, 128, platform="cpu").executor == plan_for(CHIP, 128, platform="cuda").executor == "scan"


def test_constants_of_products_are_kept_in_bfloat16_where_jax_would_round_them():
    def bytes_of_constants(precision):
        with jax.default_matmul_precision(precision):
            return int(str(plan_for(CHIP, 1024)).split("on the chip stay ")[1].split(" bytes")[0].replace(",", ""))

    assert [bytes_of_constants(name) for name in ("default", "BF16_BF16_F32", "float32")] == [1 << 21, 1 << 21, 1 << 22]


def test_an_error_while_lowering_leaves_the_rewritten_loop(monkeypatch):
    def fail(*args, **options):
        raise NotImplementedError("no such operation")

    monkeypatch.setattr(mosaic, "run", fail)
    args = params(4), jnp.ones((T, N, D))
    with strict_passes(False):
        text, (plan,) = lowered(loss, *args)
    assert plan.executor == "scan" and text.count("stablehlo.while") == 1
    assert "NotImplementedError in a pass (please report it): no such operation" in str(plan)
    with pytest.raises(NotImplementedError, match="no such operation"):
        lowered(lambda p, x: loss(p, x * 1), *args)


def test_an_error_while_planning_leaves_the_rewritten_loop(monkeypatch):
    monkeypatch.setattr(mosaic, "padded_bytes", lambda *args: 1 // 0)
    with strict_passes(False):
        plan = plan_for(CHIP, 128)
    assert plan.executor == "scan" and "not persistent: ZeroDivisionError (please report it)" in str(plan)
    with pytest.raises(ZeroDivisionError):
        plan_for(CHIP, 128)


def test_a_program_divided_among_devices():
    mesh = jax.sharding.AbstractMesh((8,), ("n",))
    rows = jax.ShapeDtypeStruct((T, 8, H), jnp.float32, sharding=jax.NamedSharding(mesh, Spec(None, "n")))
    w = jnp.eye(H)

    def run(x):
        return scan(lambda h, x: (jnp.tanh(h @ w + x), h), x[0], x)[1]

    text, (plan,) = lowered(run, rows)
    assert plan.executor == "scan" and "divided among devices" in str(plan)
    inside = jax.shard_map(run, mesh=mesh, in_specs=Spec(None, "n"), out_specs=Spec(None, "n"))
    text, (plan,) = lowered(inside, rows)
    assert plan.executor == "persistent" and "tpu_custom_call" in text
