"""The suite "filters": its loops, its jobs and its summary; nothing is timed."""

from __future__ import annotations

import filters
import jax
import pytest

from jrnn.bench.peers import Timed
from jrnn.bench.results import Record
from jrnn.bench.suites import SuiteOptions


@pytest.mark.parametrize("name", filters.LOOPS)
def test_loops_have_steps_and_a_gradient(name):
    fn, args = filters.program(name, "train", "lax.scan")
    shapes = jax.eval_shape(fn, *args)
    assert jax.tree.map(lambda v: v.shape, shapes) == jax.tree.map(lambda v: v.shape, args)


def test_jobs_name_loops_and_peers(monkeypatch):
    monkeypatch.setattr(filters, "averaged", lambda fn, args: Timed(lambda: 0.0))
    jobs = [*filters.jobs(SuiteOptions(suite="filters", cells=["orbit"], modes=["forward"]))]
    assert [(job.cell, job.mode, job.size, list(job.programs)) for job in jobs] == [
        ("orbit", "forward", "1000", ["jrnn", "lax.scan"])
    ]


def test_the_summary_keeps_quick_loops_apart():
    def record(cell, peer, seconds):
        return Record(cell, "1000", "train", peer, seconds, seconds, seconds, 1, None, 1, 0.0)

    slow = [record("joseph", "jrnn", 1e-3), record("joseph", "lax.scan", 1e-2)]
    quick = [record("orbit", "jrnn", 1e-4), record("orbit", "lax.scan", 2e-4)]
    assert filters.summary(slow + quick) == (
        "train, 1 loops that take lax.scan more than 1 us a step: time 0.100 of lax.scan's (at most 0.10)\n"
        "train, 1 loops that take lax.scan less a step: time 0.500 of lax.scan's (at most 0.50)"
    )
