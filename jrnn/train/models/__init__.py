"""Models: pure functions that a task trains, made as a net, as layers of jrnn.nn, or read from a net on disk."""

from jrnn.train.models.build import FEATURE_MODELS, MAKERS, TOKEN_MODELS, ModelKind, build_model, model_table
from jrnn.train.models.function import FunctionModel
from jrnn.train.models.model import Carry, Compute, Model, Outcome, Params, Signature

__all__ = [
    "FEATURE_MODELS",
    "MAKERS",
    "TOKEN_MODELS",
    "Carry",
    "Compute",
    "FunctionModel",
    "Model",
    "ModelKind",
    "Outcome",
    "Params",
    "Signature",
    "build_model",
    "model_table",
]
