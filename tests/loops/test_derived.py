"""A derived program is compared with its loop on random numbers before it is used: faults that are planted are found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from planted_faults import FAULTS

import jrnn
from jrnn import jaxprs, nn
from jrnn.jaxprs.by_numpy import evaluate_by_numpy
from jrnn.jaxprs.resized import resized
from jrnn.loops.ir import ScanParams, derived, observers

HERE = Path(__file__).parent


def said(folder, kind):
    paths = os.pathsep.join([str(folder), str(HERE), str(HERE.parent)])
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    program = [sys.executable, str(HERE / "planted_faults.py"), kind]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_has_its_line(fault):
    """Of the others, a quick run plants two only; so it would not notice that a line has changed."""
    text = (Path(jrnn.__file__).parent / "loops" / FAULTS[fault]["file"]).read_text()
    assert text.count(FAULTS[fault]["line"]) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", sorted({fault["kind"] for fault in FAULTS.values()}))
def test_right_programs_agree_with_their_loops(kind):
    text = said(Path(jrnn.__file__).parents[1], kind)
    assert "on random numbers" not in text
    assert "not compared" not in text


@pytest.mark.sample("rows in the order of updates", "values computed from the wrong ones")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, tmp_path):
    kind, file, line, wrong = FAULTS[fault].values()
    shutil.copytree(
        Path(jrnn.__file__).parent, tmp_path / "jrnn", ignore=shutil.ignore_patterns("__pycache__")
    )
    changed = tmp_path / "jrnn" / "loops" / file
    changed.write_text(changed.read_text().replace(line, wrong))
    assert "on random numbers" in said(tmp_path, kind)


def test_an_unverified_scan_compares_nothing(monkeypatch):
    asked = []
    monkeypatch.setattr(derived, "validate", lambda *args: asked.append(args) or (True, ""))

    def slope():
        def loss(w):
            return jrnn.scan(
                lambda h, x: (jnp.tanh(h @ w + x),) * 2, jnp.ones((2, 3)), jnp.ones((4, 2, 3))
            )[1]

        jax.make_jaxpr(jax.grad(lambda w: jnp.sum(loss(w))))(jnp.eye(3))

    with jrnn.loops.unverified():
        slope()
    assert not asked
    slope()
    assert asked


def test_chunks_of_a_layer_that_carries_a_maximum_are_compared(in_chunks_always):
    layer = nn.MLSTM(8, num_heads=2, rngs=nnx.Rngs(0))
    loss = lambda params, x: jnp.sum(layer.apply(params, x)[0])  # noqa: E731
    with observers.collected() as plans:
        jax.jit(jax.grad(loss)).lower(layer.params(), jnp.ones((64, 2, 8)))
    text = "\n".join(plan.text() for plan in plans)
    assert "solved in chunks" in text and "not compared" not in text


def test_a_loop_that_cannot_be_compared_is_tried_once():
    step = jax.make_jaxpr(lambda c, x: (c * x + 0.125, c))(1.0, 1.0)
    tried = []

    def derive(scan):
        tried.append(scan)
        raise ValueError

    counts = []
    for _ in range(2):
        agrees, note = derived.validate(ScanParams(step, 0, 1, 2, False), "none", derive)
        assert agrees and "raises ValueError" in note
        counts.append(len(tried))
    assert counts[1] == counts[0] > 0


def test_a_step_is_the_same_over_smaller_arrays():
    """Axes of one meaning have one size, and axes that are counted, such as that of a split, keep theirs."""

    def step(w, h, x):
        z, gates = jnp.tanh(h @ w + x[:, :64]), jnp.split(x, 2, 1)
        return z * jnp.exp(gates[1]) - jnp.eye(64)[3:4], z.sum(1)

    program = jaxprs.trace(
        step, [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(64, 64), (32, 64), (32, 128)]]
    )
    run, avals = resized(program, [(program.invars[1], program.outvars[0])])
    assert [a.shape[0] < 13 for a in avals] == [False, True, True]
    assert avals[1].shape[1] == 64
    given = [np.random.default_rng(i).normal(size=a.shape) for i, a in enumerate(avals)]
    small = jax.make_jaxpr(run)(*avals)
    for a, b in zip(
        evaluate_by_numpy(small.jaxpr, small.consts, given), step(*map(jnp.asarray, given))
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fn", [lambda p, v, s: jnp.linalg.cholesky(p), lambda p, v, s: jnp.sqrt(s - v @ p @ v)]
)
def test_numbers_are_found_for_which_results_are_finite(fn):
    """NaN agrees with NaN: a comparison of covariances that are not positive definite would find nothing."""
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 4), (4,), ())]
    assert derived.disagreement(lambda *args: [fn(*args)], lambda *args: [fn(*args)], avals) is None
    assert (
        derived.disagreement(lambda *args: [2 * fn(*args)], lambda *args: [fn(*args)], avals)
        is not None
    )


def test_functions_that_differ_in_a_tangent_only_disagree():
    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    sine.defjvp(lambda p, t: (jnp.sin(p[0]), -jnp.cos(p[0]) * t[0]))
    avals = [jax.ShapeDtypeStruct((3,), jnp.float32)]
    assert derived.disagreement(lambda x: [jnp.sin(x)], lambda x: [jnp.sin(x)], avals) is None
    assert derived.disagreement(lambda x: [sine(x)], lambda x: [jnp.sin(x)], avals).startswith(
        "tangent of result 0"
    )
    with pytest.raises(derived.TooLarge):
        derived.disagreement(
            *2 * [lambda x: [x]], [jax.ShapeDtypeStruct((2000, 2000), jnp.float32)]
        )
