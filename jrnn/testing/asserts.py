"""Assertions about recurrent cells.

Shapes: T time, N batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import ScanError
from jrnn.loops import COMPARED_EXECUTORS, scan
from jrnn.nets.cells import Cell
from jrnn.nets.ir import Net
from jrnn.nets.lowering import run_net
from jrnn.testing.gradients import (
    INEXACT,
    TOLERANCE,
    Effort,
    Subject,
    check,
    over_time,
    subject_of_function,
    subject_of_net,
)
from jrnn.testing.invariance import depends_on_batch, depends_on_padding, floats, named, one_differs
from jrnn.testing.subjects import CellNet, Layer, PyTree, layer_of

Results = dict[str, Any]  # by what they are of

FILLS = (np.nan, np.inf, -np.inf, 1e30)
# of a layer
RESULTS = (
    "y",
    "the last state",
    *(f"the gradient of {what}" for what in ("params", "x", "the initial state")),
)


def assert_gradients_agree(
    cell: Any,
    carry: PyTree = None,
    xs: PyTree = None,
    *,
    params: PyTree = None,
    lengths: Any = None,
    loss: str | None = None,
    key: Any = None,
    surrogates: Sequence[str] = (),
    **effort: Any,
) -> None:
    """Asserts that JAX's gradient, the generated net's and central differences agree, in float64, over a whole sequence.

    If no net can have the step's gradient, as with complex numbers or a Cholesky factorization, the other two are compared.
    What `jax.lax.stop_gradient` stops is a constant to JAX, so differences hold it.

    Args:
        cell: a step, which is differentiated over time with respect to all its arguments; a `jrnn.nets.cells.Cell`; a
            `Layer`; or a `Net`.
        carry: the first carry, a pytree [N, ...]; for a `Cell` a tuple, random if None; for a `Net` its blobs.
        xs: sequences [T, N, ...].
        params: weights that the step takes before the carry.
        lengths: the lengths of the sequences, int32 [N].
        loss: the blob of a `Net` to differentiate; by default all of its outputs.
        key: for cells that draw random numbers.
        surrogates: the names of functions in a step whose `jax.custom_jvp` or `jax.custom_vjp` is a surrogate gradient on
            purpose, such as a spike's; then all the rest is checked.
        effort: fields of `jrnn.testing.gradients.Effort`, such as `max_elements` (64 of each blob here) or `second`. Blobs
            with more elements are also checked along random directions, 2 by default, which move all elements.

    Raises:
        AssertionError: with a table of the gradients, which of the three agree, and the operation at fault with its line.

    >>> step = lambda h, x: (jnp.tanh(h + x), h * x)
    >>> assert_gradients_agree(step, jnp.ones((1, 2)), jnp.ones((3, 1, 2)))
    """
    with jax.enable_x64(True):
        s = _subject(cell, carry, xs, params, lengths, loss, key, surrogates)
        defaults = {
            "tolerance": TOLERANCE if s.exact else INEXACT,
            "max_elements": 64,
            "directions": 2,
        }
        report = check(s, Effort(**{**defaults, **effort}))
    assert report.agrees, f"the gradients disagree\n{report}"


def _subject(
    cell: Any,
    carry: PyTree,
    xs: PyTree,
    params: PyTree,
    lengths: Any,
    loss: str | None,
    key: Any,
    surrogates: Sequence[str],
) -> Subject:
    if isinstance(cell, Net):
        return subject_of_net(cell, carry, loss, key=key)
    if isinstance(cell, Cell):
        net = CellNet.of(cell, carry, xs)
        blobs = net.blobs(xs, _lengths(lengths, *np.shape(xs)[:2]))
        return subject_of_net(net.net, blobs, key=key)
    if lengths is None and not isinstance(cell, Layer):
        return subject_of_function(over_time(cell), (carry, xs), params, surrogates)
    layer = layer_of(cell, carry, xs, params)
    ends = _lengths(lengths, *layer.size)
    return subject_of_function(
        lambda params, state, xs: layer.call(params, xs, state, ends),
        (layer.state, layer.x),
        layer.params,
        surrogates,
    )


def assert_padding_invariant(
    cell: Any,
    carry: PyTree = None,
    xs: PyTree = None,
    *,
    params: PyTree = None,
    lengths: Sequence[int] | None = None,
    key: Any = None,
    fills: Sequence[float] = FILLS,
) -> None:
    """Asserts that results and gradients do not depend on the values in the padding, bit for bit.

    Args:
        cell, carry, xs, params, key: see `assert_gradients_agree`.
        lengths: the lengths; by default mixed ones with 0, 1 and T among them, then all 0, all 1 and all T.
        fills: values of the padding, besides zeros.
    """
    layer = layer_of(cell, carry, xs, params, key)
    steps, batch = layer.size
    run = _with_gradients(layer)
    mixed = np.resize([max(steps - 1, 0), 0, steps, min(1, steps)], batch)
    if lengths is None:
        some = [mixed, np.full(batch, steps), np.zeros(batch), np.ones(batch)]
    else:
        some = [lengths]
    for ends in some:
        ends = np.minimum(np.asarray(ends, np.int32), steps)

        def results(fill: float, ends: Any = ends) -> Results:
            return run(layer.params, _padded(layer.x, ends, fill), layer.state, ends)

        for what, tree in results(0.0).items():
            for name, leaf in named(what, tree):
                assert np.isfinite(leaf).all(), (
                    f"{name} is not finite, with zeros behind the lengths {ends.tolist()}"
                )
        where = f"with lengths {ends.tolist()} and {{}} instead of 0 behind them"
        wrong = depends_on_padding(results, where, fills, 0.0)
        assert wrong is None, wrong


def _padded(xs: PyTree, ends: np.ndarray, fill: float) -> Any:
    def padded(leaf: Any) -> Any:
        leaf = np.array(leaf)
        if leaf.dtype.kind == "f":
            leaf[np.arange(len(leaf))[:, None] >= ends[None, :]] = fill
        return leaf

    return jax.tree.map(padded, xs)


def assert_batch_invariant(
    cell: Any,
    carry: PyTree = None,
    xs: PyTree = None,
    *,
    params: PyTree = None,
    lengths: Sequence[int] | None = None,
    tolerance: float = 1e-6,
) -> None:
    """Asserts that a sequence's results do not depend on its batch: they are the same alone and among others.

    Args:
        cell, carry, xs, params: see `assert_gradients_agree`; cells that draw random numbers depend on the batch.
        lengths: int32 [N]; all T by default.
        tolerance: relative to the largest result, or absolute if that is below 1.
    """
    layer = layer_of(cell, carry, xs, params)
    ends = _lengths(lengths, *layer.size)
    run = jax.jit(layer.call)
    wrong = depends_on_batch(
        layer,
        lambda x, state, rows: run(layer.params, x, state, ends[rows]),
        tolerance,
        ("alone", "in another order"),
    )
    assert wrong is None, f"{wrong}, by more than {tolerance:g}"


def assert_executors_agree(
    cell: Any,
    carry: PyTree = None,
    xs: PyTree = None,
    *,
    params: PyTree = None,
    lengths: Sequence[int] | None = None,
    key: Any = None,
    tolerance: float = 1e-5,
    unrolled_tolerance: float = 1e-6,
) -> None:
    """Asserts that every way to run a cell over time gives the same results, and for steps the same gradients.

    A step is run by `jax.lax.scan`, unrolled, by each executor of `jrnn.scan` that can run it, and with recomputation in the
    reverse pass. A `jrnn.nets.cells.Cell` is run as a recurrent network, unrolled, and operator by operator.

    Args:
        cell, carry, xs, params, key: see `assert_gradients_agree`; not for a `Layer`, which hides how it is run.
        lengths: int32 [N]; all T by default.
        tolerance, unrolled_tolerance: relative to the largest result, or absolute if that is below 1.
    """
    assert not isinstance(cell, Layer), "a Layer hides how it is run; give the cell itself"
    if isinstance(cell, Cell):
        ways = _ways_of_cell(cell, carry, xs, lengths, key)
    else:
        ways = _ways_of_step(cell, carry, xs, params, lengths)
    (first, wanted), *others = ways
    for name, computed in others:
        limit = unrolled_tolerance if name == "unrolled" else tolerance
        wrong = one_differs(computed, wanted, limit)
        assert wrong is None, f"{name}, and {first}: {wrong}, by more than {limit:g}"


def _ways_of_cell(
    cell: Cell, carry: PyTree, xs: PyTree, lengths: Any, key: Any
) -> Iterator[tuple[str, Results]]:
    ends = _lengths(lengths, *np.shape(xs)[:2])
    for name, unrolled in (("as a recurrent network", False), ("unrolled", True)):
        layer = CellNet.of(cell, carry, xs, unrolled=unrolled).layer(xs, key)
        yield name, dict(zip(RESULTS, jax.jit(layer.call)(layer.params, xs, layer.state, ends)))
    net = CellNet.of(cell, carry, xs)
    got = run_net(net.net, net.blobs(xs, ends), key=key)
    yield (
        "operator by operator",
        dict(zip(RESULTS, (got[net.output], tuple(got[n][0] for n in net.last)))),
    )


def _ways_of_step(
    step: Callable, carry: PyTree, xs: PyTree, params: PyTree, lengths: Any
) -> Iterator[tuple[str, Results]]:
    plain = layer_of(step, carry, xs, params)
    ends = None if lengths is None else _lengths(lengths, *plain.size)
    arguments = (plain.params, plain.x, plain.state)
    if ends is None:
        layer = Layer(
            lambda w, x, s, _: over_time(step)(*([w] if params is not None else []), s, x)[::-1],
            *arguments,
        )
        yield "by jax.lax.scan", _with_gradients(layer)(*arguments, None)
    bound = step if params is None else (lambda carry, x: step(params, carry, x))
    ways: dict[str, Results] = {}
    for name in COMPARED_EXECUTORS:
        try:
            jax.eval_shape(
                lambda state, xs, name=name: scan(bound, state, xs, lengths=ends, executor=name),
                plain.state,
                plain.x,
            )
        except ScanError:  # it cannot run this step
            continue
        ways[f"by {name}"] = {"executor": name}
    for r in ("contractions", "sqrt"):
        ways[f"recompute={r!r}"] = {"recompute": r}
    ways["unrolled"] = {"unroll": True}
    for name, options in ways.items():
        yield name, _with_gradients(layer_of(step, carry, xs, params, **options))(*arguments, ends)


def _with_gradients(layer: Layer) -> Callable[..., Results]:
    """Returns a compiled function that gives a layer's results, and gradients with respect to all its float arguments.

    The gradients are of the sum of the cosines of the results.
    """

    def everything(params: PyTree, x: PyTree, state: PyTree, ends: Any) -> tuple[Any, ...]:
        smooth, join = floats((params, x, state))

        def loss(values: list[Any]) -> tuple[Any, Any]:
            results = layer.call(*join(values), ends)
            return sum(jnp.sum(jnp.cos(v)) for v in floats(results)[0]), results

        (_, (y, last)), gradients = jax.value_and_grad(loss, has_aux=True)(
            list(map(jnp.asarray, smooth))
        )
        return (y, last, *join(gradients))

    compiled = jax.jit(everything)
    return lambda *args: dict(zip(RESULTS, compiled(*args)))


def _lengths(lengths: Any, steps: int, batch: int) -> np.ndarray:
    return np.full(batch, steps, np.int32) if lengths is None else np.asarray(lengths, np.int32)
