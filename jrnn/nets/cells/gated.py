"""Cells whose gates begin with one product of the input, with the parameters `i2h_w` [G H, D] and `i2h_b` [G H]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jrnn.nets.builder import NetBuilder
from jrnn.nets.cells.base import Cell, StateSpec, fully_connected
from jrnn.nets.cells.cell_options import LayerOptions
from jrnn.nets.ir import Names


@dataclass(frozen=True)
class GatedCell(Cell):
    """A cell of G gates.

    Attributes:
        rows: the gates in the rows of `i2h_w`.
        recomputed: the blobs that `memory_optimization` computes again.
    """

    input_size: int
    hidden_size: int
    options: LayerOptions

    rows: ClassVar[Names]
    recomputed: ClassVar[Names]

    @property
    def recompute(self) -> Names:
        return self.recomputed if self.options.memory_optimization else ()

    def prepare_input(self, b: NetBuilder, x: str) -> str:
        size = len(self.rows) * self.hidden_size
        return fully_connected(b, x, "i2h", self.input_size, size)


@dataclass(frozen=True)
class HiddenCell(GatedCell):
    """A cell whose only state is the hidden one."""

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (StateSpec("hidden_t_prev", "hidden_t", "initial_hidden_state", self.hidden_size),)
