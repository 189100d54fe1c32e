"""Where the time goes, TensorBoard's events, and traces."""

import builtins
import time

import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from jrnn.errors import ConfigError
from jrnn.train import train
from jrnn.train.clock import Clock
from jrnn.train.metrics import Board, read_metrics


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
        Board(tmp_path)
