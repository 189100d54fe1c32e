"""Trials of a program: numbers to run it on, whether its while loops end on them, and whether two results agree."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.jaxprs import scan_counts
from jrnn.jaxprs.flat import Graph, Node, evaluate, flatten, read

TRIPS = 10_000
TOLERANCE = 1e-5


def ends(graph: Graph, args: Sequence[Any]) -> bool:
    """Whether every while loop of a graph ends within TRIPS steps for these arguments.

    Random numbers may keep a loop going that ends for the caller's numbers.
    """
    if not has_while(graph):
        return True
    return bool(jax.jit(lambda args: _bounded(graph, args)[1])(list(args)))


def has_while(graph: Graph) -> bool:
    """Whether there is a while loop in a graph, or in a loop or branch of it."""
    return any(node.name == "while" or any(map(has_while, _bodies(node))) for node in graph.nodes)


def _bodies(node: Node) -> list[Graph]:
    """The graphs inside a scan, a cond, or a while loop: its condition and its body."""
    p = node.params
    match node.name:
        case "scan":
            return [flatten(p["jaxpr"])]
        case "cond":
            return list(map(flatten, p["branches"]))
        case "while":
            return [flatten(p["cond_jaxpr"]), flatten(p["body_jaxpr"])]
    return []


def _bounded(graph: Graph, args: Sequence[Any]) -> tuple[list[Any], Any]:
    """The outputs of a graph whose while loops stop after TRIPS steps, and whether all of them had ended."""
    ended = jnp.asarray(True)

    def call(node: Node, values: list[Any]) -> Sequence[Any]:
        nonlocal ended
        bodies = _bodies(node)
        if not any(map(has_while, bodies)) and node.name != "while":
            return node.run(*values)
        p = node.params
        if node.name == "scan":
            constants, count = scan_counts(p)
            (body,) = bodies

            def step(carry, xs):
                outs, here = _bounded(body, [*values[:constants], *carry[0], *xs])
                return (outs[:count], carry[1] & here), outs[count:]

            start, xs = values[constants : constants + count], values[constants + count :]
            (last, ended), ys = jax.lax.scan(step, (start, ended), xs, p["length"], p["reverse"])
            return [*last, *ys]
        if node.name == "cond":
            branches = [lambda *xs, body=body: _bounded(body, xs) for body in bodies]
            outs, here = jax.lax.switch(values[0], branches, *values[1:])
            ended = ended & here
            return outs
        go, body = bodies
        a, b = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]

        def goes_on(state):
            return _bounded(go, [*values[:a], *state[2]])[0][0]

        def run(state):
            outs, here = _bounded(body, [*values[a:b], *state[2]])
            return state[0] + 1, state[1] & here, outs

        start = (jnp.int32(0), ended, values[b:])
        last = jax.lax.while_loop(lambda s: (s[0] < TRIPS) & s[1] & goes_on(s), run, start)
        ended = last[1] & ~goes_on(last)
        return last[2]

    env = evaluate(graph, args, call)
    return read(env, graph.outputs), ended


def drawn(rng: np.random.Generator, example: Any) -> Any:
    """Random numbers near an example; integers and booleans are kept, as they may be indices or lengths."""
    is_spec, shape, dtype = (
        isinstance(example, jax.ShapeDtypeStruct),
        np.shape(example),
        jax.dtypes.result_type(example),
    )
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype) if is_spec else example
    noise = rng.standard_normal(shape).astype(np.float32)
    return noise if is_spec else np.asarray(example, np.float32) + 0.1 * noise


def close(computed: Any, wanted: Any) -> bool:
    """Whether arrays agree, relative to the larger of 1 and the largest number; NaN equals NaN.

    To TOLERANCE, and for types of fewer bits to a few roundings, as each operator may round in another place.
    """
    computed, wanted = np.asarray(computed), np.asarray(wanted)
    if computed.shape != wanted.shape:
        return False
    if not jnp.issubdtype(wanted.dtype, jnp.inexact):
        return bool((computed == wanted).all())
    tolerance = max(TOLERANCE, 4 * float(jnp.finfo(wanted.dtype).eps)) if wanted.dtype.itemsize <= 2 else TOLERANCE
    wide = np.complex128 if jnp.issubdtype(wanted.dtype, jnp.complexfloating) else np.float64
    computed, wanted = computed.astype(wide), wanted.astype(wide)
    finite = wanted[np.isfinite(wanted)]
    scale = max(1.0, float(np.abs(finite).max())) if finite.size else 1.0
    return np.allclose(computed, wanted, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def central_difference(value: Callable[[Any], Any], point: Any, towards: Any, step: float) -> Any:
    """(f(p + h d) - f(p - h d)) / 2h, the slope of a function of a tree of arrays along a direction, by differences.

    Args:
        value: a function of such a tree that returns an array or a tree of arrays.
        point: p.
        towards: d, a tree as `point`, with None for what stays as it is.
        step: h.

    >>> float(central_difference(lambda p: p["x"] ** 2, {"x": 3.0, "y": 1}, {"x": 1.0, "y": None}, 0.5))
    6.0
    """

    def moved(h: float) -> Any:
        return value(jax.tree.map(lambda d, v: v if d is None else v + h * d, towards, point, is_leaf=_is_none))

    return jax.tree.map(lambda a, b: (np.asarray(a) - np.asarray(b)) / (2 * step), moved(step), moved(-step))


def _is_none(value: Any) -> bool:
    return value is None
