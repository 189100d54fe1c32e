"""The arrays in a rule, and the helpers that all rules share.

An operator of an `Operand` binds JAX's primitive at once. That of a traced array first looks for a type, a shape and a
function of jax.numpy, which takes 3 to 20 times as long. So both operands of an operator have one type, and one rank unless
one of them is a scalar. Matrices are the last two axes, and all other axes are batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array, lax

from jrnn.jaxprs import Eqn

Values = Sequence[Any] | None  # arrays, or None where a rule does not apply
Number = Any  # a number, or a scalar of a loop

State = TypeVar("State")  # an operand, or a tuple of operands
DType = Any

_ARITHMETIC = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "truediv": lax.div,
}
_LOGIC = {"and": lax.bitwise_and, "or": lax.bitwise_or}
_COMPARISONS = {
    "lt": lax.lt,
    "le": lax.le,
    "gt": lax.gt,
    "ge": lax.ge,
    "eq": lax.eq,
    "ne": lax.ne,
}


@jax.tree_util.register_pytree_node_class
class Operand:
    """An array that is traced. Numbers next to it get its type."""

    __slots__ = ("array",)

    def __init__(self, array: Array):
        self.array = array

    def tree_flatten(self) -> tuple[tuple[Array], None]:
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Array]) -> Operand:
        return cls(*children)

    def __getattr__(self, name: str) -> Any:  # the shape, the rank and the type
        return getattr(self.array, name)

    def __neg__(self) -> Operand:
        return Operand(lax.neg(self.array))

    def __invert__(self) -> Operand:
        return Operand(lax.bitwise_not(self.array))

    def __abs__(self) -> Operand:
        return Operand(lax.abs(self.array))

    @property
    def is_complex(self) -> bool:
        return bool(np.issubdtype(self.dtype, np.complexfloating))

    @property
    def real(self) -> Operand:
        return Operand(lax.real(self.array)) if self.is_complex else self

    @property
    def imag(self) -> Operand:
        return Operand(lax.imag(self.array))

    def astype(self, dtype: Any) -> Operand:
        return self if self.dtype == dtype else Operand(lax.convert_element_type(self.array, dtype))

    def conj(self) -> Operand:
        return Operand(lax.conj(self.array)) if self.is_complex else self

    def sqrt(self) -> Operand:
        return Operand(lax.sqrt(self.array))

    def reduced(self, axis: int, by: Callable[..., Array] = lax.reduce_sum) -> Operand:
        """Returns a reduction along an axis, which remains."""
        at = (axis + self.ndim,)
        return Operand(lax.expand_dims(by(self.array, at), at))

    def reshape(self, *shape: int) -> Operand:
        return Operand(lax.reshape(self.array, shape))

    def full(self, value: complex) -> Operand:
        """Returns an array of this shape and type with one value."""
        return Operand(lax.full(self.shape, value, self.dtype))


def _operator(primitive: Callable[..., Array], swap: bool = False) -> Callable[..., Operand]:
    """Returns the method that binds a primitive to an operand and another one, or a number, which `swap` puts first."""

    def method(self: Operand, other: Operand | Number) -> Operand:
        operands = (self.array, array_of(other, self.dtype))
        return Operand(primitive(*(operands[::-1] if swap else operands)))

    return method


for name, primitive in {**_ARITHMETIC, **_LOGIC, **_COMPARISONS}.items():
    setattr(Operand, f"__{name}__", _operator(primitive))
for name, primitive in _ARITHMETIC.items():
    setattr(Operand, f"__r{name}__", _operator(primitive, swap=True))


def array_of(value: Operand | Number, dtype: DType) -> Array:
    """Returns the array of an operand, or a number as a scalar of a type."""
    return value.array if isinstance(value, Operand) else np.asarray(value, dtype)


def on_operands(rule: Callable[..., Values]) -> Callable[..., Values]:
    """Returns the rule on arrays; its results too."""

    def of_arrays(eqn: Eqn, *arrays: Array) -> Values:
        values = rule(eqn, *map(Operand, arrays))
        if values is None:
            return None
        return [None if v is None else v.array for v in values]

    return of_arrays


def block(a: Operand, rows: slice, columns: slice) -> Operand:
    """Returns a part of each matrix, without removing an axis."""
    top, bottom, _ = rows.indices(a.shape[-2])
    left, right, _ = columns.indices(a.shape[-1])
    starts = (*[0] * (a.ndim - 2), top, left)
    return Operand(lax.slice(a.array, starts, (*a.shape[:-2], bottom, right)))


def unstacked(a: Operand, axis: int) -> list[Operand]:
    """Returns the rows (axis -2) or columns (axis -1) of each matrix. One equation lowers sooner than a slice for each."""
    return split(a, (1,) * a.shape[axis], axis)


def split(a: Operand, sizes: Sequence[int], axis: int) -> list[Operand]:
    """Returns parts of some sizes, in rows (axis -2) or columns (axis -1)."""
    return [*map(Operand, lax.split(a.array, sizes, axis=a.ndim + axis))]


def concatenate(operands: Sequence[Operand], axis: int) -> Operand:
    return Operand(lax.concatenate([a.array for a in operands], operands[0].ndim + axis))


def transposed(a: Operand) -> Operand:
    return Operand(lax.transpose(a.array, (*range(a.ndim - 2), a.ndim - 1, a.ndim - 2)))


def indices(shape: Sequence[int], axis: int) -> Operand:
    """Returns the index of the row (axis -2) or column (axis -1) of each element."""
    return Operand(lax.broadcasted_iota(np.int32, shape, len(shape) + axis))


def row(a: Operand, k: Operand | Number) -> Operand:
    """Returns a row of each matrix, whose number is in range."""
    return _part(a, k, -2, (*a.shape[:-2], 1, a.shape[-1]))


def column(a: Operand, k: Operand | Number) -> Operand:
    """Returns a column of each matrix, whose number is in range."""
    return _part(a, k, -1, (*a.shape[:-1], 1))


def _part(
    a: Operand,
    k: Operand | Number,
    axis: int,
    shape: Sequence[int],
) -> Operand:
    starts = _starts(a, k, axis)
    return Operand(lax.dynamic_slice(a.array, starts, shape, allow_negative_indices=False))


def with_part(
    a: Operand,
    part: Operand,
    k: Operand | Number,
    axis: int = -2,
) -> Operand:
    """Returns the matrices with other rows (axis -2) or columns (axis -1) from one on, whose number is in range."""
    starts = _starts(a, k, axis)
    updated = lax.dynamic_update_slice(a.array, part.array, starts, allow_negative_indices=False)
    return Operand(updated)


def _starts(a: Operand, k: Operand | Number, axis: int) -> list[Any]:
    """Returns where a part begins along each axis."""
    starts = [np.int32(0)] * a.ndim
    starts[axis] = array_of(k, np.int32)
    return starts


def where(which: Operand, a: Operand | Number, b: Operand | Number) -> Operand:
    """Returns `jnp.where(which, a, b)`, of an operand and an operand or number."""
    dtype = (a if isinstance(a, Operand) else b).dtype
    arrays = (which.array, array_of(b, dtype), array_of(a, dtype))
    shape = np.broadcast_shapes(*(v.shape for v in arrays))
    return Operand(lax.select_n(*(broadcast(v, shape) for v in arrays)))


def broadcast(array: Array, shape: Sequence[int]) -> Array:
    """Returns `jnp.broadcast_to(array, shape)`."""
    if array.shape == shape:
        return array
    n = len(shape)
    return lax.broadcast_in_dim(array, shape, (*range(n - array.ndim, n),))


def repeated(
    times: int,
    body: Callable[[Operand, State], State],
    start: State,
) -> State:
    """Returns what a loop makes of `start`: `body` gets the number of an iteration and the state."""

    def iteration(state: tuple[Operand, State], _: None) -> tuple[tuple[Operand, State], None]:
        k, value = state
        return (k + 1, body(k, value)), None

    (_, last), _ = lax.scan(iteration, (Operand(np.int32(0)), start), None, times)
    return last
