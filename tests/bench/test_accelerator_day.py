"""The accelerator day in smoke mode: what a machine without a GPU runs of it, in a few of its steps."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "accelerator_day.sh"


@pytest.fixture(scope="module")
def day():
    spec = importlib.util.spec_from_file_location("accelerator_day", SCRIPT.with_suffix(".py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["accelerator_day"] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.exhaustive
def test_steps_on_a_cpu_leave_their_files_and_a_summary(tmp_path):
    command = [SCRIPT, str(tmp_path / "out"), "command-buffers-off", "profile", "newton"]
    environment = {**os.environ, "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "out" / "summary.md").read_text()
    assert "| platform | cpu |" in page and "| profile | ok, " in page
    assert "## command-buffers-off, on cpu" in page and "| lstm train 5x2x3x4 | " in page
    assert list((tmp_path / "out" / "profile").rglob("*.xplane.pb")), "a profile of a train step"
    assert "## newton, on cpu" in page and "| gru train 5x2x3x4 | " in page
    records = json.loads((tmp_path / "out" / "command-buffers-off.json").read_text())["records"]
    assert {"jrnn", "jrnn.nn", "lax.scan", "flax"} <= {record["peer"] for record in records}


def test_every_step_is_there_on_both_kinds_of_machine(day, tmp_path):
    names = [step.name for step in day.steps(tmp_path, True)]
    assert names == [step.name for step in day.steps(tmp_path, False)] and len(set(names)) == len(names)
    assert {f"bench-{cell}-{name}" for cell in day.CELLS for name in day.PRECISIONS} <= set(names)
    files = (*day.EXECUTOR_TESTS, *day.CONFORMANCE_TESTS, *day.SMOKE_TESTS)
    assert all((ROOT / name).exists() for name in files)
    assert day.BUDGET < 9 * 60


def test_a_step_that_fails_or_hangs_costs_no_other(day, tmp_path, monkeypatch):
    def steps(out, on_gpu):
        run = [sys.executable, "-c"]
        return [
            day.Step("fails", [*run, "print('why'); raise SystemExit(3)"], 30),
            day.Step("hangs", ["a program that hangs"], 20),
            day.Step("works", [*run, "import os; print(os.environ['GIVEN'])"], 30, {"GIVEN": "yes"}),
        ]

    def run(command, *, timeout=None, original=subprocess.run, **options):
        if command == ["a program that hangs"]:
            raise subprocess.TimeoutExpired(command, timeout)
        return original(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(day, "steps", steps)
    monkeypatch.setattr(day, "PLATFORM", "print('gpu')")
    assert day.main([str(tmp_path)]) == 1
    page = (tmp_path / "summary.md").read_text()
    assert (
        "| fails | FAILED with status 3" in page and "| hangs | STOPPED after 20 s" in page and "| works | ok" in page
    )
    assert (tmp_path / "fails.log").read_text() == "why\n" and (tmp_path / "works.log").read_text() == "yes\n"
    assert day.main([str(tmp_path), "wroks"]) == 2
    monkeypatch.setattr(day, "BUDGET", 0.0)
    day.main([str(tmp_path), "works"])
    assert "| works | SKIPPED: out of time |" in (tmp_path / "summary.md").read_text()
