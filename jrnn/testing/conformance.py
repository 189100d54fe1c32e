"""check_layer and check_model: whether a layer or a language model does what each should, with counterexamples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jrnn.errors import LayerError, near
from jrnn.testing import properties
from jrnn.testing.language_models import language_model
from jrnn.testing.model_properties import MODEL_PROPERTIES
from jrnn.testing.properties import PROPERTIES, NotApplicable, Property, smaller
from jrnn.testing.recurrent_layers import recurrent_layer
from jrnn.testing.subjects import Layer, PyTree

PropertyTable = Mapping[str, Property]

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Finding:
    """A property that a layer or a model does not have.

    Attributes:
        property: its name.
        rule: what should hold.
        counterexample: what was found; of a layer with the fewest steps and sequences that show it.
        steps, batch: T and N of the counterexample, or of the tokens that the model was checked on.
    """

    property: str
    rule: str
    counterexample: str
    steps: int
    batch: int

    def __str__(self) -> str:
        return f"{self.property}: {self.rule}; but for T={self.steps}, N={self.batch}: {self.counterexample}"


@dataclass(frozen=True)
class ConformanceReport:
    """The result of `check_layer` and `check_model`.

    Attributes:
        holds: the properties that hold.
        findings: the properties that do not hold.
        skipped: a property that does not apply, or that rests on one that does not hold -> why.
    """

    holds: tuple[str, ...]
    findings: tuple[Finding, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        lines = [
            f"holds: {', '.join(self.holds) or 'nothing'}",
            *(f"FAILS {f}" for f in self.findings),
        ]
        return "\n".join(
            [*lines, *(f"not checked: {name}, because {why}" for name, why in self.skipped.items())]
        )


def check_layer(
    layer: Any,
    x: PyTree = None,
    state: PyTree = None,
    *,
    params: PyTree = None,
    only: Collection[str] | None = None,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> ConformanceReport:
    """Checks a recurrent layer of any library, and finds the smallest counterexample of what it does wrong.

    It compiles the layer for each of many sizes, which may take a minute; a terminal shows the property under way.

    Args:
        layer: a function `(params, x, state, *, lengths=None, resets=None, mask=None) -> (y, state)`, whose last arguments
            are optional and checked if it has them; a layer of flax.nnx, linen, Equinox, Haiku, Keras, torch or `jrnn.nn`;
            or a `Layer`. See `jrnn.testing.recurrent_layer`.
        x: sequences in the layer's layout, float32 [T, N, ...] or [N, T, ...]; T = 4 and N = 3 are enough.
        state: a first state to check with; a random one is made for a library's layer.
        params: weights of a function, a linen module or a Haiku pair.
        only: names of properties to check, such as ["causality", "resets"]; by default all.
        tolerance: of float32 results, relative to the largest if that is above 1.
        options: fields of `Layer`, such as `time_axis` of a function, `reset_to`, `bidirectional`, `swap`.

    Returns:
        A Report.

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
    adapted = recurrent_layer(layer, x, state, params=params, **options)
    return _report(PROPERTIES, adapted, only, tolerance, _smallest)


def check_model(
    model: Any,
    tokens: Any = None,
    *,
    only: Collection[str] | None = None,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> ConformanceReport:
    """Checks a language model of any library: documents in one row, pieces, decoding, states, padding, batches, files.

    It compiles the model for about 20 sizes, which may take a minute; a terminal shows the property under way.

    Args:
        model: a model of `jrnn.models`; a model as transformers has them, in torch or not; or an `AdaptedModel`. See
            `jrnn.testing.language_model`.
        tokens: integers [N, T] to check it on, N at least 2 and T at least 6; random ones by default.
        only: names of properties to check, such as ["decoding", "left padding"]; by default all.
        tolerance: of logits, relative to the largest if that is above 1.
        options: fields of `AdaptedModel`, such as `over_devices` or `resets`.

    Returns:
        A Report.

    Raises:
        LayerError: for a model of an unknown kind, tokens that do not fit, or an unknown property.

    >>> import numpy as np
    >>> from jrnn.testing import AdaptedModel
    >>> def call(tokens, state):  # the logits are how often each token was there
    ...     counts = np.eye(5)[tokens].cumsum(axis=1)
    ...     return counts if state is None else counts + state[:, None], counts[:, -1]
    >>> report = check_model(AdaptedModel(call, 5), only=["causality", "pieces", "left padding"])
    >>> print(report)
    holds: causality
    FAILS pieces: a prompt read in pieces, the state handed on, gives what one call gives; but for T=8, N=2: in pieces of \
(2, 2, 4) tokens, logits[0, 4, 3] is 0, not 1
    not checked: left padding, because the model takes no attention_mask
    """
    adapted = language_model(model, tokens, **options)

    def finding(name: str, adapted: Any, tolerance: float, wrong: str) -> Finding:
        return Finding(name, MODEL_PROPERTIES[name].rule, wrong, *adapted.size)

    return _report(MODEL_PROPERTIES, adapted, only, tolerance, finding)


def _report(
    table: PropertyTable,
    adapted: Any,
    only: Collection[str] | None,
    tolerance: float,
    finding: Callable[[str, Any, float, str], Finding],
) -> ConformanceReport:
    """Checks the properties of a table; `finding` describes each one that does not hold."""
    names = list(table if only is None else only)
    _known(names, table)
    results: dict[str, Finding | str | None] = {}  # a finding, why it was not checked, or None
    for k, name in enumerate(_in_order(names, table), 1):
        _show(f"{k} of {len(names)} properties: {name}")
        failed = []
        for on in table[name].rests_on:
            if isinstance(results.get(on), Finding):
                failed.append(on)
        if failed:
            results[name] = f"{failed[0]} does not hold"
            continue
        try:
            wrong = _wrong(table[name], adapted, tolerance)
        except NotApplicable as e:
            results[name] = str(e)
            continue
        results[name] = None if wrong is None else finding(name, adapted, tolerance, wrong)
    _show("")
    found = {name: results[name] for name in names}
    return ConformanceReport(
        tuple(name for name, result in found.items() if result is None),
        tuple(result for result in found.values() if isinstance(result, Finding)),
        {name: result for name, result in found.items() if isinstance(result, str)},
    )


def _in_order(names: Collection[str], table: PropertyTable) -> Sequence[str]:
    """The names, each after the properties that it rests on."""
    order: dict[str, None] = {}

    def enter(name: str) -> None:
        for on in table[name].rests_on:
            enter(on)
        if name in names:
            order[name] = None

    for name in names:
        enter(name)
    return list(order)


def _known(names: Collection[str], table: PropertyTable) -> None:
    for name in names:
        if name not in table:
            raise LayerError(
                f"there is no property {name!r}{near(name, table)}; there are: {', '.join(table)}"
            )


def _show(text: str) -> None:
    """Shows the current check in one line of a terminal, which replaces the line before."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _wrong(property: Property, adapted: Any, tolerance: float) -> str | None:
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return property.check(adapted, tolerance)
    except NotApplicable:
        raise
    except Exception as e:  # what any library raises is a finding
        return f"raises {type(e).__name__}: {(str(e).splitlines() or [''])[0]}"


def _smallest(name: str, layer: Layer, tolerance: float, wrong: str) -> Finding:
    """The finding of the fewest steps and sequences that shows the same kind of fault: a difference, or an error."""
    steps, batch = layer.size
    for t in [steps] if name == "long" else range(1, steps + 1):
        for n in range(1, batch + 1):
            if (t, n) == (steps, batch):
                fault = wrong
            else:
                fault = _wrong(PROPERTIES[name], smaller(layer, t, n), tolerance)
            if fault is not None and fault.startswith("raises ") == wrong.startswith("raises "):
                text = f"{fault}{_behavior(name, layer, tolerance, wrong)}"
                length = properties.LONG if name == "long" else t
                return Finding(name, PROPERTIES[name].rule, text, length, n)
    raise AssertionError("the whole layer is the last one tried")


def _behavior(name: str, layer: Layer, tolerance: float, wrong: str) -> str:
    """What the whole layer does, as the end of a counterexample; "" where nothing is known of that."""
    behavior = PROPERTIES[name].behavior
    if behavior is None or wrong.startswith("raises "):
        return ""
    said = _wrong(replace(PROPERTIES[name], check=behavior), layer, tolerance)
    return "" if said is None or said.startswith("raises ") else f"; {said}"


def layer_tests(
    make: Callable[[], Any], *, skip: Collection[str] = (), tolerance: float = TOLERANCE
) -> Callable:
    """Returns a test function for pytest, with one test for each property of `check_layer`.

    Args:
        make: a function that returns a `Layer`, as `jrnn.testing.recurrent_layer` makes it; it is called once.
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
    return _tests(PROPERTIES, check_layer, make, skip, tolerance)


def model_tests(
    make: Callable[[], Any], *, skip: Collection[str] = (), tolerance: float = TOLERANCE
) -> Callable:
    """Returns a test function for pytest, with one test for each property of `check_model`.

    Args:
        make: a function that returns a model, as `check_model` takes it; it is called once.
        skip, tolerance: as of `layer_tests`.

    Raises:
        LayerError: for an unknown property in `skip`.
        ImportError: if pytest is missing.

    >>> import jrnn
    >>> config = {"model_type": "mamba", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1}
    >>> test_my_model = model_tests(lambda: jrnn.models.create(config, jax.random.key(0)), skip=["devices"])
    """
    return _tests(MODEL_PROPERTIES, check_model, make, skip, tolerance)


def _tests(
    table: PropertyTable,
    check: Callable,
    make: Callable,
    skip: Collection[str],
    tolerance: float,
) -> Callable:
    import pytest

    _known(skip, table)
    layers: list[Any] = []

    @pytest.mark.parametrize("property", [name for name in table if name not in skip])
    def test_layer(property: str) -> None:
        if not layers:
            layers.append(make())
        report = check(layers[0], only=[property], tolerance=tolerance)
        for why in report.skipped.values():
            pytest.skip(why)
        assert not report.findings, str(report.findings[0])

    return test_layer
