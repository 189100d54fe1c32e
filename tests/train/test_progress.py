"""What a run tells people: signs of life, how long it takes, and where its time went; traces and TensorBoard's events."""

import builtins
import io
import os
import subprocess
import time
from pathlib import Path

import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from jrnn.errors import ConfigError
from jrnn.train import progress, train
from jrnn.train.metrics import open_board, read_metrics
from jrnn.train.progress import Clock, Heartbeat, Report

ROOT = Path(__file__).parents[2]


def test_a_line_where_nothing_else_was_printed():
    console = Console(file=io.StringIO(), width=100)
    with Heartbeat(console, "compiling", silence=0.02) as beat:
        wait_until(lambda: console.file.getvalue().count("compiling: 0 s so far\n") >= 2)
        with beat.during("validating"):
            wait_until(lambda: "validating: 0 s so far" in console.file.getvalue())
        beat.doing(lambda: "step 7")
        wait_until(lambda: console.file.getvalue().endswith("step 7\n"))
    said = console.file.getvalue()
    time.sleep(0.05)
    assert console.file.getvalue() == said  # it ends with the block


def wait_until(true):
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_heartbeat_is_silent_where_others_speak():
    console = Console(file=io.StringIO(), width=100)
    with Heartbeat(console, "compiling", silence=30.0) as beat:
        beat.say("a line")
        time.sleep(0.05)
    assert console.file.getvalue() == "a line\n"


def test_what_goes_on_may_change_without_a_word():
    """Many things that take a little each are no silence together."""
    console = Console(file=io.StringIO(), width=100)
    with Heartbeat(console, "reading", silence=0.05) as beat:
        begun = time.monotonic()
        while not console.file.getvalue():
            beat.doing("something else")
            time.sleep(0.005)
            assert time.monotonic() - begun < 30


def test_a_run_says_what_it_does_and_how_long_it_takes(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "SILENCE", 0.02)
    update = Report.update
    monkeypatch.setattr(Report, "update", lambda self, *args: (time.sleep(0.05), update(self, *args)))  # slow steps
    console = Console(file=io.StringIO(), width=200)
    train(make_config(), tmp_path / "run", console=console)
    said = console.file.getvalue()
    for what in (
        "reading the data and making the model: 0 s",
        "compiling: 0 s",
        "validating: 0 s",
        "writing a checkpoint: ",
    ):
        assert what in said
    assert " of 24: loss " in said and " s to go\n" in said


def test_the_script_that_trains_is_never_silent_for_long(tmp_path):
    """With a short `sleep`, an installation that takes a second, and a Python that shows its arguments."""
    scripts, tools = tmp_path / "scripts", tmp_path / "tools"
    scripts.mkdir()
    tools.mkdir()
    (scripts / "train.sh").write_text((ROOT / "scripts" / "train.sh").read_text())
    (scripts / "venv.sh").write_text(
        "make_venv() { command -p sleep 1; mkdir -p .venv/bin; cp tools/show .venv/bin/python; echo made $1; }\n"
    )
    for name, text in (("sleep", "exec /bin/sleep 0.05"), ("show", 'shift 2; echo "python: $*"')):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    command = ["bash", str(scripts / "train.sh"), "--set", "train.steps=2"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert lines[:3] == ["installing what is missing into .venv", "installing: 8 s so far", "installing: 16 s so far"]
    assert lines[-3:] == ["made plot", "loading JAX", "python: train char_lstm --set train.steps=2"]


def test_all_time_is_accounted_for():
    clock = Clock("steps")
    time.sleep(0.02)
    clock.claim("compiling")
    with clock("validation"):
        time.sleep(0.03)
    time.sleep(0.01)
    spent = clock.seconds()
    assert list(spent) == ["steps", "compiling", "validation"]
    assert spent["compiling"] >= 0.02 and spent["validation"] >= 0.03 and spent["steps"] >= 0.01
    lines = [line.split() for line in clock.table("compiling").splitlines()]
    assert [line[0] for line in lines] == ["steps", "compiling", "validation"]
    assert lines[1][2:] == ["s"]
    assert sum(float(lines[k][-1].rstrip("%")) for k in (0, 2)) == pytest.approx(100, abs=0.02)


def test_a_profiled_run_leaves_a_trace_and_tells_its_time(make_config, tmp_path):
    console = Console(record=True, width=200)
    config = make_config(train={"tensorboard": True, "steps": 16})
    train(config, tmp_path / "run", profile=True, console=console)
    said = console.export_text()
    assert f"trace: {tmp_path / 'run' / 'profile'}" in said
    for what in (
        "steps",
        "compiling, first call",
        "compiling, first validation",
        "checkpoints",
        "tracing",
        "waiting for",
    ):
        assert f"\n  {what} " in said
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    assert list((tmp_path / "run" / "profile").rglob("*.trace.json.gz"))
    scalars = _scalars(tmp_path / "run" / "tensorboard")
    measured = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for name in ("loss", "gradient_norm", "validation_loss", "items_per_second"):
        assert scalars[name] == pytest.approx({m["step"]: m[name] for m in measured if name in m}, rel=1e-6)


def _scalars(folder):
    """{name: {step: value}} of TensorBoard's events."""
    found = {}
    for path in sorted(folder.iterdir()):
        raw = path.read_bytes()
        while raw:  # records: 8 bytes of size, 4 of checksum, the event, 4 of checksum
            size = int.from_bytes(raw[:8], "little")
            event, raw = Event.FromString(raw[12 : 12 + size]), raw[16 + size :]
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_without_tensorboardx_it_is_said(monkeypatch, tmp_path):
    def without(name, *args, original=builtins.__import__, **kwargs):
        if name.startswith("tensorboardX"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"needs tensorboardX: pip install 'jrnn\[tensorboard\]'"):
        open_board(tmp_path)
