"""`jrnn.scan(..., axis_name=...)`: time divided among devices, compared with the plain scan of the whole sequence.

Most tests divide time among the copies of a `jax.vmap`, so that they need one device. `segment_cells.py` runs on 8.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import segment_cells
from by_numpy import by_numpy
from plans_of import scan_plans
from segment_cells import everything, example, off, whole

import jrnn
from jrnn import scan
from jrnn.errors import ScanError
from jrnn.loops import Newton
from jrnn.loops.segments import api

D, T = 4, 8
RESETS = jnp.asarray(np.random.default_rng(0).random((T, segment_cells.B)) < 0.3)
MASKS = dict(lengths=jnp.array([8, 5]), resets=RESETS)

pytestmark = pytest.mark.usefixtures("rewritten", "x64", "little_optimization")


def divided(step, w, first, xs, devices=D, **options):
    """The scan over the copies of a `vmap`, each with a part of the inputs, `resets` and `mask`."""
    parts = {k: options.pop(k) for k in ("resets", "mask") if k in options}
    cut = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), (xs, parts))

    def one(xs, parts):
        return scan(functools.partial(step, w), first, xs, axis_name="time", **parts, **options)

    last, ys = jax.vmap(one, axis_name="time")(*cut)
    return jax.tree.map(lambda v: v[0], last), jax.tree.map(
        lambda v: v.reshape(-1, *v.shape[2:]), ys
    )


def stages_of(monkeypatch):
    """A list that gets the kinds of the stages of the scans that are traced."""
    recorded = []
    tell = api._note_stages
    monkeypatch.setattr(
        api,
        "_note_stages",
        lambda stages, *args: (recorded.append([s.kind for s in stages]), tell(stages, *args)),
    )
    return recorded


@pytest.mark.sample("linear-options0-kinds0")
@pytest.mark.parametrize(
    "name, options, kinds",
    [
        ("linear", {"reverse": True}, ["affine"]),
        ("gla", MASKS, ["affine"]),
        ("gated_delta", {**MASKS, "reverse": True}, ["affine"]),
        ("mlstm", {"recompute": "sqrt"}, ["opaque", "affine"]),
        ("min_gru", {"executor": "associative", "mask": ~RESETS}, ["affine"]),
        ("rotation", MASKS, ["affine"]),
        ("rnn", {**MASKS, "reverse": True}, ["opaque"]),
        ("rnn", {"executor": Newton(), "resets": RESETS}, ["opaque"]),
        ("counting", {}, ["overwritten", "opaque", "affine"]),
    ],
)
def test_values_and_gradients(name, options, kinds, monkeypatch):
    stages = stages_of(monkeypatch)
    alone = {k: v for k, v in options.items() if k not in ("executor", "recompute")}
    actual = everything(functools.partial(divided, **options), name, T)
    wanted = everything(functools.partial(whole, **alone), name, T, jit=by_numpy)
    assert off(actual, wanted) < 1e-12
    assert all(f == kinds for f in stages) and stages


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gated_delta", "rnn"])
def test_second_derivatives_and_forward_mode(name):
    def of(loss, args):
        gradient = jax.grad(loss, (0, 1, 2))
        return jax.jvp(gradient, args, args), jax.jvp(loss, args, args)

    actual, wanted = (
        everything(run, name, 4, of) for run in (functools.partial(divided, devices=2), whole)
    )
    assert off(actual, wanted) < 1e-12


@pytest.mark.exhaustive
def test_products_that_overflow_are_not_used():
    """A of a segment is infinite, and its state is 0: one device after the other runs."""
    factors = jnp.concatenate([jnp.full((4, 2), 1e200), jnp.full((4, 2), 0.5)])
    inputs = jnp.concatenate([jnp.zeros((4, 2)), jnp.ones((4, 2))])

    def loss(run, w):
        last, ys = run(
            lambda w, h, x: ((h := w * x[0] * h + x[1]), h), w, jnp.zeros(2), (factors, inputs)
        )
        return jnp.sum(ys) + jnp.sum(last), ys

    actual, wanted = (
        jax.value_and_grad(functools.partial(loss, run), has_aux=True)(1.0)
        for run in (divided, whole)
    )
    assert np.isfinite(wanted[0][1]).all() and off(actual[0], wanted[0]) < 1e-12


def test_large_summaries_go_from_device_to_device(monkeypatch):
    monkeypatch.setattr("jrnn.loops.segments.shard.MAX_GATHERED_BYTES", 0)
    step, w, first, xs = example("gated_delta", T)
    actual, wanted = (
        jax.jit(functools.partial(run, step))(w, first, xs) for run in (divided, whole)
    )
    assert off(actual, wanted) < 1e-12


@pytest.mark.exhaustive
def test_one_device_and_under_vmap_and_without_inputs():
    step, w, first, xs = example("min_gru", T)
    two = jnp.stack([w, 2 * w])
    actual, wanted = (
        jax.vmap(lambda w, run=run: run(step, w, first, xs))(two) for run in (divided, whole)
    )
    assert off(actual, wanted) < 1e-12
    assert off(divided(step, w, first, xs, devices=1), whole(step, w, first, xs)) < 1e-12

    def count(h, _):
        return 2 * h + 1, h

    last, ys = jax.vmap(lambda _: scan(count, 1.0, length=3, axis_name="time"), axis_name="time")(
        jnp.zeros(2)
    )
    assert last.tolist() == [127.0, 127.0] and ys.tolist() == [[1, 3, 7], [15, 31, 63]]


# On 8 devices ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eight():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    folder = Path(__file__).parent
    root = Path(jrnn.__file__).parents[1]
    path = os.pathsep.join(map(str, (folder, folder.parent, root, root / "scripts" / "benchmarks")))
    command = [sys.executable, str(folder / "segment_cells.py")]
    done = subprocess.run(
        command, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_on_eight_devices(eight):
    """Values and gradients with lengths and resets, on meshes of 8 and of 4 x 2, with and without checked types."""
    sizes = {name: size for name, size in eight.items() if name != "sent"}
    assert len(sizes) == 6 and max(sizes.values()) < 1e-12, sizes


def test_bytes_that_are_sent_do_not_depend_on_the_number_of_steps(eight):
    for few, many in eight["sent"]:
        assert few == many > 0


# What it says ---------------------------------------------------------------------------------------------------------


def test_errors():
    step, w, first, xs = example("rnn", T)
    plain = functools.partial(step, w)
    with pytest.raises(ScanError, match="axis_name='time' is no axis here"):
        scan(plain, first, xs, axis_name="time")

    def refusal(step, **options):
        with pytest.raises(ScanError) as caught:
            jax.vmap(
                lambda xs: scan(step, first, xs, axis_name="time", **options), axis_name="time"
            )(jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), xs))
        return str(caught.value)

    assert "until" in refusal(plain, until=lambda h: jnp.sum(h) > 0)
    assert "one after the other" in refusal(plain, strict=True)
    assert "a collective over 'time'" in refusal(lambda h, x: (jax.lax.psum(h, "time"), h))

    def prints(h, x):
        jax.debug.print("{}", h)
        return h, h

    assert "no side effects" in refusal(prints)
    with pytest.raises(TypeError):  # JAX's error
        jax.vmap(lambda xs: scan(lambda h, x: h, first, xs, axis_name="time"), axis_name="time")(xs)


def test_explanation():
    step, w, first, xs = example("gated_delta", T)
    told = []

    def one(xs):
        told.append(str(scan_plans(functools.partial(step, w), first, xs, axis_name="time")))
        return 0

    jax.vmap(one, axis_name="time", axis_size=T, in_axes=None)(xs)
    assert "time over 8 devices along 'time'" in told[0] and "a matrix of 4 x 4" in told[0]
