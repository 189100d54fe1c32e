"""Trials of a program: numbers to run it on, whether its while loops end on them, and whether two results agree."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn.jaxprs import Values, all_equations, sub_jaxprs
from jrnn.jaxprs.by_numpy import LOOPS, Endless, Evaluator
from jrnn.jaxprs.flat import FlatEquation, Graph, evaluate_graph
from jrnn.jaxprs.mesh_axes import Tree
from jrnn.jaxprs.tangents import is_smooth

TRIPS = 10_000
TOLERANCE = 1e-5


def ends(graph: Graph, args: Values) -> bool:
    """Whether every while loop of a graph ends within TRIPS steps for these arguments.

    Random numbers may keep a loop going that ends for the caller's numbers.
    """

    def call(node: FlatEquation, values: Values) -> Values:
        loop = LOOPS.get(node.name)
        if loop is None:
            return node.run(*values)
        return loop(Evaluator(trips=TRIPS), list(map(np.asarray, values)), **node.params)

    if has_while(graph):
        try:
            evaluate_graph(graph, args, call)
        except Endless:
            return False
    return True


def has_while(graph: Graph) -> bool:
    """Whether there is a while loop in a graph, or in a loop or branch of it."""
    inner = (
        e.primitive
        for node in graph.nodes
        for body in sub_jaxprs(node)
        for e in all_equations(body)
    )
    return any(part.name == "while" for part in (*graph.nodes, *inner))


def drawn(rng: np.random.Generator, example: Array | jax.ShapeDtypeStruct) -> Array:
    """Random numbers near an example; integers and booleans stay, as they may be indices or lengths."""
    is_spec = isinstance(example, jax.ShapeDtypeStruct)
    shape = np.shape(example)
    dtype = jax.dtypes.result_type(example)
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype) if is_spec else example
    noise = rng.standard_normal(shape).astype(np.float32)
    return noise if is_spec else np.asarray(example, np.float32) + 0.1 * noise


def close(computed: Array, expected: Array) -> bool:
    """Whether arrays agree, relative to the larger of 1 and the largest number; NaN equals NaN.

    To TOLERANCE, and for types of fewer bits to a few roundings, as each operator may round in another place.
    """
    computed = np.asarray(computed)
    expected = np.asarray(expected)
    if computed.shape != expected.shape:
        return False
    if not is_smooth(expected):
        return bool((computed == expected).all())
    tolerance = (
        max(TOLERANCE, 4 * float(jnp.finfo(expected.dtype).eps))
        if expected.dtype.itemsize <= 2
        else TOLERANCE
    )
    wide = np.complex128 if jnp.issubdtype(expected.dtype, jnp.complexfloating) else np.float64
    computed = computed.astype(wide)
    expected = expected.astype(wide)
    finite = expected[np.isfinite(expected)]
    scale = max(1.0, float(np.abs(finite).max())) if finite.size else 1.0
    return np.allclose(computed, expected, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def central_difference(
    value: Callable[[Tree], Tree], point: Tree, towards: Tree, step: float
) -> Tree:
    """(f(p + h d) - f(p - h d)) / 2h, the slope of a function of a tree of arrays along a direction, by differences.

    Args:
        value: a function of such a tree that returns an array or a tree of arrays.
        point: p.
        towards: d, a tree as `point`, with None for unchanged leaves.
        step: h.

    >>> float(central_difference(lambda p: p["x"] ** 2, {"x": 3.0, "y": 1}, {"x": 1.0, "y": None}, 0.5))
    6.0
    """

    def moved(h: float) -> Tree:
        def along(direction: Array | None, leaf: Array) -> Array:
            return leaf if direction is None else leaf + h * direction

        return value(jax.tree.map(along, towards, point, is_leaf=_is_none))

    def slope(after: Array, before: Array) -> Array:
        return (np.asarray(after) - np.asarray(before)) / (2 * step)

    return jax.tree.map(slope, moved(step), moved(-step))


def _is_none(leaf: Array | None) -> bool:
    return leaf is None
