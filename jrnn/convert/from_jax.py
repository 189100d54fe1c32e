"""from_jax: converts a JAX function to nets that Caffe2 runs, and verifies them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_flatten_with_path

from jrnn.convert.arguments import Leaf, arguments_of, callable_of, closed_over, path_of
from jrnn.convert.emit import TYPE_CODES, Blob, Emitter
from jrnn.convert.flat import Graph, flatten
from jrnn.convert.groups import recognize
from jrnn.convert.package import Package
from jrnn.convert.rules import RULES
from jrnn.convert.verify import verify
from jrnn.errors import ConversionError
from jrnn.graph import live_ops, rename_blobs

_NOT_KNOWN = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_RANDOM = ("random_", "threefry", "rng_")


def from_jax(fn: Callable, *example_args: Any, params: Any = None, name: str | None = None) -> Package:
    """Converts a JAX function to nets, for arguments of the shapes and types of the examples.

    Args:
        fn: a pure function of arrays, or of pytrees of them. A module that is a pytree and can be called, such as a
            `flax.nnx` one, gives its own arrays as params. A module with `init` and `apply`, such as a `flax.linen` one,
            is applied to `params`.
        example_args: arrays, or `jax.ShapeDtypeStruct`s. They become inputs of the net, named as in the function's
            signature, with the path in the pytree after it: `x`, `carry/0`. A single dict gives its keys as names.
        params: a pytree of weights that `fn` takes before the other arguments. They are stored in the init net, named
            by their paths, as in `decoder/lstm/w_hh`; so are arrays that `fn` closes over, named by their variables.
        name: of the net; by default the function's.

    Returns:
        The package. `output` is the name of a single output, else `output/...` with the paths in the result.

    Raises:
        ConversionError: for effects, random numbers, shapes that are not known, arguments that are not arrays, types
            that Caffe2 lacks, and primitives without a rule, all of them listed with the lines that use them; or where
            the nets give other numbers than the function, with the first blob that differs.

    >>> import jax.numpy as jnp
    >>> import jrnn
    >>> weights = {"dense": {"w": jnp.ones((4, 3)), "b": jnp.zeros(4)}}
    >>> def layer(weights, x):
    ...     return jnp.tanh(x @ weights["dense"]["w"].T + weights["dense"]["b"].reshape(1, -1))
    >>> package = from_jax(layer, jnp.ones((2, 3)), params=weights)
    >>> package.weight_names, [op.type for op in package.predict_net.ops]
    (('dense/b', 'dense/w'), ['FC', 'Tanh'])
    """
    fn, params, own = callable_of(fn, params)
    name = name or getattr(fn, "__name__", type(fn).__name__).strip("<>")
    leaves, call = arguments_of(fn, example_args, params, own, name)
    graph, out_names = _trace(call, leaves, name)
    e = Emitter(name, RULES, recognize, closed_over(fn))
    values = _declare(e, graph, leaves)
    used = graph.users()
    odd = [v for v in graph.inputs if v in used and v.dtype not in TYPE_CODES]
    problems = [f"an argument is {v}; Caffe2 has float32, int32, int64 and bool" for v in odd]
    results = e.graph(graph, values)
    problems += e.problems
    if problems:
        lines = "\n  ".join(dict.fromkeys(problems))
        count = len(dict.fromkeys(problems))
        raise ConversionError(f"{name} cannot be converted, for {count} reason{'s' * (count > 1)}:\n  {lines}")
    package, renamed = _package(e, results, out_names)
    shapes = {leaf.name: jax.ShapeDtypeStruct(v.shape, v.dtype) for leaf, v in zip(leaves, graph.inputs)}
    package = replace(package, shapes={n: shapes[n] for n in package.input_names if n in shapes})
    verify(package, graph, [leaf.value for leaf in leaves], e.given, e.trail, renamed)
    return package


def _trace(call: Callable, leaves: Sequence[Leaf], name: str) -> tuple[Graph, list[str]]:
    specs = [leaf.spec for leaf in leaves]
    try:
        closed, out = jax.make_jaxpr(call, return_shape=True)(specs)
    except _NOT_KNOWN as e:
        raise ConversionError(
            f"{name}: depends on values that are known only when it runs: {str(e).splitlines()[0]}"
        ) from e
    graph = flatten(closed)
    kinds = {str(effect) for effect in closed.effects}
    kinds.update(f"{node.name}, {node.source}" for node in graph.nodes if "callback" in node.name)
    if kinds:
        raise ConversionError(
            f"{name} has effects ({'; '.join(sorted(kinds))}); a net computes values alone: take prints and callbacks out"
        )
    random = [node for node in graph.nodes if node.name.startswith(_RANDOM)]
    if random:
        lines = ", ".join(dict.fromkeys(node.source for node in random))
        raise ConversionError(
            f"{name} draws random numbers ({lines}); draw them outside and give them as an argument, or put a module with "
            "dropout in evaluation: module.eval(), deterministic=True"
        )
    if not graph.outputs:
        raise ConversionError(f"{name} returns no array; a net must have an output")
    return graph, [path_of("output", path) for path, _ in tree_flatten_with_path(out)[0]]


def _declare(e: Emitter, graph: Graph, leaves: Sequence[Leaf]) -> list[Any]:
    """Puts the arguments and constants that are used into the net, and returns the values of the graph's inputs."""
    used = graph.users()
    values: list[Any] = []
    for leaf, var in zip(leaves, graph.inputs):
        if leaf.is_param and (var not in used or var.dtype not in TYPE_CODES):
            values.append(Blob.of("(unknown)", var.shape, var.dtype if var.dtype in TYPE_CODES else np.float32))
        elif leaf.is_param:
            values.append(e.weight(leaf.name, np.asarray(leaf.value, var.dtype)))
        else:
            known = var.dtype if var.dtype in TYPE_CODES else np.dtype(np.float32)
            values.append(e.input(leaf.name, var.shape, known))
    return values


def _package(e: Emitter, results: Sequence[Any], out_names: Sequence[str]) -> tuple[Package, dict[str, str]]:
    """The nets, without what no output needs, and the new names of the blobs that are outputs."""
    inputs = set(e.root.external_inputs)
    renamed: dict[str, str] = {}
    for value, out_name in zip(results, out_names):
        blob = e.blob(value)
        if blob.name in inputs or blob.name in renamed:
            blob = e.copy(blob)
        renamed[blob.name] = e.claim(out_name)
    net = e.root.build(outputs=renamed)
    net = replace(net, ops=(*e.prelude, *net.ops))
    net = replace(net, ops=tuple(net.ops[k] for k in live_ops(net, renamed)))
    read = {i for op in net.ops for i in op.inputs}
    init = e.init_net(read)
    weights = {op.outputs[0] for op in init.ops}
    kept = tuple(n for n in net.external_inputs if n in e.given or n in weights)
    return Package(init, rename_blobs(replace(net, external_inputs=kept), renamed)), renamed
