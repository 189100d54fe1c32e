"""From a config to what a run is made of."""

from __future__ import annotations

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
from jrnn.train.optimizers import make_optimizer
from jrnn.train.run_dir import RunDir
from jrnn.train.step import State, Steps, initial_state
from jrnn.train.tasks import Trained


def make_steps(config: Config, axes: Any) -> Steps:
    """What a step of the run is made of; `axes` are those of its task's batches."""
    return Steps(
        make_optimizer(config.optimizer, config.train.steps),
        config.data.batch,
        config.seed,
        config.optimizer.accumulate,
        axes,
        config.optimizer.ema,
        config.train.on_nan,
        config.train.loss_limit,
    )


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
    """The trained model of a run as a package: its net, and a net that makes its weights.

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
