"""What a step consists of for the kernel: operations that compute views from views and constants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jrnn.loops.kernels.native.views import View


@dataclass(frozen=True)
class Uniform:
    """The same number in all places."""

    value: float
    shape: tuple[int, ...] = ()


NativeOperand = Any  # View | Uniform


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

    @property
    def is_elementwise(self) -> bool:
        return self.kind not in ("product", "reduce_sum", "reduce_max", "reduce_min", "move")

    @property
    def width(self) -> int:
        return math.prod(n for a, n in enumerate(self.out.shape) if a != self.axis)

    @property
    def views(self) -> list[View]:
        return [v for v in self.operands if isinstance(v, View)]
