"""Verification of an export: runs function and nets on the same numbers, and names the first blob that differs."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.convert.bounded import TRIPS, ends
from jrnn.convert.emit import Blob
from jrnn.convert.flat import Graph, Node, Var, evaluate, read
from jrnn.convert.package import Package
from jrnn.errors import ConversionError, describe_op
from jrnn.nets.lowering import run_net

TOLERANCE = 1e-5


def verify(
    package: Package,
    graph: Graph,
    examples: Sequence[Any],
    given: Iterable[str],
    trail: Sequence[tuple[Node, Var, Blob]],
) -> None:
    """Raises ConversionError if package and graph differ, on the examples or on random numbers.

    Random numbers on which a while loop does not end soon are left out.

    Args:
        examples: a value, or a shape and type, for each input of the graph; params come first.
        given: the names of the inputs of the predict net, in the order of the last examples.
        trail: the blobs that stand for variables of the graph, with the nodes that make these.
    """
    names = list(given)
    first = len(examples) - len(names)
    rng = np.random.default_rng(0)
    expected = jax.jit(lambda args: read(evaluate(graph, args), graph.outputs))
    run = jax.jit(package.to_jax())
    random = [drawn(rng, x) if k >= first else x for k, x in enumerate(examples)]
    trials = [random] if ends(graph, random) else []
    if not any(isinstance(x, jax.ShapeDtypeStruct) for x in examples):
        trials.insert(0, list(examples))
    if not trials:
        raise ConversionError(
            f"{package.predict_net.name}: a while loop takes more than {TRIPS} steps on random numbers, so the nets cannot "
            "be verified; pass arrays for which it ends instead of ShapeDtypeStructs"
        )
    for args in trials:
        inputs = {n: jnp.asarray(x) for n, x in zip(names, args[first:])}
        with jax.default_matmul_precision("highest"):
            wanted = expected(args)
            found = run(inputs)
            bad = [n for n, want in zip(package.output_names, wanted) if not close(found[n], want)]
            if bad:
                raise ConversionError(_explain(package, graph, args, inputs, trail, bad))


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


def close(found: Any, wanted: Any) -> bool:
    """Whether arrays agree, relative to the larger of 1 and the largest number; NaN equals NaN.

    To TOLERANCE, and for types of fewer bits to a few roundings, as each operator may round in another place.
    """
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.shape != wanted.shape:
        return False
    if not jnp.issubdtype(wanted.dtype, jnp.inexact):
        return bool((found == wanted).all())
    tolerance = max(TOLERANCE, 4 * float(jnp.finfo(wanted.dtype).eps)) if wanted.dtype.itemsize <= 2 else TOLERANCE
    wide = np.complex128 if jnp.issubdtype(wanted.dtype, jnp.complexfloating) else np.float64
    found, wanted = found.astype(wide), wanted.astype(wide)
    finite = wanted[np.isfinite(wanted)]
    scale = max(1.0, float(np.abs(finite).max())) if finite.size else 1.0
    return np.allclose(found, wanted, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def _explain(package: Package, graph: Graph, args, inputs, trail, bad) -> str:
    """The error message, with the first blob that differs."""
    net = package.predict_net
    head = f"the nets of {net.name!r} compute other numbers than the function for {', '.join(map(repr, bad))}"
    env = evaluate(graph, args)
    blobs = run_net(net, {**package.weights(), **inputs})
    for node, var, blob in trail:
        found = blobs.get(blob.name)
        if found is None or var not in env:
            continue
        if not close(np.broadcast_to(found, blob.shape) if found.shape == blob.held else found, env[var]):
            index, op = next((k, op) for k, op in enumerate(net.ops) if blob.name in op.outputs)
            return (
                f"{head}; the first blob that differs is {blob.name!r}, made from {node.name} ({node.source}) by "
                f"{describe_op(index, op.type, op.outputs, net.name)}"
            )
    return f"{head}; every blob before them agrees"
