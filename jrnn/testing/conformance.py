"""check_layer: whether a recurrent layer of any library does what every recurrent layer should, with counterexamples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jrnn.errors import LayerError, near
from jrnn.testing import properties
from jrnn.testing.properties import PROPERTIES, NotApplicable, smaller
from jrnn.testing.recurrent_layers import AdaptedLayer, recurrent_layer

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Finding:
    """A property that a layer does not have.

    Attributes:
        property: its name.
        rule: what should hold.
        counterexample: what was found, with the fewest steps and sequences that show it.
        steps, batch: T and N of the counterexample.
    """

    property: str
    rule: str
    counterexample: str
    steps: int
    batch: int

    def __str__(self) -> str:
        return f"{self.property}: {self.rule}; but for T={self.steps}, N={self.batch}: {self.counterexample}"


@dataclass(frozen=True)
class LayerReport:
    """The result of `check_layer`.

    Attributes:
        holds: the properties that hold.
        findings: those that do not.
        skipped: those that do not apply to the layer -> why.
    """

    holds: tuple[str, ...]
    findings: tuple[Finding, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"holds: {', '.join(self.holds) or 'nothing'}", *(f"FAILS {f}" for f in self.findings)]
        return "\n".join([*lines, *(f"not checked: {name}, because {why}" for name, why in self.skipped.items())])


def check_layer(
    layer: Any,
    x: Any = None,
    state: Any = None,
    *,
    params: Any = None,
    only: Collection[str] | None = None,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> LayerReport:
    """Checks a recurrent layer of any library, and finds the smallest counterexample of what it does wrong.

    It compiles the layer for each of many sizes, which may take a minute; a terminal shows the property under way.

    Args:
        layer: a function `(params, x, state, *, lengths=None, resets=None) -> (y, state)`, of which the last two arguments
            are optional and checked if it has them; a layer of flax.nnx, linen, Equinox, Haiku, Keras, torch or `jrnn.nn`;
            or a `AdaptedLayer`. See `jrnn.testing.recurrent_layer`.
        x: sequences in the layer's layout, float32 [T, N, ...] or [N, T, ...]; T = 4 and N = 3 are enough.
        state: a first state to check with; a random one is made for a library's layer.
        params: weights of a function, a linen module or a Haiku pair.
        only: names of properties to check, such as ["causality", "resets"]; by default all.
        tolerance: of float32 results, relative to the largest if that is above 1.
        options: fields of `AdaptedLayer`, such as `time_axis` of a function, `reset_to`, `bidirectional`, `swap`.

    Returns:
        A LayerReport.

    Raises:
        LayerError: for a layer of an unknown kind, sequences that do not fit, or an unknown property.

    >>> import numpy as np
    >>> def layer(params, x, state):
    ...     total = state + jnp.cumsum(x, axis=0)
    ...     return total / total.max(), total[-1]
    >>> import jax.numpy as jnp
    >>> report = check_layer(layer, np.ones((3, 2, 1), np.float32), np.ones((2, 1), np.float32), only=["causality", "jit"])
    >>> print(report.findings[0])
    causality: an output does not depend on later inputs; but for T=2, N=1: with other inputs from step 1 on, y[0, 0, 0] is \
0.4444444, not 0.6666667
    >>> report.holds
    ('jit',)
    """
    made = recurrent_layer(layer, x, state, params=params, **options)
    for name in only or ():
        if name not in PROPERTIES:
            raise LayerError(
                f"there is no property {name!r}{near(name, PROPERTIES)}; there are: {', '.join(PROPERTIES)}"
            )
    holds: list[str] = []
    findings: list[Finding] = []
    skipped: dict[str, str] = {}
    names = list(PROPERTIES if only is None else only)
    for k, name in enumerate(names, 1):
        _show(f"{k} of {len(names)} properties: {name}")
        try:
            wrong = _wrong(name, made, tolerance)
        except NotApplicable as e:
            skipped[name] = str(e)
            continue
        if wrong is None:
            holds.append(name)
        else:
            findings.append(_smallest(name, made, tolerance, wrong))
    _show("")
    return LayerReport(tuple(holds), tuple(findings), skipped)


def _show(text: str) -> None:
    """Shows what is under way in one line of a terminal, in place of the last one."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _wrong(name: str, layer: AdaptedLayer, tolerance: float) -> str | None:
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return PROPERTIES[name].check(layer, tolerance)
    except NotApplicable:
        raise
    except Exception as e:  # what any library raises is a finding
        return f"raises {type(e).__name__}: {(str(e).splitlines() or [''])[0]}"


def _smallest(name: str, layer: AdaptedLayer, tolerance: float, wrong: str) -> Finding:
    """The finding of the fewest steps and sequences that shows the same kind of fault: a difference, or an error."""
    steps, batch = layer.size
    for t in [steps] if name == "long" else range(1, steps + 1):
        for n in range(1, batch + 1):
            found = wrong if (t, n) == (steps, batch) else _wrong(name, smaller(layer, t, n), tolerance)
            if found is not None and found.startswith("raises ") == wrong.startswith("raises "):
                return Finding(name, PROPERTIES[name].rule, found, properties.LONG if name == "long" else t, n)
    raise AssertionError("the whole layer is the last one tried")


def layer_tests(make: Callable[[], Any], *, skip: Collection[str] = (), tolerance: float = TOLERANCE) -> Callable:
    """Returns a test function for pytest, with one test for each property of `check_layer`.

    Args:
        make: a function that returns a `AdaptedLayer`, as `jrnn.testing.recurrent_layer` makes it; it is called once.
        skip: names of properties that are not to be tested.
        tolerance: as of `check_layer`.

    Raises:
        LayerError: for an unknown property in `skip`.
        ImportError: if pytest is missing.

    >>> import jax.numpy as jnp
    >>> def layer(params, x, state):
    ...     y = state + jnp.cumsum(params * x, axis=0)
    ...     return y, y[-1]
    >>> def make():
    ...     return recurrent_layer(layer, jnp.ones((3, 2, 1)), jnp.ones((2, 1)), params=jnp.float32(2))
    >>> test_my_layer = layer_tests(make)  # in a test file: pytest runs test_my_layer[causality], test_my_layer[chunks], ...
    """
    import pytest

    for name in skip:
        if name not in PROPERTIES:
            raise LayerError(
                f"there is no property {name!r}{near(name, PROPERTIES)}; there are: {', '.join(PROPERTIES)}"
            )
    made: list[AdaptedLayer] = []

    @pytest.mark.parametrize("property", [name for name in PROPERTIES if name not in skip])
    def test_layer(property: str) -> None:
        if not made:
            made.append(make())
        report = check_layer(made[0], only=[property], tolerance=tolerance)
        for why in report.skipped.values():
            pytest.skip(why)
        assert not report.findings, str(report.findings[0])

    return test_layer
