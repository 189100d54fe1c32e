"""The suite "first-call": its jobs, the program of the fresh process and its summary."""

from __future__ import annotations

import subprocess

import first_call
import pytest

from jrnn.bench.results import Record
from jrnn.bench.suites import SuiteOptions
from jrnn.errors import ConfigError


def test_each_program_starts_a_process_of_its_own(monkeypatch):
    commands = []

    def run(command, env, **_):
        commands.append((command[2:], env["JAX_ENABLE_COMPILATION_CACHE"]))
        return subprocess.CompletedProcess(command, 0, stdout="1.5\n")

    monkeypatch.setattr(first_call.subprocess, "run", run)
    options = SuiteOptions(suite="first-call", cells=["gla", "mlstm"], sizes=["64x1x8x8"])
    jobs = [*first_call.jobs(options)]
    assert [p.run() for job in jobs for p in job.programs.values()] == [1.5] * 4
    assert commands == [
        ([c, p, "64x1x8x8"], "false") for c in ("gla", "mlstm") for p in ("jrnn", "lax.scan")
    ]
    with pytest.raises(ConfigError, match="glq"):
        list(first_call.jobs(SuiteOptions(suite="first-call", cells=["glq"])))


@pytest.mark.parametrize("peer", first_call.PEERS)
def test_the_first_call_is_run(peer):
    assert first_call.seconds("delta_rule", peer, "40x1x4x4") >= 0


def test_the_summary_has_the_mean_and_the_largest_ratio():
    def record(cell, peer, seconds):
        return Record(
            cell,
            "1024x8x64x64",
            "train",
            peer,
            seconds,
            seconds,
            seconds,
            1,
            None,
            None,
            0.0,
            seconds,
        )

    seconds = {
        ("gla", "jrnn"): 4.0,
        ("gla", "lax.scan"): 1.0,
        ("mlstm", "jrnn"): 1.0,
        ("mlstm", "lax.scan"): 1.0,
    }
    both = [record(cell, peer, s) for (cell, peer), s in seconds.items()]
    assert first_call.summary(both) == "first call: 2.00 of lax.scan's time (at most 4.00)"
