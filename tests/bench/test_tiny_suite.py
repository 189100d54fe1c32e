"""The suite "tiny": its loops, its jobs and its summary; nothing is timed."""

from __future__ import annotations

import jax
import pytest
import tiny_loops

from jrnn.bench.peers import Timed
from jrnn.bench.results import Record
from jrnn.bench.suites import SuiteOptions


@pytest.mark.parametrize("name", tiny_loops.LOOPS)
def test_loops_have_steps_and_a_gradient(name):
    fn, args = tiny_loops.program(name, "train", "lax.scan", 20)
    shapes = jax.eval_shape(fn, *args)
    assert jax.tree.map(lambda v: v.shape, shapes) == jax.tree.map(lambda v: v.shape, args)


def test_jobs_have_the_steps_that_are_asked_for(monkeypatch):
    monkeypatch.setattr(tiny_loops, "averaged", lambda fn, args: Timed(lambda: len(args[2])))
    jobs = [
        *tiny_loops.jobs(
            SuiteOptions(suite="tiny", cells=["biquad"], modes=["forward"], sizes=["30", "40"])
        )
    ]
    assert [(job.cell, job.size, job.programs["jrnn"].run()) for job in jobs] == [
        ("biquad", "30", 30),
        ("biquad", "40", 40),
    ]


def test_the_summary_keeps_wide_loops_apart():
    def record(cell, peer, seconds):
        return Record(
            cell, "16000", "train", peer, seconds, seconds, seconds, 1, None, 1, 0.0, least=seconds
        )

    records = [
        record(c, p, s)
        for c, s in (("biquad", 1e-4), ("leaky_64", 1e-3))
        for p, s in (("jrnn", s), ("lax.scan", 2 * s))
    ]
    assert tiny_loops.summary(records) == (
        "train, 1 loops over at most 8 numbers: time 0.50 of lax.scan's (at most 0.50)\n"
        "train, 1 loops over more, or a product: time 0.50 of lax.scan's (at most 0.50)"
    )
