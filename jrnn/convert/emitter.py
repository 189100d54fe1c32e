"""The Emitter, which builds nets from values, and the table of conversion rules.

A value is static (a numpy array, known at conversion) or a Blob. A Blob may hold fewer elements than its shape says, with
dimensions of size 1 that are not broadcast yet: Caffe2's binary operators broadcast them, other operators take the full
blob.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jrnn.convert.package import fill
from jrnn.errors import ConversionError, JrnnError
from jrnn.jaxprs.flat import FlatEquation, Graph, Var, evaluate_graph, flatten, read
from jrnn.jaxprs.primitives import named, registering
from jrnn.nets.builder import NetBuilder
from jrnn.nets.ir import Op, Shape

FLOAT, INT32, INT64, BOOL = (np.dtype(t) for t in (np.float32, np.int32, np.int64, np.bool_))
TYPE_CODES = {FLOAT: 1, INT32: 2, BOOL: 5, INT64: 10}  # TensorProto.DataType
TYPES = "Caffe2 has float32, int32, int64 and bool"
# A constant of one value with at least this many elements is written as a ConstantFill.
_ELEMENTS_OF_FILL = 64


@dataclass(frozen=True)
class Blob:
    """A blob of a net: `shape` is its logical shape, `own_shape` the shape of its
    elements, which broadcasts to `shape`."""

    name: str
    shape: Shape
    dtype: np.dtype
    own_shape: Shape

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: Any) -> Blob:
        return cls(name, tuple(shape), np.dtype(dtype), tuple(shape))


Value = Any  # Blob | np.ndarray
UNKNOWN = "(unknown)"  # the name of a blob that could not be made


# primitive -> `fn(emitter, node, *values)`, which appends operators and returns the node's results
RULES: dict[str, Callable[..., Any]] = {}
rule = registering(RULES)


class Emitter:
    """The nets under construction. `b` is the net that operators are currently appended to."""

    def __init__(
        self,
        name: str,
        recognize: Callable[[Graph], Graph],
        closed_over: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self.root = self.b = NetBuilder(name)
        self.given: list[str] = []
        self.fills: list[Op] = []  # of the init net
        self.prelude: list[Op] = []  # fills of constants, at the start of the net
        self.problems: list[str] = []
        self.trail: list[tuple[FlatEquation, Var, Blob]] = []
        self.read: tuple[bool, ...] = ()  # which outputs of the current node are read
        self.origins: dict[str, str] = {}  # blob -> the primitive and the line that it comes from
        self.without_gradient: list[str] = []  # why a scan was written without a backward net
        self._node_name = self._source = ""  # of the current node: its primitive and its line
        self._recognize = recognize
        self._closed_over = closed_over
        self._casts: dict[str, Blob] = {}  # result of a Cast -> its operand
        self._reshapes: dict[str, Blob] = {}  # result of a Reshape -> its operand
        self._used: set[str] = set()
        self._counts: dict[str, int] = {}
        self._constants: dict[Any, str] = {}
        # By the array's id; holding the array keeps the id unique.
        self._weights: dict[int, tuple[Any, Blob]] = {}

    def claim(self, name: str) -> str:
        """Returns a name that no net uses yet: `name`, else `name_1`, ..."""
        free = name
        while free in self._used:
            self._counts[name] = self._counts.get(name, 0) + 1
            free = f"{name}_{self._counts[name]}"
        self._used.add(free)
        return free

    # inputs, weights, constants

    def input(self, name: str, shape: Sequence[int], dtype: Any) -> Blob:
        self.given.append(self.root.input(self.claim(name)))
        return Blob.of(self.given[-1], shape, dtype)

    def weight(self, name: str, value: Any) -> Blob:
        """A blob that the init net fills with `value`."""
        return self._filled(name, np.asarray(value), self.fills)

    def constant(self, value: np.ndarray) -> Blob:
        """A static value as a blob, which the net fills at its start; equal constants share a blob."""
        value = np.asarray(value)
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._constants:
            self._constants[key] = self._filled("constant", value, self.prelude).name
        return Blob.of(self._constants[key], value.shape, value.dtype)

    def _filled(self, name: str, value: np.ndarray, fills: list[Op]) -> Blob:
        if value.dtype not in TYPE_CODES:
            raise ConversionError(f"weight {name!r} is {value.dtype}; {TYPES}: convert it first")
        name = self.root.input(self.claim(name))
        if value.size >= _ELEMENTS_OF_FILL and (value == value.flat[0]).all():
            fills.append(_constant_fill(name, value.shape, value.dtype, value.flat[0]))
        else:
            fills.append(fill(name, value))
        return Blob.of(name, value.shape, value.dtype)

    # operators

    def ops(
        self,
        type: str,
        inputs: Sequence[str | Value],
        outputs: Sequence[tuple[Sequence[int], Any] | None],
        **args: Any,
    ) -> list[Blob]:
        """Appends an operator.

        Args:
            inputs: names, or values: the operator gets their full blobs.
            outputs: (shape, dtype) of each output; None for an output that is not used, which is not returned.
        """
        read = []
        for value in inputs:
            read.append(value if isinstance(value, str) else self.blob(value).name)
        written = []
        results = []
        for output in outputs:
            name = self.claim(type if output else f"{type}_unused")
            written.append(name)
            self.origins[name] = f"{self._node_name} ({self._source})"
            if output:
                results.append(Blob.of(name, *output))
        self.b.add(Op.of(type, read, written, **args))
        return results

    def op(
        self,
        type: str,
        inputs: Sequence[str | Value],
        shape: Sequence[int],
        dtype: Any,
        /,
        **args: Any,
    ) -> Blob:
        """Appends an operator with one output."""
        return self.ops(type, inputs, [(shape, dtype)], **args)[0]

    def blob(self, value: Value) -> Blob:
        """The value as a blob that holds all of its elements."""
        if not isinstance(value, Blob):
            return self.constant(value)
        return self.reshaped(self._spread(value), value.shape)

    def loose(self, value: Value) -> Blob:
        """The value as a blob that may hold fewer elements, for operators that broadcast."""
        if isinstance(value, Blob):
            return value
        return replace(self.constant(shrink(value)), shape=value.shape)

    def _spread(self, blob: Blob) -> Blob:
        """A blob that holds all elements of its shape, by Tile along the axes that are broadcast."""
        if math.prod(blob.own_shape) == math.prod(blob.shape):
            return replace(blob, shape=blob.own_shape)
        if blob.dtype == BOOL:  # Tile has no booleans
            return self.cast(self._spread(self.cast(blob, INT32)), BOOL)
        padded_shape = (1,) * (len(blob.shape) - len(blob.own_shape)) + blob.own_shape
        spread = self.reshaped(replace(blob, shape=blob.own_shape), padded_shape)
        for axis, (have, want) in enumerate(zip(padded_shape, blob.shape)):
            if have != want:
                shape = list(spread.shape)
                shape[axis] = want
                spread = self.op("Tile", [spread], shape, blob.dtype, tiles=want, axis=axis)
        return spread

    def reshaped(self, value: Value, shape: Sequence[int]) -> Value:
        """The value with another shape of the same size."""
        shape = tuple(shape)
        if not isinstance(value, Blob):
            return value.reshape(shape)
        if value.own_shape != value.shape:
            value = self.blob(value)
        if value.shape != shape:
            value = self._reshapes.get(value.name, value)
        if value.shape == shape:
            return value
        if 0 in shape:
            raise ConversionError(
                f"an array of shape {list(shape)} has no elements; Caffe2 cannot reshape to it"
            )
        (view,) = self.ops("Reshape", [value.name], [(shape, value.dtype), None], shape=list(shape))
        self._reshapes[view.name] = value
        return view

    def cast(self, value: Value, dtype: Any) -> Blob:
        dtype = np.dtype(dtype)
        if not isinstance(value, Blob):
            return self.constant(value.astype(dtype))
        if value.dtype == dtype:
            return value
        codes = {"to": TYPE_CODES[dtype], "from_type": TYPE_CODES[value.dtype]}
        converted = self.op("Cast", [value.name], value.own_shape, dtype, **codes)
        self._casts[converted.name] = value
        return replace(converted, shape=value.shape)

    def was_bool(self, blob: Blob) -> Blob | None:
        """The boolean that a blob is a Cast of, or None."""
        source = self._casts.get(blob.name)
        return source if source is not None and source.dtype == BOOL else None

    def copy(self, blob: Blob, name: str | None = None) -> Blob:
        """A copy of a full blob, under a new name or `name`."""
        name = name or self.claim("Copy")
        self.b.add(Op.of("Copy", [blob.name], [name]))
        return replace(blob, name=name)

    def zeros(self, shape: Sequence[int], dtype: Any, name: str) -> Blob:
        """A new blob of zeros, filled by the net itself."""
        dtype = np.dtype(dtype)
        name = self.claim(name)
        zero = 0.0 if dtype == FLOAT else 0
        self.b.add(_constant_fill(name, shape, dtype, zero))
        return Blob.of(name, shape, dtype)

    @contextmanager
    def inside(self, b: NetBuilder) -> Iterator[None]:
        """Appends operators to another net within the context."""
        before = self.b
        self.b = b
        try:
            yield
        finally:
            self.b = before

    # functions

    def graph(self, graph: Graph, values: Sequence[Value]) -> list[Value]:
        """Appends the operators of a graph and returns the values of its outputs.

        What a rule refuses is noted in `problems`, and conversion goes on, to find all of them.
        """
        consts = {}
        for var, value in graph.consts.items():
            self._note_type(var, "a constant of the function")
            consts[var] = self._captured(value) if var.dtype == FLOAT else np.asarray(value)
        graph = self._recognize(replace(graph, consts=consts))
        used = graph.used()

        def call(node: FlatEquation, inputs: list[Value]) -> Sequence[Value]:
            self.read = tuple(v in used for v in node.outputs)
            outs = self._node(node, inputs)
            for var, blob in zip(node.outputs, outs):
                if self.b is self.root and isinstance(blob, Blob):
                    self.trail.append((node, var, blob))
            return outs

        return read(evaluate_graph(graph, values, call), graph.outputs)

    def call(self, fn: Callable, *values: Value) -> Any:
        """Appends a JAX function of values, for primitives that are defined by others; returns its results."""
        specs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
        with jax.numpy_rank_promotion("allow"):
            graph = flatten(jax.make_jaxpr(fn)(*specs))
        nodes = tuple(replace(node, source=self._source) for node in graph.nodes)
        outs = self.graph(replace(graph, nodes=nodes), values)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _captured(self, value: Any) -> Blob:
        """An array that the function closes over, as a weight."""
        if id(value) not in self._weights:
            weight_name = "constant"
            for name, variable in self._closed_over:
                if variable is value or _same(variable, value):
                    weight_name = name
                    break
            self._weights[id(value)] = value, self.weight(weight_name, value)
        return self._weights[id(value)][1]

    def _node(self, node: FlatEquation, values: list[Value]) -> Sequence[Value]:
        """Appends the operators of one node, by its rule, and returns its results."""
        is_known = values and all(isinstance(v, np.ndarray) for v in values)
        if is_known or node.name == "iota":
            with jax.ensure_compile_time_eval():
                return [np.asarray(v) for v in node.run(*values)]

        placeholders = [Blob.of(UNKNOWN, v.shape, v.dtype or FLOAT) for v in node.outputs]
        rule = RULES.get(node.name)
        definition = named(node.name).definition
        if rule is None and definition is None:
            self.problems.append(f"{node.name} has no rule ({node.source or 'in a library'})")
            return placeholders
        for var in node.outputs:
            if not self._note_type(var, f"{node.name} ({node.source})"):
                return placeholders
        for value in values:
            if isinstance(value, Blob) and value.name == UNKNOWN:
                return placeholders

        known = len(self.problems)
        self._source = node.source
        self._node_name = node.name
        try:
            outs = rule(self, node, *values) if rule else self.call(definition, *values)
        except ConversionError as e:
            self.problems.append(f"{e} ({node.source})" if node.source not in str(e) else str(e))
            return placeholders
        except JrnnError as e:
            # Something within it was refused, so it could not be completed.
            if len(self.problems) > known:
                return placeholders
            raise e.at(f"{node.name} ({node.source})") from None
        return outs if isinstance(outs, (tuple, list)) else (outs,)

    def _note_type(self, var: Var, what: str) -> bool:
        if var.dtype in TYPE_CODES:
            return True
        self.problems.append(f"{what} makes {var.dtype}; {TYPES}")
        return False


def _constant_fill(name: str, shape: Sequence[int], dtype: np.dtype, value: Any) -> Op:
    """The operator that fills a blob with one number."""
    code = TYPE_CODES[dtype]
    return Op.of("ConstantFill", [], [name], shape=list(shape), dtype=code, value=value)


def _same(variable: Any, value: Any) -> bool:
    """Whether `value` is JAX's copy of `variable`, a numpy array that a function closes over."""
    if not isinstance(variable, np.ndarray) or variable.shape != np.shape(value):
        return False
    return np.array_equal(variable, np.asarray(value))


def shrink(value: np.ndarray) -> np.ndarray:
    """The smallest array that broadcasts to `value`.

    >>> shrink(np.ones((2, 3))).shape, shrink(np.array([[1, 2], [1, 2]])).shape
    ((), (1, 2))
    """
    for axis in range(value.ndim):
        if value.shape[axis] < 2:
            continue
        first = value.take([0], axis)
        repeated = np.broadcast_to(first, value.shape)
        if np.array_equal(repeated, value, equal_nan=value.dtype.kind == "f"):
            value = first
    return value.reshape(()) if value.size == 1 else value
