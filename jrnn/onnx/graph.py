"""ONNX graphs as frozen records, their evaluation node by node, and the table of operators.

A value is a numpy array if it is known while the graph is traced (shapes, axes, numbers of steps and what is computed from
them), else a JAX array; a list for a sequence; or None for an input that is left out or an empty optional.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax import Array
from onnx import AttributeProto, helper, numpy_helper

from jrnn.errors import ConversionError, FormatError, JrnnError, OpError, UnknownOperatorError, near
from jrnn.jaxprs.jax_internals import is_traced
from jrnn.jaxprs.primitives import registering
from jrnn.jaxprs.queries import is_floating
from jrnn.nets.memory import check_call, check_results, check_size
from jrnn.onnx.expand import STANDARD

DEPTH = 32  # of graphs inside graphs
# type -> `(node, *inputs) -> output or tuple of outputs`
OPERATORS: dict[str, Callable[..., Any]] = {}
op = registering(OPERATORS)
Values = Mapping[str, Any]  # by the names of a graph
# operators on numbers one by one, whose results are as large as what they read
ELEMENTWISE = {
    "Add", "Sub", "Mul", "Div", "Mod", "Neg", "Abs", "Min", "Max", "Less", "LessOrEqual", "Greater", "GreaterOrEqual",
    "Equal", "And", "Or", "Xor", "Not", "Where", "Identity", "Cast",
}  # fmt: skip
# the name of the call's key among the values, which no value of a file has; its value in loops
KEY = "\0key"
IN_LOOP = "\0loop"


def known(*values: Any) -> bool:
    """Whether all values are known while the graph is traced."""
    return all(isinstance(v, (np.ndarray, np.generic)) for v in values)


def xp(*values: Any) -> Any:
    """numpy where all values are known, so that 64-bit integers and shapes stay exact; else jax.numpy."""
    return np if known(*values) else jnp


def as_jax(value: Any, where: str) -> Array:
    """A value as a JAX array, with a warning if it is a known integer that JAX's 32 bits cannot hold."""
    if known(value) and value.dtype.kind in "iu" and value.size:
        bounds = np.iinfo(jax.dtypes.canonicalize_dtype(value.dtype))
        if value.min() < bounds.min or value.max() > bounds.max:
            warnings.warn(
                f"{where}: a number does not fit {bounds.dtype} and wraps around; set jax_enable_x64",
                stacklevel=2,
            )
    return jnp.asarray(value)


def spread(*values: Any) -> list[Any]:
    """Values of one rank, by leading axes of size 1: ONNX broadcasts as numpy does."""
    if not known(*values):
        values = [as_jax(v, "an operand") if known(v) else v for v in values]
    else:
        check_size(np.broadcast_shapes(*map(np.shape, values)), np.int64)
    rank = max(map(np.ndim, values))
    of_one_rank = []
    for v in values:
        missing = rank - np.ndim(v)
        of_one_rank.append(v.reshape((1,) * missing + np.shape(v)) if missing else v)
    return of_one_rank


def cast(x: Any, dtype: Any) -> Any:
    """`x` in another type; JAX arrays only have 64 bits if `jax_enable_x64` is set."""
    if known(x):
        with np.errstate(all="ignore"):
            return np.asarray(x).astype(dtype)
    return x.astype(jax.dtypes.canonicalize_dtype(dtype))


@dataclass(frozen=True, eq=False)
class OnnxGraph:
    """Nodes in order. `consts` are known values; `params` maps a value's name to the name of the parameter."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[OnnxNode, ...]
    consts: Mapping[str, np.ndarray]
    params: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class OnnxNode:
    """One node. `run(graph, args)` evaluates a graph that the node holds, in its scope. `key` is the call's key."""

    type: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Values
    opset: int
    run: Any = field(default=None, repr=False)
    key: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        named = f" {self.name!r}" if self.name else ""
        return f"node{named} {self.type} -> {', '.join(map(repr, self.outputs))}"

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute's value."""
        return self.attributes.get(name, default)

    def ints(self, name: str, given: Any = None) -> tuple[int, ...] | None:
        """Integers that newer operator sets pass as an input and older ones as an attribute; None if both are absent."""
        if given is not None:
            return tuple(map(int, np.atleast_1d(self.known(given, name)).tolist()))
        values = self.get(name)
        if values is None:
            return None
        return tuple(map(int, np.atleast_1d(values).tolist()))

    def random(self) -> Array:
        """The key of the numbers that this node draws."""
        if isinstance(self.key, Array):
            return jax.random.fold_in(self.key, zlib.crc32(self.outputs[0].encode()))
        if self.key is None and "seed" in self.attributes:
            return jax.random.key(np.float32(self.attributes["seed"]).view(np.int32))
        if self.key == IN_LOOP:
            rule = "it is in a loop, where each step would draw the same numbers"
        else:
            rule = "pass one: key="
        raise ConversionError(f"{self}: it draws random numbers and has no key; {rule}")

    def known(self, value: Any, what: str) -> np.ndarray:
        """A value that must be known while the graph is traced."""
        if isinstance(value, Array) and not is_traced(value):
            return np.asarray(value)
        if not isinstance(value, (np.ndarray, np.generic)):
            raise ConversionError(
                f"{self}: {what} depends on values that are not known while the function is traced, so neither is the "
                "shape of the result; pass the integer inputs that it depends on as numpy arrays, outside of jit"
            )
        return np.asarray(value)


# Of domains whose operators depend on the machine.
_LEVELS = {
    "com.microsoft.nchwc": ": its weights are in an order of one kind of processor; let onnxruntime write the file at the "
    "level ORT_ENABLE_EXTENDED"
}


def read_graph(
    proto: onnx.GraphProto, opset: int, own: Container[str]
) -> tuple[OnnxGraph, dict[str, np.ndarray]]:
    """The graph of a GraphProto, and the parameters in it and in the graphs inside it, which are among the values `own`."""
    arrays: dict[str, np.ndarray] = {}

    def read(proto: onnx.GraphProto, path: str, depth: int, passed: int = 0) -> OnnxGraph:
        if depth > DEPTH:
            raise FormatError(f"graphs are nested deeper than {DEPTH} levels")
        consts: dict[str, np.ndarray] = {}
        params: dict[str, str] = {}

        def put(name: str, value: np.ndarray) -> None:
            if is_param(value) and name in own:
                params[name] = unused(path + name, arrays)
                arrays[params[name]] = value
            else:
                consts[name] = value

        for tensor in proto.initializer:
            put(tensor.name, array_of(tensor))
        for sparse in proto.sparse_initializer:
            put(sparse.values.name, _dense(sparse))
        nodes = []
        for n in proto.node:
            label = f"{path}{n.name or next(iter(n.output), '')}"
            kind = n.op_type if n.domain in STANDARD else f"{n.domain}.{n.op_type}"
            node = OnnxNode(kind, n.name, tuple(n.input), tuple(n.output), {}, opset)
            if kind not in (*OPERATORS, "Constant"):
                if n.domain not in STANDARD:
                    raise UnknownOperatorError(
                        f"{node}: this operator of the domain {n.domain!r} is not read{_LEVELS.get(n.domain, '')}"
                    )
                hint = near(n.op_type, OPERATORS)
                raise UnknownOperatorError(
                    f"{node}: jrnn has no operator {n.op_type!r} of ONNX{hint}"
                )
            attributes = {}
            for a in n.attribute:
                if a.type == AttributeProto.GRAPH:
                    attributes[a.name] = read(
                        a.g, f"{label}/{a.name}/", depth + 1, _passed(n, opset)
                    )
                else:
                    attributes[a.name] = _attribute(a)
            if kind == "Constant":
                put(n.output[0], _constant(attributes, label))
            else:
                nodes.append(replace(node, attributes=attributes))
        inputs = tuple(i.name for i in proto.input)
        if not depth or len(inputs) != passed:
            # initializers are inputs, too, with a default value, and must be up to version 3 of the format
            inputs = tuple(name for name in inputs if name not in consts and name not in params)
        return OnnxGraph(
            proto.name, inputs, tuple(o.name for o in proto.output), tuple(nodes), consts, params
        )

    return read(proto, "", 0), arrays


def unused(name: str, taken: Container[str]) -> str:
    """A name, followed by a number if it is taken: nodes may have the same name, and then so have the values in them.

    >>> unused("loop/body/w", {"loop/body/w"})
    'loop/body/w_2'
    """
    free = name
    number = 1
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def _passed(node: onnx.NodeProto, opset: int) -> int:
    """How many values a node passes to a graph in it."""
    if node.op_type == "Loop":
        return max(len(node.input), 2)
    if node.op_type == "Scan":
        return len(node.input) - (opset < 9)  # which has lengths as well
    return 0


def _attribute(a: onnx.AttributeProto) -> Any:
    if a.ref_attr_name:
        raise FormatError(
            f"the attribute {a.name!r} refers to {a.ref_attr_name!r} outside of a function"
        )
    value = helper.get_attribute_value(a)
    match a.type:
        case AttributeProto.TENSOR:
            return array_of(value)
        case AttributeProto.SPARSE_TENSOR:
            return _dense(value)
        case AttributeProto.STRING:
            return value.decode(errors="replace")
        case AttributeProto.STRINGS:
            return [v.decode(errors="replace") for v in value]
        case AttributeProto.INTS | AttributeProto.FLOATS:
            return list(value)
    return value


def is_param(value: np.ndarray) -> bool:
    """Whether a constant is a parameter: floating point, of rank 1 or more. A scalar, such as an epsilon, is none."""
    return value.ndim > 0 and is_floating(value)


def array_of(tensor: onnx.TensorProto) -> np.ndarray:
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise FormatError(f"the tensor {tensor.name!r} cannot be read: {error}") from error


def _dense(sparse: onnx.SparseTensorProto) -> np.ndarray:
    values = array_of(sparse.values)
    indices = array_of(sparse.indices)
    try:
        dense = np.zeros(check_size(sparse.dims, values.dtype), values.dtype)
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
    except (IndexError, ValueError) as error:
        raise FormatError(
            f"the sparse tensor {sparse.values.name!r} cannot be read: {error}"
        ) from error
    return dense


def _constant(attributes: Values, label: str) -> np.ndarray:
    for name, value in attributes.items():
        if name in ("value", "sparse_value"):
            return value
        if name in ("value_float", "value_floats"):
            return np.asarray(value, np.float32)
        if name in ("value_int", "value_ints"):
            return np.asarray(value, np.int64)
    raise ConversionError(
        f"node {label!r} Constant: it holds {sorted(attributes)}; strings are not read"
    )


_MISTAKES = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, MemoryError, jax.errors.JaxRuntimeError,
)  # fmt: skip


def run_graph(
    graph: OnnxGraph,
    args: Sequence[Any],
    outer: Values,
    params: Values,
    max_bytes: int,
) -> list[Any]:
    """The outputs of a graph for values of its inputs; `outer` holds the values of the graphs around it.

    A node whose result needs more than `max_bytes` is an error.
    """
    env = {**outer, **graph.consts}
    for name, key in graph.params.items():
        env[name] = params[key]
    env.update(zip(graph.inputs, args, strict=True))
    for node in graph.nodes:
        env.update(zip(node.outputs, _call(node, env, params, max_bytes), strict=False))
    return [_look_up(env, name, f"graph {graph.name!r}") for name in graph.outputs]


def _look_up(env: Values, name: str, where: str) -> Any:
    if name and name not in env:
        raise FormatError(
            f"{where}: the value {name!r} is not defined{near(name, [n for n in env if n])}"
        )
    return env[name] if name else None


def _call(node: OnnxNode, env: Values, params: Values, max_bytes: int) -> Sequence[Any]:
    run = OPERATORS[node.type]
    node = replace(node, key=env.get(KEY))
    values = [_look_up(env, name, str(node)) for name in node.inputs]
    if any(isinstance(v, OnnxGraph) for v in node.attributes.values()):
        scope = {**env, KEY: env.get(KEY) if node.type == "If" else IN_LOOP}
        node = replace(
            node, run=lambda graph, args: run_graph(graph, args, scope, params, max_bytes)
        )
    try:
        are_known = known(*values)
        if are_known:
            # numpy computes these while they are traced, before anything can be bounded by their types
            check_size([sum(v.size for v in values)], np.int64)
        is_small = are_known and node.type in ELEMENTWISE
        if node.run is None and not is_small and not any(map(is_traced, values)):
            check_call(
                lambda: [v for v in _outputs(run(node, *values)) if hasattr(v, "dtype")],
                node.outputs,
                max_bytes,
            )
        results = _outputs(run(node, *values))
        check_results(results, node.outputs, max_bytes)
    except JrnnError as error:
        raise error if str(error).startswith("node") else error.at(str(node)) from None
    except _MISTAKES as error:
        shapes = ", ".join(map(_shown, values))
        raise OpError(f"{node}: cannot be run on ({shapes}): {error}") from error
    return results


def _outputs(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return f"a sequence of {len(value)}"
