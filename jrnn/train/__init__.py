"""Training from a configuration: `load_config`, `train`, and functions of runs; and the parts of users' own tasks.

In: a config, and data on disk. Out: a run directory with metrics, checkpoints and a model. Read `loop.py` first.
"""

from jrnn.train.config import Config, load_config
from jrnn.train.loggers import Logger
from jrnn.train.loop import Result, train
from jrnn.train.models import (
    FEATURE_MODELS,
    TOKEN_MODELS,
    Compute,
    FunctionModel,
    Model,
    ModelKind,
    Outcome,
    Signature,
    build_model,
)
from jrnn.train.serving import TrainedModel, load_run
from jrnn.train.tasks import Task, TaskKind, Trained
from jrnn.train.tasks.task import Examples, HeldOutTask, Shuffled, checksum, split

__all__ = [
    "FEATURE_MODELS",
    "TOKEN_MODELS",
    "Compute",
    "Config",
    "Examples",
    "FunctionModel",
    "HeldOutTask",
    "Logger",
    "Model",
    "ModelKind",
    "Outcome",
    "Result",
    "Shuffled",
    "Signature",
    "Task",
    "TaskKind",
    "Trained",
    "TrainedModel",
    "build_model",
    "checksum",
    "load_config",
    "load_run",
    "split",
    "train",
]
