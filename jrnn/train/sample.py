"""What a trained model writes: its run's newest checkpoint, loaded and asked."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from jrnn.errors import ConfigError
from jrnn.train.run_dir import RunDir
from jrnn.train.setup import load_trained


def sample_run(run_dir: str | Path, seed: int = 0, **changes: Any) -> str:
    """Text from the newest checkpoint of a run.

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
