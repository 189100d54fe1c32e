"""Processes: killed at any moment, interrupted, two at once. The run ends as if nothing had happened."""

import json
import os
import random
import signal

import pytest

from jrnn.train.toml_codec import override


def write_toml(path, tables):
    lines = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines.extend(f"{key} = {json.dumps(value)}" for key, value in table.items())
    path.write_text("\n".join(lines))


@pytest.fixture
def train(small, tmp_path):
    """The words of `jrnn train` with a small configuration."""
    path = tmp_path / "small.toml"
    changed = [
        "train.steps=60",
        "train.steps_per_call=5",
        "train.validate_every=20",
        "train.checkpoint_every=7",
    ]
    write_toml(path, override(small, changed))
    return lambda out, *more: ("train", str(path), "--out", str(out), "--no-sample", *more)


def loss_lines(run):
    """Losses and norms of every step, to the last bit: as the text that was written."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(m["step"], repr(m["loss"]), repr(m["gradient_norm"])) for m in lines if "loss" in m]


def last_line(process):
    assert process.status == 0, process.err
    return process.out.splitlines()[-1].split(";")[0]


@pytest.mark.exhaustive
def test_killed_at_random_moments_a_run_ends_with_the_same_bits(forks, train, tmp_path):
    """Killed at an operation on a file: between these, nothing changes that another process could see."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    uninterrupted = forks.run(*train(whole))
    rng = random.Random(0)
    count = uninterrupted.operations
    for first, end in [(count // 2, 3 * count // 4), (0, count // 4), (0, count // 4)]:
        process = forks.run(*train(killed, "--resume"), kill_at=1 + rng.randrange(first, end))
        assert process.status == -signal.SIGKILL
    assert any((killed / "checkpoints").glob("[0-9]*"))
    resumed = forks.run(*train(killed, "--resume"))
    assert "60 steps, validation loss" in last_line(resumed) and "resuming from step" in resumed.out
    assert last_line(resumed) == last_line(uninterrupted)
    assert loss_lines(killed) == loss_lines(whole)


WAIT = """
import os, socket

def wait(task, params, loss):
    "At the first validation, until the test has seen it and goes on."
    with socket.socket(fileno=int(os.environ["TALK"])) as talk:
        talk.send(b"validated")
        talk.recv(1)
    return 0.0
"""


@pytest.mark.exhaustive
def test_interrupted_it_leaves_a_checkpoint_and_a_second_process_is_refused(forks, train, tmp_path):
    run, metric = tmp_path / "run", tmp_path / "metric.py"
    metric.write_text(WAIT)
    process = forks.start(*train(run, "--set", f'train.metrics=["{metric}:wait"]'))
    assert process.talk.recv(9) == b"validated"
    second = forks.run(*train(run, "--resume"))
    assert second.status == 2
    assert f"another process (pid {process.pid}) is training in this directory" in second.err
    assert "Traceback" not in second.err
    os.kill(process.pid, signal.SIGINT)
    process.talk.send(b".")
    process.wait()
    assert process.status == 130
    assert "stopped at step 20" in process.err and f"jrnn train {run} --resume" in process.err
    assert (run / "checkpoints" / "20").is_dir()
