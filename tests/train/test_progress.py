"""What a run prints: progress, how long it takes, and where its time went; traces and TensorBoard's events."""

import builtins
import csv
import io
import os
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from jrnn.errors import ConfigError
from jrnn.files import progress
from jrnn.files.progress import Clock, Heartbeat, RunProgress
from jrnn.train import train
from jrnn.train.loggers import TensorBoard
from jrnn.train.metrics import Recorder, read_metrics

ROOT = Path(__file__).parents[2]


class Hands:
    """A clock that a test sets forward, in seconds."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for name in ("monotonic", "perf_counter"):
            monkeypatch.setattr(progress, name, lambda: self.now)

    def go_on(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Hands(monkeypatch)


@pytest.fixture
def said():
    """A console, and a function that returns what was printed since its last call."""
    console = Console(file=io.StringIO(), width=200)

    def printed():
        text = console.file.getvalue()
        console.file.seek(0)
        console.file.truncate()
        return text

    return console, printed


def test_a_line_where_nothing_else_was_printed(clock, said):
    console, printed = said
    beat = Heartbeat(console, "compiling")
    for seconds in (6, 7, 13, 14):
        clock.now = seconds
        beat.check()
    assert printed() == "compiling: 7 s so far\ncompiling: 14 s so far\n"
    with beat.during("validating"):
        clock.go_on(8)
        beat.check()
    assert printed() == "validating: 8 s so far\n"
    clock.go_on(7)
    beat.check()
    assert printed() == "compiling: 29 s so far\n"
    beat.doing(lambda: "step 7")
    clock.go_on(7)
    beat.check()
    assert printed() == "step 7\n"


def test_a_heartbeat_is_silent_where_others_speak(clock, said):
    console, printed = said
    beat = Heartbeat(console, "compiling")
    for speak in (lambda: beat.say("a line"), beat.heard):  # `heard`: of a progress line
        for _ in range(3):
            clock.go_on(6)
            speak()
            beat.check()
    assert printed() == "a line\n" * 3


def test_what_goes_on_may_change_without_a_word(clock, said):
    """Many things that take a little each are no silence together."""
    console, printed = said
    beat = Heartbeat(console, "reading")
    for number in range(3):
        beat.doing(f"part {number}")
        clock.go_on(3)
        beat.check()
    assert printed() == "part 2: 3 s so far\n"


def test_a_heartbeat_checks_until_its_block_ends(monkeypatch, said):
    class Turns:
        """In place of the event that ends the thread: five turns, without waiting."""

        left, waits = 5, ()

        def wait(self, seconds):
            self.left, self.waits = self.left - 1, (*self.waits, seconds)
            return self.left < 0

        def set(self):
            self.is_set = True

    checks = []
    monkeypatch.setattr(Heartbeat, "check", lambda self: checks.append(self))
    beat = Heartbeat(said[0], "compiling")
    beat._end = turns = Turns()
    with beat:
        pass
    assert checks == [beat] * 5 and turns.is_set and not beat._thread.is_alive()
    assert set(turns.waits) == {0.5}


@pytest.mark.exhaustive
def test_a_run_says_what_it_does_and_how_long_it_takes(
    make_config, tmp_path, monkeypatch, clock, said
):
    """Whatever a run does takes 8 seconds here, and its steps take 1 second a call."""
    doing, update = Heartbeat.doing, RunProgress.update

    def slowly(self, what):
        doing(self, what)
        if isinstance(what, str):
            clock.go_on(8)
            self.check()

    def slow_steps(self, *args):
        clock.go_on(1)
        update(self, *args)

    monkeypatch.setattr(Heartbeat, "doing", slowly)
    monkeypatch.setattr(RunProgress, "update", slow_steps)
    console, printed = said
    train(make_config(), tmp_path / "run", console=console)
    lines = printed().splitlines()
    for what in (
        "reading the data and making the model",
        "compiling",
        "validating",
        "writing a checkpoint",
    ):
        assert f"{what}: 8 s so far" in lines
    assert [
        line
        for line in lines
        if line.startswith("step 12 of 24: loss ") and line.endswith(", about 15 s to go")
    ]


def test_the_script_that_trains_is_never_silent_for_long(tmp_path):
    """With an installation that takes until the third `sleep` begins, and a Python that shows its arguments."""
    scripts, tools = tmp_path / "scripts", tmp_path / "tools"
    scripts.mkdir()
    tools.mkdir()
    os.mkfifo(tools / "begun")
    os.mkfifo(tools / "ended")
    (scripts / "train.sh").write_text((ROOT / "scripts" / "train.sh").read_text())
    (scripts / "venv.sh").write_text(
        "make_venv() { for n in 1 2; do read -r _ <tools/begun; echo >tools/ended; done; read -r _ <tools/begun\n"
        "mkdir -p .venv/bin; cp tools/show .venv/bin/python; echo made $1; }\n"
    )
    nap = "echo >tools/begun; read -r _ <tools/ended"
    for name, text in (("sleep", nap), ("show", 'shift 2; echo "python: $*"')):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    command = ["bash", str(scripts / "train.sh"), "--set", "train.steps=2"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert lines[:3] == [
        "installing what is missing into .venv",
        "installing: 8 s so far",
        "installing: 16 s so far",
    ]
    assert lines[-3:] == [
        "made data,onnx,plot,text",
        "loading JAX",
        "python: train char_lstm --set train.steps=2",
    ]


def test_all_time_is_accounted_for(clock):
    spent = Clock("steps")
    clock.go_on(20)
    spent.claim("compiling")
    with spent("validation"):
        clock.go_on(30)
    clock.go_on(10)
    assert spent.seconds() == {"steps": 10, "compiling": 20, "validation": 30}
    assert [line.split() for line in spent.table("compiling").splitlines()] == [
        ["steps", "10.00", "s", "25.00%"],
        ["compiling", "20.00", "s"],
        ["validation", "30.00", "s", "75.00%"],
    ]


def test_a_profiled_run_leaves_a_trace_and_tells_its_time(make_config, tmp_path, monkeypatch):
    unmeasured = []  # calls under way whenever the clock of the rate restarts: their rates would be too high
    restart_clock = Recorder.restart_clock
    monkeypatch.setattr(
        Recorder,
        "restart_clock",
        lambda r: (unmeasured.append(getattr(r, "_pending", None)), restart_clock(r)),
    )
    console = Console(record=True, width=200)
    config = make_config(train={"loggers": ["tensorboard", "csv"], "steps": 16})
    train(config, tmp_path / "run", profile=True, console=console)
    assert set(unmeasured) == {None}
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
        assert _columns(tmp_path / "run" / "metrics.csv")[name] == {
            m["step"]: m[name] for m in measured if name in m
        }
        assert scalars[name] == pytest.approx(
            {m["step"]: m[name] for m in measured if name in m}, rel=1e-6
        )


def _columns(path):
    """{name: {step: value}} of metrics.csv."""
    columns = {}
    for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        columns.setdefault(row["name"], {})[int(row["step"])] = float(row["value"])
    return columns


def _scalars(folder):
    """{name: {step: value}} of TensorBoard's events."""
    scalars = {}
    for path in sorted(folder.iterdir()):
        raw = path.read_bytes()
        while raw:  # records: 8 bytes of size, 4 of checksum, the event, 4 of checksum
            size = int.from_bytes(raw[:8], "little")
            event, raw = Event.FromString(raw[12 : 12 + size]), raw[16 + size :]
            for value in event.summary.value:
                scalars.setdefault(value.tag, {})[event.step] = value.simple_value
    return scalars


def test_without_tensorboardx_it_is_said(monkeypatch, tmp_path):
    def without(name, *args, original=builtins.__import__, **kwargs):
        if name.startswith("tensorboardX"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ConfigError, match=r"needs the extra 'tensorboard': pip install 'jrnn\[tensorboard\]'"
    ):
        TensorBoard(tmp_path, None, None)
