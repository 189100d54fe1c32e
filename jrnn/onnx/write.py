"""to_onnx: converts a JAX function to an ONNX model, and compares the two.

Inputs and outputs may have other types than the values inside: int64 for integers, as clients send them.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import onnx
from jax.export import symbolic_args_specs
from onnx import AttributeProto, TensorProto, checker, helper

from jrnn.errors import ConversionError, needs_extra
from jrnn.jaxprs.arguments import Call, call_of
from jrnn.jaxprs.flat import Graph
from jrnn.jaxprs.trials import TRIPS, close, ends, has_while
from jrnn.nn.layers import whole_layers
from jrnn.onnx.attention_loops import OPSET
from jrnn.onnx.emit import GraphEmitter, Ref, info, live, names_of, reads, tensor
from jrnn.onnx.read import save_model

OPSETS = range(17, 28)


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
        examples: arguments. The model is verified on their values.
        params: a pytree of weights that `fn` takes before the other arguments; they become initializers.
        dims: sizes that stay open, as `jax.export.symbolic_args_specs` takes them: one string for each argument, or one for
            all, such as "T, N, ..." or "batch, _, 3". The model is verified at other sizes too.
        path: a file to write.
        opset: ONNX's operator set, 17 to 27. From 27 on, linear attention is one node LinearAttention.
        name: the name of the graph; defaults to the function's.

    Returns:
        The model. Inputs are named as in the function's signature and by their path in the pytree. A single output is
        named "output", several "output/...". Inputs of int32, such as token ids, are int64, as clients send them, except
        inputs that come back as an output, as a counter in a state does.

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
        raise ConversionError(
            f"opset is {opset}; operator sets {OPSETS.start} to {OPSETS.stop - 1} can be written"
        )
    if opset > (newest := onnx.defs.onnx_opset_version()):
        raise ConversionError(
            f"opset is {opset}; onnx {onnx.__version__} has operator sets to {newest}: install a newer one"
        )
    call = call_of(fn, examples, params, name)
    specs = _specs(call, examples, dims)
    try:
        with whole_layers(
            frozenset(["recurrent_layer"] + ["causal_convolution"] * (opset >= OPSET))
        ):
            graph, out_names = call.trace(specs)
    except NotImplementedError:  # a gradient or a batch of a layer is written step by step
        with whole_layers(frozenset()):
            graph, out_names = call.trace(specs)
    symbols = {}
    for leaf, spec in reversed(list(zip(call.leaves, specs, strict=True))):
        if not leaf.is_param:
            for axis, size in enumerate(spec.shape):
                if not isinstance(size, int) and str(size).isidentifier():
                    symbols[str(size)] = (leaf.name, axis)
    model = _model(GraphEmitter(opset=opset, symbols=symbols), graph, call, out_names)
    try:
        checker.check_model(model, full_check=True)
    except (checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ConversionError(f"{call.name}: ONNX's checker rejects the model: {error}") from error
    if symbols and _is_empty(call, specs):
        trials = []
    else:
        trials = [_resized(call, specs, {})]
    if symbols:
        trials.append(_resized(call, specs, dict(zip(symbols, range(3, 3 + len(symbols))))))
    if has_while(graph):
        trials = _ending(call, trials)
    if not trials:
        raise ConversionError(
            f"{call.name}: a while loop takes more than {TRIPS} steps on random numbers, so the model cannot be verified; "
            "pass arrays for which it ends instead of ShapeDtypeStructs"
        )
    for args in trials:
        _verify(model, call, args, out_names)
    if path is not None:
        save_model(model, path)
    return model


def _ending(call: Call, trials: Sequence[list[Any]]) -> list[list[Any]]:
    """The trials on which the while loops end. They end on the values of the examples themselves."""
    has_values = not any(isinstance(leaf.value, jax.ShapeDtypeStruct) for leaf in call.leaves)
    ending = []
    for k, args in enumerate(trials):
        if (has_values and k == 0) or ends(call.trace(args)[0], args):
            ending.append(args)
    return ending


def _specs(call: Call, examples: Sequence[Any], dims: Any) -> list[jax.ShapeDtypeStruct]:
    weights: list[Any] = []
    plain: list[Any] = []
    for leaf in call.leaves:
        (weights if leaf.is_param else plain).append(leaf.spec)
    if dims is None:
        return [*weights, *plain]
    given = jax.tree.unflatten(jax.tree.structure(tuple(examples)), plain)
    try:
        opened = jax.tree.leaves(symbolic_args_specs(given, dims))
        if list(map(np.ndim, opened)) != list(map(np.ndim, plain)):
            raise ValueError(f"they have shapes {[s.shape for s in plain]}")
        return [*weights, *opened]
    except ValueError as error:
        raise ConversionError(
            f"{call.name}: dims {dims!r} do not fit the examples: {error}"
        ) from error


def _model(e: GraphEmitter, graph: Graph, call: Call, out_names: Sequence[str]) -> onnx.ModelProto:
    used = graph.used()
    values: list[Any] = []
    for leaf, var in zip(call.leaves, graph.inputs, strict=True):
        if not leaf.is_param:
            values.append(Ref(e.claim(leaf.name), var.shape, np.dtype(var.dtype)))
        else:
            values.append(e.hinted(np.asarray(leaf.value), leaf.name) if var in used else None)
    keys = {id(value): key for key, value in call.closed_over}
    consts = {}
    for k, (var, value) in enumerate(graph.consts.items()):
        if var in used:
            consts[var] = e.hinted(np.asarray(value), keys.get(id(value), f"weight_{k}"))
    inputs = [info(value) for value in values if isinstance(value, Ref)]
    e.taken.update(out_names)
    results = e.owned(e.run(replace(graph, consts=consts), values))
    names = dict(zip(names_of(results), out_names, strict=True))
    for node in e.nodes:
        rename(node, names)
    outputs = []
    dtypes = dict(e.dtypes)
    for result in results:
        renamed = replace(result, name=names[result.name])
        dtypes[renamed.name] = renamed.dtype
        outputs.append(info(renamed))
    nodes = live(e.nodes, out_names)
    read: set[str] = set()
    for node in nodes:
        read.update(reads(node))
    tensors = [tensor(name, value) for name, value in e.initializers.items() if name in read]
    proto = helper.make_graph(
        nodes, re.sub(r"\W", "_", call.name) or "graph", inputs, outputs, tensors
    )
    widened(proto, dtypes)
    opsets = [helper.make_opsetid("", e.opset)]
    return helper.make_model(
        proto,
        producer_name="jrnn",
        opset_imports=opsets,
        ir_version=helper.find_min_ir_version_for(opsets),
    )


def _is_empty(call: Call, specs: Sequence[Any]) -> bool:
    """Whether an example has no steps where the size is open: onnxruntime runs no Scan of no steps."""
    for leaf, spec in zip(call.leaves, specs, strict=True):
        for given, size in zip(np.shape(leaf.value), spec.shape, strict=True):
            if given == 0 and not isinstance(size, int):
                return True
    return False


def _resized(call: Call, specs: Sequence[Any], sizes: dict[str, int]) -> list[Any]:
    """The examples, with their values repeated to other sizes where those are open."""
    leaves = []
    for leaf, spec in zip(call.leaves, specs, strict=True):
        if leaf.is_param:
            leaves.append(leaf.value)
            continue
        if isinstance(leaf.value, jax.ShapeDtypeStruct):
            value = (
                np.random.default_rng(0).uniform(0, 1, leaf.value.shape).astype(leaf.value.dtype)
            )
        else:
            value = np.asarray(leaf.value, spec.dtype)
        shape = []
        for size, given in zip(spec.shape, value.shape, strict=True):
            shape.append(sizes.get(str(size), given))
        leaves.append(np.resize(value, shape))
    return leaves


def _of_type(values: Iterable[onnx.ValueInfoProto], code: int) -> list[onnx.ValueInfoProto]:
    """The values whose tensors have this type."""
    return [value for value in values if value.type.tensor_type.elem_type == code]


def _feedable(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that takes and returns float32 for bfloat16, for which onnxruntime has no arrays."""
    feedable = onnx.ModelProto()
    feedable.CopyFrom(model)
    ends = (*feedable.graph.input, *feedable.graph.output)
    retyped(feedable.graph, _of_type(ends, TensorProto.BFLOAT16), TensorProto.FLOAT)
    return feedable


def _verify(
    model: onnx.ModelProto, call: Call, args: Sequence[Any], out_names: Sequence[str]
) -> None:
    """Compares the model, run by onnxruntime, with the function."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ConversionError(needs_extra("the check of an ONNX model", "onnx")) from error
    model = _feedable(model)
    kinds = {}
    for i in model.graph.input:
        kinds[i.name] = helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type)
    feeds = {}
    for leaf, arg in zip(call.leaves, args, strict=True):
        if leaf.name in kinds:
            feeds[leaf.name] = np.asarray(arg).astype(kinds[leaf.name])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        computed = session.run(None, feeds)
    except Exception as error:  # onnxruntime's own have no common base
        raise ConversionError(
            f"{call.name}: onnxruntime does not run the model: {error}"
        ) from error
    expected = jax.tree.leaves(jax.jit(call.run)(args))
    for key, ours, theirs in zip(out_names, expected, computed, strict=True):
        if not close(theirs, ours):
            same = np.shape(ours) == np.shape(theirs)
            if same:
                by = np.abs(np.asarray(theirs, float) - np.asarray(ours, float)).max()
            else:
                by = "its shape"
            raise ConversionError(
                f"{call.name}: onnxruntime computes another {key!r}, which differs by {by}; this is a defect of the "
                "conversion"
            )


def rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Renames values, in the graphs inside of a node too."""
    for field in (node.input, node.output):
        field[:] = [names.get(n, n) for n in field]
    for a in node.attribute:
        for inner in a.g.node:
            rename(inner, names)
        for output in a.g.output:
            output.name = names.get(output.name, output.name)


def retyped(graph: onnx.GraphProto, values: Iterable[onnx.ValueInfoProto], code: int) -> None:
    """Gives inputs and outputs of a graph another type, and casts them."""
    for value in list(values):
        outer = value.name
        old = value.type.tensor_type.elem_type
        inner = f"{outer}/{TensorProto.DataType.Name(old).lower()}"
        is_input = value in graph.input
        for node in graph.node:
            rename(node, {outer: inner})
        value.type.tensor_type.elem_type = code
        ends = ([outer], [inner]) if is_input else ([inner], [outer])
        cast = helper.make_node("Cast", *ends, to=old if is_input else code)
        graph.node.insert(0, cast) if is_input else graph.node.append(cast)


def widened(graph: onnx.GraphProto, dtypes: Mapping[str, Any]) -> None:
    """Declares int32 inputs, such as token ids, as int64, except inputs that come back as an output, as a counter does.

    Args:
        graph: the graph.
        dtypes: of all values of the graph and of the graphs in it.
    """
    outputs = set(names_of(graph.output))
    edges: dict[str, set[str]] = {}
    _connect(graph.node, edges, lambda name: dtypes[name].kind in "iu")
    chosen = []
    for value in _of_type(graph.input, TensorProto.INT32):
        if not outputs & _reached(value.name, edges):
            chosen.append(value)
    retyped(graph, chosen, TensorProto.INT64)


def _reached(name: str, edges: Mapping[str, Collection[str]]) -> set[str]:
    found = {name}
    pending = [name]
    while pending:
        new = set(edges.get(pending.pop(), ())) - found
        found |= new
        pending += new
    return found


def _connect(
    nodes: Sequence[onnx.NodeProto], edges: dict[str, set[str]], counts: Callable[[str], bool]
) -> None:
    """Adds edges from each value to the integers that are computed from it."""

    def connect(sources: Iterable[str], targets: Iterable[str]) -> None:
        for a, b in zip(sources, targets):
            if a and b and counts(b):
                edges.setdefault(a, set()).add(b)

    for node in nodes:
        graphs = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
        for g in graphs:
            _connect(g.node, edges, counts)
            ins = names_of(g.input)
            outs = names_of(g.output)
            connect(node.input, ins)
            if node.op_type == "Loop":  # its body also has a counter, and a condition on both sides
                ins = ins[2:]
                outs = outs[1:]
            sequences = sum(a.i for a in node.attribute if a.name == "num_scan_inputs")
            connect(outs, node.output)
            connect(outs, ins[: len(ins) - sequences])  # what the next step gets
        if not graphs and node.op_type not in ("Shape", "Size"):
            for source in node.input:
                connect([source] * len(node.output), node.output)
