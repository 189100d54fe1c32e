"""The use of a trained run: its model is loaded from a checkpoint, sampled from, and exported as a package."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jrnn.convert import Package
from jrnn.errors import CheckpointError, ConfigError
from jrnn.train.checkpoint import Checkpoints
from jrnn.train.config import Config
from jrnn.train.models import Model
from jrnn.train.models.net import NetModel
from jrnn.train.run_dir import RunDir
from jrnn.train.step import State, initial_state, make_steps
from jrnn.train.tasks import Trained


def load_trained(run: RunDir) -> Trained:
    """The model of a run with the parameters that were validated best, where it keeps them, or else the newest ones.

    Raises:
        CheckpointError: where there is no run, no checkpoint, or none that loads.
    """
    config = run.load_config()
    if not run.has_checkpoint():
        raise CheckpointError(
            f"{run.path}: has no checkpoint, so that there are no weights yet: the first is written at step "
            f"{min(config.train.checkpoint_every, config.train.steps)}; continue it with: jrnn train {run.path} --resume"
        )
    kept = run.load_fingerprint()
    model = config.kind.model(config, kept)
    state = abstract_state(model, config)
    if config.train.patience and run.best.is_dir():
        with Checkpoints(run.best, 1) as checkpoints:
            if checkpoints.steps():  # none where the run was stopped before its first validation
                params, _ = checkpoints.restore(state.evaluation_params)
                return Trained(config, kept, model, params)
    with Checkpoints(run.checkpoints, config.train.keep) as checkpoints:
        state, _ = checkpoints.restore(state)
    return Trained(config, kept, model, state.evaluation_params)


def abstract_state(model: Model, config: Config) -> State:
    """The shapes and types of a run's state."""
    return jax.eval_shape(partial(initial_state, model, make_steps(config, {})))


def export_run(run_dir: str | Path) -> Package:
    """Returns the trained model of a run as a package: its net, and a net that makes its weights.

    Its inputs are those of the model and, where the state is carried, the first states; its outputs those of the net on
    disk that was trained further or, of a model of cells, the logits or values; and the last states.

    Raises:
        CheckpointError: as `load_trained` does.
        ConfigError: for a model that is no net.
    """
    trained = load_trained(RunDir(run_dir))
    if not isinstance(trained.model, NetModel):
        kind = trained.config.model.kind
        raise ConfigError(
            f'{run_dir}: a model of kind "{kind}" is no net; train one of kind "cells" or "net" to export it'
        )
    return trained.model.package(jax.device_get(trained.params))


def sample_run(run_dir: str | Path, seed: int = 0, **changes: Any) -> str:
    """Returns text that the newest checkpoint of a run writes.

    Args:
        run_dir: the run directory.
        seed: of the random draws.
        changes: keys of the config's table [sample] (of a language model: `length`, `temperature`, `prompt`), where they
            should differ from it; None leaves one as it is.

    Returns:
        What the model writes: of a language model, the prompt and the text that it put after it.

    Raises:
        CheckpointError: where there is no run, no checkpoint, or none that loads.
        ConfigError: where the run's task writes nothing.
        DataError: where the prompt holds a character that the model does not know.
    """
    run = RunDir(run_dir)
    config = run.load_config()
    if config.kind.write is None:
        raise ConfigError(
            f"{run.path}: a model of task {config.task!r} writes nothing; its metrics are in {run.metrics}"
        )
    given = {name: value for name, value in changes.items() if value is not None}
    known = [f.name for f in fields(config.sample)]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{run.path}: sampling of task {config.task!r} has no {name!r}; it has {', '.join(known)}"
            )
    trained = load_trained(run)
    sample = replace(config.sample, **given)
    return config.kind.write(replace(trained, config=replace(config, sample=sample)), seed)
