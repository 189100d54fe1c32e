"""Optimizers and schedules, from optax by name."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from inspect import signature
from typing import Any

import jax
import optax
from optax import contrib

from jrnn.errors import ConfigError
from jrnn.train.config import OptimizerConfig
from jrnn.train.toml_codec import hint

Schedule = Callable[[Any], Any]


# Optimizers that need only gradients and losses: not lbfgs and sophia, which call the loss function; dpsgd, which needs the
# gradient of each example; and schedule_free, which wraps another optimizer.
NAMES = """
adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw noisy_sgd
novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3 yogi contrib.acprop
contrib.ademamix contrib.adopt contrib.cocob contrib.dadapt_adamw contrib.dog contrib.dowg contrib.galore contrib.madgrad
contrib.momo contrib.momo_adam contrib.muon contrib.prodigy contrib.schedule_free_adamw contrib.schedule_free_sgd
contrib.simplified_ademamix
"""
NAMES_OF_SCHEDULES = """
constant_schedule cosine_decay_schedule cosine_onecycle_schedule exponential_decay linear_onecycle_schedule linear_schedule
piecewise_constant_schedule piecewise_interpolate_schedule polynomial_schedule sgdr_schedule warmup_constant_schedule
warmup_cosine_decay_schedule warmup_exponential_decay_schedule
"""


def _found(names: str) -> dict[str, Callable[..., Any]]:
    """Returns the functions of optax with these names; an older optax lacks some of them."""
    functions = {}
    for name in names.split():
        module = contrib if name.startswith("contrib.") else optax
        function = getattr(module, name.removeprefix("contrib."), None)
        if function is not None:
            functions[name] = function
    return functions


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = _found(NAMES)
SCHEDULES: dict[str, Callable[..., Schedule]] = _found(NAMES_OF_SCHEDULES)
# Names of a schedule's greatest rate; the first that it has.
_GREATEST = ("peak_value", "init_value", "value")
_LENGTHS = ("decay_steps", "transition_steps")  # names of a schedule's number of steps


def make_schedule(config: OptimizerConfig, steps: int) -> Schedule:
    """Returns the learning rate as a function of the step: linear warm-up, then the schedule until its end.

    Args:
        config: the table [optimizer].
        steps: the steps of the run, which are the length of the schedule unless the config has one.

    Raises:
        ConfigError: for an unknown schedule, or options that it does not take.
    """
    rest = max((config.schedule_steps or steps) - config.warmup, 1)
    main = _main_schedule(config, rest)
    if config.warmup == 0:
        return main
    rise = optax.linear_schedule(
        config.learning_rate / config.warmup, config.learning_rate, config.warmup - 1
    )
    return optax.join_schedules([rise, main], [config.warmup])


def follows_the_run(config: OptimizerConfig) -> bool:
    """Returns whether the learning rate at a step depends on the number of steps of the run."""
    if config.schedule_steps or config.schedule == "constant":
        return False
    lengths = set(_LENGTHS)
    if config.schedule in SCHEDULES:
        lengths &= signature(SCHEDULES[config.schedule]).parameters.keys()
    return not lengths <= config.schedule_options.keys()


def _main_schedule(config: OptimizerConfig, steps: int) -> Schedule:
    name = config.schedule
    rate = config.learning_rate
    options = {key: _by_step(value) for key, value in config.schedule_options.items()}
    short: dict[str, Schedule] = {
        "cosine": optax.cosine_decay_schedule(rate, steps, config.final_rate / rate),
        "linear": optax.linear_schedule(rate, config.final_rate, steps),
        "constant": optax.constant_schedule(rate),
    }
    if name in short:
        if options:
            raise ConfigError(
                f"optimizer.schedule_options: the schedule {name!r} takes none; give optax's own name"
            )
        return short[name]
    make = _choose("optimizer.schedule", "schedule", name, SCHEDULES, [*short, *SCHEDULES])
    known = signature(make).parameters
    defaults: dict[str, Any] = {}
    if "init_value" in known:
        defaults["init_value"] = 0.0
    greatest = [name for name in _GREATEST if name in known]
    if greatest:
        defaults[greatest[0]] = rate
    defaults |= dict.fromkeys(known.keys() & set(_LENGTHS), steps)
    return _created("optimizer.schedule_options", make, options, known, defaults)


def _by_step(value: Any) -> Any:
    """Converts the keys of a table from strings, which TOML requires, to steps; returns other values unchanged."""
    if not isinstance(value, dict):
        return value
    return {int(key) if key.isdigit() else key: item for key, item in value.items()}


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformationExtraArgs:
    """Returns clipping, then the optimizer with its schedule; `update` also takes the loss, as `value`.

    Raises:
        ConfigError: for an unknown optimizer or schedule, or options that it does not take.
    """
    make = _choose("optimizer.name", "optimizer", config.name, OPTIMIZERS, OPTIMIZERS)
    known = list(signature(make).parameters)
    if "learning_rate" in known:  # a key of its own
        known.remove("learning_rate")
    steady = config.schedule == "constant" and not config.warmup and not config.schedule_options
    rate = config.learning_rate if steady else make_schedule(config, steps)
    extra: dict[str, Any] = {"learning_rate": rate}
    if config.decay == "matrices":
        mask = _mask_of_decay(known)
        if mask is None:
            takers = []
            for name, optimizer_of in OPTIMIZERS.items():
                if _mask_of_decay(signature(optimizer_of).parameters):
                    takers.append(name)
            raise ConfigError(
                f'optimizer.decay = "matrices" needs an optimizer with weight decay: {", ".join(takers)}'
            )
        extra[mask] = _are_matrices
    if "key" in known:
        extra["key"] = jax.random.key(0)  # of the noise that the optimizer adds
    optimizer = _created("optimizer.options", make, config.options, known, extra)
    clip = [optax.clip_by_global_norm(config.clip)] if config.clip else []
    whole = optax.chain(*clip, optimizer)
    if config.only:  # the others have no moments, and do not decay
        parts = {True: whole, False: optax.set_to_zero()}
        whole = optax.partition(parts, partial(trained, config.only))
    return optax.with_extra_args_support(whole)


def _are_matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def trained(only: Iterable[str], params: Any) -> Any:
    """Returns whether each parameter is trained: whether one of the patterns matches its name.

    >>> trained(["layers.1.*"], {"layers.0.w": 0, "layers.1.w": 0})
    {'layers.0.w': False, 'layers.1.w': True}
    """

    def is_trained(path: Any, parameter: Any) -> bool:
        name = name_of(path)
        return any(fnmatchcase(name, pattern) for pattern in only)

    return jax.tree.map_with_path(is_trained, params)


def name_of(path: Any) -> str:
    """Returns the name of a parameter: the keys that lead to it, joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _mask_of_decay(options: Container[str]) -> str | None:
    """Returns the name of the option that chooses the parameters that decay."""
    return next((name for name in ("weight_decay_mask", "mask") if name in options), None)


def _choose(
    where: str, what: str, name: str, known: Mapping[str, Any], shown: Iterable[str]
) -> Any:
    if name not in known:
        raise ConfigError(f"{where}: optax has no {what} {name!r} here{hint(name, shown)}")
    return known[name]


def _created(
    where: str, make: Callable, options: Mapping, known: Iterable[str], defaults: Mapping[str, Any]
) -> Any:
    """Calls a function of optax with a table's options, which must all be `known`, and with defaults for the others."""
    for option in options:
        if option not in known:
            raise ConfigError(
                f"{where}: optax.{make.__name__} has no option {option!r}{hint(option, known)}"
            )
    try:
        return make(**{**defaults, **options})
    except (TypeError, ValueError) as e:
        raise ConfigError(f"{where}: optax.{make.__name__}: {e}") from None
