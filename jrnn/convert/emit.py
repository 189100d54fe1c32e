"""What conversion rules use: values of the function being converted, and the nets that are built from them.

A value is *static* (known now: a numpy array, folded at once) or a blob. A blob may hold less than its shape says, with
dimensions of size 1 that are not broadcast yet: Caffe2's binary operators broadcast such operands themselves, and other
operators are given the blob in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jrnn.builder import NetBuilder
from jrnn.convert.flat import Atom, Graph, Node, Var, flatten
from jrnn.errors import ConversionError, JrnnError
from jrnn.ir import Net, Op

FLOAT, INT32, INT64, BOOL = (np.dtype(t) for t in (np.float32, np.int32, np.int64, np.bool_))
TYPE_CODES = {FLOAT: 1, INT32: 2, BOOL: 5, INT64: 10}  # TensorProto.DataType
_FILLS = {
    FLOAT: "GivenTensorFill",
    INT32: "GivenTensorIntFill",
    INT64: "GivenTensorInt64Fill",
    BOOL: "GivenTensorBoolFill",
}
_BIG = 64  # elements from which a constant of one value is written as a ConstantFill


@dataclass(frozen=True)
class Blob:
    """A blob of a net: `shape` is what it stands for, `held` what it holds, with 1s (or less rank) where it is to spread."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    held: tuple[int, ...]

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: Any) -> Blob:
        return cls(name, tuple(shape), np.dtype(dtype), tuple(shape))

    @property
    def is_full(self) -> bool:
        return self.held == self.shape


Value = Any  # Blob | np.ndarray


class Emitter:
    """The nets under construction. `b` is the net that operators are appended to at the moment."""

    def __init__(
        self,
        name: str,
        rules: Mapping[str, Callable],
        recognize: Callable[[Graph], Graph],
        closed_over: Sequence[tuple[str, Any]] = (),
    ):
        self.root = self.b = NetBuilder(name)
        self.given: list[str] = []
        self.prelude: list[Op] = []
        self.problems: list[str] = []
        self.read: tuple[bool, ...] = ()  # which outputs of the node at hand are read
        self._source = ""  # the line of the node at hand
        self._casts: dict[str, Blob] = {}  # what a blob is a Cast of
        self._reshapes: dict[str, Blob] = {}  # what a blob is a Reshape of
        self._closed_over = closed_over
        self.trail: list[tuple[Node, Var, Blob]] = []
        self._rules = rules
        self._recognize = recognize
        self._init: list[Op] = []
        self._used: set[str] = set()
        self._counts: dict[str, int] = {}
        self._constants: dict[Any, str] = {}
        self._weights: dict[int, Blob] = {}
        self._alive: list[Any] = []  # what _weights knows by id must live on

    # names

    def claim(self, name: str) -> str:
        """`name`, or `name_1`, ... where it is taken, in any of the nets."""
        found = name
        while found in self._used:
            self._counts[name] = self._counts.get(name, 0) + 1
            found = f"{name}_{self._counts[name]}"
        self._used.add(found)
        return found

    # blobs from outside

    def input(self, name: str, shape: Sequence[int], dtype: Any) -> Blob:
        self.given.append(self.root.input(self.claim(name)))
        return Blob.of(self.given[-1], shape, dtype)

    def weight(self, name: str, value: Any) -> Blob:
        """A blob that the init net fills with `value`."""
        value = np.asarray(value)
        name = self.root.input(self.claim(name))
        self._init.append(_fill(name, value))
        return Blob.of(name, value.shape, value.dtype)

    def constant(self, value: np.ndarray) -> Blob:
        """A static value as a blob, which the net fills before all else; equal ones share it."""
        value = np.asarray(value)
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._constants:
            self._constants[key] = name = self.root.input(self.claim("constant"))
            self.prelude.append(_fill(name, value))
        return Blob.of(self._constants[key], value.shape, value.dtype)

    # operators

    def op(
        self,
        type: str,
        inputs: Sequence[str | Blob],
        shape: Sequence[int],
        dtype: Any,
        /,
        *,
        extra: int = 0,
        **args: Any,
    ) -> Blob:
        """Appends an operator with one output that matters and returns it. `extra` outputs get names of their own."""
        outputs = [self.claim(type)] + [self.claim(type + "_unused") for _ in range(extra)]
        self.b.add(Op.of(type, [i.name if isinstance(i, Blob) else i for i in inputs], outputs, **args))
        return Blob.of(outputs[0], shape, dtype)

    def blob(self, value: Value) -> Blob:
        """The value as a blob that holds it all."""
        if not isinstance(value, Blob):
            return self.constant(value)
        return self.reshaped(self._spread(value), value.shape)

    def loose(self, value: Value) -> Blob:
        """The value as a blob that may still have to be spread, for operators that broadcast."""
        if isinstance(value, Blob):
            return value
        shrunk = shrink(value)
        return replace(self.constant(shrunk), shape=value.shape)

    def _spread(self, blob: Blob) -> Blob:
        if blob.is_full or math.prod(blob.held) == math.prod(blob.shape):
            return replace(blob, shape=blob.held)
        if blob.dtype == BOOL:  # Tile has no booleans
            return self.cast(self._spread(self.cast(blob, INT32)), BOOL)
        held = (1,) * (len(blob.shape) - len(blob.held)) + blob.held
        found = self.reshaped(replace(blob, shape=blob.held), held)
        for axis, (have, want) in enumerate(zip(held, blob.shape)):
            if have != want:
                shape = (*found.shape[:axis], want, *found.shape[axis + 1 :])
                found = self.op("Tile", [found], shape, blob.dtype, tiles=want, axis=axis)
        return found

    def reshaped(self, blob: Blob, shape: Sequence[int]) -> Blob:
        """A full blob with another shape of the same size."""
        if blob.shape == tuple(shape):
            return blob
        blob = self._reshapes.get(blob.name, blob)
        if blob.shape == tuple(shape):
            return blob
        if 0 in shape:
            raise ConversionError(f"an array of shape {list(shape)} has no elements; Caffe2 cannot reshape to it")
        made = self.op("Reshape", [blob], shape, blob.dtype, shape=list(shape), extra=1)
        self._reshapes[made.name] = blob
        return made

    def cast(self, value: Value, dtype: Any) -> Blob:
        blob = value if isinstance(value, Blob) else self.constant(value)
        dtype = np.dtype(dtype)
        if blob.dtype == dtype:
            return blob
        codes = {"to": TYPE_CODES[dtype], "from_type": TYPE_CODES[blob.dtype]}
        made = self.op("Cast", [blob], blob.held, dtype, **codes)
        self._casts[made.name] = blob
        return replace(made, shape=blob.shape)

    def was_bool(self, blob: Blob) -> Blob | None:
        """The boolean that a blob is a Cast of, or None."""
        source = self._casts.get(blob.name)
        return source if source is not None and source.dtype == BOOL else None

    def copy(self, blob: Blob, name: str | None = None) -> Blob:
        """A copy of a full blob, into the blob `name` where that is given."""
        outputs = [name or self.claim("Copy")]
        self.b.add(Op.of("Copy", [blob.name], outputs))
        return replace(blob, name=outputs[0])

    def zeros(self, shape: Sequence[int], dtype: Any, name: str = "zeros") -> Blob:
        """A new blob of zeros, made by the net itself."""
        outputs = [self.claim(name)]
        value: Any = 0.0 if np.dtype(dtype) == FLOAT else 0
        self.b.add(
            Op.of("ConstantFill", [], outputs, shape=list(shape), dtype=TYPE_CODES[np.dtype(dtype)], value=value)
        )
        return Blob.of(outputs[0], shape, dtype)

    @contextmanager
    def inside(self, b: NetBuilder) -> Iterator[None]:
        """Operators go to another net for a while."""
        before, self.b = self.b, b
        try:
            yield
        finally:
            self.b = before

    # functions

    def graph(self, graph: Graph, values: Sequence[Value]) -> list[Value]:
        """Appends the operators of a graph and returns the values of its outputs.

        What a rule refuses is noted in `problems`, and conversion goes on, to find all of them.
        """
        env: dict[Var, Value] = dict(zip(graph.inputs, values))
        for var, value in graph.consts.items():
            self._note_type(var, "a constant of the function")
            env[var] = self._captured(value) if var.dtype == FLOAT else np.asarray(value)
        graph = self._recognize(graph)
        users = graph.users()
        for node in graph.nodes:
            self.read = tuple(v in users for v in node.outputs)
            for var, value in zip(node.outputs, self._node(node, [self._value(env, a) for a in node.inputs])):
                env[var] = value
                if isinstance(value, Blob) and self.b is self.root:
                    self.trail.append((node, var, value))
        return [self._value(env, a) for a in graph.outputs]

    def call(self, fn: Callable, *values: Value) -> Any:
        """Appends a JAX function of values, for primitives that are defined by others; returns its results."""
        specs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
        with jax.numpy_rank_promotion("allow"):
            graph = flatten(jax.make_jaxpr(fn)(*specs))
        found = self.graph(replace(graph, nodes=tuple(replace(n, source=self._source) for n in graph.nodes)), values)
        return found[0] if len(found) == 1 else tuple(found)

    def _captured(self, value: Any) -> Blob:
        """An array that the function closes over, as a weight."""
        if id(value) not in self._weights:
            names = [name for name, held in self._closed_over if held is value or _same(held, value)]
            self._weights[id(value)] = self.weight(names[0] if names else "constant", value)
            self._alive.append(value)
        return self._weights[id(value)]

    @staticmethod
    def _value(env: Mapping[Var, Value], atom: Atom) -> Value:
        return env[atom] if isinstance(atom, Var) else atom

    def _node(self, node: Node, values: list[Value]) -> Sequence[Value]:
        if (values and all(isinstance(v, np.ndarray) for v in values)) or node.name == "iota":
            with jax.ensure_compile_time_eval():
                return [np.asarray(v) for v in node.run(*values)]
        placeholders = [Blob.of("(unknown)", v.shape, v.dtype or FLOAT) for v in node.outputs]
        rule = self._rules.get(node.name)
        if rule is None:
            self.problems.append(f"{node.name} has no rule ({node.source})")
            return placeholders
        if not all(self._note_type(v, f"{node.name} ({node.source})") for v in node.outputs) or any(
            isinstance(v, Blob) and v.name == "(unknown)" for v in values
        ):
            return placeholders
        known, self._source = len(self.problems), node.source
        try:
            found = rule(self, node, *values)
        except ConversionError as e:
            self.problems.append(f"{e} ({node.source})" if node.source not in str(e) else str(e))
            return placeholders
        except JrnnError as e:
            if len(self.problems) > known:  # something within it was refused, and it could not be completed
                return placeholders
            raise e.at(f"{node.name} ({node.source})") from None
        return found if isinstance(found, (tuple, list)) else (found,)

    def _note_type(self, var: Var, what: str) -> bool:
        if var.dtype in TYPE_CODES:
            return True
        self.problems.append(f"{what} makes {var.dtype}; Caffe2 has float32, int32, int64 and bool")
        return False

    # results

    def init_net(self, used: Collection[str]) -> Net:
        """The net that fills the weights that are used."""
        ops = tuple(op for op in self._init if op.outputs[0] in used)
        return Net(self.root.name + "_init", ops, (), tuple(op.outputs[0] for op in ops))


def _fill(name: str, value: np.ndarray) -> Op:
    if value.dtype not in _FILLS:
        raise ConversionError(
            f"weight {name!r} is {value.dtype}; Caffe2 has float32, int32, int64 and bool: convert it first"
        )
    shape = list(value.shape)
    if value.size >= _BIG and (value == value.flat[0]).all():
        code = TYPE_CODES[value.dtype]
        return Op.of("ConstantFill", [], [name], shape=shape, dtype=code, value=value.flat[0].item())
    values = value.reshape(-1)
    if value.dtype != FLOAT:
        values = values.astype(np.int64)
    return Op.of(_FILLS[value.dtype], [], [name], shape=shape, values=values)


def _same(held: Any, value: Any) -> bool:
    """Whether a numpy array that a function closes over is the one that JAX has made a copy of."""
    return isinstance(held, np.ndarray) and held.shape == np.shape(value) and np.array_equal(held, np.asarray(value))


def shrink(value: np.ndarray) -> np.ndarray:
    """The smallest array that broadcasts to `value`.

    >>> shrink(np.ones((2, 3))).shape, shrink(np.array([[1, 2], [1, 2]])).shape
    ((), (1, 2))
    """
    for axis in range(value.ndim):
        first = value.take([0], axis) if value.shape[axis] else value
        if value.shape[axis] > 1 and np.array_equal(
            np.broadcast_to(first, value.shape), value, equal_nan=value.dtype.kind == "f"
        ):
            value = first
    return value.reshape(()) if value.size == 1 else value
