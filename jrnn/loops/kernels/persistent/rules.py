"""The rules that compute each primitive with tiles. A primitive without a rule raises `Refused`.

A rule `(eqn, form, reader) -> tiles` computes the results of an equation; results that are vectors get the form `form`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var, primitives
from jrnn.jaxprs.axes import aligned
from jrnn.loops.kernels.persistent.forms import (
    FLAT,
    UPRIGHT,
    WHOLE,
    Form,
    MatrixForm,
    decoded,
    encoded,
    long_axes,
    spread,
    tile_shape,
    turned,
    widened,
)
from jrnn.loops.kernels.refused import Refused


@dataclass(frozen=True)
class TileReader:
    """Gives rules the tiles of their operands.

    Attributes:
        read: returns the tile of a variable in a form.
        natural: the form of each vector that costs least.
        consts: the constants of the loop.
        on_tpu: whether the kernel runs on a TPU instead of being interpreted.
    """

    read: Callable[[Var, Form], Any]
    natural: Mapping[Var, Form]
    consts: Collection[Var]
    on_tpu: bool

    def tile(self, atom: Atom, form: Form) -> Any:
        """Returns the tile of an operand; matrices and scalars have only the form `WHOLE`."""
        if len(long_axes(atom.aval.shape)) != 1 and not isinstance(form, MatrixForm):
            form = WHOLE
        if jaxprs.is_literal(atom):
            return lax.full(tile_shape(atom.aval.shape, form), atom.val, atom.aval.dtype)
        return self.read(atom, form)

    def form(self, atom: Atom) -> Form:
        """Returns the form of an operand that costs least."""
        if len(long_axes(atom.aval.shape)) != 1:
            return WHOLE
        return FLAT if jaxprs.is_literal(atom) else self.natural.get(atom, FLAT)

    def factor(self, atom: Atom, transposed: bool, dtype: Any) -> Any:
        """Returns a matrix as an operand of a product; constants are converted before the loop."""
        if jaxprs.is_in(atom, self.consts):
            return self.read(atom, MatrixForm(transposed, jnp.dtype(dtype)))
        tile = self.tile(atom, WHOLE).astype(dtype)
        return jnp.transpose(tile) if transposed else tile


def computed(eqn: Eqn, form: Form, reader: TileReader) -> list[Any]:
    """Returns the tiles of an equation's results."""
    name = eqn.primitive.name
    if name in _ELEMENTWISE:
        return [_elementwise(eqn, form, reader)]
    if name not in _RULES:
        raise Refused(f"the kernel has no {name}")
    return _RULES[name](eqn, form, reader)


# Elementwise ----------------------------------------------------------------------------------------------------------

_SAME = frozenset((*primitives.COPIES, "pvary", "stop_gradient"))
_COMPARISONS = frozenset(("eq", "ge", "gt", "le", "lt", "ne"))
# fmt: off
_ELEMENTWISE = _SAME | _COMPARISONS | frozenset((
    "abs", "add", "add_any", "and", "ceil", "clamp", "convert_element_type", "cos", "div", "erf", "exp", "exp2", "expm1",
    "floor", "integer_pow", "is_finite", "log", "log1p", "logistic", "max", "min", "mul", "neg", "not",
    "one_minus_square", "or", "pow", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "sub", "tan", "tanh", "xor",
))
# fmt: on


def _elementwise(eqn: Eqn, form: Form, reader: TileReader) -> Any:
    out = eqn.outvars[0].aval
    shape = tile_shape(out.shape, form)
    operands = [
        lax.full(shape, a.val, a.aval.dtype)
        if jaxprs.is_literal(a)
        else spread(_operand(a, out.shape, form, reader), shape)
        for a in eqn.invars
    ]
    value = _applied(eqn, [widened(tile) for tile in operands], out.dtype)
    return value if value.dtype == out.dtype else value.astype(out.dtype)


def _applied(eqn: Eqn, operands: list[Any], dtype: Any) -> Any:
    name = eqn.primitive.name
    first = operands[0]
    if name in _SAME:
        return first
    if name == "select_n":
        if len(operands) != 3 or first.dtype != jnp.bool_:
            raise Refused("the kernel selects by booleans only")
        if dtype == jnp.bool_:
            return (first & operands[2]) | (~first & operands[1])
        return lax.select(first, operands[2], operands[1])
    if name == "convert_element_type":
        to_bool = dtype == jnp.bool_ and first.dtype != jnp.bool_
        return ~(first == 0) if to_bool else encoded(first).astype(dtype)
    if name == "sign":
        ones = jnp.ones_like(first)
        return lax.select(first > 0, ones, lax.select(first < 0, -ones, first))
    if name == "expm1":
        half = jnp.tanh(first * 0.5)  # exact near 0, where exp(x) - 1 is not
        return lax.select(abs(first) < 0.5, 2 * half / (1 - half), jnp.exp(first) - 1)
    if name == "clamp":
        return lax.min(lax.max(operands[1], first), operands[2])
    if name in _COMPARISONS:
        operands = [encoded(tile) for tile in operands]
        if name == "ne":  # Mosaic's `ne` treats NaN as equal to everything
            return ~lax.eq(*operands)
    params = {k: None if k == "out_dtype" else v for k, v in eqn.primitive.get_bind_params(eqn.params).items()}
    return eqn.primitive.bind(*operands, **params)


# Views and pieces -----------------------------------------------------------------------------------------------------


def _view(eqn: Eqn, form: Form, reader: TileReader) -> list[Any]:
    """Views: broadcasts, reshapes and transpositions."""
    operand, out = eqn.invars[0], eqn.outvars[0].aval
    shape = tile_shape(out.shape, form)
    if jaxprs.is_literal(operand):
        return [lax.full(shape, operand.val, out.dtype)]
    axes = _axes_in_result(eqn)
    if list(axes) != sorted(axes):
        return [jnp.transpose(reader.tile(operand, WHOLE))]
    return [spread(reader.tile(operand, _placed(axes, out.shape, form)), shape)]


def _axes_in_result(eqn: Eqn) -> list[int]:
    """Returns the axes of the result that the operand's axes longer than 1 become."""
    operand, out = eqn.invars[0].aval, eqn.outvars[0]
    follow = aligned(eqn, 0, out)
    try:
        return [follow[a] for a in long_axes(operand.shape)]
    except KeyError:
        raise Refused(f"the kernel cannot reshape {list(operand.shape)} to {list(out.aval.shape)}") from None


def _placed(axes: Sequence[int], shape: Sequence[int], form: Form) -> Form:
    """Returns the form of an operand whose long axes become these axes of a result of `shape`."""
    into = long_axes(shape)
    if len(axes) == 1 and len(into) == 2:
        return UPRIGHT if axes[0] == into[0] else FLAT
    return form


def _operand(atom: Atom, shape: Sequence[int], form: Form, reader: TileReader) -> Any:
    """Returns the tile of an operand that has the axes of a result of `shape`, possibly of length 1."""
    return reader.tile(atom, _placed(long_axes(atom.aval.shape), shape, form))


def _pieces(eqn: Eqn, form: Form, reader: TileReader) -> list[Any]:
    """Slices and splits."""
    operand, params = eqn.invars[0], eqn.params
    if eqn.primitive.name == "split":
        whole, axis = [(0, n) for n in operand.aval.shape], params["axis"]
        ends = itertools.accumulate(params["sizes"], initial=0)
        ranges = [[*whole[:axis], part, *whole[axis + 1 :]] for part in itertools.pairwise(ends)]
    else:
        if any(s != 1 for s in params["strides"] or ()):
            raise Refused("the kernel has no slices with steps")
        ranges = [list(zip(params["start_indices"], params["limit_indices"]))]
    is_vector = len(long_axes(operand.aval.shape)) == 1
    pieces = []
    for out, limits in zip(eqn.outvars, ranges):
        stays = len(long_axes(out.aval.shape)) == 1
        own = form if stays else reader.form(operand)
        at = [limits[a] for a in long_axes(operand.aval.shape)]
        tile = reader.tile(operand, own if is_vector else WHOLE)
        if is_vector:
            at = [*at, (0, 1)] if own == UPRIGHT else [(0, 1), *at]
        elif not at:
            at = [(0, 1), (0, 1)]
        piece = decoded(lax.slice(encoded(tile), [int(a) for a, _ in at], [int(b) for _, b in at]), tile.dtype)
        pieces.append(turned(piece) if stays and piece.shape != tile_shape(out.aval.shape, form) else piece)
    return pieces


def _joined(eqn: Eqn, form: Form, reader: TileReader) -> list[Any]:
    """Concatenations, stacks, and pads, which concatenate the filling."""
    out, operands = eqn.outvars[0].aval, list(eqn.invars)
    into = long_axes(out.shape)
    shape = tile_shape(out.shape, form)

    if eqn.primitive.name == "concatenate":
        tiles = [_operand(a, out.shape, form, reader) for a in operands]
        return [_concatenated(tiles, into, eqn.params["dimension"], form)]
    if eqn.primitive.name == "stack":
        at = eqn.params["axis"]
        placed = [[a + (a >= at) for a in long_axes(v.aval.shape)] for v in operands]
        tiles = [reader.tile(v, _placed(axes, out.shape, form)) for v, axes in zip(operands, placed)]
        return [_concatenated(tiles, into, at, form)]
    middle, filling = _operand(operands[0], out.shape, form, reader), reader.tile(operands[1], WHOLE)
    for axis, (low, high, inner) in enumerate(eqn.params["padding_config"]):
        if low < 0 or high < 0 or inner:
            raise Refused("the kernel only pads at the ends")
        if low or high:
            rows, columns = middle.shape
            sizes = [(n, columns) if _tile_axis(into, axis, form) == 0 else (rows, n) for n in (low, high)]
            before, after = ([spread(filling, size)] if n else [] for n, size in zip((low, high), sizes))
            middle = _concatenated([*before, middle, *after], into, axis, form)
    return [spread(middle, shape)]


def _tile_axis(into: Sequence[int], axis: int, form: Form) -> int:
    """Returns the axis of the tile that an axis of the result lies along."""
    if len(into) == 2:
        return into.index(axis)
    return 0 if form == UPRIGHT else 1


def _concatenated(tiles: Sequence[Any], into: Sequence[int], axis: int, form: Form) -> Any:
    if len(tiles) == 1:
        return tiles[0]
    return decoded(lax.concatenate([encoded(t) for t in tiles], _tile_axis(into, axis, form)), tiles[0].dtype)


def _iota(eqn: Eqn, form: Form, reader: TileReader) -> list[Any]:
    out, axis = eqn.outvars[0].aval, eqn.params["dimension"]
    shape, into = tile_shape(out.shape, form), long_axes(out.shape)
    if axis not in into:
        return [lax.full(shape, 0, out.dtype)]
    return [lax.broadcasted_iota(jnp.int32, shape, _tile_axis(into, axis, form)).astype(out.dtype)]


# Reductions and products ----------------------------------------------------------------------------------------------


_REDUCE: dict[str, Callable] = {
    "reduce_and": jnp.min,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_or": jnp.max,
    "reduce_sum": lambda tile, **options: jnp.sum(tile, dtype=tile.dtype, **options),
}


def _reduction(eqn: Eqn, form: Form, reader: TileReader) -> list[Any]:
    operand, out = eqn.invars[0], eqn.outvars[0].aval
    own = reader.form(operand)
    tile = reader.tile(operand, own)
    long = long_axes(operand.aval.shape)
    axes = [_tile_axis(long, a, own) for a in long if a in eqn.params["axes"]]
    if axes:
        reduced = _REDUCE[eqn.primitive.name](widened(encoded(tile)), axis=tuple(axes), keepdims=True)
        tile = decoded(reduced, jnp.bool_) if tile.dtype == jnp.bool_ else reduced.astype(tile.dtype)
    return [tile if tile.shape == tile_shape(out.shape, form) else turned(tile)]


def _product(eqn: Eqn, form: Form, reader: TileReader) -> list[Any]:
    """A product of matrices, vectors or both, over one axis."""
    left, right = eqn.invars
    axes, batch = eqn.params["dimension_numbers"]
    if any(left.aval.shape[a] != 1 for a in batch[0]):
        raise Refused("the kernel has no batches of products")
    dtype, precision = _precision(eqn, reader.on_tpu)
    out = eqn.outvars[0].aval
    wide = jnp.promote_types(out.dtype, jnp.float32)
    ranks = [len(long_axes(v.aval.shape)) for v in (left, right)]
    summed = [[a for a in of if v.aval.shape[a] != 1] for v, of in zip((left, right), axes)]
    if len(summed[0]) > 1 or max(ranks) > 2:
        raise Refused("the kernel has no products over several axes")
    first = [bool(s) and long_axes(v.aval.shape).index(s[0]) == 0 for v, s in zip((left, right), summed)]

    if not summed[0]:  # an outer product
        shape = tile_shape(out.shape, form)
        own = (UPRIGHT, FLAT) if ranks == [1, 1] else (form, form)
        a, b = (spread(widened(reader.tile(v, f)), shape) for v, f in zip((left, right), own))
        return [(a * b).astype(out.dtype)]
    if ranks == [1, 1]:
        own = reader.form(left)
        product = jnp.sum(widened(reader.tile(left, own)) * widened(reader.tile(right, own)), keepdims=True)
        return [product.astype(out.dtype)]
    if ranks[1] == 1:  # put the matrix on the right
        left, right, ranks, first = right, left, ranks[::-1], first[::-1]
    a = reader.tile(left, FLAT).astype(dtype) if ranks[0] == 1 else reader.factor(left, first[0], dtype)
    b = reader.factor(right, not first[1], dtype)
    product = jnp.dot(a, b, precision=precision, preferred_element_type=wide).astype(out.dtype)
    return [product if product.shape == tile_shape(out.shape, form) else turned(product)]


def _precision(eqn: Eqn, on_tpu: bool) -> tuple[Any, Any]:
    """Returns the dtype to round the operands of a product to, and its precision.

    On a TPU, JAX by default rounds float32 operands to bfloat16. Constants are rounded before the loop.
    """
    given, types = eqn.params["precision"], {v.aval.dtype for v in eqn.invars}
    if len(types) != 1 or not jnp.issubdtype(dtype := types.pop(), jnp.floating):
        raise Refused(f"the kernel has no products of {' and '.join(sorted(str(v.aval.dtype) for v in eqn.invars))}")
    if isinstance(given, tuple):
        given = given[0] if given[0] == given[1] else lax.Precision.HIGHEST
    preset = lax.DotAlgorithmPreset
    if given in (None, lax.Precision.DEFAULT, preset.DEFAULT):
        return jnp.bfloat16 if on_tpu else dtype, None
    if given in (lax.Precision.HIGH, lax.Precision.HIGHEST, preset.F32_F32_F32):
        return dtype, lax.Precision.HIGHEST
    if given == preset.BF16_BF16_F32:
        return jnp.bfloat16, None
    raise Refused(f"the kernel has no products of precision {given}")


_RULES: dict[str, Callable[[Any, Form, TileReader], list[Any]]] = {
    **dict.fromkeys(("broadcast_in_dim", "expand_dims", "reshape", "squeeze", "transpose"), _view),
    **dict.fromkeys(("slice", "split"), _pieces),
    **dict.fromkeys(("concatenate", "pad", "stack"), _joined),
    **dict.fromkeys(_REDUCE, _reduction),
    "dot_general": _product,
    "iota": _iota,
}
