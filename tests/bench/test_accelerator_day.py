"""The accelerator day on a machine without a GPU: its files, and what a part or a peer that fails leaves to the others."""

from __future__ import annotations

import importlib
import json
import sys
import tarfile
from unittest import mock

import jax.numpy as jnp
import pytest


@pytest.fixture(scope="module")
def modules():
    """The script's modules, which Python looks for next to the script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"
        )  # restored after the script has set it
        names = ("day", "measure", "parts", "tries")
        yield {name: importlib.import_module(f"accelerator_{name}") for name in names}
        for name in names:
            sys.modules.pop(f"accelerator_{name}", None)


def results_in(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def run_parts(modules, out, monkeypatch, **parts):
    parts = {name: (part, "what it measures") for name, part in parts.items()}
    monkeypatch.setattr(modules["day"], "PARTS", parts)
    monkeypatch.setattr(modules["day"], "GROUPS", {"A": parts})
    assert modules["day"].main([str(out), "100"]) == 0
    return results_in(out)


def test_a_part_or_a_peer_that_fails_stops_no_other(modules, tmp_path, monkeypatch):
    Job = modules["measure"].Job
    x = jnp.ones(3)

    def fails(day):
        raise ValueError("this part fails")

    def peers(day):
        def refuses(x):
            raise TypeError("this peer fails to compile")

        def breaks():
            raise RuntimeError("this peer fails to run")

        works = Job("a job", "works", lambda x: x + 1, [x], 10)
        others = [
            Job("a job", "refuses", refuses, [x], 10),
            Job("a job", "breaks", breaks, None, 10),
        ]
        day.timed([works, *others, Job("a job", "works too", jnp.sin, [x], 10)], 0.0, keep="job")

    results = run_parts(modules, tmp_path, monkeypatch, fails=fails, peers=peers)
    failed = {(r["part"], r.get("peer")): r["failed"] for r in results if "failed" in r}
    assert failed == {
        ("fails", None): "ValueError: this part fails",
        ("peers", "refuses"): "TypeError: this peer fails to compile",
        ("peers", "breaks"): "RuntimeError: this peer fails to run",
    }
    timed = {r["peer"]: r for r in results if "seconds" in r}
    assert timed.keys() == {"works", "works too"} and all(r["runs"] >= 2 for r in timed.values())
    assert timed["works"]["us_a_step"] == pytest.approx(
        timed["works"]["seconds"] / 10 * 1e6, abs=1e-3
    )
    page = (tmp_path / "summary.md").read_text()
    assert (
        "- failed ValueError: this part fails" in page
        and "| a job | works | " in page
        and "| 1.000 |" in page
    )
    with tarfile.open(tmp_path / "programs.tar.gz") as archive:
        assert set(archive.getnames()) == {"peers_a_job_works.txt", "peers_a_job_works_too.txt"}
        assert b"HloModule" in archive.extractfile("peers_a_job_works.txt").read()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "day.log",
        "programs.tar.gz",
        "results.jsonl",
        "summary.md",
    ]
    assert "Traceback" in (tmp_path / "day.log").read_text()


def test_default_programs_are_compared_with_float64(modules, tmp_path, monkeypatch):
    parts = modules["parts"]

    def right(day):
        cases = dict(parts.cells(names=["lstm"]))
        wrong = parts.Case(lambda w, x: 1.001 * x, *[([jnp.ones(3)], jnp.ones(3))], lambda w, x: x)
        parts._check(day, cases, "highest")
        parts._check(day, {"wrong": wrong}, None)

    results = run_parts(modules, tmp_path, monkeypatch, right=right)
    lstm, wrong = (next(r for r in results if r.get("job") == name) for name in ("lstm", "wrong"))
    assert lstm["error"] < 1e-5 and lstm["gradient_error"] < 1e-5 and lstm["repeats"] is True
    assert len(lstm["strategies"].split()) == 2 and lstm["precision"] == "highest"
    assert wrong["error"] == pytest.approx(1e-3, rel=1e-3) and wrong["lax_scan"] == 0
    assert "| wrong | 1.0e-03 | 0.0e+00 | " in (tmp_path / "summary.md").read_text()


def test_constants_are_patched_while_a_program_is_lowered(modules):
    from jrnn.loops.affine.chunkwise import chunked

    tries, default = modules["tries"], chunked.chunk_length(4096)
    with tries.chunks_of(2 * default):
        assert chunked.chunk_length(4096, False) == chunked.chunk_length(4096, True) == 2 * default
    assert chunked.chunk_length(4096) == default


def test_nothing_begins_when_the_time_is_over(modules, tmp_path, monkeypatch):
    monkeypatch.setattr(modules["measure"].Day, "left", lambda self: 0.0)
    monkeypatch.setattr(modules["measure"].threading, "Timer", mock.Mock())
    results = run_parts(modules, tmp_path, monkeypatch, first=lambda day: pytest.fail("it began"))
    assert [r.get("skipped") for r in results] == [None, "out of time"]


def test_names_of_parts_and_groups(modules, tmp_path, capsys):
    with pytest.raises(SystemExit):
        modules["day"].main([str(tmp_path), "1", "unrol"])
    assert "there is no part unrol; there are A, B, C, launch" in capsys.readouterr().err
    assert not (tmp_path / "results.jsonl").exists()
