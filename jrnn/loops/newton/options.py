"""`Newton`, the options of the executor "newton", and `ScanStatistics`, what it reports."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jrnn.errors import ScanError, near
from jrnn.files import plain

_JACOBIANS = ("exact", "diagonal")
_GUESSES = ("zeros", "sweep")


@dataclass(frozen=True)
class Newton:
    """The options of `executor="newton"`; give an object of this class as the executor.

    Attributes:
        iterations: the most updates. If the certificate does not hold then, the loop is run step by step.
        tolerance: the largest residual `|h[t] - f(h[t-1], x[t])|` of any element, in units of the scale of that element at
            that step; None: 32 units of the last place of the dtype.
        guess: what the iteration starts from: "zeros"; "sweep", one step from the initial carry at every time; or the
            carries after every step, a pytree with leaves [T, ...], as in `ScanStatistics.states` of the last training step.
        jacobian: "exact"; or "diagonal", which leaves out what is not on the diagonal of dense blocks (quasi-Newton): less
            memory and more iterations. The solution and the derivatives are the same.
        damping: the part of the Jacobian that is left out of an update, from 0 to 1. None: it starts at 0, and goes half of
            the way to 1 whenever the residual grew.
        most_bytes: the most bytes of the Jacobians of all steps; a step that needs more raises a ScanError.

    >>> Newton(iterations=8).tolerance is None
    True
    """

    iterations: int = 50
    tolerance: float | None = None
    guess: Any = "zeros"
    jacobian: str = "exact"
    damping: float | None = None
    most_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.jacobian not in _JACOBIANS:
            raise ScanError(
                f"Newton: jacobian must be 'exact' or 'diagonal', but is {self.jacobian!r}"
                f"{near(str(self.jacobian), _JACOBIANS)}"
            )
        if isinstance(self.guess, str) and self.guess not in _GUESSES:
            raise ScanError(
                f"Newton: guess must be 'zeros', 'sweep' or the carries after every step, but is {self.guess!r}"
                f"{near(self.guess, _GUESSES)}"
            )
        _check_count("iterations", self.iterations, 2**31)
        _check_count("most_bytes", self.most_bytes, 2**63)
        _check_number("tolerance", self.tolerance)
        _check_number("damping", self.damping)
        if self.tolerance is not None and not self.tolerance > 0:
            raise ScanError(f"Newton: tolerance must be positive, but is {self.tolerance}")
        if self.damping is not None and not 0 <= self.damping <= 1:
            raise ScanError(f"Newton: damping must be from 0 to 1, but is {self.damping}")

    def separate_guess(self) -> tuple[Newton, Any]:
        """Returns the options without an array, so that they can be hashed; and the carries to start from, or None."""
        if isinstance(self.guess, str):
            return self, None
        return replace(self, guess="zeros"), self.guess

    def with_guess(self, guess: Any) -> Newton:
        """The inverse of `separate_guess`."""
        return self if guess is None else replace(self, guess=guess)


def _check_count(name: str, value: object, limit: int) -> None:
    value = plain(value)
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or not 1 <= value < limit:
        raise ScanError(f"Newton: {name} must be an integer of at least 1, but is {value!r:.80}")


def _check_number(name: str, value: object) -> None:
    value = plain(value)
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if value is not None and not is_number:
        raise ScanError(f"Newton: {name} must be None or a number, but is {value!r:.80}")


def options_of(executor: object) -> Newton | None:
    """Returns the options of an executor; None for all but "newton"."""
    if isinstance(executor, Newton):
        return executor
    if isinstance(executor, str) and executor == "newton":
        return Newton()
    return None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScanStatistics:
    """What the executor "newton" reports.

    Attributes:
        iterations: the number of updates; of several groups of carries that are solved one after the other, the most.
        residual: the largest `|h[t] - f(h[t-1], x[t])|` of any element, in units of its scale at that step.
        error: a bound of the distance from the result of the loop: of carries in the same units, of outputs in units of the
            largest element of each, at any step; 0 if the loop was run.
        sequential_steps: how many steps were run one after the other: T, or 0 if the certificate held.
        states: the carries after every step, a pytree with leaves [T, ...].
    """

    iterations: jax.Array
    residual: jax.Array
    error: jax.Array
    sequential_steps: jax.Array
    states: Any = field(repr=False)
