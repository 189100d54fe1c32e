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
from jrnn.jaxprs import Atom, Eqn, Var, primitives
from jrnn.loops.ir import Unsupported
from jrnn.loops.kernels.native.operations import (
    Array,
    NativeOperand,
    Operation,
    Uniform,
    View,
    collapsed,
    dense,
    elements_of,
    has_stride,
    without,
)

Shape = Sequence[int]
Results = Sequence[NativeOperand]

_MAX_PRODUCTS = 64  # that one equation becomes: one for each head of a product in heads
_MAX_POWER = 8
_MAX_REDUCED_DIMS = 3  # of a row, besides the elements that are reduced

# Operations of the kernel, by the names of their primitives.
# fmt: off
_SAME_NAME = (
    "abs", "add", "ceil", "cos", "div", "erf", "exp", "expm1", "floor", "is_finite", "log", "log1p", "logistic", "max",
    "min", "mul", "neg", "one_minus_square", "rsqrt", "sign", "sin", "sqrt", "square", "sub", "tanh",
)
# fmt: on
ELEMENTWISE = {
    **dict(zip(_SAME_NAME, _SAME_NAME)),
    "add_any": "add",
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "select_n": "select",
}
OF_BOOLEANS = {"and": "min", "or": "max", "xor": "not_equal", "not": "not"}
SWAPPED = {"gt": "less", "ge": "less_equal"}  # with the operands in the other order
_REDUCTIONS = {
    "reduce_sum": "reduce_sum",
    "reduce_max": "reduce_max",
    "reduce_min": "reduce_min",
    "reduce_and": "reduce_min",
    "reduce_or": "reduce_max",
}
# Their results in bfloat16 are rounded; the other operations return one of their operands.
_ROUNDS = {*ELEMENTWISE, "dot_general", "integer_pow", "reduce_sum"}
_ROUNDS -= {"select_n", "max", "min", "neg", "abs"}


@dataclass
class Collector:
    """Collects the operations of a step; `rows` is N, and `constants` are the arrays that do not change."""

    rows: int
    values: dict[Var, NativeOperand]
    constants: frozenset[Array]
    operations: list[Operation] = field(default_factory=list)

    def value(self, atom: Atom) -> NativeOperand:
        if jaxprs.is_literal(atom):
            return Uniform(float(np.asarray(atom.val)), atom.aval.shape)
        return self.values[atom]

    def run(self, eqn: Eqn) -> None:
        """Adds the operations of an equation."""
        name = eqn.primitive.name
        for v in eqn.outvars:
            if v.aval.dtype != jnp.bool_ and not jnp.issubdtype(v.aval.dtype, jnp.floating):
                raise Unsupported(f"{name} computes {v.aval.dtype}")
        operands = [self.value(a) for a in eqn.invars]
        if name in _VIEWS and isinstance(operands[0], Uniform):
            number = operands[0].value
            results = [Uniform(number, v.aval.shape) for v in eqn.outvars]
        elif name in _RULES:
            results = _RULES[name](self, eqn, *operands)
        else:
            results = [self._elementwise(eqn, operands)]
        for v, result in zip(eqn.outvars, results):
            if v.aval.dtype == jnp.bfloat16 and name in _ROUNDS:
                result = self.apply("to_bfloat16", [result], v.aval.shape)
            self.values[v] = result

    # Elementwise -------------------------------------------------------------------------------------

    def _elementwise(self, eqn: Eqn, operands: list[NativeOperand]) -> NativeOperand:
        name = eqn.primitive.name
        out = eqn.outvars[0].aval
        shape = out.shape
        if name in ELEMENTWISE:
            is_selection = name == "select_n"
            if is_selection and (len(operands) != 3 or not _is_boolean(eqn.invars[0])):
                raise Unsupported("the kernel selects by booleans only")
            return self.apply(ELEMENTWISE[name], operands, shape)
        if name in SWAPPED:
            return self.apply(SWAPPED[name], operands[::-1], shape)
        if name in OF_BOOLEANS and all(map(_is_boolean, eqn.invars)):
            return self.apply(OF_BOOLEANS[name], operands, shape)
        if name == "clamp":
            low, x, high = operands
            return self.apply("min", [self.apply("max", [x, low], shape), high], shape)
        if name == "round" and eqn.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN:
            return self.apply("round", operands, shape)
        if name == "convert_element_type":
            if _is_boolean(eqn.invars[0]):
                return operands[0]
            if out.dtype == jnp.bool_:
                return self.apply("not_equal", [operands[0], Uniform(0.0)], shape)
            if out.dtype == jnp.bfloat16:
                return self.apply("to_bfloat16", operands, shape)
            return operands[0]
        if name == "integer_pow" and 0 < abs(eqn.params["y"]) <= _MAX_POWER:
            return self._power(operands[0], eqn.params["y"], shape)
        if primitives.row_of(eqn).copies:
            return operands[0]
        definition = primitives.row_of(eqn).definition
        if definition is not None and out.dtype != jnp.bfloat16:  # XLA rounds there within
            return self._defined(definition, eqn, operands)
        raise Unsupported(f"the kernel has no {name}")

    def _defined(
        self, definition: Callable[..., Any], eqn: Eqn, operands: list[NativeOperand]
    ) -> NativeOperand:
        """Adds the operations of a function that defines a primitive by others, and returns its result."""
        avals = [atom.aval for atom in eqn.invars]
        program = jaxprs.trace(lambda *args: [definition(*args)], avals)
        self.values.update(zip(program.invars, operands))
        for inner in program.eqns:
            self.run(inner)
        return self.value(program.outvars[0])

    def _power(self, x: NativeOperand, y: int, shape: Shape) -> NativeOperand:
        if y < 0:
            return self.apply("div", [Uniform(1.0), self._power(x, -y, shape)], shape)
        if y == 1:
            return x
        half = self._power(x, y // 2, shape)
        even = self.apply("square", [half], shape)
        return self.apply("mul", [even, x], shape) if y % 2 else even

    def apply(self, kind: str, operands: Sequence[NativeOperand], shape: Shape) -> View:
        """Adds an elementwise operation, and returns its result."""
        shape = tuple(shape)
        spread = [_spread(v, shape) for v in operands]
        axis = self.row_axis(spread, shape)
        for i, v in enumerate(spread):
            if isinstance(v, View):
                spread[i] = self.contiguous_rows(v, axis)
        out = self.new(shape, axis)
        self.add(kind, out, spread, axis)
        return out

    def add(
        self,
        kind: str,
        out: View,
        operands: Sequence[NativeOperand],
        axis: int | None,
    ) -> None:
        self.operations.append(Operation(kind, out, list(operands), axis))

    def row_axis(self, values: Sequence[NativeOperand], shape: Shape) -> int | None:
        """Returns the axis of a result of `shape` that holds the rows, or None if all rows hold the same."""
        views = [v for v in values if isinstance(v, View)]
        sources = {v.row for v in views if v.row is not None}
        if len(sources) > 1:
            raise Unsupported("two values of the step have their rows in different axes")
        if sources:
            return sources.pop()
        if self.rows == 1 or not shape or shape[0] != self.rows:
            return None
        # Arguments may have their rows in the first axis; what the kernel computed is the same for all rows.
        for v in views:
            if v.array.in_rows and v.dims[0][0] != 1 and v.dims[0][1] != 0:
                return None
        return 0

    def new(self, shape: Shape, axis: int | None, array: Array | None = None) -> View:
        """Returns a view of an array that is stored row after row, by default a new one."""
        dims = dense([n for a, n in enumerate(shape) if a != axis])
        if array is None:
            array = Array(elements_of(dims))
        if axis is not None:
            dims = (*dims[:axis], (self.rows, 0), *dims[axis:])
        return View(array, dims, row=axis)

    def contiguous_rows(self, view: View, axis: int | None) -> View:
        """Returns a view whose rows are contiguous or one number."""
        return view if has_stride(view.inner(axis), 0, 1) else self.copied(view, axis)

    def copied(self, view: View, axis: int | None) -> View:
        """Returns a contiguous copy of a view."""
        if view.array.dtype != "float":
            raise Unsupported(f"the step transposes or spreads an input of {view.array.dtype}")
        out = self.new(view.shape, axis)
        self.add("move", out, [view], axis)
        return out

    def floats(self, view: View) -> View:
        """Returns the view in the type that the kernel computes with."""
        return view if view.array.dtype == "float" else self.apply("copy", [view], view.shape)

    def assign(self, to: View, value: NativeOperand, axis: int | None) -> None:
        """Writes a value to a view, by an operation or by computing it there."""
        is_contiguous = has_stride(to.inner(axis), 1)
        if isinstance(value, Uniform):
            if not is_contiguous:
                raise Unsupported("the step writes a constant between other values")
            self.add("copy", to, [value], axis)
            return

        if axis is None and to.array.in_rows and value.row is not None:
            raise Unsupported("a value that all rows share depends on a row")
        if is_contiguous and self._may_compute_in(to, value, axis):
            value.array.parent = (to.array, to.offset)
        elif is_contiguous and len(collapsed(value.inner(axis))) <= 1:
            self.add("copy", to, [self.contiguous_rows(value, axis)], axis)
        else:
            self.add("move", to, [self.floats(value)], axis)

    def _may_compute_in(self, to: View, value: View, axis: int | None) -> bool:
        """Returns True if a value of the kernel's own may be stored in a part of another array."""
        array = value.array
        if not array.is_scratch or not value.is_whole or value.row != axis:
            return False
        has_whole_rows = to.array.in_rows or self.rows == 1 or axis == 0
        return has_whole_rows and to.array.dtype == "float" and array not in to.array.chain

    # Products and reductions -------------------------------------------------------------------------

    def _free_row_axis(self, view: View, free: Sequence[int], refusal: str) -> int | None:
        """Returns the axis of an operand that holds the rows, which must be a free one."""
        axis = view.row
        if axis is None and not view.array.in_rows and self.rows > 1:
            candidates = [a for a in free if view.dims[a][0] == self.rows]
            return candidates[0] if candidates else None
        if axis is not None and axis not in free:
            raise Unsupported(refusal)
        return axis

    def product(self, eqn: Eqn, left: NativeOperand, right: NativeOperand) -> Results:
        """Adds the products of rows with a constant matrix: one for each head and each free index of a row."""
        operands = (left, right)
        are_matrices = [isinstance(v, View) and v.array in self.constants for v in operands]
        if not any(are_matrices) or any(isinstance(v, Uniform) for v in operands):
            raise Unsupported("it multiplies two values that both change from step to step")
        out_aval = eqn.outvars[0].aval
        if eqn.params.get("preferred_element_type") not in (None, out_aval.dtype):
            raise Unsupported("a product accumulates in another type")

        contracted, batch = eqn.params["dimension_numbers"]
        sides = list(zip(operands, contracted, batch))
        right_is_matrix = are_matrices[1]
        if not right_is_matrix:
            sides.reverse()
        (rows, sums, heads), (matrix, down, matrix_heads) = sides
        rows = self.floats(rows)
        free = _other_axes(rows, (*sums, *heads))
        columns = matrix.axes(_other_axes(matrix, (*down, *matrix_heads)))
        axis = self._free_row_axis(rows, free, "a product adds rows up")

        # The elements of a row that are added up must be contiguous.
        if not has_stride(rows.axes(sums), 1):
            first = [] if axis is None else [axis]
            order = [*first, *heads, *(a for a in free if a != axis), *sums]
            axis = None if axis is None else 0
            rows = self.copied(rows.transposed(order), axis)
            heads, free, sums = ([order.index(a) for a in axes] for axes in (heads, free, sums))

        depth = collapsed(matrix.axes(down))
        width = collapsed(columns)
        size = elements_of(rows.axes(sums))
        if len(depth) > 1 or len(width) > 1 or not sums or size < 2:
            raise Unsupported("the kernel has no product of this form")

        others = [*heads, *free]
        row = None if axis is None else others.index(axis)
        counts = [n for n, _ in rows.axes(others)]
        out = self.new([*counts, *(n for n, _ in columns)], row)
        if row is not None:
            counts[row] = 1
        if math.prod(counts) > _MAX_PRODUCTS:
            raise Unsupported("a product has too many heads")

        out_axis = None if axis is None else 0
        rows_axis = None if rows.row is None else 0
        matrix_dims = (depth[0], *(width or [(1, 1)]))
        for at in itertools.product(*map(range, counts)):
            part = rows.as_rows(axis, size, rows_axis, rows.start_at(at, others))
            start = out.start_at(at, range(len(at)))
            target = out.as_rows(row, elements_of(columns), out_axis, start)
            part_matrix = View(matrix.array, matrix_dims, matrix.start_at(at, matrix_heads))
            self.operations.append(Operation("product", target, [part], out_axis, part_matrix))

        if not right_is_matrix:  # the result has the axes of the matrix first
            n = len(heads)
            axes = [*range(len(out.dims))]
            out = out.transposed([*axes[:n], *axes[len(others) :], *axes[n : len(others)]])
        assert out.shape == tuple(out_aval.shape)
        return [out]

    def reduction(self, eqn: Eqn, value: NativeOperand) -> Results:
        axes = eqn.params["axes"]
        if isinstance(value, Uniform):
            raise Unsupported("it reduces a constant")
        value = self.floats(value)
        result_axes = _other_axes(value, axes)
        axis = self._free_row_axis(value, result_axes, "it reduces over rows")
        row = None if axis is None else result_axes.index(axis)
        count = len(result_axes)
        value = value.transposed([*result_axes, *axes])
        result_dims = collapsed(without(value.dims[:count], row))
        if len(collapsed(value.dims[count:])) > 1 or len(result_dims) > _MAX_REDUCED_DIMS:
            value = self.copied(value, row)
        out = self.new(value.shape[:count], row)
        self.add(_REDUCTIONS[eqn.primitive.name], out, [value], row)
        return [out]


def _is_boolean(atom: Atom) -> bool:
    return atom.aval.dtype == jnp.bool_


def _other_axes(view: View, axes: Sequence[int]) -> list[int]:
    return [a for a in range(len(view.dims)) if a not in axes]


def _spread(value: NativeOperand, shape: Shape) -> NativeOperand:
    """Returns an operand of an elementwise operation with the shape of its result."""
    if isinstance(value, Uniform) or value.shape == shape:
        return value
    axes = range(len(shape)) if len(value.dims) == len(shape) else ()
    return value.broadcast(shape, axes)


# Views and parts -------------------------------------------------------------------------------------


def _reshape(step: Collector, eqn: Eqn, value: View) -> Results:
    shape = eqn.outvars[0].aval.shape
    try:
        return [value.reshaped(shape)]
    except Unsupported:
        return [step.copied(value, step.row_axis([value], value.shape)).reshaped(shape)]


def _broadcast(step: Collector, eqn: Eqn, value: View) -> Results:
    return [value.broadcast(eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"])]


def _transpose(step: Collector, eqn: Eqn, value: View) -> Results:
    return [value.transposed(eqn.params["permutation"])]


def _slice(step: Collector, eqn: Eqn, value: View) -> Results:
    starts = eqn.params["start_indices"]
    strides = eqn.params["strides"] or [1] * len(starts)
    return [value.sliced(starts, eqn.params["limit_indices"], strides)]


def _part(
    value: View,
    axis: int,
    start: int,
    size: int,
) -> View:
    """Returns `size` places of a value along an axis."""
    starts = [0] * len(value.shape)
    ends = list(value.shape)
    starts[axis] = start
    ends[axis] = start + size
    return value.sliced(starts, ends, [1] * len(ends))


def _split(step: Collector, eqn: Eqn, value: View) -> Results:
    parts = []
    start = 0
    for size in eqn.params["sizes"]:
        parts.append(_part(value, eqn.params["axis"], start, size))
        start += size
    return parts


def _concatenate(step: Collector, eqn: Eqn, *values: NativeOperand) -> Results:
    return [_joined(step, values, eqn.params["dimension"], eqn.outvars[0].aval.shape)]


def _joined(
    step: Collector,
    values: Results,
    dimension: int,
    shape: Shape,
) -> View:
    """Returns a new array, and writes values to its parts along a dimension."""
    axis = step.row_axis(values, shape)
    if axis == dimension:
        raise Unsupported("it concatenates rows")
    out = step.new(shape, axis)
    start = 0
    for value in values:
        size = value.shape[dimension]
        step.assign(_part(out, dimension, start, size), value, axis)
        start += size
    return out


def _pad(
    step: Collector,
    eqn: Eqn,
    value: NativeOperand,
    filling: NativeOperand,
) -> Results:
    if not isinstance(filling, Uniform):
        raise Unsupported("it pads with a value that changes")
    for axis, (low, high, inner) in enumerate(eqn.params["padding_config"]):
        if low < 0 or high < 0 or inner:
            raise Unsupported("the kernel only pads at the ends")
        if not low and not high:
            continue
        shape = list(value.shape)
        shape[axis] = low
        before = Uniform(filling.value, tuple(shape))
        shape[axis] = high
        after = Uniform(filling.value, tuple(shape))
        parts = [v for v in (before, value, after) if v.shape[axis]]
        shape[axis] = low + value.shape[axis] + high
        value = _joined(step, parts, axis, shape)
    return [value]


# Of a number that is the same in all places, the results are this number.
_VIEWS = frozenset(("broadcast_in_dim", "reshape", "slice", "split", "squeeze", "transpose"))
_RULES: dict[str, Callable[..., Results]] = {
    **dict.fromkeys(_REDUCTIONS, Collector.reduction),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "dot_general": Collector.product,
    "pad": _pad,
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    "squeeze": _reshape,
    "transpose": _transpose,
}
