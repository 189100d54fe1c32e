"""Text from a trained model, character by character."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import DataError
from .checkpoint import Checkpoints
from .config import SampleConfig
from .model import Model, Params, char_lstm
from .optimizers import make_optimizer
from .run_dir import RunDir
from .step import initial_state


def sample_run(run_dir: str | Path, seed: int = 0, **changes: Any) -> str:
    """Text from the newest checkpoint of a run.

    Args:
        run_dir: the run directory.
        seed: of the random draws.
        changes: `length`, `temperature` or `prompt`, where they should differ from the run's config.

    Returns:
        The prompt and the characters that the model put after it.

    Raises:
        CheckpointError: where there is no run, no checkpoint, or none that loads.
        DataError: where the prompt holds a character that the model does not know.
    """
    run = RunDir(run_dir)
    config = run.load_config()
    vocabulary = run.load_vocabulary()
    settings = replace(config.sample, **{name: value for name, value in changes.items() if value is not None})
    prompt = vocabulary.encode(settings.prompt)
    model = char_lstm(config.model, len(vocabulary))
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    like = jax.eval_shape(partial(initial_state, model, optimizer, config.data.batch, config.seed))
    with Checkpoints(run.checkpoints, config.train.keep) as checkpoints:
        state, _ = checkpoints.restore(like)
    return vocabulary.decode(sample(model, state.params, prompt, settings, seed))


def sample(model: Model, params: Params, prompt: np.ndarray, settings: SampleConfig, seed: int = 0) -> np.ndarray:
    """`prompt` and `settings.length` more characters, as numbers; DataError where the prompt is empty."""
    if not len(prompt):
        raise DataError("the prompt is empty; it must hold at least one character")
    forced = np.full(len(prompt) + settings.length, -1, np.int32)
    forced[: len(prompt)] = prompt

    @jax.jit
    def run(params: Params, forced: Any, key: Any) -> Any:
        def body(loop, at):
            carry, drawn = loop
            given, key = at
            token = jnp.where(given >= 0, given, drawn)
            logits, carry = model.predict(params, carry, token[None, None])
            logits = logits[0, 0]
            if settings.temperature == 0:
                drawn = jnp.argmax(logits)
            else:
                drawn = jax.random.categorical(key, logits / settings.temperature)
            return (carry, drawn.astype(jnp.int32)), token

        keys = jax.random.split(key, len(forced))
        start = (model.initial_carry(1), jnp.zeros((), jnp.int32))
        return jax.lax.scan(body, start, (forced, keys))[1]

    return np.asarray(run(params, forced, jax.random.key(seed)))
