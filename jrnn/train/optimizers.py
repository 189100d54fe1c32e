"""Optimizers and schedules, from optax by name."""

from __future__ import annotations

import inspect

import optax

from ..errors import ConfigError, near
from .config import OptimizerConfig

# optax's optimizers that need nothing but the gradient and a learning rate.
NAMES = (
    "adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad", "lamb",
    "lars", "lion", "nadam", "nadamw", "novograd", "radam", "rmsprop", "sgd", "yogi",
)  # fmt: skip


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate as a function of the step: linear warm-up, then the schedule until step `steps`."""
    rest = max(steps - config.warmup, 1)
    if config.schedule == "cosine":
        main = optax.cosine_decay_schedule(config.learning_rate, rest, config.final_rate / config.learning_rate)
    elif config.schedule == "linear":
        main = optax.linear_schedule(config.learning_rate, config.final_rate, rest)
    else:
        main = optax.constant_schedule(config.learning_rate)
    if config.warmup == 0:
        return main
    rise = optax.linear_schedule(config.learning_rate / config.warmup, config.learning_rate, config.warmup - 1)
    return optax.join_schedules([rise, main], [config.warmup])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping, then the optimizer with its schedule.

    Raises:
        ConfigError: for an unknown optimizer, or options that it does not take.
    """
    if config.name not in NAMES:
        hint = near(config.name, NAMES) or f"; known are {', '.join(NAMES)}"
        raise ConfigError(f"optimizer.name: optax has no optimizer {config.name!r} here{hint}")
    make = getattr(optax, config.name)
    known = [p for p in inspect.signature(make).parameters if p != "learning_rate"]
    for option in config.options:
        if option not in known:
            hint = near(option, known) or f"; it takes {', '.join(known)}"
            raise ConfigError(f"optimizer.options: optax.{config.name} has no option {option!r}{hint}")
    try:
        optimizer = make(make_schedule(config, steps), **config.options)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"optimizer.options: optax.{config.name}: {e}") from None
    return optax.chain(optax.clip_by_global_norm(config.clip), optimizer) if config.clip else optimizer
