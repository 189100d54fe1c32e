"""Something is printed every few seconds, and the time that a run takes is measured before it is told."""

import io
import os
import subprocess
import time
from pathlib import Path

from rich.console import Console

from jrnn.train import heartbeat, train
from jrnn.train.heartbeat import Heartbeat
from jrnn.train.metrics import Report

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
    monkeypatch.setattr(heartbeat, "SILENCE", 0.02)
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
