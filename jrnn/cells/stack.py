"""Cells on top of each other, as one cell: each layer's output is the next one's input, within the same step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jrnn.builder import NetBuilder
from jrnn.cells.base import Cell, StateSpec, StepInputs
from jrnn.errors import NetError
from jrnn.recurrent import RecurrentState


@dataclass(frozen=True)
class StackedCell(Cell):
    """Layers as one cell, under the scopes `layer_0`, `layer_1`, ...

    Its states are those of all layers, and its output is that of the top layer.

    Attributes:
        cells: the layers, the lowest first.
        residual: the layers, from 1 on, whose input is added to their output. Their sizes must be equal.
    """

    cells: tuple[Cell, ...]
    residual: tuple[int, ...] = ()

    def __post_init__(self):
        for i in self.residual:
            if not 1 <= i < len(self.cells):
                raise NetError(f"residual layer {i} is not one of the layers 1 to {len(self.cells) - 1}")
            below, here = (c.states[c.output_index].size for c in self.cells[i - 1 : i + 1])
            if below != here:
                raise NetError(f"residual layer {i} has size {here}, the layer below {below}; they must be equal")

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return tuple(s.within(f"layer_{i}") for i, cell in enumerate(self.cells) for s in cell.states)

    def _first_state(self, layer: int) -> int:
        return sum(len(c.states) for c in self.cells[:layer])

    @property
    def _connected(self) -> tuple[int, ...]:
        """The layers whose outputs add up to the output of the top one."""
        lowest = len(self.cells) - 1
        while lowest in self.residual:
            lowest -= 1
        return tuple(range(lowest, len(self.cells)))

    @property
    def output_index(self) -> int:
        return self._first_state(len(self.cells) - 1) + self.cells[-1].output_index

    @property
    def recompute(self) -> tuple[str, ...]:
        return tuple(f"layer_{i}/{name}" for i, cell in enumerate(self.cells) for name in cell.recompute)

    def prepare_input(self, b: NetBuilder, x: str) -> str:
        return self.cells[0].prepare_input(b, x)

    def before_loop(self, b: NetBuilder, x: str) -> None:
        for i, cell in enumerate(self.cells):
            with b.scope(f"layer_{i}"):
                cell.before_loop(b, x)

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        new: list[str] = []
        below = ""  # the output of the layer below, which the first one lacks
        for i, cell in enumerate(self.cells):
            with b.scope(f"layer_{i}"):
                if below:
                    at = replace(at, input=cell.prepare_input(b, below), extra=())
                made = cell.step(b, at, previous[len(new) : len(new) + len(cell.states)])
                if i < len(self.cells) - 1:
                    output = cell.output(b, made)
                    if i in self.residual:
                        output = b.op("Sum", [output, below], f"residual_output_{i}")
                    below = output
            new += made
        return new

    def output(self, b: NetBuilder, new: Sequence[str]) -> str:
        outputs = []
        for i in self._connected:
            with b.scope(f"layer_{i}"):
                start = self._first_state(i)
                outputs.append(self.cells[i].output(b, new[start : start + len(self.cells[i].states)]))
        return outputs[0] if len(outputs) == 1 else b.op("Sum", outputs, "residual_output")

    def output_sequence(self, b: NetBuilder, states: Sequence[RecurrentState]) -> str:
        outputs = []
        for i in self._connected:
            with b.scope(f"layer_{i}"):
                start = self._first_state(i)
                outputs.append(self.cells[i].output_sequence(b, states[start : start + len(self.cells[i].states)]))
        return outputs[0] if len(outputs) == 1 else b.op("Sum", outputs, "residual_output_sequence")
