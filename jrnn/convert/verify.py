"""Verification of an export: runs function and nets on the same numbers, and names the first blob that differs."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.convert.emit import Blob
from jrnn.convert.package import Package
from jrnn.errors import ConversionError, describe_op
from jrnn.jaxprs.flat import FlatEquation, Graph, Var, evaluate, read
from jrnn.jaxprs.trials import TRIPS, close, drawn, ends
from jrnn.nets.lowering import run_net


def verify(
    package: Package,
    graph: Graph,
    examples: Sequence[Any],
    given: Iterable[str],
    trail: Sequence[tuple[FlatEquation, Var, Blob]],
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
            outs = run(inputs)
            bad = [n for n, want in zip(package.output_names, wanted) if not close(outs[n], want)]
            if bad:
                raise ConversionError(_explain(package, graph, args, inputs, trail, bad))


def _explain(package: Package, graph: Graph, args, inputs, trail, bad) -> str:
    """The error message, with the first blob that differs."""
    net = package.predict_net
    head = f"the nets of {net.name!r} compute other numbers than the function for {', '.join(map(repr, bad))}"
    env = evaluate(graph, args)
    blobs = run_net(net, {**package.weights(), **inputs})
    for node, var, blob in trail:
        value = blobs.get(blob.name)
        if value is None or var not in env:
            continue
        if not close(np.broadcast_to(value, blob.shape) if value.shape == blob.held else value, env[var]):
            index, op = next((k, op) for k, op in enumerate(net.ops) if blob.name in op.outputs)
            return (
                f"{head}; the first blob that differs is {blob.name!r}, made from {node.name} ({node.source}) by "
                f"{describe_op(index, op.type, op.outputs, net.name)}"
            )
    return f"{head}; every blob before them agrees"
