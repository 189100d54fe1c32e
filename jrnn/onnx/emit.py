"""Emitter: nodes of an ONNX graph from values that are known (numpy arrays) or named (`Ref`)."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from onnx import helper, numpy_helper

from jrnn.errors import ConversionError, near
from jrnn.jaxprs import primitives
from jrnn.jaxprs.flat import FlatEquation, Graph, evaluate_graph, flatten, read
from jrnn.jaxprs.primitives import registering

BFLOAT16 = np.dtype(jnp.bfloat16)
FOLD = 4096  # elements: a result that is known is computed at once up to this size, and up to the size of its inputs


@dataclass(frozen=True)
class Ref:
    """A value of the ONNX graph. Its sizes are numbers, or JAX's symbolic ones."""

    name: str
    shape: tuple[Any, ...]
    dtype: Any


@dataclass(frozen=True, eq=False)
class Fill:
    """One known number in every element of a shape with open sizes; it becomes a node where a node reads it."""

    value: np.ndarray
    shape: tuple[Any, ...]

    @property
    def dtype(self) -> Any:
        return self.value.dtype


Value = Any  # np.ndarray | Ref | Fill
# primitive -> `(emitter, node, *values) -> value or tuple of values`
RULES: dict[str, Callable[..., Any]] = {}
rule = registering(RULES)


def known(*values: Value) -> bool:
    return all(isinstance(v, np.ndarray) for v in values)


def names_of(values: Iterable[Any]) -> list[str]:
    """The names of references or of protos."""
    return [value.name for value in values]


def is_static(shape: Sequence[Any]) -> bool:
    return all(isinstance(size, (int, np.integer)) for size in shape)


def ints(*values: Any) -> np.ndarray:
    return np.asarray(values, np.int64)


# in the text of a symbolic size
_OPERATORS: dict[Any, str] = {
    ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.Pow: "Pow",
    "max": "Max", "min": "Min", "mod": "Mod", "floordiv": "Div",
}  # fmt: skip
_NOT_FOLDED = ("scan", "while", "cond", "recurrent_layer", "dim_as_value")


class GraphEmitter:
    """A graph under construction. Constants and sizes are in the outermost graph, where all inner graphs see them."""

    def __init__(
        self,
        parent: GraphEmitter | None = None,
        opset: int = 0,
        symbols: Mapping[str, tuple] | None = None,
    ):
        self.root: GraphEmitter = self if parent is None else parent.root
        self.nodes: list[onnx.NodeProto] = []
        self.written: set[str] = set()
        if parent is None:
            self.opset = opset
            self.symbols = dict(symbols or {})
            self.taken: set[str] = set()
            self.initializers: dict[str, np.ndarray] = {}
            self.dtypes: dict[str, Any] = {}  # of all values that nodes make or inner graphs get
            self.makers: dict[str, onnx.NodeProto] = {}
            # names of known arrays, by their identity
            self.hints: dict[int, tuple[np.ndarray, str]] = {}
            self._constants: dict[tuple, str] = {}
            self._sizes: dict[Any, str] = {}

    # Names, constants, nodes

    def claim(self, hint: str) -> str:
        root = self.root
        name = hint
        k = 0
        while name in root.taken:
            k += 1
            name = f"{hint}_{k}"
        root.taken.add(name)
        return name

    def const(self, value: Any) -> str:
        """The name of an initializer, which equal values share."""
        _, hint = self.root.hints.get(id(value), (None, "const"))
        value = np.ascontiguousarray(value).reshape(np.shape(value))
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self.root._constants:
            name = self.root._constants[key] = self.claim(hint)
            self.root.initializers[name] = value
        return self.root._constants[key]

    def hinted(self, value: Value, hint: str) -> Value:
        """The value; if it is known, its initializer gets this name."""
        if known(value):
            self.root.hints[id(value)] = (value, hint)
        return value

    def name(self, value: Value) -> str:
        """The name of a value; "" for None, an input that is left out."""
        if isinstance(value, Fill):
            value = self.op(
                "Expand", [value.value, self.sizes(value.shape)], value.shape, value.dtype
            )
        if value is None:
            return ""
        if isinstance(value, Ref):
            return value.name
        return self.const(value)

    def op(
        self,
        type: str,
        inputs: Sequence[Value],
        shape: Sequence[Any],
        dtype: Any,
        **attributes: Any,
    ) -> Ref:
        """A node with one output."""
        return self.ops(type, inputs, [(shape, dtype)], **attributes)[0]

    def _claimed(self, hint: str, types: Sequence[tuple]) -> list[Ref]:
        """New references of these shapes and types, named after `hint`."""
        refs = []
        for shape, dtype in types:
            ref = Ref(self.claim(hint), tuple(shape), np.dtype(dtype))
            self.root.dtypes[ref.name] = ref.dtype
            refs.append(ref)
        return refs

    def ops(
        self,
        type: str,
        inputs: Sequence[Value],
        types: Sequence[tuple],
        **attributes: Any,
    ) -> tuple[Ref, ...]:
        used = set()
        for value in inputs:
            if value is not None:
                used.add(np.dtype(value.dtype))
        for _, dtype in types:
            used.add(np.dtype(dtype))
        if BFLOAT16 in used and type not in ("Cast", "If", "Loop", "Scan"):
            return self._in_float32(type, inputs, types, attributes)
        refs = self._claimed(type, types)
        inputs = list(map(self.name, inputs))
        outputs = names_of(refs)
        node = helper.make_node(type, inputs, outputs, name=outputs[0], **attributes)
        self.nodes.append(node)
        self.written.update(outputs)
        self.root.makers.update(dict.fromkeys(outputs, self.nodes[-1]))
        return tuple(refs)

    def _in_float32(
        self,
        type: str,
        inputs: Sequence[Value],
        types: Sequence[tuple],
        attributes: Any,
    ) -> tuple[Ref, ...]:
        """A node on bfloat16, which runtimes hardly compute with: in float32, and each result rounded, as XLA does it."""

        def wide(dtype: Any) -> Any:
            if np.dtype(dtype) == BFLOAT16:
                return np.dtype(np.float32)
            return dtype

        given = []
        for v in inputs:
            given.append(None if v is None else self.cast(v, wide(v.dtype)))
        wide_types = []
        for shape, dtype in types:
            wide_types.append((shape, wide(dtype)))
        refs = self.ops(type, given, wide_types, **attributes)
        return tuple(
            self.cast(ref, np.dtype(dtype)) for ref, (_, dtype) in zip(refs, types, strict=True)
        )

    # Sizes

    def size(self, size: Any) -> Value:
        """A size as an int64 scalar, computed at run time if it is symbolic."""
        if isinstance(size, (int, np.integer)):
            return np.asarray(size, np.int64)
        root = self.root
        if str(size) not in root._sizes:
            root._sizes[str(size)] = root._expression(
                ast.parse(str(size).replace("^", "**"), mode="eval").body
            )
        return root._sizes[str(size)]

    def _expression(self, tree: ast.AST) -> Value:
        if isinstance(tree, ast.Constant):
            return np.asarray(tree.value, np.int64)
        if isinstance(tree, ast.Name):
            name, axis = self.symbols[tree.id]
            size = self.op(
                "Shape", [Ref(name, (), np.float32)], (1,), np.int64, start=axis, end=axis + 1
            )
            return self.op("Squeeze", [size, ints(0)], (), np.int64)
        if isinstance(tree, ast.UnaryOp):
            return self.op("Neg", [self._expression(tree.operand)], (), np.int64)
        if isinstance(tree, ast.BinOp):
            kind = _OPERATORS.get(type(tree.op))
            args = [tree.left, tree.right]
        elif isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            kind = _OPERATORS.get(tree.func.id)
            args = tree.args
        else:
            kind = None
            args = []
        if kind is None:
            raise ConversionError(
                f"the size {ast.unparse(tree)} is not a sum or product of the open sizes"
            )
        return self.op(kind, list(map(self._expression, args)), (), np.int64)

    def sizes(self, shape: Sequence[Any]) -> Value:
        """A shape as an int64 vector."""
        if is_static(shape):
            return ints(*shape)
        root = self.root
        key = str(tuple(shape))
        if key not in root._sizes:
            zero = ints(0)
            parts = []
            for s in shape:
                parts.append(root.op("Unsqueeze", [root.size(s), zero], (1,), np.int64))
            root._sizes[key] = root.op("Concat", parts, (len(parts),), np.int64, axis=0)
        return root._sizes[key]

    # Common nodes

    def cast(self, x: Value, dtype: Any) -> Value:
        if x.dtype == dtype:
            return x
        if known(x):
            return x.astype(dtype)
        return self.op("Cast", [x], x.shape, dtype, to=type_code(dtype))

    def reshape(self, x: Value, shape: Sequence[Any]) -> Value:
        shape = tuple(shape)
        if x.shape == shape:
            return x
        if known(x) and is_static(shape):
            return x.reshape(shape)
        # The node finds a single open size itself, for which -1 stands. With allowzero, 0 is a size.
        is_open = [not is_static([size]) for size in shape]
        if is_open.count(True) == 1 and 0 not in shape:
            sizes = list(shape)
            sizes[is_open.index(True)] = -1
            wanted: Value = ints(*sizes)
        else:
            wanted = self.sizes(shape)
        return self.op("Reshape", [x, wanted], shape, x.dtype, allowzero=1)

    def expand(self, x: Value, shape: Sequence[Any]) -> Value:
        """Broadcasts a value to `shape`."""
        shape = tuple(shape)
        if x.shape == shape:
            return x
        if known(x) and is_static(shape) and math.prod(shape) <= FOLD:
            return np.broadcast_to(x, shape)
        if known(x) and x.size == 1 and not is_static(shape):
            return Fill(x.reshape(()), shape)
        return self.op("Expand", [x, self.sizes(shape)], shape, x.dtype)

    def transpose(self, x: Value, order: Sequence[int]) -> Value:
        order = tuple(map(int, order))
        if order == tuple(range(len(order))):
            return x
        if known(x):
            return np.transpose(x, order)
        return self.op("Transpose", [x], tuple(x.shape[k] for k in order), x.dtype, perm=order)

    def flip(self, x: Value, axes: Sequence[int]) -> Value:
        """Reverses the order of the elements along axes."""
        if known(x):
            return np.flip(x, tuple(axes))
        ones = np.ones(len(axes), np.int64)
        far = np.full(len(axes), np.iinfo(np.int64).min)
        return self.op("Slice", [x, -ones, far, ints(*axes), -ones], x.shape, x.dtype)

    def clip(self, x: Value, low: Value, high: Value) -> Value:
        if known(x, low, high):
            return np.asarray(np.clip(x, low, high))
        return self.op("Min", [self.op("Max", [x, low], x.shape, x.dtype), high], x.shape, x.dtype)

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        if len(values) == 1:
            return values[0]
        if known(*values):
            return np.concatenate(values, axis)
        shape = list(values[0].shape)
        shape[axis] = sum(v.shape[axis] for v in values)
        return self.op("Concat", values, shape, values[0].dtype, axis=axis)

    def stack(self, values: Sequence[Value], axis: int) -> Value:
        parts = []
        for value in values:
            shape = (*value.shape[:axis], 1, *value.shape[axis:])
            parts.append(self.reshape(value, shape))
        return self.concat(parts, axis)

    # Graphs

    def run(self, graph: Graph, values: Sequence[Value]) -> list[Value]:
        """Emits a flattened jaxpr; returns the values of its outputs."""
        consts = {}
        for var, value in graph.consts.items():
            consts[var] = np.asarray(value)
        graph = replace(graph, consts=consts)

        def call(node: FlatEquation, args: list[Value]) -> Sequence[Value]:
            constant = self._folded(node, args)
            if constant is None:
                return self._by_rule(node, args)
            return constant

        return read(evaluate_graph(graph, values, call), graph.outputs)

    def _folded(self, node: FlatEquation, args: Sequence[Value]) -> Any:
        """The outputs of a node whose inputs are all known, unless they are much larger; else None."""
        row = primitives.named(node.name)
        moved = []
        for i, a in enumerate(args):
            if i not in row.positions:
                moved.append(a)
        is_filled = moved and all(isinstance(a, Fill) and a.value == moved[0].value for a in moved)
        if is_filled and row.kind in ("view", "placement", "lookup"):
            return [Fill(moved[0].value, v.shape) for v in node.outputs]
        shapes = [v.shape for v in node.outputs]
        if not known(*args) or node.name in _NOT_FOLDED:
            return None
        if not all(map(is_static, shapes)):
            return None
        if sum(map(math.prod, shapes)) > max(FOLD, *(a.size for a in args), 0):
            return None
        return list(map(np.asarray, node.run(*args)))

    def _by_rule(self, node: FlatEquation, args: Sequence[Value]) -> Sequence[Value]:
        rule = RULES.get(node.name)
        definition = primitives.named(node.name).definition
        if rule is None and definition is None:
            raise ConversionError(
                f"{node.source}: the primitive {node.name!r} has no rule for ONNX{near(node.name, RULES)}"
            )
        try:
            refs = rule(self, node, *args) if rule else self.defined(definition, node, *args)
        except ConversionError as error:
            raise ConversionError(f"{node.source}: {node.name}: {error}") from None
        return refs if isinstance(refs, tuple) else (refs,)

    def defined(self, definition: Callable[..., Any], node: FlatEquation, *args: Value) -> Value:
        """Emits a node by a function that defines it by other primitives. 16-bit types are computed in float32."""
        dtype = np.dtype(node.outputs[0].dtype)
        wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
        shapes = [jax.ShapeDtypeStruct(x.shape, wide) for x in args]
        with jax.enable_x64(wide == np.float64):
            graph = flatten(jax.make_jaxpr(definition)(*shapes))
        (result,) = self.run(graph, [self.cast(x, wide) for x in args])
        return self.cast(result, dtype)

    def inner(
        self,
        name: str,
        inputs: Sequence[tuple],
        body: Callable[[GraphEmitter, Sequence[Ref]], Sequence[Value]],
    ):
        """An inner graph with the nodes of `body(emitter, inputs) -> outputs`, and its outputs."""
        e = GraphEmitter(self)
        refs = self._claimed("in", inputs)
        outputs = e.owned(body(e, refs))
        nodes = live(e.nodes, names_of(outputs))
        return helper.make_graph(
            nodes, self.claim(name), list(map(info, refs)), list(map(info, outputs))
        ), outputs

    def owned(self, values: Sequence[Value]) -> list[Ref]:
        """Values as outputs of this graph, which must be made by its nodes, each by another output."""
        refs: list[Ref] = []
        for value in values:
            if (
                not isinstance(value, Ref)
                or value.name not in self.written
                or value.name in names_of(refs)
            ):
                value = self.op("Identity", [value], value.shape, value.dtype)
            refs.append(value)
        return refs


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node reads, in the graphs inside of it too."""
    yield from node.input
    for a in node.attribute:
        for inner in a.g.node:
            yield from reads(inner)
        yield from names_of(a.g.output)


def live(nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]) -> list[onnx.NodeProto]:
    """The nodes that outputs need."""
    wanted = set(outputs)
    needed = []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            needed.append(node)
            wanted.update(reads(node))
    return needed[::-1]


_POSITIVE = {"Exp", "Sigmoid", "Softplus", "Softmax", "Abs", "Sqrt", "Shape", "Range"}
_FIRST = {
    "Reshape",
    "Transpose",
    "Expand",
    "Unsqueeze",
    "Squeeze",
    "Slice",
    "Identity",
    "Cast",
    "Gather",
    "Split",
}
_EVERY = {"Mul", "Add", "Div", "Min", "Concat", "Pow", "ReduceSum", "CumSum"}


def is_positive(e: GraphEmitter, value: Value) -> bool:
    """Whether no element of a value can be negative, as far as its nodes show."""
    if not isinstance(value, Ref):
        return bool(np.all((value.value if isinstance(value, Fill) else value) >= 0))
    pending = [value.name]
    while pending:
        name = pending.pop()
        constant = e.root.initializers.get(name)
        maker = e.root.makers.get(name)
        if constant is not None and not (constant >= 0).all():
            return False
        if constant is None:
            if maker is None or maker.op_type not in _POSITIVE | _FIRST | _EVERY:
                return False
            if maker.op_type not in _POSITIVE:
                pending += maker.input[:1] if maker.op_type in _FIRST else maker.input
    return True


def type_code(dtype: Any) -> int:
    try:
        return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    except (KeyError, ValueError, TypeError) as error:
        raise ConversionError(f"ONNX has no type {dtype}") from error


def info(ref: Ref) -> onnx.ValueInfoProto:
    """The declaration of an input or output. An open size keeps its name; a size computed from open ones has none."""
    shape = []
    for size in ref.shape:
        if is_static([size]):
            shape.append(int(size))
        else:
            shape.append(str(size) if str(size).isidentifier() else None)
    return helper.make_tensor_value_info(ref.name, type_code(ref.dtype), shape)


def tensor(name: str, value: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)
