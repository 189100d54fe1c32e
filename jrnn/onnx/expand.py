"""Operators without a row in the table, in terms of others: ONNX defines them by functions."""

from collections.abc import Container, Iterator, Mapping

import onnx
from onnx import defs, helper, inliner, shape_inference

STANDARD = ("", "ai.onnx")
_DEPTH = 8  # of functions that call functions


def opset_of(proto: onnx.ModelProto) -> int:
    return max((o.version for o in proto.opset_import if o.domain in STANDARD), default=0)


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph and of the graphs in it."""
    for node in graph.node:
        yield node
        for a in node.attribute:
            for inner in (a.g, *a.graphs):
                yield from nodes_of(inner)


def constants_of(graph: onnx.GraphProto) -> set[str]:
    """The names of the constants of a graph and of the graphs in it."""
    names = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    for node in graph.node:
        names.update(node.output if node.op_type == "Constant" else ())
        names.update(*(constants_of(a.g) for a in node.attribute))
    return names


def schema_of(name: str, opset: int) -> defs.OpSchema | None:
    try:
        return defs.get_schema(name, opset, "")
    except (defs.SchemaError, TypeError):  # TypeError: a damaged name
        return None


def expanded(proto: onnx.ModelProto, table: Container[str]) -> onnx.ModelProto:
    """A model whose nodes are in the table, as far as ONNX defines the others; functions may call functions."""
    opset = opset_of(proto)
    for _ in range(_DEPTH):
        if not any(_is_missing(node, table) for node in nodes_of(proto.graph)):
            break
        model = onnx.ModelProto()
        functions = []
        model.CopyFrom(proto)
        types = _types(model.graph)
        for k, node in enumerate(nodes_of(model.graph)):
            if _is_missing(node, table):
                body = _body(node, types, opset)
            else:
                body = None
            # each node is a call of a function of its own, which depends on its types
            if body is not None:
                node.domain = body.domain = "jrnn"
                node.op_type = body.name = f"{node.op_type}_{k}"
                functions.append(body)
        if not functions:
            break
        model.functions.extend(functions)
        model.opset_import.append(helper.make_opsetid("jrnn", 1))
        proto = inliner.inline_local_functions(model)
        del proto.opset_import[:]
        proto.opset_import.extend(model.opset_import[:-1])
        proto = shape_inference.infer_shapes(proto)
    return proto


def _is_missing(node: onnx.NodeProto, table: Container[str]) -> bool:
    return node.domain in STANDARD and node.op_type not in table


def _types(graph: onnx.GraphProto) -> dict[str, bytes]:
    """The type of each value of a graph whose shapes are inferred, and of the graphs in it."""
    values = (*graph.input, *graph.value_info, *graph.output)
    types = {v.name: v.type.SerializeToString() for v in values}
    for t in graph.initializer:
        types[t.name] = helper.make_tensor_type_proto(t.data_type, t.dims).SerializeToString()
    for node in graph.node:
        for a in node.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                types |= _types(a.g)
    return types


def _body(
    node: onnx.NodeProto, types: Mapping[str, bytes], opset: int
) -> onnx.FunctionProto | None:
    """The function that defines a node; of the first later operator set that has one, if its own has none."""
    for later in range(opset, defs.onnx_opset_version() + 1):
        schema = schema_of(node.op_type, later)
        if schema is not None and schema.all_function_opset_versions:
            break
    else:
        return None
    given = {a.name for a in node.attribute}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type:
            node.attribute.append(attribute.default_value)
    versions = schema.all_function_opset_versions
    version = max((v for v in versions if v <= opset), default=min(versions))
    if schema.has_context_dependent_function:
        inputs = [types.get(name, b"") for name in node.input]
        data = schema.get_context_dependent_function_with_opset_version(
            version, node.SerializeToString(), inputs
        )
    else:
        data = schema.get_function_with_opset_version(version)
    body = onnx.FunctionProto()
    body.ParseFromString(data)
    del body.opset_import[:]
    body.opset_import.append(helper.make_opsetid("", opset))
    return body
