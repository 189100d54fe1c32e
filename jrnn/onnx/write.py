"""to_onnx: converts a JAX function to an ONNX model, and compares the two."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import onnx
from jax.export import symbolic_args_specs
from onnx import checker, helper

from jrnn.convert.arguments import Leaf, arguments_of, callable_of, closed_over, path_of
from jrnn.convert.flat import Graph, flatten
from jrnn.errors import ConversionError
from jrnn.nn.layers import whole_layers
from jrnn.onnx.emit import Emitter, Ref, info, tensor

OPSETS = range(17, 23)
TOLERANCE = 1e-5


def to_onnx(
    fn: Callable[..., Any],
    *examples: Any,
    params: Any = None,
    dims: Any = None,
    path: str | os.PathLike[str] | None = None,
    opset: int = 18,
    name: str | None = None,
) -> onnx.ModelProto:
    """Converts a JAX function to an ONNX model, and verifies it with onnxruntime.

    Recurrent layers of `jrnn.nn` become LSTM, GRU and RNN nodes, scans Scan nodes, `while_loop` Loop, and `cond` If.

    Args:
        fn: a pure function of arrays or pytrees, or a module, as `jrnn.from_jax` takes them.
        examples: arguments; their values are what the model is tried on.
        params: a pytree of weights that `fn` takes before the other arguments; they become initializers.
        dims: sizes that stay open, as `jax.export.symbolic_args_specs` takes them: one string for each argument, or one for
            all, such as "T, N, ..." or "batch, _, 3". The model is tried on other sizes too.
        path: a file to write.
        opset: ONNX's operator set, 17 to 22.
        name: of the graph; by default the function's.

    Returns:
        The model. Inputs are named as in the function's signature, with the path in a pytree after it; a single output is
        "output", several are "output/...".

    Raises:
        ConversionError: a primitive without a rule, with the line that uses it, or a model that computes something else.

    >>> import jax.numpy as jnp
    >>> import jrnn
    >>> def total(x):
    ...     return jrnn.scan(lambda c, x: (c + x, c * x), jnp.zeros(2), x)
    >>> model = to_onnx(total, jnp.ones((3, 2)), dims="T, ...")
    >>> [node.op_type for node in model.graph.node], [str(o) for o in jrnn.from_onnx(model).outputs]
    (['Scan'], ['output/0: float32[2]', 'output/1: float32[T, 2]'])
    """
    if opset not in OPSETS:
        raise ConversionError(f"opset is {opset}; operator sets {OPSETS.start} to {OPSETS.stop - 1} are written")
    fn, params, own = callable_of(fn, params)
    name = name or getattr(fn, "__name__", type(fn).__name__).strip("<>")
    leaves, call = arguments_of(fn, examples, params, own, name)
    specs = _specs(leaves, examples, dims, name)
    graph, out_names = _trace(call, specs, name)
    symbols = {
        str(size): (leaf.name, axis)
        for leaf, spec in reversed(list(zip(leaves, specs, strict=True)))
        if not leaf.is_param
        for axis, size in enumerate(spec.shape)
        if not isinstance(size, int) and str(size).isidentifier()
    }
    e = Emitter(opset=opset, symbols=symbols)
    model = _model(e, graph, leaves, out_names, name, closed_over(fn))
    try:
        checker.check_model(model, full_check=True)
    except (checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ConversionError(f"{name}: ONNX's checker refuses the model: {error}") from error
    for sizes in ({}, dict(zip(symbols, range(3, 3 + len(symbols))))) if symbols else ({},):
        _verify(model, call, _resized(leaves, specs, sizes), leaves, out_names, name)
    if path is not None:
        onnx.save(model, os.fspath(path))
    return model


def _specs(leaves: Sequence[Leaf], examples: Sequence[Any], dims: Any, name: str) -> list[jax.ShapeDtypeStruct]:
    weights, plain = ([leaf.spec for leaf in leaves if leaf.is_param == which] for which in (True, False))
    if dims is None:
        return [*weights, *plain]
    given = jax.tree.unflatten(jax.tree.structure(tuple(examples)), plain)
    try:
        opened = jax.tree.leaves(symbolic_args_specs(given, dims))
        if [len(s.shape) for s in opened] != [len(s.shape) for s in plain]:
            raise ValueError(f"they have shapes {[s.shape for s in plain]}")
        return [*weights, *opened]
    except ValueError as error:
        raise ConversionError(f"{name}: dims {dims!r} do not fit the examples: {error}") from error


def _trace(call: Callable[..., Any], specs: Sequence[jax.ShapeDtypeStruct], name: str) -> tuple[Graph, list[str]]:
    def trace(whole: bool) -> Any:
        with whole_layers(whole):
            return jax.make_jaxpr(call, return_shape=True)(specs)

    try:
        try:
            closed, out = trace(True)
        except NotImplementedError:  # a gradient or a batch of a layer: it is written step by step
            closed, out = trace(False)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        first = str(error).splitlines()[0]
        raise ConversionError(f"{name}: depends on values that are known only when it runs: {first}") from error
    graph = flatten(closed)
    bad = [n for n in graph.nodes if n.name.startswith(("random_", "threefry", "rng_")) or "callback" in n.name]
    if bad or closed.effects:
        where = ", ".join(dict.fromkeys(f"{n.name} ({n.source})" for n in bad)) or str(closed.effects)
        raise ConversionError(
            f"{name} draws random numbers or has effects: {where}; give noise as an argument, or put a module in evaluation"
        )
    paths = [path_of("output", path) for path, _ in jax.tree_util.tree_flatten_with_path(out)[0]]
    if not paths:
        raise ConversionError(f"{name} returns no array")
    return graph, paths


def _model(
    e: Emitter,
    graph: Graph,
    leaves: Sequence[Leaf],
    out_names: Sequence[str],
    name: str,
    closed: Sequence[tuple[str, Any]],
) -> onnx.ModelProto:
    used = graph.users()
    values: list[Any] = []
    for leaf, var in zip(leaves, graph.inputs, strict=True):
        if leaf.is_param and var not in used:
            values.append(None)
        elif leaf.is_param:
            values.append(e.hinted(np.asarray(leaf.value), leaf.name))
        else:
            values.append(Ref(e.claim(leaf.name), var.shape, np.dtype(var.dtype)))
    names = {id(value): key for key, value in closed}
    consts = {
        var: e.hinted(np.asarray(value), names.get(id(value), f"weight_{k}"))
        for k, (var, value) in enumerate(graph.consts.items())
        if var in used
    }
    inputs = [v for v in values if isinstance(v, Ref)]
    e.taken.update(out_names)
    results = e.owned(e.run(replace(graph, consts=consts), values))
    renamed = {r.name: out for r, out in zip(results, out_names, strict=True)}
    for node in e.nodes:
        _rename(node, renamed)
    outputs = [info(Ref(renamed[r.name], r.shape, r.dtype)) for r in results]
    tensors = [tensor(n, v) for n, v in e.initializers.items()]
    proto = helper.make_graph(e.nodes, re.sub(r"\W", "_", name) or "graph", [info(i) for i in inputs], outputs, tensors)
    opsets = [helper.make_opsetid("", e.opset)]
    return helper.make_model(
        proto, producer_name="jrnn", opset_imports=opsets, ir_version=helper.find_min_ir_version_for(opsets)
    )


def _rename(node: onnx.NodeProto, names: dict[str, str]) -> None:
    """Gives values other names, in the graphs inside of a node too."""
    for field in (node.input, node.output):
        field[:] = [names.get(n, n) for n in field]
    for a in node.attribute:
        for inner in a.g.node:
            _rename(inner, names)
        for output in a.g.output:
            output.name = names.get(output.name, output.name)


def _resized(leaves: Sequence[Leaf], specs: Sequence[Any], sizes: dict[str, int]) -> list[Any]:
    """The examples, with their values repeated to other sizes where those are open."""
    found = []
    for leaf, spec in zip(leaves, specs, strict=True):
        if leaf.is_param:
            found.append(leaf.value)
            continue
        if isinstance(leaf.value, jax.ShapeDtypeStruct):
            value = np.random.default_rng(0).uniform(0, 1, leaf.value.shape).astype(leaf.value.dtype)
        else:
            value = np.asarray(leaf.value, spec.dtype)
        shape = [sizes.get(str(size), given) for size, given in zip(spec.shape, value.shape, strict=True)]
        found.append(np.resize(value, shape))
    return found


def _verify(
    model: onnx.ModelProto,
    call: Callable[..., Any],
    args: Sequence[Any],
    leaves: Sequence[Leaf],
    out_names: Sequence[str],
    name: str,
) -> None:
    """Compares the model, run by onnxruntime, with the function."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ConversionError("a model is tried with onnxruntime: pip install 'jrnn[onnx]'") from error
    declared = {i.name for i in model.graph.input}
    feeds = {leaf.name: arg for leaf, arg in zip(leaves, args, strict=True) if leaf.name in declared}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found = session.run(None, feeds)
    except Exception as error:  # onnxruntime's own have no common base
        raise ConversionError(f"{name}: onnxruntime does not run the model: {error}") from error
    expected = jax.tree.leaves(jax.jit(call)(args))
    for key, ours, theirs in zip(out_names, expected, found, strict=True):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        scale = max(1.0, np.abs(ours[np.isfinite(ours)]).max(initial=0)) if ours.dtype.kind == "f" else 1
        if ours.shape != theirs.shape or not np.allclose(theirs, ours, rtol=0, atol=TOLERANCE * scale, equal_nan=True):
            by = np.abs(theirs.astype(float) - ours).max() if ours.shape == theirs.shape else "another shape"
            raise ConversionError(
                f"{name}: onnxruntime gives another {key!r}, by {by}; this is a defect of the conversion"
            )
