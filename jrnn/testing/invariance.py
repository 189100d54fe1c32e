"""What must not matter to a recurrent layer: its batch, and what padding holds. And how two results are compared.

Shapes: T time, N batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from jrnn.nets.ir import Values
from jrnn.testing.subjects import Layer, Outputs, PyTree

Wrong = str | None  # what is wrong, in words


def named(what: str, tree: PyTree) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a tree, each with its path behind `what`."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        yield what + keystr(path), np.asarray(leaf)


def differs(what: str, computed: Any, wanted: Any, tolerance: float) -> Wrong:
    """The first element in which two trees differ, in words; a NaN equals a NaN, and with tolerance 0 all bits count.

    The tolerance is relative to the largest element that is wanted, if that is above 1; integers must be equal.
    """
    others = list(named(what, wanted))
    pairs = list(zip(named(what, computed), others))
    if len(pairs) != len(others) or len(jax.tree.leaves(computed)) != len(others):
        return f"{what} has {len(jax.tree.leaves(computed))} arrays, not {len(others)}"
    for (name, a), (_, b) in pairs:
        if a.shape != b.shape:
            return f"{name} has shape {list(a.shape)}, not {list(b.shape)}"
        if a.tobytes() == b.tobytes() or a.dtype.kind not in "fciub":
            continue
        wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
        compares_signs = tolerance == 0 and a.dtype.kind == "f"
        a = a.astype(wide)
        b = b.astype(wide)
        scale = max(1.0, float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b))))
        with np.errstate(invalid="ignore"):
            same = (np.abs(a - b) <= tolerance * scale) | (a == b) | (np.isnan(a) & np.isnan(b))
        if compares_signs:
            same &= np.signbit(a) == np.signbit(b)
        if not same.all():
            at = tuple(map(int, np.argwhere(~same)[0]))
            return f"{name}{list(at)} is {a[at]:.7g}, not {b[at]:.7g}"
    return None


def one_differs(computed: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float) -> Wrong:
    """As `differs`, for the first of several trees by name."""
    for what, tree in wanted.items():
        if wrong := differs(what, computed[what], tree, tolerance):
            return wrong
    return None


def floats(tree: PyTree) -> tuple[list[Any], Callable[[Any], Any]]:
    """The floating-point arrays of a tree, and a function that puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)
    places = [k for k, v in enumerate(leaves) if jnp.issubdtype(jnp.result_type(v), jnp.floating)]

    def join(values: Any) -> Any:
        full = list(leaves)
        for k, value in zip(places, values):
            full[k] = value
        return jax.tree.unflatten(structure, full)

    return [leaves[k] for k in places], join


def state_rows(layer: Layer, state: PyTree, rows: Any) -> Any:
    """The states of some sequences."""
    return jax.tree.map(lambda v: np.asarray(v)[(slice(None),) * layer.state_axis + (rows,)], state)


def run_layer(layer: Layer, x: PyTree, state: PyTree, **options: Any) -> Outputs:
    """The results of a layer for other sequences and states, as numpy arrays."""
    results = layer.call(layer.params, jnp.asarray(x) if layer.in_jax else x, state, **options)
    return jax.tree.map(np.asarray, results)


def results_differ(computed: Outputs, wanted: Outputs, tolerance: float) -> Wrong:
    """The first element in which outputs or last states differ, in words."""
    names = ("y", "the last state")
    return one_differs(dict(zip(names, computed)), dict(zip(names, wanted)), tolerance)


Run = Callable[[Any, Any, np.ndarray], Outputs]


def depends_on_batch(
    layer: Layer, run: Run, tolerance: float, orders: Iterable[str] = ("alone",)
) -> Wrong:
    """What of a sequence is different alone, or in a batch "in another order", in words; or None.

    Args:
        run: `(x, state, rows) -> (y, state)`, the layer's results for the sequences with the indices `rows`.
    """
    everyone = np.arange(layer.size[1])

    def of(rows: np.ndarray) -> Outputs:
        x = jax.tree.map(lambda leaf: np.asarray(leaf)[:, rows], layer.x)
        return run(x, state_rows(layer, layer.state, rows), rows)

    def one(results: Outputs, n: int) -> Values:
        y, last = results
        row = slice(n, n + 1)
        return {
            "y": jax.tree.map(lambda v: np.asarray(v)[:, row], y),
            "the last state": state_rows(layer, last, row),
        }

    together = of(everyone)
    turned = of(everyone[::-1]) if "in another order" in orders else None
    for n in everyone:
        for order in orders:
            if order == "alone":
                other = one(of(everyone[n : n + 1]), 0)
            else:
                other = one(turned, len(everyone) - 1 - n)
            if wrong := one_differs(one(together, n), other, tolerance):
                return f"for sequence {n} of the batch, {wrong} {order}"
    return None


def depends_on_padding(
    results: Callable[[float], Mapping[str, Any]],
    where: str,
    fills: Iterable[float],
    tolerance: float,
) -> Wrong:
    """What changes with the padding, in words, or None.

    Args:
        results: from a number as padding to trees by name.
        where: text about the padding, with "{}" for the number.
    """
    wanted = results(0.0)
    for fill in fills:
        if wrong := one_differs(results(fill), wanted, tolerance):
            return f"{where.format(fill)}, {wrong}"
    return None
