"""Models: pure functions that a task trains, made as a net, as layers of jrnn.nn, or read from a net on disk."""

from .build import FEATURE_MODELS, TOKEN_MODELS, build_model
from .model import Carry, Compute, Model, Outcome, Params, Signature
