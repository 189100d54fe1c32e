"""The step of a loop as operations on views: elementwise work, products with constant matrices, reductions and moves.

`Collector` goes through the equations in order. Views, slices and transpositions cost nothing; a part of a concatenation is
written where it belongs. A primitive without a rule raises `Unsupported`.

Shapes: N rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn import jaxprs
from jrnn.jaxprs import primitives
from jrnn.loops.ir import Unsupported
from jrnn.loops.kernels.native.operations import (
    Array,
    Dims,
    NativeOperand,
    Operation,
    Uniform,
    View,
    collapsed,
    dense,
)

_MOST_PRODUCTS = 64  # that one equation becomes: one for each head of a product in heads

ELEMENTWISE = {  # operations of the kernel, by the names of their primitives
    **{
        "add_any": "add",
        "eq": "equal",
        "ne": "not_equal",
        "lt": "less",
        "le": "less_equal",
        "select_n": "select",
    },
    **{"one_minus_square": "one_minus_square", "is_finite": "is_finite"},
}
ELEMENTWISE |= {
    name: name
    for name in (
        *(
            "abs",
            "add",
            "ceil",
            "cos",
            "div",
            "erf",
            "exp",
            "expm1",
            "floor",
            "log",
            "log1p",
            "logistic",
            "max",
            "min",
        ),
        *("mul", "neg", "rsqrt", "sign", "sin", "sqrt", "square", "sub", "tanh"),
    )
}
OF_BOOLEANS = {"and": "min", "or": "max", "xor": "not_equal", "not": "not"}
SWAPPED = {"gt": "less", "ge": "less_equal"}
_REDUCTIONS = {
    "reduce_sum": "reduce_sum",
    "reduce_max": "reduce_max",
    "reduce_min": "reduce_min",
    "reduce_and": "reduce_min",
    "reduce_or": "reduce_max",
}
_LARGEST_POWER = 8


@dataclass
class Collector:
    """Collects the operations of a step; `rows` is N, and `constants` are the variables that do not change."""

    rows: int
    values: dict[Any, NativeOperand]
    constants: frozenset[Array]
    operations: list[Operation] = field(default_factory=list)

    def value(self, atom: Any) -> NativeOperand:
        if jaxprs.is_literal(atom):
            return Uniform(float(np.asarray(atom.val)), atom.aval.shape)
        return self.values[atom]

    def run(self, eqn: jaxprs.Eqn) -> None:
        """Adds the operations of an equation."""
        name = eqn.primitive.name
        out = [v.aval for v in eqn.outvars]
        for v in eqn.outvars:
            if v.aval.dtype != jnp.bool_ and not jnp.issubdtype(v.aval.dtype, jnp.floating):
                raise Unsupported(f"{name} computes {v.aval.dtype}")
        read = [self.value(a) for a in eqn.invars]
        if name in _RULES:
            values = _RULES[name](self, eqn, *read)
        else:
            values = [self._elementwise(eqn, name, read, out[0])]
        for v, value in zip(eqn.outvars, values):
            if v.aval.dtype == jnp.bfloat16 and name in _ROUNDS:
                value = self.apply("to_bfloat16", [value], v.aval.shape)
            self.values[v] = value

    # Elementwise ------------------------------------------------------------------------------------------------------

    def _elementwise(
        self, eqn: jaxprs.Eqn, name: str, read: list[NativeOperand], out: Any
    ) -> NativeOperand:
        types = {a.aval.dtype for a in eqn.invars}
        if name in ELEMENTWISE:
            if name == "select_n" and (len(read) != 3 or eqn.invars[0].aval.dtype != jnp.bool_):
                raise Unsupported("the kernel selects by booleans only")
            return self.apply(ELEMENTWISE[name], read, out.shape)
        if name in SWAPPED:
            return self.apply(SWAPPED[name], read[::-1], out.shape)
        if name in OF_BOOLEANS and types == {jnp.dtype(jnp.bool_)}:
            return self.apply(OF_BOOLEANS[name], read, out.shape)
        if name == "clamp":
            return self.apply(
                "min", [self.apply("max", read[1::-1], out.shape), read[2]], out.shape
            )
        if name == "round" and eqn.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN:
            return self.apply("round", read, out.shape)
        if name == "convert_element_type":
            if out.dtype == jnp.bool_ and eqn.invars[0].aval.dtype != jnp.bool_:
                return self.apply("not_equal", [read[0], Uniform(0.0)], out.shape)
            narrows = out.dtype == jnp.bfloat16 and eqn.invars[0].aval.dtype != jnp.bool_
            return self.apply("to_bfloat16", read, out.shape) if narrows else read[0]
        if name == "integer_pow" and 0 < abs(eqn.params["y"]) <= _LARGEST_POWER:
            return self._power(read[0], eqn.params["y"], out.shape)
        if primitives.row_of(eqn).copies:
            return read[0]
        if name in COMPOSED and out.dtype != jnp.bfloat16:  # XLA rounds there within
            return COMPOSED[name](self, out.shape, *read)
        raise Unsupported(f"the kernel has no {name}")

    def _power(self, x: NativeOperand, y: int, shape: Sequence[int]) -> NativeOperand:
        if y < 0:
            return self.apply("div", [Uniform(1.0), self._power(x, -y, shape)], shape)
        if y == 1:
            return x
        half = self._power(x, y // 2, shape)
        even = self.apply("square", [half], shape)
        return self.apply("mul", [even, x], shape) if y % 2 else even

    def apply(self, kind: str, read: Sequence[NativeOperand], shape: Sequence[int]) -> View:
        """Adds an elementwise operation, and returns its result."""
        shape = tuple(shape)
        operands = [self._spread(v, shape) for v in read]
        axis = self._rows_of(operands, shape)
        operands = [self.contiguous_rows(v, axis) if isinstance(v, View) else v for v in operands]
        out = self.new(shape, axis)
        self.operations.append(Operation(kind, out, operands, axis))
        return out

    @staticmethod
    def _spread(value: NativeOperand, shape: Sequence[int]) -> NativeOperand:
        if isinstance(value, Uniform) or value.shape == shape:
            return value
        return value.broadcast(shape, range(len(shape)) if len(value.dims) == len(shape) else ())

    def _rows_of(self, values: Sequence[NativeOperand], shape: Sequence[int]) -> int | None:
        """Returns the axis of a result of `shape` that holds the rows."""
        views = [v for v in values if isinstance(v, View)]
        sources = {v.row for v in views if v.row is not None}
        if len(sources) > 1:
            raise Unsupported("two values of the step have their rows in different axes")
        if sources or self.rows == 1:
            return sources.pop() if sources else None
        whole = [v for v in views if v.array.in_rows]  # the same for all rows
        first = (
            bool(shape)
            and shape[0] == self.rows
            and all(v.dims[0][0] == 1 or v.dims[0][1] == 0 for v in whole)
        )
        return 0 if first else None

    def new(self, shape: Sequence[int], axis: int | None) -> View:
        """Returns a view of a new array, row after row."""
        inner = [n for a, n in enumerate(shape) if a != axis]
        dims = list(dense(inner))
        if axis is not None:
            dims.insert(axis, (self.rows, 0))
        return View(Array(math.prod(inner)), tuple(dims), row=axis)

    def contiguous_rows(self, view: View, axis: int | None) -> View:
        """Returns a view whose rows are contiguous or one number."""
        _, inner = view.by_rows(axis, self.rows)
        joined = collapsed(inner)
        if not joined or (len(joined) == 1 and joined[0][1] in (0, 1)):
            return view
        return self.copied(view, axis)

    def copied(self, view: View, axis: int | None) -> View:
        """Returns a contiguous copy of a view."""
        if view.array.dtype != "float":
            raise Unsupported(f"the step transposes or spreads an input of {view.array.dtype}")
        out = self.new(view.shape, axis)
        self.operations.append(Operation("move", out, [view], axis))
        return out

    def floats(self, view: View) -> View:
        """Returns the view in the type that the kernel computes with."""
        return view if view.array.dtype == "float" else self.apply("copy", [view], view.shape)

    def assign(self, to: View, value: NativeOperand, axis: int | None) -> None:
        """Writes a value to a view, by an operation or by computing it there."""
        _, into = to.by_rows(axis, self.rows)
        part = collapsed(into)
        contiguous = not part or (len(part) == 1 and part[0][1] == 1)
        if isinstance(value, View):
            if axis is None and to.array.in_rows and value.row is not None:
                raise Unsupported("a value that all rows share depends on a row")
            array = value.array
            own = (
                array.argument is None
                and array.parent is None
                and value.is_whole
                and value.row == axis
            )
            whole_rows = to.array.in_rows or self.rows == 1 or axis == 0
            if (
                own
                and contiguous
                and whole_rows
                and to.array.dtype == "float"
                and array not in to.array.chain
            ):
                array.parent = (to.array, to.offset)
                return
            if not (contiguous and len(collapsed(value.by_rows(axis, self.rows)[1])) <= 1):
                self.operations.append(Operation("move", to, [self.floats(value)], axis))
                return
            value = self.contiguous_rows(value, axis)
        elif not contiguous:
            raise Unsupported("the step writes a constant between other values")
        self.operations.append(Operation("copy", to, [value], axis))

    # Products and reductions ------------------------------------------------------------------------------------------

    def product(self, eqn: jaxprs.Eqn, left: NativeOperand, right: NativeOperand) -> list[View]:
        (contracted, batch), shape = eqn.params["dimension_numbers"], eqn.outvars[0].aval.shape
        sides = [(left, contracted[0], batch[0]), (right, contracted[1], batch[1])]
        is_matrix = [isinstance(v, View) and v.array in self.constants for v, *_ in sides]
        if not any(is_matrix) or isinstance(left, Uniform) or isinstance(right, Uniform):
            raise Unsupported("it multiplies two values that both change from step to step")
        if eqn.params.get("preferred_element_type") not in (None, eqn.outvars[0].aval.dtype):
            raise Unsupported("a product accumulates in another type")
        swapped = not is_matrix[1]
        (rows, sums, heads), (matrix, down, matrix_heads) = sides[::-1] if swapped else sides
        rows = self.floats(rows)
        free = [a for a in range(len(rows.dims)) if a not in (*sums, *heads)]
        columns = [a for a in range(len(matrix.dims)) if a not in (*down, *matrix_heads)]
        axis = rows.row
        if axis is None and not rows.array.in_rows and self.rows > 1:
            axis = next((a for a in free if rows.dims[a][0] == self.rows), None)
        if axis is not None and axis not in free:
            raise Unsupported("a product adds rows up")
        order = [*heads, *(a for a in free if a != axis), *sums]
        inner = rows.dims
        if len(collapsed([inner[a] for a in sums])) > 1 or any(
            s != 1 for _, s in collapsed([inner[a] for a in sums])
        ):
            rows = self.copied(
                rows.transposed([*([] if axis is None else [axis]), *order]),
                None if axis is None else 0,
            )
            first = 0 if axis is None else 1
            place = {a: first + i for i, a in enumerate(order)} | (
                {} if axis is None else {axis: 0}
            )
            heads, free, sums = ([place[a] for a in axes] for axes in (heads, free, sums))
            axis = None if axis is None else 0
            inner = rows.dims
        depth = collapsed([matrix.dims[a] for a in down])
        width = collapsed([matrix.dims[a] for a in columns])
        if len(depth) > 1 or len(width) > 1 or not sums or math.prod(inner[a][0] for a in sums) < 2:
            raise Unsupported("the kernel has no product of this form")
        dims = (depth[0], width[0] if width else (1, 1))
        others = [*heads, *free]
        natural = [*(inner[a][0] for a in others), *(matrix.dims[a][0] for a in columns)]
        out = self.new(natural, None if axis is None else others.index(axis))
        ranges = [range(1 if a == axis else inner[a][0]) for a in others]
        if math.prod(map(len, ranges)) > _MOST_PRODUCTS:
            raise Unsupported("a product has too many heads")
        count = math.prod(matrix.dims[a][0] for a in columns)
        for at in itertools.product(*ranges):
            start = rows.offset + sum(i * inner[a][1] for i, a in zip(at, others))
            at_matrix = matrix.offset + sum(i * matrix.dims[a][1] for i, a in zip(at, matrix_heads))
            to = out.offset + sum(i * d[1] for i, d in zip(at, out.dims))
            depth_dims: Dims = ((math.prod(inner[a][0] for a in sums), 1),)
            row = () if axis is None else (inner[axis],)
            place = None if axis is None else 0
            piece = View(rows.array, (*row, *depth_dims), start, None if rows.row is None else 0)
            target = View(
                out.array, (*(() if axis is None else ((self.rows, 0),)), (count, 1)), to, place
            )
            operation = Operation(
                "product", target, [piece], place, View(matrix.array, dims, at_matrix)
            )
            self.operations.append(operation)
        if swapped:  # the result has the axes of the matrix first
            n = len(heads)
            m = len(free)
            out = out.transposed([*range(n), *range(n + m, len(natural)), *range(n, n + m)])
        assert out.shape == tuple(shape)
        return [out]

    def reduction(self, eqn: jaxprs.Eqn, value: NativeOperand) -> list[NativeOperand]:
        axes = eqn.params["axes"]
        kind = _REDUCTIONS[eqn.primitive.name]
        if isinstance(value, Uniform):
            raise Unsupported("it reduces a constant")
        value = self.floats(value)
        axis = value.row
        if axis is None and not value.array.in_rows and self.rows > 1:
            axis = next(
                (a for a, (n, _) in enumerate(value.dims) if n == self.rows and a not in axes), None
            )
        if axis in axes:
            raise Unsupported("it reduces over rows")
        result_axes = [a for a in range(len(value.dims)) if a not in axes]
        row = None if axis is None else result_axes.index(axis)
        reduced = [value.dims[a] for a in axes]
        value = value.transposed([*result_axes, *axes])
        if (
            len(collapsed(reduced)) > 1
            or len(collapsed([value.dims[i] for i in range(len(result_axes)) if i != row])) > 3
        ):
            value = self.copied(value, row)
        out = self.new([value.dims[i][0] for i in range(len(result_axes))], row)
        self.operations.append(Operation(kind, out, [value], row))
        return [out]


# Views and pieces -----------------------------------------------------------------------------------------------------


def _reshape(step: Collector, eqn: jaxprs.Eqn, value: NativeOperand) -> list[NativeOperand]:
    shape = eqn.outvars[0].aval.shape
    if isinstance(value, Uniform):
        return [Uniform(value.value, shape)]
    try:
        return [value.reshaped(shape)]
    except Unsupported:
        return [step.copied(value, step._rows_of([value], value.shape)).reshaped(shape)]


def _broadcast(step: Collector, eqn: jaxprs.Eqn, value: NativeOperand) -> list[NativeOperand]:
    shape = eqn.outvars[0].aval.shape
    if isinstance(value, Uniform):
        return [Uniform(value.value, shape)]
    return [value.broadcast(shape, eqn.params["broadcast_dimensions"])]


def _transpose(step: Collector, eqn: jaxprs.Eqn, value: NativeOperand) -> list[NativeOperand]:
    return [value if isinstance(value, Uniform) else value.transposed(eqn.params["permutation"])]


def _cut(
    value: NativeOperand, starts: Sequence[int], ends: Sequence[int], steps: Sequence[int]
) -> NativeOperand:
    if isinstance(value, Uniform):
        return Uniform(value.value, tuple(-(-(b - a) // s) for a, b, s in zip(starts, ends, steps)))
    return value.sliced(starts, ends, steps)


def _slice(step: Collector, eqn: jaxprs.Eqn, value: NativeOperand) -> list[NativeOperand]:
    starts, ends, strides = (eqn.params[k] for k in ("start_indices", "limit_indices", "strides"))
    return [_cut(value, starts, ends, strides or [1] * len(starts))]


def _split(step: Collector, eqn: jaxprs.Eqn, value: NativeOperand) -> list[NativeOperand]:
    axis = eqn.params["axis"]
    shape = value.shape
    parts = []
    for a, b in itertools.pairwise(itertools.accumulate(eqn.params["sizes"], initial=0)):
        starts = [0] * len(shape)
        ends = list(shape)
        starts[axis], ends[axis] = a, b
        parts.append(_cut(value, starts, ends, [1] * len(shape)))
    return parts


def _concatenate(step: Collector, eqn: jaxprs.Eqn, *values: NativeOperand) -> list[NativeOperand]:
    return [_joined(step, values, eqn.params["dimension"], eqn.outvars[0].aval.shape)]


def _joined(
    step: Collector, values: Sequence[NativeOperand], dimension: int, shape: Sequence[int]
) -> View:
    rows = step._rows_of(values, shape)
    if rows == dimension:
        raise Unsupported("it concatenates rows")
    out = step.new(shape, rows)
    at = 0
    for value in values:
        starts = [0] * len(shape)
        ends = list(shape)
        starts[dimension], ends[dimension] = at, at + value.shape[dimension]
        at = ends[dimension]
        step.assign(out.sliced(starts, ends, [1] * len(shape)), value, rows)
    return out


def _pad(
    step: Collector, eqn: jaxprs.Eqn, value: NativeOperand, filling: NativeOperand
) -> list[NativeOperand]:
    if not isinstance(filling, Uniform):
        raise Unsupported("it pads with a value that changes")
    for axis, (low, high, inner) in enumerate(eqn.params["padding_config"]):
        if low < 0 or high < 0 or inner:
            raise Unsupported("the kernel only pads at the ends")
        if low or high:
            shape = list(value.shape)
            sizes = [[*shape[:axis], n, *shape[axis + 1 :]] for n in (low, high)]
            ends = [Uniform(filling.value, tuple(size)) for size in sizes]
            shape[axis] += low + high
            value = _joined(
                step, [v for v in (ends[0], value, ends[1]) if v.shape[axis]], axis, shape
            )
    return [value]


Shape = Sequence[int]


def _log2(step: Collector, shape: Shape, x: NativeOperand) -> View:
    return step.apply("div", [step.apply("log", [x], shape), Uniform(math.log(2))], shape)


def _exp2(step: Collector, shape: Shape, x: NativeOperand) -> View:
    return step.apply("exp", [step.apply("mul", [x, Uniform(math.log(2))], shape)], shape)


def _tan(step: Collector, shape: Shape, x: NativeOperand) -> View:
    return step.apply("div", [step.apply(name, [x], shape) for name in ("sin", "cos")], shape)


def _polynomial(
    step: Collector, shape: Shape, x: NativeOperand, *coefficients: NativeOperand
) -> NativeOperand:
    """Horner's rule; the last coefficient is that of the highest power."""
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        product = step.apply("mul", [total, x], shape)
        total = step.apply("add", [product, coefficient], shape)
    return total


COMPOSED: dict[str, Callable[..., NativeOperand]] = {  # of several operations of the kernel
    "exp2": _exp2,
    "log2": _log2,
    "polynomial": _polynomial,
    "tan": _tan,
}
_RULES: dict[str, Callable[..., list[NativeOperand]]] = {
    **dict.fromkeys(("reshape", "squeeze"), _reshape),
    **dict.fromkeys(_REDUCTIONS, Collector.reduction),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "dot_general": Collector.product,
    "pad": _pad,
    "slice": _slice,
    "split": _split,
    "transpose": _transpose,
}
_ROUNDS = frozenset((*ELEMENTWISE, "dot_general", "integer_pow", "reduce_sum")) - {
    "select_n",
    "max",
    "min",
    "neg",
    "abs",
}
