"""Assertions about recurrent cells.

Shapes: T time, N batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from jrnn.errors import ScanError
from jrnn.loops import EXECUTORS, scan
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
from jrnn.testing.subjects import CellNet, Layer, layer_of

FILLS = (np.nan, np.inf, -np.inf, 1e30)


def assert_gradients_agree(
    cell: Any,
    carry: Any = None,
    xs: Any = None,
    *,
    params: Any = None,
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
        cell: a step, which is differentiated over time with respect to all its arguments; a `jrnn.cells.Cell`; a `Layer`;
            or a `Net`.
        carry: the first carry, a pytree [N, ...]; for a `Cell` a tuple, random if None; for a `Net` its blobs.
        xs: sequences [T, N, ...].
        params: weights that the step takes before the carry.
        lengths: the lengths of the sequences, int32 [N].
        loss: the blob of a `Net` to differentiate; by default all of its outputs.
        key: for cells that draw random numbers.
        surrogates: the names of functions in a step whose `jax.custom_jvp` or `jax.custom_vjp` is a surrogate gradient on
            purpose, such as a spike's; the proof then is that all the rest is right.
        effort: fields of `jrnn.testing.gradients.Effort`, such as `max_elements` (64 of each blob here) or `second`. Blobs
            with more elements are also checked along random directions, 2 by default, which move all elements.

    Raises:
        AssertionError: with a table of the gradients, which of the three agree, and the operation at fault with its line.

    >>> step = lambda h, x: (jnp.tanh(h + x), h * x)
    >>> assert_gradients_agree(step, jnp.ones((1, 2)), jnp.ones((3, 1, 2)))
    """
    with jax.enable_x64(True):
        s = _subject(cell, carry, xs, params, lengths, loss, key, surrogates)
        defaults = {"tolerance": TOLERANCE if s.exact else INEXACT, "max_elements": 64, "directions": 2}
        report = check(s, Effort(**{**defaults, **effort}))
    assert report.agrees, f"the gradients disagree\n{report}"


def _subject(
    cell: Any, carry: Any, xs: Any, params: Any, lengths: Any, loss: str | None, key: Any, surrogates: Sequence[str]
) -> Subject:
    if isinstance(cell, Net):
        return subject_of_net(cell, carry, loss, key=key)
    if isinstance(cell, Cell):
        made = CellNet.of(cell, carry, xs)
        blobs = made.blobs(xs, _lengths(lengths, *np.shape(xs)[:2]))
        return subject_of_net(made.net, blobs, key=key)
    if lengths is None and not isinstance(cell, Layer):
        return subject_of_function(over_time(cell), (carry, xs), params, surrogates)
    layer = layer_of(cell, carry, xs, params)
    ends = _lengths(lengths, *layer.size)
    return subject_of_function(
        lambda weights, state, xs: layer.call(weights, state, xs, ends),
        (layer.state, layer.xs),
        layer.weights,
        surrogates,
    )


def assert_padding_invariant(
    cell: Any,
    carry: Any = None,
    xs: Any = None,
    *,
    params: Any = None,
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
    some = [mixed, np.full(batch, steps), np.zeros(batch), np.ones(batch)] if lengths is None else [lengths]
    for ends in some:
        ends = np.minimum(np.asarray(ends, np.int32), steps)
        wanted = run(layer.weights, layer.state, _padded(layer.xs, ends, 0.0), ends)
        for path, leaf in _leaves(wanted):
            assert np.isfinite(leaf).all(), f"{path} is not finite, with zeros behind the lengths {ends.tolist()}"
        for fill in fills:
            found = run(layer.weights, layer.state, _padded(layer.xs, ends, fill), ends)
            for (path, a), (_, b) in zip(_leaves(found), _leaves(wanted)):
                same = a.tobytes() == b.tobytes()
                assert same, f"{path} changes with {fill} behind the lengths {ends.tolist()}{_first(a, b)}"


def _padded(xs: Any, ends: np.ndarray, fill: float) -> Any:
    def padded(leaf: Any) -> Any:
        leaf = np.array(leaf)
        if leaf.dtype.kind == "f":
            leaf[np.arange(len(leaf))[:, None] >= ends[None, :]] = fill
        return leaf

    return jax.tree.map(padded, xs)


def assert_batch_invariant(
    cell: Any,
    carry: Any = None,
    xs: Any = None,
    *,
    params: Any = None,
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

    def of(order: Sequence[int]) -> tuple[Any, Any]:
        """Returns the results of the sequences with these indices, as a batch."""
        rows = np.asarray(order)
        state = jax.tree.map(lambda leaf: jnp.take(jnp.asarray(leaf), rows, axis=layer.state_axis), layer.state)
        some = jax.tree.map(lambda leaf: jnp.asarray(leaf)[:, rows], layer.xs)
        return run(layer.weights, state, some, ends[rows])

    def one(results: tuple[Any, Any], n: int) -> tuple[Any, Any]:
        ys, last = results
        return jax.tree.map(lambda y: y[:, n], ys), jax.tree.map(lambda v: jnp.take(v, n, axis=layer.state_axis), last)

    everyone = list(range(layer.size[1]))
    together, backwards = of(everyone), of(everyone[::-1])
    for n in everyone:
        for other, what in ((one(of([n]), 0), "alone"), (one(backwards, -1 - n), "in another order")):
            _assert_close(one(together, n), other, tolerance, f"sequence {n} in its batch, and {what}")


def assert_executors_agree(
    cell: Any,
    carry: Any = None,
    xs: Any = None,
    *,
    params: Any = None,
    lengths: Sequence[int] | None = None,
    key: Any = None,
    tolerance: float = 1e-5,
    unrolled_tolerance: float = 1e-6,
) -> None:
    """Asserts that every way to run a cell over time gives the same results, and for steps the same gradients.

    A step is run by `jax.lax.scan`, unrolled, by each executor of `jrnn.scan` that can run it, and with recomputation in the
    reverse pass. A `jrnn.cells.Cell` is run as a recurrent network, unrolled, and operator by operator.

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
    for name, found in others:
        limit = unrolled_tolerance if name == "unrolled" else tolerance
        _assert_close(found, wanted, limit, f"{name}, and {first}")


def _ways_of_cell(cell: Cell, carry: Any, xs: Any, lengths: Any, key: Any) -> Iterator[tuple[str, Any]]:
    ends = _lengths(lengths, *np.shape(xs)[:2])
    for name, unrolled in (("as a recurrent network", False), ("unrolled", True)):
        layer = CellNet.of(cell, carry, xs, unrolled=unrolled).layer(xs, key)
        yield name, jax.jit(layer.call)(layer.weights, layer.state, xs, ends)
    made = CellNet.of(cell, carry, xs)
    got = run_net(made.net, made.blobs(xs, ends), key=key)
    yield "operator by operator", (got[made.output], tuple(got[n][0] for n in made.last))


def _ways_of_step(step: Callable, carry: Any, xs: Any, params: Any, lengths: Any) -> Iterator[tuple[str, Any]]:
    plain = layer_of(step, carry, xs, params)
    ends = None if lengths is None else _lengths(lengths, *plain.size)
    arguments = (plain.weights, plain.state, plain.xs)
    if ends is None:
        layer = Layer(lambda w, s, x, _: over_time(step)(*([w] if params is not None else []), s, x)[::-1], *arguments)
        yield "by jax.lax.scan", _with_gradients(layer)(*arguments, None)
    bound = step if params is None else (lambda carry, x: step(params, carry, x))
    ways: dict[str, dict[str, Any]] = {}
    for name in EXECUTORS:
        try:
            jax.eval_shape(
                lambda state, xs, name=name: scan(bound, state, xs, lengths=ends, executor=name), plain.state, plain.xs
            )
        except ScanError:  # it cannot run this step
            continue
        ways[f"by {name}"] = {"executor": name}
    ways |= {f"recompute={r!r}": {"recompute": r} for r in ("contractions", "sqrt")}
    ways["unrolled"] = {"unroll": True}
    for name, options in ways.items():
        yield name, _with_gradients(layer_of(step, carry, xs, params, **options))(*arguments, ends)


class Everything(NamedTuple):
    """The results of a layer, and the gradients of the sum of their cosines."""

    outputs: Any
    last_state: Any
    gradient_of_weights: Any
    gradient_of_the_first_state: Any
    gradient_of_the_sequences: Any


def _with_gradients(layer: Layer) -> Callable:
    """Returns a compiled function that gives a layer's results, and gradients with respect to all its float arguments."""

    def everything(weights: Any, state: Any, xs: Any, ends: Any) -> Everything:
        leaves, structure = jax.tree.flatten((weights, state, xs))
        smooth = [k for k, v in enumerate(leaves) if jnp.issubdtype(jnp.result_type(v), jnp.floating)]

        def loss(floats: list[Any]) -> tuple[Any, Any]:
            full = list(leaves)
            for k, v in zip(smooth, floats):
                full[k] = v
            results = layer.call(*jax.tree.unflatten(structure, full), ends)
            terms = [v for v in jax.tree.leaves(results) if jnp.issubdtype(v.dtype, jnp.floating)]
            return sum(jnp.sum(jnp.cos(v)) for v in terms), results

        (_, results), gradients = jax.value_and_grad(loss, has_aux=True)([jnp.asarray(leaves[k]) for k in smooth])
        none = [None] * len(leaves)
        for k, g in zip(smooth, gradients):
            none[k] = g
        of_weights, of_state, of_xs = jax.tree.unflatten(structure, none)
        return Everything(*results, of_weights, of_state, of_xs)

    return jax.jit(everything)


def _lengths(lengths: Any, steps: int, batch: int) -> np.ndarray:
    return np.full(batch, steps, np.int32) if lengths is None else np.asarray(lengths, np.int32)


def _leaves(tree: Any) -> list[tuple[str, np.ndarray]]:
    """Returns the arrays of a tree, each with its path in words."""
    found = tree_flatten_with_path(tree)[0]
    return [(keystr(p[:1]).lstrip(".").replace("_", " ") + keystr(p[1:]), np.asarray(leaf)) for p, leaf in found]


def _first(a: np.ndarray, b: np.ndarray) -> str:
    """Describes the first difference between two arrays."""
    different = np.argwhere(~((a == b) | ((a != a) & (b != b))))
    if not len(different):
        return ""
    at = tuple(int(i) for i in different[0])
    return f": at {list(at)} {a[at]}, not {b[at]}"


def _assert_close(found: Any, wanted: Any, tolerance: float, what: str) -> None:
    for (path, a), (_, b) in zip(_leaves(found), _leaves(wanted), strict=True):
        scale = max(1.0, float(np.max(np.abs(b), initial=0.0))) if b.dtype.kind == "f" else 1.0
        close = a.shape == b.shape and np.allclose(a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True)
        assert close, f"{what}: {path} differs by more than {tolerance:g}{_first(a, b) if a.shape == b.shape else ''}"
