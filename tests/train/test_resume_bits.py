"""A run with all that can be resumed wrongly: patience, a running mean, low-rank parts and batches in parts.

It is killed at operations on files, between which nothing changes that another process could see; sometimes its newest
checkpoint is damaged, too. It ends with the bits of a run that was never killed, and at each moment `load_run` gives the
parameters of the best validation that metrics.jsonl names.
"""

import json
import random
import signal
import warnings

import jax
import numpy as np
import pytest

from jrnn import models
from jrnn.files.corpus import tokenize
from jrnn.train import load_config, load_run
from jrnn.train.checkpoint import Checkpoints, steps_in
from jrnn.train.metrics import read_metrics, read_validations
from jrnn.train.step import Recipe, abstract_state, make_validation

KILLS = 20  # on each number of devices
CONFIG = {"model_type": "rwkv", "vocab_size": 264, "hidden_size": 4, "num_hidden_layers": 1}


class Killed:
    """The run that was never killed, and those that are."""

    def __init__(self, folder, forks, devices):
        self.folder, self.forks, self.devices = folder, forks, devices
        lines = (f"{'the cat ' * (k % 3 + 1)}{k}\n" for k in range(60))
        (folder / "text.txt").write_text("".join(lines), encoding="utf-8")
        tokenize([folder / "text.txt"], folder / "corpus", vocabulary=260)
        models.create(CONFIG, jax.random.key(0)).save(folder / "model")
        self.config = folder / "small.toml"
        self.config.write_text(f"""
            task = "tokens"
            data = {{ path = "{folder}/corpus", batch = 4, chunk = 4, validation = 2 }}
            optimizer = {{ learning_rate = 0.3, accumulate = 2, ema = 0.5, schedule = "constant" }}
            train = {{ steps = 60, steps_per_call = 5, validate_every = 5, checkpoint_every = 7, patience = 4 }}
            model = {{ pretrained = "{folder}/model", lora_rank = 2, lora_targets = ["*.key.weight"] }}
        """)
        self.whole = folder / "whole"
        uninterrupted = self.run(self.whole)
        assert uninterrupted.status == 0, uninterrupted.err
        self.operations = uninterrupted.operations
        self.said = uninterrupted.out.splitlines()[-1].split(";")[0]
        config = load_config(self.config)
        task = config.kind.load(config)
        self.state = abstract_state(task.model, Recipe.of(config, {}))
        self.validate = make_validation(task)

    def run(self, out, kill_at=None):
        words = ["train", str(self.config), "--out", str(out), "--resume", "--no-sample"]
        return self.forks.run(*words, f"--devices={self.devices}", kill_at=kill_at)

    def assert_best_is_there(self, run):
        """`load_run` gives the parameters of the best validation in metrics.jsonl."""
        losses = read_validations(run / "metrics.jsonl")
        if losses:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what is damaged
                params = load_run(run).params
            np.testing.assert_allclose(self.validate(params), min(losses.values()), rtol=1e-6)

    def assert_same_bits(self, run):
        last = self.run(run)
        assert last.status == 0, last.err
        assert last.out.splitlines()[-1].split(";")[0] == self.said
        assert _measured(run) == _measured(self.whole)
        trees = [load_run(path).params for path in (run, self.whole)]
        jax.tree.map(np.testing.assert_array_equal, *trees)
        trees = []
        for path in (run, self.whole):
            with Checkpoints(path / "checkpoints") as checkpoints:
                trees.append(checkpoints.restore(self.state)[0])
        jax.tree.map(np.testing.assert_array_equal, *trees)


def _measured(run):
    """All that was measured but its speed, to the last bit."""
    lines = read_metrics(run / "metrics.jsonl")
    return [json.dumps({k: v for k, v in m.items() if k != "items_per_second"}) for m in lines]


def damage_the_newest(run, rng):
    """Changes a byte of the newest checkpoint, if there is an older one."""
    steps = steps_in(run / "checkpoints")
    if len(steps) > 1:
        files = [p for p in (run / "checkpoints" / str(steps[-1])).rglob("*") if p.is_file()]
        path = max(files, key=lambda p: p.stat().st_size)
        raw = bytearray(path.read_bytes())
        raw[rng.randrange(len(raw))] ^= 0xFF
        path.write_bytes(raw)


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_killed_anywhere_ends_with_the_same_bits(tmp_path, forks, devices):
    runs = Killed(tmp_path, forks, devices)
    assert 20 < steps_in(runs.whole / "checkpoints")[-1] < 60  # its patience ended
    rng = random.Random(devices)
    number = 0
    killed = 0
    damaged = 0
    while killed < KILLS:
        run = tmp_path / f"killed{number}"
        ended = runs.run(run, kill_at=rng.randrange(1, runs.operations // 2))
        if ended.status == 0:
            number += 1
            runs.assert_same_bits(run)
            continue
        assert ended.status == -signal.SIGKILL, ended.err
        killed += 1
        runs.assert_best_is_there(run)
        if rng.random() < 0.3:
            damaged += 1
            damage_the_newest(run, rng)
            runs.assert_best_is_there(run)
    runs.assert_same_bits(run)
    assert damaged > 3
