"""from_jax: converts a JAX function to nets that Caffe2 runs, and verifies them; from_factory: what `jrnn convert` names."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.convert.emitter import TYPE_CODES, TYPES, UNKNOWN, Blob, Emitter
from jrnn.convert.groups import recognize
from jrnn.convert.named import load_named
from jrnn.convert.package import Package
from jrnn.errors import ConversionError
from jrnn.jaxprs.arguments import Call, Leaf, call_of
from jrnn.jaxprs.flat import FlatEquation, Graph, Var, evaluate_graph, read
from jrnn.jaxprs.trials import TRIPS, close, drawn, ends
from jrnn.nets.graph import rename_blobs
from jrnn.nets.graph.ssa import place_of, with_live_ops
from jrnn.nets.ir import Blobs, Net, inputs_of
from jrnn.nets.lowering import run_net


def from_jax(
    fn: Callable, *example_args: Any, params: Any = None, name: str | None = None
) -> Package:
    """Converts a JAX function to nets, for arguments of the shapes and types of the examples.

    Args:
        fn: a pure function of arrays or pytrees of arrays. A callable module that is a pytree, such as a `flax.nnx` one,
            provides its own arrays as params. A module with `init` and `apply`, such as a `flax.linen` one, is applied to
            `params`.
        example_args: arrays, or `jax.ShapeDtypeStruct`s. They become inputs of the net, named as in the function's
            signature and by their path in the pytree: `x`, `carry/0`. A single dict gives its keys as names.
        params: a pytree of weights that `fn` takes before the other arguments. The init net stores them, named by their
            paths, as in `decoder/lstm/w_hh`. Arrays that `fn` closes over are stored too, named by their variables.
        name: the name of the net; defaults to the function's.

    Returns:
        The package. A single output is named `output`, several `output/...` with their paths in the result.

    Raises:
        ConversionError: for effects, random numbers, shapes that are not known, arguments that are not arrays, types
            that Caffe2 lacks, and primitives without a rule. All of these are listed, with the lines that use them. Also
            raised if the nets compute other numbers than the function, with the first blob that differs.

    >>> import jax.numpy as jnp
    >>> import jrnn
    >>> weights = {"dense": {"w": jnp.ones((4, 3)), "b": jnp.zeros(4)}}
    >>> def layer(weights, x):
    ...     return jnp.tanh(x @ weights["dense"]["w"].T + weights["dense"]["b"].reshape(1, -1))
    >>> package = from_jax(layer, jnp.ones((2, 3)), params=weights)
    >>> package.weight_names, [op.type for op in package.predict_net.ops]
    (('dense/b', 'dense/w'), ['FC', 'Tanh'])
    """
    return convert(call_of(fn, example_args, params, name)).package


@dataclass(frozen=True)
class ConvertedPackage:
    """A package, and a record of how it was made.

    Attributes:
        origins: blob of the predict net -> the primitive and the user's line that it comes from.
        without_gradient: why scans were written without a backward net, each with its primitive and line.
    """

    package: Package
    origins: Mapping[str, str]
    without_gradient: tuple[str, ...]


def convert(call: Call) -> ConvertedPackage:
    """Converts the call of a function, as `from_jax` does."""
    leaves = call.leaves
    graph, out_names = call.trace([leaf.spec for leaf in leaves])
    e = Emitter(call.name, recognize, call.closed_over)
    used = graph.used()
    values = _declare(e, graph, leaves, used)
    problems: dict[str, None] = {}
    for var in graph.inputs:
        if var in used and var.dtype not in TYPE_CODES:
            problems[f"an argument is {var}; {TYPES}"] = None
    results = e.graph(graph, values)
    problems.update(dict.fromkeys(e.problems))
    if problems:
        lines = "\n  ".join(("", *problems))
        count = f"{len(problems)} reason{'s' * (len(problems) > 1)}"
        raise ConversionError(f"{call.name} cannot be converted, for {count}:{lines}")

    package, new_names = _package(e, results, out_names)
    input_names = package.input_names
    shapes = {}
    for leaf, var in zip(leaves, graph.inputs):
        if leaf.name in input_names:
            shapes[leaf.name] = jax.ShapeDtypeStruct(var.shape, var.dtype)
    package = replace(
        package, shapes={name: shapes[name] for name in input_names if name in shapes}
    )
    trail = []
    for node, var, blob in e.trail:
        blob = replace(blob, name=new_names.get(blob.name, blob.name))
        trail.append((node, var, blob))
    verify(
        package=package,
        graph=graph,
        examples=[leaf.value for leaf in leaves],
        given=e.given,
        trail=trail,
    )
    origins = {new_names.get(name, name): where for name, where in e.origins.items()}
    return ConvertedPackage(package, origins, tuple(e.without_gradient))


def _declare(e: Emitter, graph: Graph, leaves: Sequence[Leaf], used: Collection[Var]) -> list[Any]:
    """Declares the inputs and the weights that are used, and returns the values of the graph's inputs."""
    values: list[Any] = []
    for leaf, var in zip(leaves, graph.inputs):
        dtype = var.dtype if var.dtype in TYPE_CODES else np.dtype(np.float32)
        if not leaf.is_param:
            values.append(e.input(leaf.name, var.shape, dtype))
        elif var in used and var.dtype in TYPE_CODES:
            values.append(e.weight(leaf.name, np.asarray(leaf.value, dtype)))
        else:
            values.append(Blob.of(UNKNOWN, var.shape, dtype))
    return values


def _package(
    e: Emitter, results: Sequence[Any], out_names: Sequence[str]
) -> tuple[Package, dict[str, str]]:
    """The nets, without operators that no output needs, and the new names of the blobs that are outputs."""
    inputs = set(e.root.external_inputs)
    new_names: dict[str, str] = {}
    for value, out_name in zip(results, out_names):
        blob = e.blob(value)
        if blob.name in inputs or blob.name in new_names:
            blob = e.copy(blob)
        new_names[blob.name] = e.claim(out_name)
    net = e.root.build(outputs=new_names)
    net = replace(net, ops=(*e.prelude, *net.ops))
    net = with_live_ops(net, new_names)

    # The weights that are still read, and the inputs.
    read = inputs_of(net.ops)
    fills = tuple(op for op in e.fills if op.outputs[0] in read)
    weights = tuple(op.outputs[0] for op in fills)
    init = Net(net.name + "_init", fills, (), weights)
    read_from_outside = {*e.given, *weights}
    inputs_read = tuple(filter(read_from_outside.__contains__, net.external_inputs))
    net = replace(net, external_inputs=inputs_read)
    return Package(init, rename_blobs(net, new_names)), new_names


def from_factory(target: str) -> Package:
    """Converts what `MODULE:FACTORY` returns: `(fn, args)` or `(fn, args, params)`, the arguments of `from_jax`.

    MODULE is a module's dotted name or the path of a Python file, whose code is run.

    Raises:
        ConversionError: for a module or factory that does not exist, a factory that returns something else, and as
            `from_jax` does.
    """
    factory = load_function(target)
    try:
        example = factory()
    except Exception as e:  # whatever the user's code raises
        first_line = str(e).partition("\n")[0]
        raise ConversionError(f"{target} raised {type(e).__name__}: {first_line:.300}") from e
    fn, args, params = example_of(target, example)
    return from_jax(fn, *args, params=params)


def example_of(target: str, example: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """What a factory returned, as (fn, args, params). Raises ConversionError for anything else."""
    if isinstance(example, tuple) and len(example) in (2, 3):
        fn, args, params = (*example, None)[:3]
        if isinstance(args, (tuple, list)):
            return fn, tuple(args), params
    raise ConversionError(
        f"{target} returns a {type(example).__name__}; it must return (fn, args) or (fn, args, params), where args is a "
        "tuple of example arrays"
    )


def load_function(target: str) -> Callable[..., Any]:
    """The function that `MODULE:FUNCTION` names; MODULE is a module's dotted name or the path of a Python file.

    Raises:
        ConversionError: for a module or function that does not exist.
    """
    fn = load_named(target, ConversionError, "FUNCTION")
    if not callable(fn):
        raise ConversionError(f"{target} is a {type(fn).__name__}, not a function")
    return fn


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

    @jax.jit
    def expected(args: Sequence[Any]) -> Any:
        return read(evaluate_graph(graph, args), graph.outputs)

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
            wrong = []
            for name, value in zip(package.output_names, wanted):
                if not close(outs[name], value):
                    wrong.append(repr(name))
            if wrong:
                head = (
                    f"the nets of {package.predict_net.name!r} compute other numbers than the function for "
                    f"{', '.join(wrong)}"
                )
                where = _first_difference(package, graph, args, inputs, trail)
                raise ConversionError(f"{head}; {where}")


def _first_difference(
    package: Package,
    graph: Graph,
    args: Sequence[Any],
    inputs: Blobs,
    trail: Sequence[tuple[FlatEquation, Var, Blob]],
) -> str:
    """Says which blob is the first that differs."""
    net = package.predict_net
    env = evaluate_graph(graph, args)
    blobs = run_net(net, {**package.weights(), **inputs})
    for node, var, blob in trail:
        value = blobs.get(blob.name)
        if value is None or var not in env:
            continue
        if value.shape == blob.own_shape:
            value = np.broadcast_to(value, blob.shape)
        if not close(value, env[var]):
            index = next(k for k, op in enumerate(net.ops) if blob.name in op.outputs)
            return (
                f"the first blob that differs is {blob.name!r}, made from {node.name} ({node.source}) by "
                f"{place_of(net, index)}"
            )
    return "every blob before them agrees"
