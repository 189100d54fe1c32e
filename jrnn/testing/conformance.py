"""check_layer, check_kernel and check_model: whether each does what it should, with counterexamples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jrnn.errors import LayerError, near
from jrnn.testing import properties
from jrnn.testing.kernels import (
    KERNEL_PROPERTIES,
    Kernel,
    Trial,
    counterexample_of,
    example_trial,
    sequence_kernel,
    smallest_trial,
)
from jrnn.testing.language_models import language_model
from jrnn.testing.model_properties import MODEL_PROPERTIES
from jrnn.testing.properties import PROPERTIES, NotApplicable, Property, smaller, smallest_of
from jrnn.testing.recurrent_layers import recurrent_layer
from jrnn.testing.subjects import Layer, PyTree

PropertyTable = Mapping[str, Property]

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Finding:
    """A property that a layer, a kernel or a model does not have.

    Attributes:
        property: its name.
        rule: what should hold.
        counterexample: what was found; of a layer or a kernel with the fewest steps and sequences that show it.
        steps, batch: T and N of the counterexample, or of the tokens that the model was checked on.
        inputs: of a kernel, the arrays of the counterexample by name, in the kernel's layout.
    """

    property: str
    rule: str
    counterexample: str
    steps: int
    batch: int
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.property}: {self.rule}; but for T={self.steps}, N={self.batch}: {self.counterexample}"


@dataclass(frozen=True)
class ConformanceReport:
    """The result of `check_layer`, `check_kernel` and `check_model`.

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


def check_kernel(
    step: Any,
    kernel: Any = None,
    xs: PyTree = None,
    state: PyTree = None,
    *,
    only: Collection[str] | None = None,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> ConformanceReport:
    """Checks anything that claims to compute the loop of a step, and finds the smallest counterexample of each fault.

    The step, run token by token in float64, is what all results and gradients are compared with.

    Args:
        step: `step(carry, x) -> (carry, y)` of JAX, for one token of one sequence and one head; or a `Kernel`.
        kernel: `kernel(xs, state) -> (ys, state)`, of JAX, torch or NumPy, or an ONNX model. Its signature says which of
            lengths, resets, segments and mask it takes. See `jrnn.testing.sequence_kernel`.
        xs: a pytree of inputs in the kernel's layout, a few steps; [T, N, ...] by default.
        state: a state that a sequence may begin in.
        only: names of properties to check, such as ["values", "gradients"]; by default all.
        tolerance: of float32 results, relative to the largest if that is above 1.
        options: arguments of `sequence_kernel`, such as layout, params and framework, and fields of `Kernel`, such as chunk,
            decay, multiple_of, returns_state.

    Returns:
        A report. What the kernel does not take is in `skipped`, with the reason.

    Raises:
        LayerError: for a kernel of an unknown kind, arrays that do not fit, or an unknown property or option.

    >>> import jax.numpy as jnp
    >>> def step(total, x):
    ...     return total + x, total + x
    >>> def kernel(xs, state):  # forgets its first state where there is more than one chunk
    ...     ys = jnp.cumsum(xs, axis=0) + (state if len(xs) <= 4 else 0)
    ...     return ys, ys[-1]
    >>> xs, state = np.ones((2, 1), np.float32), np.ones(1, np.float32)
    >>> report = check_kernel(step, kernel, xs, state, chunk=4, layout="TN", only=["values", "first state"])
    >>> report.holds
    ('values',)
    >>> print(report.findings[0])
    first state: from a first state, outputs and the last state are the step's; but for T=5, N=1: y[0, 0] is 0, not 1; \
with xs = [0, 0, 0, 0, 0], state = 1
    """
    if isinstance(step, Kernel):
        adapted = replace(step, **options)
    else:
        adapted = sequence_kernel(step, kernel, xs, state, **options)
    return _report(KERNEL_PROPERTIES, example_trial(adapted), only, tolerance, _smallest_trial)


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

    def finding(property: Property, adapted: Any, tolerance: float, wrong: str) -> Finding:
        return Finding(property.name, property.rule, wrong, *adapted.size)

    return _report(MODEL_PROPERTIES, adapted, only, tolerance, finding)


def _report(
    table: PropertyTable,
    adapted: Any,
    only: Collection[str] | None,
    tolerance: float,
    finding: Callable[[Property, Any, float, str], Finding],
) -> ConformanceReport:
    """Checks the properties of a table; `finding` describes each one that does not hold."""
    names = list(table if only is None else only)
    _known(names, table)
    results: dict[str, Finding | str | None] = {}  # a finding, why it was not checked, or None
    causes: dict[str, str] = {}  # the property at fault, of those that do not hold or rest on one
    for k, name in enumerate(_in_order(names, table), 1):
        _show(f"{k} of {len(names)} properties: {name}")
        failed = [causes[on] for on in table[name].rests_on if on in causes]
        if failed:
            causes[name] = failed[0]
            results[name] = f"{failed[0]} does not hold"
            continue
        try:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                results[name] = _first_finding(table[name], adapted, causes, tolerance, finding)
        except NotApplicable as e:
            results[name] = str(e)
        if isinstance(results[name], Finding):
            causes[name] = name
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
        return property.check(adapted, tolerance)
    except NotApplicable:
        raise
    except Exception as e:  # what any library raises is a finding
        return f"raises {type(e).__name__}: {(str(e).splitlines() or [''])[0]}"


def _first_finding(
    property: Property,
    adapted: Any,
    failed: Collection[str],
    tolerance: float,
    finding: Callable[[Property, Any, float, str], Finding],
) -> Finding | None:
    for subject in property.variations(adapted, failed):
        wrong = _wrong(property, subject, tolerance)
        if wrong is not None:
            return finding(property, subject, tolerance, wrong)
    return None


def _fails_alike(property: Property, tolerance: float, wrong: str) -> Callable[[Any], bool]:
    """Whether something shows the same kind of fault: a difference, or an error."""

    def fails(subject: Any) -> bool:
        try:
            fault = _wrong(property, subject, tolerance)
        except NotApplicable:
            return False
        return fault is not None and fault.startswith("raises ") == wrong.startswith("raises ")

    return fails


def _smallest(property: Property, layer: Layer, tolerance: float, wrong: str) -> Finding:
    """The finding of the fewest steps and sequences that shows the same kind of fault."""
    steps, batch = layer.size
    is_long = property.name == "long"

    def smaller_layers() -> Iterator[Layer]:
        for t in [steps] if is_long else range(1, steps + 1):
            for n in range(1, batch + 1):
                if (t, n) != (steps, batch):
                    yield smaller(layer, t, n)

    smallest = smallest_of(layer, smaller_layers(), _fails_alike(property, tolerance, wrong))
    fault = wrong if smallest is layer else _wrong(property, smallest, tolerance) or wrong
    text = f"{fault}{_behavior(property, layer, tolerance, wrong)}"
    t, n = smallest.size
    return Finding(property.name, property.rule, text, properties.LONG if is_long else t, n)


def _smallest_trial(property: Property, trial: Trial, tolerance: float, wrong: str) -> Finding:
    """The finding of a kernel on the smallest arrays that show the same kind of fault."""
    smallest = smallest_trial(trial, _fails_alike(property, tolerance, wrong))
    fault = _wrong(property, smallest, tolerance) or wrong
    text, inputs = counterexample_of(smallest, fault)
    return Finding(property.name, property.rule, text, *smallest.size, inputs)


def _behavior(property: Property, layer: Layer, tolerance: float, wrong: str) -> str:
    """What the whole layer does, as the end of a counterexample; "" where nothing is known of that."""
    behavior = property.behavior
    if behavior is None or wrong.startswith("raises "):
        return ""
    said = _wrong(replace(property, check=behavior), layer, tolerance)
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


def kernel_tests(
    make: Callable[[], Any], *, skip: Collection[str] = (), tolerance: float = TOLERANCE
) -> Callable:
    """Returns a test function for pytest, with one test for each property of `check_kernel`.

    Args:
        make: a function that returns a `Kernel`, as `jrnn.testing.sequence_kernel` makes it; it is called once.
        skip, tolerance: as of `layer_tests`.

    Raises:
        LayerError: for an unknown property in `skip`.
        ImportError: if pytest is missing.

    >>> import jax.numpy as jnp
    >>> def make():
    ...     step = lambda total, x: (total + x, total + x)
    ...     xs, state = np.ones((3, 2, 1), np.float32), np.ones((2, 1), np.float32)
    ...     return sequence_kernel(step, lambda xs: jnp.cumsum(xs, axis=0), xs, state, returns_state=False)
    >>> test_my_kernel = kernel_tests(make, skip=["float16"])  # pytest runs test_my_kernel[values] and so on
    """
    return _tests(KERNEL_PROPERTIES, check_kernel, make, skip, tolerance)


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
