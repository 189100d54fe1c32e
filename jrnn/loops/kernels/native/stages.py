"""The order in which a kernel runs the operations of a step: stages.

A stage is one product, reduction or move, or as much elementwise work on rows of one width as is ready. Products come first,
so that the elementwise stages are few and large.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from jrnn.loops.kernels.native.operations import Operation
from jrnn.loops.kernels.native.views import Array, View, collapsed


def fuse_additions(operations: Sequence[Operation]) -> list[Operation]:
    """Returns the operations, where a product that is only added to another value starts from that value."""
    uses: Counter[Array] = Counter(a for o in operations for v in o.views for a in (v.array,))
    writers = _writers(operations)
    dropped: set[Operation] = set()

    def product_of(view: View) -> Operation | None:
        """Returns the product that computes all of a value, if the value is read once."""
        makers = [o for o in writers[view.array] if o not in dropped]
        if (
            len(makers) != 1
            or makers[0].kind != "product"
            or uses[view.array] != 1
            or view.array.parent is not None
        ):
            return None
        return makers[0] if makers[0].out.is_whole and view.is_whole else None

    def start_from(product: Operation, value: View, axis: int | None, rows: int) -> bool:
        if len(product.operands) == 1:
            inner = collapsed(value.by_rows(axis, rows)[1])
            if value.array.dtype != "float" or inner != collapsed([(product.width, 1)]):
                return False
            first = [d for a, d in enumerate(value.dims) if a == axis]
            product.operands.append(
                View(value.array, (*first, (product.width, 1)), value.offset, _first(value, axis))
            )
            return True
        before = product_of(product.operands[1])
        return before is not None and start_from(before, value, axis, rows)

    for operation in operations:
        if operation.kind != "add" or len(operation.views) != 2:
            continue
        for value, other in (operation.views[::-1], operation.views):
            product = product_of(value)
            axis = operation.axis
            rows = operation.out.shape[axis] if axis is not None else 1
            if (
                product is None
                or value.array is other.array
                or value.row != axis
                or (product.axis is None) != (axis is None)
            ):
                continue
            if start_from(product, other, axis, rows):
                writers[operation.out.array] = [product]
                row = () if axis is None else (operation.out.dims[axis],)
                product.out = View(operation.out.array, (*row, (product.width, 1)), 0, product.axis)
                dropped.add(operation)
                break
    return [o for o in operations if o not in dropped]


def _first(view: View, axis: int | None) -> int | None:
    return 0 if view.row is not None and view.row == axis else None


def _writers(operations: Sequence[Operation]) -> dict[Array, list[Operation]]:
    """Returns the operations that write each array, or a part of it."""
    writers: dict[Array, list[Operation]] = defaultdict(list)
    for operation in operations:
        for array in operation.out.array.chain:
            writers[array].append(operation)
    return writers


def schedule(operations: Sequence[Operation], carries: Collection[Array]) -> list[list[Operation]]:
    """Returns the operations of each stage. The carries are written after all that reads them."""
    carries = set(carries)
    writers = _writers(operations)
    readers: dict[Array, list[Operation]] = defaultdict(list)
    for operation in operations:
        for view in operation.views:
            readers[view.array].append(operation)
    before: dict[
        Operation, list[tuple[Operation, bool]]
    ] = {}  # with whether one stage may hold both
    for operation in operations:
        needs: list[tuple[Operation, bool]] = []
        for view in operation.views:
            if view.array not in carries:
                for o in writers[view.array]:
                    needs.append(
                        (o, view.is_whole and o.out.array is view.array and o.out.is_whole)
                    )
        if operation.out.array in carries:
            for reader in readers[operation.out.array]:
                read = [v for v in reader.views if v.array is operation.out.array]
                needs += [
                    (reader, v.is_whole and operation.out.is_whole)
                    for v in read
                    if reader is not operation
                ]
        before[operation] = needs
    return _Waiting(operations, before).stages()


class _Waiting:
    """Operations, with how many of those that each needs are not done.

    An operation is looked at when something that it needs is done, and not for each stage again.
    """

    def __init__(
        self, operations: Sequence[Operation], before: dict[Operation, list[tuple[Operation, bool]]]
    ):
        self._position = {operation: i for i, operation in enumerate(operations)}
        self._missing = {operation: len(before[operation]) for operation in operations}
        self._after: dict[Operation, list[tuple[Operation, bool]]] = defaultdict(list)
        for operation in operations:
            for needed, together in before[operation]:
                self._after[needed].append((operation, together))
        self._calls: list[tuple[int, Operation]] = []  # that are ready; heaps, by position
        self._elementwise: dict[int, list[tuple[int, Operation]]] = defaultdict(list)  # by width
        for operation in operations:
            if not self._missing[operation]:
                self._add_ready(operation)

    def _add_ready(self, operation: Operation) -> None:
        ready = self._elementwise[operation.width] if operation.is_elementwise else self._calls
        heapq.heappush(ready, (self._position[operation], operation))

    def stages(self) -> list[list[Operation]]:
        stages = []
        count = 0
        while count < len(self._position):
            stage = self._next_stage()
            stages.append(stage)
            together = set(stage)
            count += len(stage)
            for operation in stage:
                for later, _ in self._after[operation]:
                    self._missing[later] -= 1
                    if not self._missing[later] and later not in together:
                        self._add_ready(later)
        return stages

    def _next_stage(self) -> list[Operation]:
        if self._calls:
            return [heapq.heappop(self._calls)[1]]
        ready = min(filter(None, self._elementwise.values()), default=None)
        assert ready is not None, "operations wait for each other"
        return self._elementwise_stage(ready)

    def _elementwise_stage(self, ready: list[tuple[int, Operation]]) -> list[Operation]:
        """Returns the operations of one width that are ready, and those that follow from them at the same positions.

        What an operation of this stage computes or reads is available only at the same positions.
        """
        width = ready[0][1].width
        stage = []
        in_stage: Counter[Operation] = Counter()  # how many that one needs are in this stage
        while ready:
            at, operation = heapq.heappop(ready)
            stage.append(operation)
            for later, together in self._after[operation]:
                if not together or not later.is_elementwise or later.width != width:
                    continue
                in_stage[later] += 1
                if in_stage[later] == self._missing[later] and self._position[later] > at:
                    heapq.heappush(ready, (self._position[later], later))
        return stage
