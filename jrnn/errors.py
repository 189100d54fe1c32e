"""The errors that jrnn raises. Each says where it happened, the rule, what was given, and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConversionError",
    "DataError",
    "FormatError",
    "GradientError",
    "GradientWarning",
    "JrnnError",
    "LayerError",
    "NetError",
    "OpError",
    "PlanError",
    "ScanError",
    "TrainError",
    "UnknownOperatorError",
    "UsageError",
]


class JrnnError(Exception):
    """Base of every error that jrnn raises for a user's mistake."""

    def at(self, where: str) -> JrnnError:
        """The same error with a place put before its text; used from the inside out as it leaves nested nets."""
        return type(self)(f"{where}: {self}")


class FormatError(JrnnError, ValueError):
    """Bytes or text that are not the message they should be."""


class NetError(JrnnError, ValueError):
    """A net that breaks a rule: an undefined blob, operators out of order, a repeated output."""


class UnknownOperatorError(NetError):
    """An operator type that the registry lacks."""


class OpError(JrnnError, ValueError):
    """An operator given inputs or arguments that it cannot take."""


class PlanError(JrnnError, ValueError):
    """A plan that cannot be run, or that does not end."""


class GradientError(JrnnError, ValueError):
    """A gradient that does not exist or cannot be formed."""


class ScanError(JrnnError, ValueError):
    """A scan asked for in a way that cannot be carried out."""


class LayerError(JrnnError, ValueError):
    """A recurrent layer given arrays or settings that do not fit it."""


class ConversionError(JrnnError, ValueError):
    """Something that cannot be converted between NetDefs and JAX functions."""


class ConfigError(JrnnError, ValueError):
    """A configuration with an unknown key or an impossible value."""


class DataError(JrnnError, ValueError):
    """Training data that cannot be used."""


class CheckpointError(JrnnError, ValueError):
    """A checkpoint that is missing, damaged, or of another model."""


class UsageError(JrnnError, ValueError):
    """A command line that asks for something that is not there."""


class TrainError(JrnnError):
    """A training run that cannot go on."""


class GradientWarning(UserWarning):
    """A loss whose gradients are all stopped on their way back, so that nothing can be trained by it."""


def near(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` when a known name is close to `name`, else the empty string.

    >>> near("Sigmiod", ["Sigmoid", "Tanh"])
    "; did you mean 'Sigmoid'?"
    """
    found = difflib.get_close_matches(name, list(known), n=3)
    if not found:
        return ""
    return "; did you mean " + " or ".join(repr(f) for f in found) + "?"


def describe_op(index: int, type: str, outputs: Iterable[str], net_name: str) -> str:
    """Names an operator for an error message.

    >>> describe_op(3, "FC", ["y"], "lstm")
    "op #3 FC -> 'y' in net 'lstm'"
    """
    names = ", ".join(repr(o) for o in outputs) or "(no output)"
    return f"op #{index} {type} -> {names} in net {net_name!r}"
