"""Devices and processes that share the work: the losses are those of one, and a run resumes on other devices."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import jax
import numpy as np
import pytest

from jrnn.cli import main
from jrnn.errors import ConfigError, TrainError
from jrnn.train.config import load_config
from jrnn.train.devices import Devices
from jrnn.train.metrics import read_metrics
from jrnn.train.step import Recipe, State, initial_state, stack_batches
from jrnn.train.toml_codec import encode

EIGHT = """
import json, sys
from pathlib import Path
import jax
from rich.console import Console
from jrnn.errors import JrnnError
from jrnn.train import load_config, train
from jrnn.train.devices import Devices
from jrnn.train.step import Recipe, initial_state, stack_batches

folder, quiet = Path(sys.argv[1]), Console(quiet=True)

def config(*changes):
    return load_config(folder / "shared.toml", changes)

train(config(), folder / "one", console=quiet)
train(config("train.devices=8", "train.steps=4"), folder / "eight", console=quiet)
train(config(), folder / "eight", resume=True, console=quiet)

eight = config("train.devices=8")
devices, task = Devices.of(eight), eight.kind.load(eight)
state = devices.put_state(jax.device_get(initial_state(task.model, Recipe.of(eight, task.axes))))
batches = devices.put_batches(stack_batches([task.train.at(0)], 2), task.axes)
smaller = devices.put_batches(jax.tree.map(lambda a: a[..., :6], batches), task.axes)
refused = []
for change in (["train.devices=9"], ["train.devices=8", "data.batch=12"], ["train.devices=2", "optimizer.accumulate=8"]):
    try:
        Devices.of(config(*change))
    except JrnnError as e:
        refused.append(str(e))
print(json.dumps({
    "devices": [Devices.of(config("train.devices=0")).count, devices.count],
    "carry": [x.addressable_shards[0].data.shape for x in jax.tree.leaves(state.carry)],
    "whole": [x.is_fully_replicated for x in jax.tree.leaves((state.params, state.optimizer, state.mean, state.step))],
    "tokens": batches.tokens.addressable_shards[7].data.shape,
    "smaller": smaller.tokens.is_fully_replicated,
    "fresh": batches.fresh.is_fully_replicated,
    "refused": refused,
}))
"""


def losses(run):
    return {m["step"]: m["loss"] for m in read_metrics(run / "metrics.jsonl") if "loss" in m}


def assert_same_losses(run, other, steps):
    ours, theirs = losses(run), losses(other)
    assert list(ours)[:steps] == list(range(1, steps + 1))
    np.testing.assert_allclose(
        [ours[k] for k in range(1, steps + 1)], [theirs[k] for k in range(1, steps + 1)], rtol=1e-5
    )


@pytest.fixture(scope="module")
def environment():
    return {**os.environ, "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with shared.toml, a configuration with dropout and a running mean, and with what ran."""
    folder = tmp_path_factory.mktemp("devices")
    (folder / "text.txt").write_text(
        "the cat sat on a mat and the dog ran after it until the sun went down\n" * 30
    )
    (folder / "shared.toml").write_text(
        f"""
        data = {{ path = {json.dumps(str(folder / "text.txt"))}, batch = 8, chunk = 8, validation = 0.2 }}
        model = {{ embedding = 4, hidden = 8, dropout = 0.2 }}
        optimizer = {{ learning_rate = 0.02, schedule = "constant", ema = 0.9 }}
        train = {{ steps = 8, steps_per_call = 2, validate_every = 4, checkpoint_every = 4 }}
        """
    )
    return folder


@pytest.fixture(scope="module")
def eight(folder, environment):
    """What a process with 8 devices did and said."""
    flags = environment.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", EIGHT, str(folder)],
        env={**environment, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.exhaustive
def test_eight_devices_hold_a_part_of_each_batch(eight):
    assert eight["devices"] == [8, 8]
    assert eight["carry"] == [[1, 1, 8]] * 2 and all(eight["whole"])
    assert eight["tokens"] == [2, 8, 1] and eight["fresh"]
    assert eight[
        "smaller"
    ]  # what cannot be divided equally, as the last batch of validation, every device has


@pytest.mark.exhaustive
def test_eight_devices_have_the_losses_of_one_which_goes_on_from_them(eight, folder):
    assert_same_losses(folder / "eight", folder / "one", 8)
    validations = [
        [
            m["validation_loss"]
            for m in read_metrics(folder / run / "metrics.jsonl")
            if "validation_loss" in m
        ]
        for run in ("one", "eight")
    ]
    np.testing.assert_allclose(*validations, rtol=1e-5)


def test_what_cannot_be_divided_is_refused(eight):
    assert "train.devices is 9, but JAX finds 8: cpu:0, " in eight["refused"][0]
    assert (
        "data.batch = 12 examples cannot be divided equally among 8 devices; make it a multiple of 8"
        in eight["refused"][1]
    )
    assert (
        "in 8 parts (optimizer.accumulate) cannot be divided equally among 2 devices"
        in eight["refused"][2]
    )


SLURM_PORTS = range(65536 - 4096, 65536)  # JAX takes the one that the job's number names


def free_port_of_slurm():
    for port in random.Random(os.getpid()).sample(SLURM_PORTS, 50):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("localhost", port))
            return port
    raise AssertionError("no port is free")


STOP = """
import os, signal
import jax

def stop(task, params, loss):
    "At the first validation the second process gets a signal."
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return 0.0
"""


@pytest.mark.exhaustive
def test_two_processes_train_as_one_and_stop_together(eight, forks, folder):
    """One is told of the other, one finds it as under SLURM. Only the first writes; a signal to the second stops both, at
    the same step and with a checkpoint."""
    port = free_port_of_slurm()
    (folder / "metric.py").write_text(STOP)

    def start(process, *options, **variables):
        changes = ["train.steps=1000000", f'train.metrics=["{folder / "metric.py"}:stop"]']
        words = ["train", str(folder / "shared.toml"), *(f"--set={change}" for change in changes)]
        return forks.start(
            *words, "--out", str(folder / f"process_{process}"), *options, environment=variables
        )

    processes = [
        start(0, "--coordinator", f"localhost:{port}", "--processes", "2", "--process", "0"),
        start(  # as SLURM would start it
            1,
            "--distributed",
            SLURM_JOB_ID=str(port - SLURM_PORTS.start),
            SLURM_STEP_NODELIST="localhost",
            SLURM_NTASKS="2",
            SLURM_PROCID="1",
            SLURM_LOCALID="1",
        ),
    ]
    first, second = (process.wait() for process in processes)
    assert [first.status, second.status] == [130, 130], (first.err, second.err)
    assert "step 4: validation loss" in first.out and "validation" not in second.out
    assert "stopped at step 4;" in first.err
    assert (folder / "process_0" / "checkpoints" / "4").is_dir()
    assert not (folder / "process_1").exists()
    assert_same_losses(folder / "process_0", folder / "one", 4)


DIES = """
import os, signal
import jax

def die(process):
    if str(jax.process_index()) == process == os.environ["DIES"]:
        os.kill(os.getpid(), signal.SIGKILL)

def measure(task, params, loss):
    "Called at the first validation."
    die("1")
    return 0.0

die("0")  # before the first step
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("dies", ["0", "1"])
def test_a_lost_process_ends_the_others_with_one_line(forks, folder, dies):
    """JAX would wait for the lost one at the end and then abort, or, for the first process, abort at once."""
    (folder / "dies.py").write_text(DIES)
    address = f"localhost:{free_port_of_slurm()}"
    words = [
        "train",
        str(folder / "shared.toml"),
        f'--set=train.metrics=["{folder / "dies.py"}:measure"]',
    ]
    words += [
        "--coordinator",
        address,
        "--processes",
        "2",
        "--out",
        str(folder / f"without_{dies}"),
    ]
    processes = [
        forks.start(*words, "--process", str(k), environment={"DIES": dies}, exits=True)
        for k in range(2)
    ]
    lost, other = (processes[k].wait() for k in (int(dies), 1 - int(dies)))
    assert lost.status == -signal.SIGKILL
    lines = [line for line in other.err.splitlines() if not line.startswith(("[Gloo]", "imports "))]
    assert (other.status, len(lines)) == (2, 1), other.err
    assert re.fullmatch(
        r"jrnn train: error: (another|the first) process is lost.*; start all again with --resume",
        lines[0],
    )
    # Lost before the first checkpoint, the run keeps what it measured, and is a run directory.
    if dies == "1":
        assert list(losses(folder / "without_1")) == [1, 2, 3, 4]
        assert (folder / "without_1" / "config.toml").is_file()


def test_processes_that_do_not_find_each_other(capsys):
    assert main(["train", "any.toml", "--distributed"]) == 2
    assert "jrnn train: error: cannot join the other processes: " in capsys.readouterr().err
    assert main(["train", "any.toml", "--processes", "2"]) == 2
    assert "--processes and --process need --coordinator HOST:PORT" in capsys.readouterr().err


def test_one_device_changes_nothing(folder):
    config = load_config(folder / "shared.toml")
    devices, task = Devices.of(config), config.kind.load(config)
    state = jax.device_get(initial_state(task.model, Recipe.of(config, task.axes)))
    again = devices.get(devices.put_state(state))
    assert isinstance(again, State)
    jax.tree.map(np.testing.assert_array_equal, again, state)
    batches = stack_batches([task.train.at(0)], 1)
    jax.tree.map(
        np.testing.assert_array_equal, devices.get(devices.put_batches(batches, task.axes)), batches
    )
    assert devices.is_first and not devices.any(False) and devices.any(True)
    with pytest.raises(ConfigError, match="train.devices must be at least 0"):
        load_config(folder / "shared.toml", ["train.devices=-1"])
    assert "devices = 1" in encode(config)


def test_a_lost_process_is_told_and_other_errors_stay_what_they_are(folder, monkeypatch):
    devices = Devices.of(load_config(folder / "shared.toml"))
    with pytest.raises(ValueError, match="^a mistake$"), devices.in_touch():
        raise ValueError("a mistake")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with (
        pytest.raises(
            TrainError,
            match=r"another process is lost \(Gloo failed\); start all again with --resume",
        ),
        devices.in_touch(),
    ):
        raise ValueError("Gloo failed\nat length")
    with pytest.raises(ConfigError, match="^ours$"), devices.in_touch():
        raise ConfigError("ours")
