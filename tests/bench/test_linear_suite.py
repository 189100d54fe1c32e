"""The suite "linear": its layers, the chunkwise forms that are written by hand, and its summary; nothing is timed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import linear
import numpy as np
import pytest
from linear_layers import LAYERS, problem

from jrnn.bench.peers import Timed
from jrnn.bench.results import Record
from jrnn.bench.sizes import Size
from jrnn.bench.suites import SuiteOptions
from jrnn.errors import ConfigError


@pytest.mark.parametrize("name", linear.BY_HAND)
def test_chunkwise_forms_by_hand_are_the_recurrence(name, x64):
    given = problem(name, Size(64, 2, 4, 3), np.float64)
    by_hand, steps = (linear.train(linear.programs(name)[peer]) for peer in ("by hand", "lax.scan"))
    actual, expected = jax.jit(lambda *given: (by_hand(*given), steps(*given)))(*given)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), actual, expected
    )


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_the_shapes_of_their_size(name):
    carry, xs = problem(name, Size(3, 2, 4, 5))
    last, out = jax.eval_shape(linear.programs(name)["lax.scan"], carry, xs)
    assert out.shape == (3, 2, 5)
    assert jax.tree.map(jnp.shape, last) == jax.tree.map(jnp.shape, carry)


def test_jobs_name_sizes_and_peers(monkeypatch):
    monkeypatch.setattr(linear, "averaged", lambda fn, given: Timed(lambda: 0.0))
    chosen = SuiteOptions(
        suite="linear", cells=["gla", "kda"], modes=["train"], sizes=["32x1x2x3", "40x1x2x3"]
    )
    jobs = [(job.cell, job.mode, job.size, list(job.programs)) for job in linear.jobs(chosen)]
    assert jobs == [
        ("gla", "train", "32x1x2x3", ["jrnn", "lax.scan", "by hand"]),
        (
            "gla",
            "train",
            "40x1x2x3",
            ["jrnn", "lax.scan"],
        ),  # T is no multiple of the chunk of the form by hand
        ("kda", "train", "32x1x2x3", ["jrnn", "lax.scan"]),
        ("kda", "train", "40x1x2x3", ["jrnn", "lax.scan"]),
    ]
    with pytest.raises(ConfigError, match="did you mean 'kda'"):
        list(linear.jobs(SuiteOptions(suite="linear", cells=["kdo"])))


def test_the_summary_has_geometric_means():
    def record(cell, peer, seconds, size):
        return Record(cell, "1x1x1x1", "train", peer, seconds, seconds, seconds, 1, None, size, 0.0)

    of = [
        record("gla", "jrnn", 1.0, 1),
        record("gla", "lax.scan", 2.0, 100),
        record("gla", "by hand", 9.0, 9),
    ]
    of += [record("kda", "jrnn", 1.0, 4), record("kda", "lax.scan", 8.0, 100)]
    text = linear.summary(of)
    assert text == "train: time 0.25 of lax.scan's (at most 0.50), temporary memory 0.020"
