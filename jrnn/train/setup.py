"""From a config to what a run is made of."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from .checkpoint import Checkpoints
from .config import Config
from .models import Model
from .optimizers import make_optimizer
from .run_dir import RunDir
from .step import State, Steps, initial_state
from .tasks import Trained


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
    config, kept = run.load_config(), run.load_fingerprint()
    model = config.kind.model(config, kept)
    state = abstract_state(model, config)
    if config.train.patience and run.best.is_dir():
        with Checkpoints(run.best, 1) as checkpoints:
            params, _ = checkpoints.restore(state.evaluation_params)
        return Trained(config, kept, model, params)
    with Checkpoints(run.checkpoints, config.train.keep) as checkpoints:
        state, _ = checkpoints.restore(state)
    return Trained(config, kept, model, state.evaluation_params)


def abstract_state(model: Model, config: Config) -> State:
    """The shapes and types of a run's state."""
    return jax.eval_shape(partial(initial_state, model, make_steps(config, {})))
