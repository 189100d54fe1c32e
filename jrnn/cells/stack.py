"""Cells on top of each other, as one cell: each layer's output is the next one's input, within the same step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..builder import NetBuilder
from .base import Cell, StateSpec, StepInputs


@dataclass(frozen=True)
class StackedCell:
    """Layers under the scopes `layer_0`, `layer_1`, ...; the states of all of them in turn, the top one's is the output."""

    cells: tuple[Cell, ...]

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return tuple(
            replace(s, **{k: f"layer_{i}/{getattr(s, k)}" for k in ("previous", "new", "initial")})
            for i, cell in enumerate(self.cells)
            for s in cell.states
        )

    @property
    def output_index(self) -> int:
        return sum(len(c.states) for c in self.cells[:-1]) + self.cells[-1].output_index

    @property
    def recompute(self) -> tuple[str, ...]:
        return tuple(f"layer_{i}/{name}" for i, cell in enumerate(self.cells) for name in cell.recompute)

    def prepare_input(self, b: NetBuilder, x: str) -> str:
        return self.cells[0].prepare_input(b, x)

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        new: list[str] = []
        for i, cell in enumerate(self.cells):
            with b.scope(f"layer_{i}"):
                if i:
                    at = at.with_input(cell.prepare_input(b, at.input))
                made = cell.step(b, at, previous[len(new) : len(new) + len(cell.states)])
            at = at.with_input(made[cell.output_index])
            new += made
        return new
