"""The errors that jrnn raises, and what messages are made of: near names, descriptions, text that is safe to show.

An error says where it happened, the rule, what was given, and the fix.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from typing import Any

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


LONGEST = 3000  # characters of an error's text; a name in a file can have millions
# Control characters, marks that reorder or hide text, separators of lines, surrogates, and what XML forbids.
_UNSAFE = "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff-\uffff]"
_UNSAFE_IN_LINES = _UNSAFE.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f")


class JrnnError(Exception):
    """Base of every error that jrnn raises for a user's mistake.

    Its text has at most `LONGEST` characters: the middle of a longer one is left out.

    Attributes:
        outputs: the outputs of the operator that the error is about, if it is known.
    """

    outputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) <= LONGEST:
            return text
        half = LONGEST // 2 - 30
        return f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"

    def at(self, where: str, outputs: tuple[str, ...] = ()) -> JrnnError:
        """The same error with `where` before its text. Each enclosing net adds its place as the error leaves it."""
        error = type(self)(f"{where}: {self}")
        error.outputs = self.outputs or outputs
        return error


ErrorType = type[JrnnError]  # the error that a caller wants raised


class FormatError(JrnnError, ValueError):
    """Bytes or text are not of the expected format."""


class NetError(JrnnError, ValueError):
    """A net is invalid: an undefined blob, operators out of order, a repeated output."""


class UnknownOperatorError(NetError):
    """An operator type does not exist."""


class OpError(JrnnError, ValueError):
    """An operator was given inputs or arguments that it cannot take."""


class PlanError(JrnnError, ValueError):
    """A plan cannot run, or does not end."""


class GradientError(JrnnError, ValueError):
    """A gradient does not exist or cannot be computed."""


class ScanError(JrnnError, ValueError):
    """The arguments of a scan do not fit together."""


class LayerError(JrnnError, ValueError):
    """Arrays or settings do not fit a recurrent layer."""


class ConversionError(JrnnError, ValueError):
    """A function, net or array cannot be converted."""


class ConfigError(JrnnError, ValueError):
    """A configuration has an unknown key or an impossible value."""


class DataError(JrnnError, ValueError):
    """Training data cannot be used."""


class CheckpointError(JrnnError, ValueError):
    """A checkpoint is missing, damaged, or of another model."""


class UsageError(JrnnError, ValueError):
    """A command line asks for something that does not exist."""


class TrainError(JrnnError):
    """A training run cannot continue."""


class GradientWarning(UserWarning):
    """All gradients of a loss stop before they reach a parameter, so nothing can be trained."""


def near(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` when a known name is close to `name`, else the empty string.

    >>> near("Sigmiod", ["Sigmoid", "Tanh"])
    "; did you mean 'Sigmoid'?"
    """
    names = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else ""


def check_known(name: str, known: Collection[str], error: ErrorType, text: str) -> None:
    """Raises the error with this text, and with near names, unless the name is known."""
    if name not in known:
        raise error(f"{text}{near(name, known)}")


def describe_op(index: int, type: str, outputs: Iterable[str], net_name: str) -> str:
    """Names an operator for an error message.

    >>> describe_op(3, "FC", ["y"], "lstm")
    "op #3 FC -> 'y' in net 'lstm'"
    """
    names = ", ".join(repr(o) for o in outputs) or "(no output)"
    return f"op #{index} {type} -> {names} in net {net_name!r}"


def describe_value(x: Any) -> str:
    """`float32[2,3]` for an array, else the name of the type."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return type(x).__name__


def needs_extra(what: str, extra: str) -> str:
    """The message for a package that is not installed, by the extra of jrnn that installs it.

    >>> needs_extra("a picture", "plot")
    "a picture needs the extra 'plot': pip install 'jrnn[plot]'"
    """
    return f"{what} needs the extra '{extra}': pip install 'jrnn[{extra}]'"


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text of a file or a user with an escape in place of each character that is not shown as itself.

    Args:
        text: any text.
        lines: whether line breaks and tabs stay as they are.

    >>> printable("w\x1b[2J\n"), printable("a\tb\n", lines=True)
    ('w\\x1b[2J\\n', 'a\tb\n')
    """
    return re.sub(_UNSAFE_IN_LINES if lines else _UNSAFE, lambda match: ascii(match[0])[1:-1], text)
