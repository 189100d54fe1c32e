"""Types of inputs and outputs that differ from those of the values inside: int64 for integers, as clients send them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import onnx
from onnx import AttributeProto, TensorProto, helper


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
        outer, old = value.name, value.type.tensor_type.elem_type
        inner, is_input = f"{outer}/{TensorProto.DataType.Name(old).lower()}", value in graph.input
        for node in graph.node:
            rename(node, {outer: inner})
        value.type.tensor_type.elem_type = code
        ends = ([outer], [inner]) if is_input else ([inner], [outer])
        cast = helper.make_node("Cast", *ends, to=old if is_input else code)
        graph.node.insert(0, cast) if is_input else graph.node.append(cast)


def widened(graph: onnx.GraphProto, dtypes: Mapping[str, Any]) -> None:
    """Declares int32 inputs as int64, such as token ids, except for those that come back as an output, as a counter does.

    Args:
        graph: the graph.
        dtypes: of all values of the graph and of the graphs in it.
    """
    outputs = {value.name for value in graph.output}
    edges: dict[str, set[str]] = {}
    _connect(graph.node, edges, lambda name: dtypes[name].kind in "iu")
    chosen = [v for v in graph.input if v.type.tensor_type.elem_type == TensorProto.INT32]
    retyped(graph, [v for v in chosen if not outputs & _reached(v.name, edges)], TensorProto.INT64)


def _reached(name: str, edges: Mapping[str, Collection[str]]) -> set[str]:
    found, pending = {name}, [name]
    while pending:
        new = set(edges.get(pending.pop(), ())) - found
        found |= new
        pending += new
    return found


def _connect(nodes: Sequence[onnx.NodeProto], edges: dict[str, set[str]], counts: Callable[[str], bool]) -> None:
    """Adds edges from each value to the integers that are computed from it."""

    def connect(sources: Iterable[str], targets: Iterable[str]) -> None:
        for a, b in zip(sources, targets):
            if a and b and counts(b):
                edges.setdefault(a, set()).add(b)

    for node in nodes:
        graphs = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
        for g in graphs:
            _connect(g.node, edges, counts)
            ins, outs = ([v.name for v in values] for values in (g.input, g.output))
            connect(node.input, ins)
            if node.op_type == "Loop":  # its body also has a counter, and a condition on both sides
                ins, outs = ins[2:], outs[1:]
            sequences = sum(a.i for a in node.attribute if a.name == "num_scan_inputs")
            connect(outs, node.output)
            connect(outs, ins[: len(ins) - sequences])  # what the next step gets
        if not graphs and node.op_type not in ("Shape", "Size"):
            for source in node.input:
                connect([source] * len(node.output), node.output)
