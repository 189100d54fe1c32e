"""The order in which a kernel runs the operations of a step: stages.

A stage is one product, reduction or move, or as much elementwise work on rows of one width as is ready. Each stage passes
over all rows, and reads and writes memory; inside an elementwise stage values stay in registers. So stages should be few
and large. Products come first, because more elementwise work is ready after them.

    h ──► product ─► + ─► tanh ─► *          stages: product, [+ tanh]
    x ──► product ─┘        s ────┘

This is list scheduling (Graham, "Bounds on multiprocessing timing anomalies", 1969): an operation whose operands are there
waits in a queue, ordered by its position in the step. Two operations share a stage only if the later one reads what the
earlier one wrote at the same positions: a row is complete only at the end of its stage.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jrnn.loops.kernels.native.operations import Array, Operation, View, elements_of, has_stride

# Products that start from another value --------------------------------------------------------------


def fuse_additions(operations: Sequence[Operation]) -> list[Operation]:
    """Returns the operations, where a product that is only added to another value starts from that value."""
    return _Additions(operations).fused(operations)


class _Additions:
    """Turns `a @ w + b` into a product that accumulates on b."""

    def __init__(self, operations: Sequence[Operation]):
        self._writers = _writers(operations)
        self._reads: Counter[Array] = Counter()
        self._dropped: set[Operation] = set()
        for operation in operations:
            self._reads.update([view.array for view in operation.views])

    def fused(self, operations: Sequence[Operation]) -> list[Operation]:
        for operation in operations:
            views = operation.views if operation.kind == "add" else []
            if len(views) == 2:
                first, second = views
                if not self._fuse(operation, second, first):
                    self._fuse(operation, first, second)
        return [o for o in operations if o not in self._dropped]

    def _fuse(
        self,
        addition: Operation,
        value: View,
        other: View,
    ) -> bool:
        """Drops an addition if `value` is a product that can start from `other`. Returns whether it did."""
        product = self._product_of(value)
        axis = addition.axis
        if product is None or (product.axis is None) != (axis is None):
            return False
        if value.array is other.array or value.row != axis:
            return False
        if not self._start_from(product, other, axis):
            return False

        self._writers[addition.out.array] = [product]
        product.out = addition.out.as_rows(axis, product.width, product.axis)
        self._dropped.add(addition)
        return True

    def _product_of(self, view: View) -> Operation | None:
        """Returns the product that computes all of a value, if the value is read once."""
        array = view.array
        makers = [o for o in self._writers[array] if o not in self._dropped]
        if len(makers) != 1 or self._reads[array] != 1 or array.parent is not None:
            return None
        is_all = makers[0].kind == "product" and makers[0].out.is_whole and view.is_whole
        return makers[0] if is_all else None

    def _start_from(
        self,
        product: Operation,
        value: View,
        axis: int | None,
    ) -> bool:
        """Makes a value what a product, or the product that it starts from, starts from. Returns whether it can."""
        if len(product.operands) > 1:
            before = self._product_of(product.operands[1])
            return before is not None and self._start_from(before, value, axis)

        inner = value.inner(axis)
        is_row = has_stride(inner, 1) and elements_of(inner) == product.width
        if value.array.dtype != "float" or not is_row:
            return False
        row = 0 if value.row is not None and value.row == axis else None
        product.operands.append(value.as_rows(axis, product.width, row, value.offset))
        return True


def _writers(operations: Sequence[Operation]) -> dict[Array, list[Operation]]:
    """Returns the operations that write each array, or a part of it."""
    writers: dict[Array, list[Operation]] = defaultdict(list)
    for operation in operations:
        for array in operation.out.array.chain:
            writers[array].append(operation)
    return writers


# Stages ----------------------------------------------------------------------------------------------


class _Follower(NamedTuple):
    """An operation that waits for another one, and whether one stage may hold both."""

    operation: Operation
    may_share: bool


def schedule(operations: Sequence[Operation], carries: Collection[Array]) -> list[list[Operation]]:
    """Returns the operations of each stage. The carries are written after all that reads them."""
    return _Scheduler(operations, carries).stages()


class _Scheduler:
    """Operations, with the number of operations that each waits for.

    An operation is looked at when something that it needs is done, and not for each stage again.
    """

    def __init__(self, operations: Sequence[Operation], carries: Collection[Array]):
        self._position = {operation: i for i, operation in enumerate(operations)}
        self._missing: Counter[Operation] = Counter()
        self._followers: dict[Operation, list[_Follower]] = defaultdict(list)
        writers = _writers(operations)
        readers: dict[Array, list[tuple[Operation, View]]] = defaultdict(list)
        for operation in operations:
            for view in operation.views:
                readers[view.array].append((operation, view))

        # An operation reads what others write, except carries: it reads their old values.
        for array, reading in readers.items():
            for operation, view in reading if array not in carries else ():
                for writer in writers[array]:
                    is_same = writer.out.array is array and writer.out.is_whole
                    self._follow(operation, writer, view.is_whole and is_same)
        # It overwrites a carry after all others have read the old value.
        for operation in operations:
            out = operation.out
            for reader, view in readers[out.array] if out.array in carries else ():
                if reader is not operation:
                    self._follow(operation, reader, view.is_whole and out.is_whole)

        # Heaps of the operations that are ready, by position.
        self._calls: list[tuple[int, Operation]] = []
        self._elementwise: dict[int, list[tuple[int, Operation]]] = defaultdict(list)  # by width
        for operation in operations:
            if not self._missing[operation]:
                self._add_ready(operation)

    def _follow(self, later: Operation, earlier: Operation, may_share: bool) -> None:
        """Makes an operation wait for another one."""
        self._missing[later] += 1
        self._followers[earlier].append(_Follower(later, may_share))

    def _add_ready(self, operation: Operation) -> None:
        ready = self._elementwise[operation.width] if operation.is_elementwise else self._calls
        heapq.heappush(ready, (self._position[operation], operation))

    def stages(self) -> list[list[Operation]]:
        stages = []
        count = 0
        while count < len(self._position):
            stage = self._next_stage()
            stages.append(stage)
            count += len(stage)
            in_stage = set(stage)
            for operation in stage:
                for later, _ in self._followers[operation]:
                    self._missing[later] -= 1
                    if not self._missing[later] and later not in in_stage:
                        self._add_ready(later)
        return stages

    def _next_stage(self) -> list[Operation]:
        if self._calls:
            return [heapq.heappop(self._calls)[1]]
        ready = min(filter(None, self._elementwise.values()), default=None)
        assert ready is not None, "operations wait for each other"
        return self._elementwise_stage(ready)

    def _elementwise_stage(self, ready: list[tuple[int, Operation]]) -> list[Operation]:
        """Returns the ready operations of one width, and the operations that follow from them at the same positions.

        What an operation of this stage computes or reads is available only at the same positions.
        """
        width = ready[0][1].width
        stage = []
        done_here: Counter[Operation] = Counter()  # what each waits for, and this stage does
        while ready:
            position, operation = heapq.heappop(ready)
            stage.append(operation)
            for later, may_share in self._followers[operation]:
                if not may_share or not later.is_elementwise or later.width != width:
                    continue
                done_here[later] += 1
                is_ready = done_here[later] == self._missing[later]
                if is_ready and self._position[later] > position:
                    heapq.heappush(ready, (self._position[later], later))
        return stage
