"""Values of a step as views of arrays in memory, of which one axis holds the rows.

A kernel computes rows apart: a row of a result depends on the same row of what the step reads, and on constants. An array
that XLA gives, a constant or an input of a step, has strides, and any of its axes may be read as rows. What the kernel
computes is stored row after row, and its rows are the axis `row` of its views, or None if all rows hold the same value.

Shapes: N rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jrnn.jaxprs.axes import blocks
from jrnn.loops.ir import Unsupported

Dims = tuple[tuple[int, int], ...]  # size and stride in elements


@dataclass(eq=False)
class Array:
    """An array that a kernel reads or writes.

    Attributes:
        width: elements of a row, or of the whole array if it is an argument.
        argument: the number of an argument or a result of the call; or None for scratch memory.
        stacked: the elements of one step, if it holds all steps, or 0.
        dtype: "float", "bool" or "bfloat16".
        parent: the array that this one is a part of, and where it begins in a row.
        in_rows: it is stored row after row.
    """

    width: int
    argument: int | None = None
    stacked: int = 0
    dtype: str = "float"
    parent: tuple[Array, int] | None = None
    in_rows: bool = True

    @property
    def chain(self) -> tuple[Array, ...]:
        """The array, what it is a part of, and so on."""
        return (self, *(self.parent[0].chain if self.parent else ()))

    @property
    def root(self) -> tuple[Array, int]:
        """The last of `chain`, and where this array begins in its rows."""
        if self.parent is None:
            return self, 0
        array, start = self.parent[0].root
        return array, start + self.parent[1]


@dataclass(frozen=True)
class View:
    """A value: an array, where it begins, and its axes. The stride of the rows is 0 where `array.in_rows`."""

    array: Array
    dims: Dims
    offset: int = 0
    row: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it holds all elements of a row of the array, in their order."""
        inner = collapsed([d for a, d in enumerate(self.dims) if a != self.row])
        return (
            self.array.in_rows and self.offset == 0 and inner == collapsed([(self.array.width, 1)])
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n for n, _ in self.dims)

    def transposed(self, order: Sequence[int]) -> View:
        row = None if self.row is None else list(order).index(self.row)
        return replace(self, dims=tuple(self.dims[a] for a in order), row=row)

    def sliced(self, starts: Sequence[int], ends: Sequence[int], steps: Sequence[int]) -> View:
        if self.row is not None and (starts[self.row], ends[self.row]) != (
            0,
            self.dims[self.row][0],
        ):
            raise Unsupported("a slice takes some rows of a value")
        dims = tuple(
            (-(-(b - a) // s), stride * s)
            for (_, stride), a, b, s in zip(self.dims, starts, ends, steps)
        )
        return replace(
            self, dims=dims, offset=self.offset + sum(a * d[1] for a, d in zip(starts, self.dims))
        )

    def broadcast(self, shape: Sequence[int], axes: Sequence[int]) -> View:
        dims = [(n, 0) for n in shape]
        row = self.row
        for axis, (n, stride) in zip(axes, self.dims):
            if n == shape[axis]:
                dims[axis] = (n, stride)
        return replace(self, dims=tuple(dims), row=None if row is None else axes[row])

    def reshaped(self, shape: Sequence[int]) -> View:
        """Returns the view with other axes.

        Raises:
            Unsupported: if rows would be joined, or elements would have to move.
        """
        groups = blocks(self.shape, shape)
        dims: list[tuple[int, int]] = []
        row = None
        for old, new in groups:
            if self.row is not None and self.row in old:
                long = [a for a in old if self.dims[a][0] != 1 or a == self.row]
                row_axes = [a for a in new if shape[a] == self.dims[self.row][0]]
                if len(long) != 1 or not row_axes:
                    raise Unsupported("a reshape joins rows with another axis")
                row = row_axes[0]
                dims += [self.dims[self.row] if a == row else (1, 0) for a in new]
                continue
            joined = collapsed([self.dims[a] for a in old])
            if len(joined) > 1:
                raise Unsupported("a reshape moves elements")
            stride = joined[0][1] if joined else 0
            part = []
            for a in reversed(list(new)):
                part.append((shape[a], stride))
                stride *= shape[a]
            dims += part[::-1]
        return replace(self, dims=tuple(dims), row=row)

    def by_rows(self, axis: int | None, rows: int) -> tuple[int, Dims]:
        """Returns the stride between rows and the axes of a row, where the axis `axis` of the view holds the rows."""
        inner = tuple(d for a, d in enumerate(self.dims) if a != axis)
        if self.array.in_rows:
            if self.row != axis and (
                self.row is not None or (self.dims[axis][0] > 1 and self.dims[axis][1])
            ):
                raise Unsupported("two values of the step have their rows in different axes")
            return self.array.root[0].width, inner
        return (0 if axis is None or self.dims[axis][0] != rows else self.dims[axis][1]), inner


def collapsed(dims: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins axes that are neighbors in memory, and drops those of size 1.

    >>> collapsed([(2, 12), (1, 0), (3, 4), (4, 1)])
    [(24, 1)]
    """
    merged: list[tuple[int, int]] = []
    for n, stride in dims:
        if n == 1:
            continue
        if merged and merged[-1][1] == n * stride:
            merged[-1] = (merged[-1][0] * n, stride)
        else:
            merged.append((n, stride))
    return merged


def dense(shape: Sequence[int]) -> Dims:
    """Returns the axes of an array without gaps.

    >>> dense((2, 3))
    ((2, 3), (3, 1))
    """
    return tuple((n, math.prod(shape[a + 1 :])) for a, n in enumerate(shape))
