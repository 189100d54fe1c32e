"""What a step consists of for the kernel: operations on views of arrays, where one axis holds the rows.

A kernel computes rows apart: a row of a result depends on the same row of what the step reads, and on constants. An array
that XLA gives, a constant or an input of a step, has strides, and any of its axes may be read as rows. What the kernel
computes is stored row after row, and its rows are the axis `row` of its views, or None if all rows hold the same value.

Shapes: N rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
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
        """The array, the array that it is a part of, and so on."""
        chain = [self]
        while chain[-1].parent is not None:
            chain.append(chain[-1].parent[0])
        return tuple(chain)

    @property
    def root(self) -> tuple[Array, int]:
        """The last array of `chain`, and where this one begins in its rows."""
        array = self
        start = 0
        while array.parent is not None:
            array, offset = array.parent
            start += offset
        return array, start

    @property
    def is_scratch(self) -> bool:
        """Whether it is neither an argument nor a part of another array."""
        return self.argument is None and self.parent is None


@dataclass(frozen=True)
class View:
    """A value: an array, where it begins, and its axes. The stride of the rows is 0 where `array.in_rows`."""

    array: Array
    dims: Dims
    offset: int = 0
    row: int | None = None

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether it holds all elements of a row of the array, in their order."""
        if not self.array.in_rows or self.offset:
            return False
        inner = without(self.dims, self.row)
        return has_stride(inner, 1) and elements_of(inner) == self.array.width

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple([n for n, _ in self.dims])

    def axes(self, axes: Iterable[int]) -> Dims:
        """Returns the size and the stride of some axes."""
        return tuple([self.dims[a] for a in axes])

    def transposed(self, order: Sequence[int]) -> View:
        row = None if self.row is None else list(order).index(self.row)
        return replace(self, dims=self.axes(order), row=row)

    def sliced(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        steps: Sequence[int],
    ) -> View:
        dims = []
        offset = self.offset
        for axis, (start, end, step) in enumerate(zip(starts, ends, steps)):
            size, stride = self.dims[axis]
            if axis == self.row and (start, end) != (0, size):
                raise Unsupported("a slice takes some rows of a value")
            dims.append((-(-(end - start) // step), stride * step))
            offset += start * stride
        return replace(self, dims=tuple(dims), offset=offset)

    def broadcast(self, shape: Sequence[int], axes: Sequence[int]) -> View:
        dims = [(n, 0) for n in shape]
        row = self.row
        for axis, (n, stride) in zip(axes, self.dims):
            if n == shape[axis]:
                dims[axis] = (n, stride)
        return replace(self, dims=tuple(dims), row=None if row is None else axes[row])

    def reshaped(self, shape: Sequence[int]) -> View:
        """Returns the view with other axes; raises `Unsupported` where rows are joined or elements have to move."""
        dims: list[tuple[int, int]] = []
        row = None
        for old, new in blocks(self.shape, shape):
            if self.row is not None and self.row in old:
                row = self._row_after_reshape(old, new, shape)
                dims += [self.dims[self.row] if a == row else (1, 0) for a in new]
            else:
                joined = collapsed(self.axes(old))
                if len(joined) > 1:
                    raise Unsupported("a reshape moves elements")
                stride = joined[0][1] if joined else 0
                dims += dense([shape[a] for a in new], stride)
        return replace(self, dims=tuple(dims), row=row)

    def as_rows(
        self,
        axis: int | None,
        width: int,
        row: int | None,
        offset: int = 0,
    ) -> View:
        """Returns a view of `width` elements of each row, where the axis `axis` of this one holds the rows."""
        rows = () if axis is None else (self.dims[axis],)
        return View(self.array, (*rows, (width, 1)), offset, row)

    def start_at(self, indices: Iterable[int], axes: Iterable[int]) -> int:
        """Returns where the elements at some indices of some axes begin."""
        return self.offset + sum([i * self.dims[a][1] for i, a in zip(indices, axes)])

    def _row_after_reshape(
        self,
        old: Sequence[int],
        new: Sequence[int],
        shape: Sequence[int],
    ) -> int:
        """Returns the axis among `new` that the axis of the rows, one of `old`, becomes."""
        assert self.row is not None
        others = [a for a in old if a != self.row and self.dims[a][0] != 1]
        candidates = [a for a in new if shape[a] == self.dims[self.row][0]]
        if others or not candidates:
            raise Unsupported("a reshape joins rows with another axis")
        return candidates[0]

    def inner(self, axis: int | None) -> Dims:
        """Returns the axes of a row, where the axis `axis` of the view holds the rows."""
        if self.array.in_rows and self.row != axis:
            size, stride = (1, 0) if axis is None else self.dims[axis]
            if self.row is not None or (size > 1 and stride):
                raise Unsupported("two values of the step have their rows in different axes")
        return without(self.dims, axis)

    def row_stride(self, axis: int | None, rows: int) -> int:
        """Returns the stride between rows, where the axis `axis` of the view holds the rows."""
        self.inner(axis)  # raises Unsupported for rows in another axis
        if self.array.in_rows:
            return self.array.root[0].width
        size, stride = (1, 0) if axis is None else self.dims[axis]
        return stride if size == rows else 0


def without(dims: Dims, axis: int | None) -> Dims:
    """Returns the axes of a row: all but the one that holds the rows."""
    return dims if axis is None else dims[:axis] + dims[axis + 1 :]


def collapsed(dims: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins axes that are neighbors in memory, and drops axes of size 1.

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


def has_stride(dims: Sequence[tuple[int, int]], *strides: int) -> bool:
    """Returns True if axes are as one, with one of some strides."""
    joined = collapsed(dims)
    return not joined or (len(joined) == 1 and joined[0][1] in strides)


def dense(shape: Sequence[int], stride: int = 1) -> Dims:
    """Returns axes without gaps between them, where the last one has a stride.

    >>> dense((2, 3))
    ((2, 3), (3, 1))
    """
    dims = []
    for n in reversed(shape):
        dims.append((n, stride))
        stride *= n
    return tuple(reversed(dims))


@dataclass(frozen=True)
class Uniform:
    """The same number in all places."""

    value: float
    shape: tuple[int, ...] = ()


NativeOperand = View | Uniform


@dataclass(eq=False)
class Operation:
    """Computes `out` from `operands`, for each row.

    Attributes:
        kind: an elementwise operation of `elements.h`, "product", "reduce_sum", "reduce_max", "reduce_min" or "move".
        out: the result.
        operands: the operands; of a product the rows, and what is added to the result, if there is something.
        axis: the axis of `out` that holds the rows, or None.
        matrix: of a product: a constant, [depth, width].
    """

    kind: str
    out: View
    operands: list[NativeOperand]
    axis: int | None
    matrix: View | None = None

    @functools.cached_property
    def is_elementwise(self) -> bool:
        return self.kind not in ("product", "reduce_sum", "reduce_max", "reduce_min", "move")

    @functools.cached_property
    def width(self) -> int:
        """The elements of a row of the result, wherever that is written."""
        return elements_of(without(self.out.dims, self.axis))

    @property
    def views(self) -> list[View]:
        return [v for v in self.operands if isinstance(v, View)]

    @property
    def depth(self) -> int:
        """Of a product: the elements that it adds up."""
        assert self.matrix is not None
        return self.matrix.dims[0][0]


def elements_of(dims: Iterable[tuple[int, int]]) -> int:
    """Returns the number of elements of axes."""
    count = 1
    for n, _ in dims:  # a loop, and no generator: asked very often
        count *= n
    return count
