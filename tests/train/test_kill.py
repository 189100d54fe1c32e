"""Processes: killed at any moment, interrupted, two at once. The run ends as if nothing had happened."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest

from jrnn.train.toml_codec import override

KILLS = 2


def write_toml(path, tables):
    lines = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines.extend(f"{key} = {json.dumps(value)}" for key, value in table.items())
    path.write_text("\n".join(lines))


@pytest.fixture
def config_file(small, tmp_path):
    path = tmp_path / "small.toml"
    changed = ["train.steps=600", "train.steps_per_call=5", "train.validate_every=200", "train.checkpoint_every=21"]
    write_toml(path, override(small, changed))
    return path


@pytest.fixture
def start(config_file):
    """Starts `jrnn train`."""

    def begin(out, *more):
        command = [sys.executable, "-m", "jrnn", "train", str(config_file), "--out", str(out), "--no-sample", *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return begin


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def loss_lines(run):
    """Losses and norms of every step, to the last bit: as the text that was written."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(m["step"], repr(m["loss"]), repr(m["gradient_norm"])) for m in lines if "loss" in m]


def newest_checkpoint(run):
    """The step of the newest complete checkpoint, 0 where there is none."""
    return max((int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdigit()), default=0)


def wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_killed_at_random_moments_a_run_ends_with_the_same_bits(start, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    last_line = finish(start(whole)).splitlines()[-1].split(";")[0]
    rng = random.Random(0)
    survived = 0
    for _ in range(KILLS):
        before = newest_checkpoint(killed)
        process = start(killed, "--resume")  # which starts from the beginning where there is no checkpoint yet
        wait_for(lambda before=before: newest_checkpoint(killed) > before, process)
        time.sleep(rng.uniform(0, 0.3))
        survived += process.poll() is None
        process.kill()
        process.communicate()
    assert survived  # killed while it ran
    assert finish(start(killed, "--resume")).splitlines()[-1].split(";")[0] == last_line
    assert "600 steps, validation loss" in last_line
    assert loss_lines(killed) == loss_lines(whole)


def test_interrupted_it_leaves_a_checkpoint_and_a_second_process_is_refused(start, tmp_path):
    run = tmp_path / "run"
    process = start(run, "--set", "train.steps=1000000")
    wait_for(lambda: newest_checkpoint(run), process)
    second = start(run, "--resume")
    _, err = second.communicate(timeout=120)
    assert second.returncode == 2
    assert f"another process (pid {process.pid}) is training in this directory" in err
    assert "Traceback" not in err
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped at step" in err and f"jrnn train {run} --resume" in err
    step = int(err.split("stopped at step ")[1].split(";")[0])
    assert (run / "checkpoints" / str(step)).is_dir()
