"""Cells around cells: stacks of layers, dropout of outputs and of recurrent products, and zoneout of states.

Shapes: T time, N batch, H hidden. With is_test there is no noise; states then have their expected values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from jrnn.errors import NetError
from jrnn.nets.builder import NetBuilder
from jrnn.nets.cells.base import Cell, StateSpec, StepInputs
from jrnn.nets.ir import Ints, Names, Op
from jrnn.nets.recurrent_networks import RecurrentState

Value = TypeVar("Value")  # anything that each state of a cell has


@dataclass(frozen=True)
class StackedCell(Cell):
    """Layers as one cell, under the scopes `layer_0`, `layer_1`, ...

    Its states are the states of all layers, and its output is the output of the top layer.

    Attributes:
        cells: the layers, the lowest first.
        residual: the layers, from 1 on, whose input is added to their output. Their sizes must be equal.
    """

    cells: tuple[Cell, ...]
    residual: Ints = ()

    def __post_init__(self):
        for i in self.residual:
            if not 1 <= i < len(self.cells):
                raise NetError(
                    f"residual layer {i} is not one of the layers 1 to {len(self.cells) - 1}"
                )
            below, here = map(_output_size, self.cells[i - 1 : i + 1])
            if below != here:
                raise NetError(
                    f"residual layer {i} has size {here}, the layer below {below}; they must be equal"
                )

    @property
    def states(self) -> tuple[StateSpec, ...]:
        states = []
        for i, cell in enumerate(self.cells):
            for spec in cell.states:
                states.append(spec.within(f"layer_{i}"))
        return tuple(states)

    def _by_layer(self, values: Sequence[Value]) -> list[Sequence[Value]]:
        """Splits values of all states into the values of each layer."""
        layers = []
        first = 0
        for cell in self.cells:
            end = first + len(cell.states)
            layers.append(values[first:end])
            first = end
        return layers

    @property
    def output_index(self) -> int:
        top = self.cells[-1]
        return len(self.states) - len(top.states) + top.output_index

    @property
    def recompute(self) -> Names:
        names = []
        for i, cell in enumerate(self.cells):
            for name in cell.recompute:
                names.append(f"layer_{i}/{name}")
        return tuple(names)

    def prepare_input(self, b: NetBuilder, x: str) -> str:
        return self.cells[0].prepare_input(b, x)

    def before_loop(self, b: NetBuilder, x: str) -> None:
        for i, cell in enumerate(self.cells):
            with b.scope(f"layer_{i}"):
                cell.before_loop(b, x)

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        new: list[str] = []
        below = ""  # the output of the layer below, if there is one
        for i, (cell, before) in enumerate(zip(self.cells, self._by_layer(previous))):
            with b.scope(f"layer_{i}"):
                if below:
                    at = replace(at, input=cell.prepare_input(b, below), extra=())
                states = cell.step(b, at, before)
                if i < len(self.cells) - 1:
                    output = cell.output(b, states)
                    if i in self.residual:
                        output = b.op("Sum", [output, below], f"residual_output_{i}")
                    below = output
            new += states
        return new

    def output(self, b: NetBuilder, new: Sequence[str]) -> str:
        def of_step(cell: Cell, own: Sequence[str]) -> str:
            return cell.output(b, own)

        return self._output(b, new, of_step, "residual_output")

    def output_sequence(self, b: NetBuilder, states: Sequence[RecurrentState]) -> str:
        def of_sequence(cell: Cell, own: Sequence[RecurrentState]) -> str:
            return cell.output_sequence(b, own)

        return self._output(b, states, of_sequence, "residual_output_sequence")

    def _output(
        self,
        b: NetBuilder,
        states: Sequence[Value],
        output_of: Callable[[Cell, Sequence[Value]], str],
        name: str,
    ) -> str:
        """The output of the top layer, plus the outputs of layers below it that residual connections add."""
        lowest = len(self.cells) - 1
        while lowest in self.residual:
            lowest -= 1
        outputs = []
        by_layer = self._by_layer(states)
        for i in range(lowest, len(self.cells)):
            with b.scope(f"layer_{i}"):
                outputs.append(output_of(self.cells[i], by_layer[i]))
        return outputs[0] if len(outputs) == 1 else b.op("Sum", outputs, name)


def _output_size(cell: Cell) -> int:
    """The size of the state that is a cell's output."""
    return cell.states[cell.output_index].size


@dataclass(frozen=True)
class WrappedCell(Cell):
    """A cell that delegates to another one, `cell`; subclasses override what they change."""

    cell: Cell

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return self.cell.states

    @property
    def output_index(self) -> int:
        return self.cell.output_index

    @property
    def recompute(self) -> Names:
        return self.cell.recompute

    def prepare_input(self, b: NetBuilder, x: str) -> str:
        return self.cell.prepare_input(b, x)

    def before_loop(self, b: NetBuilder, x: str) -> None:
        self.cell.before_loop(b, x)

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        return self.cell.step(b, at, previous)

    def output(self, b: NetBuilder, new: Sequence[str]) -> str:
        return self.cell.output(b, new)

    def output_sequence(self, b: NetBuilder, states: Sequence[RecurrentState]) -> str:
        return self.cell.output_sequence(b, states)


@dataclass(frozen=True)
class DropoutCell(WrappedCell):
    """Drops each element of the output with probability `ratio`, independently at every step. States do not change.

    A layer above reads the step's output after dropout. As in Caffe2, the output over time has another dropout outside of
    the loop.
    """

    ratio: float
    is_test: bool = False

    def output(self, b: NetBuilder, new: Sequence[str]) -> str:
        return self._dropout(b, self.cell.output(b, new))

    def output_sequence(self, b: NetBuilder, states: Sequence[RecurrentState]) -> str:
        return self._dropout(b, self.cell.output_sequence(b, states))

    def _dropout(self, b: NetBuilder, blob: str) -> str:
        names = [blob + "_dropped", blob + "_dropped_mask"]
        b.add(Op.of("Dropout", [blob], names, ratio=self.ratio, is_test=int(self.is_test)))
        return names[0]


@dataclass(frozen=True)
class RecurrentDropoutCell(WrappedCell):
    """Drops units of the hidden state in the recurrent products, the same units at every step.

    Source: Gal and Ghahramani, A Theoretically Grounded Application of Dropout in Recurrent Neural Networks, 2016.
    """

    ratio: float
    is_test: bool = False

    def before_loop(self, b: NetBuilder, x: str) -> None:
        super().before_loop(b, x)
        if self.is_test:
            return
        size = _output_size(self)
        input_shape = b.op("Shape", [x], "input_shape")
        batch = b.op("Slice", [input_shape], "batch_size", starts=[1], ends=[2])
        one = b.op("GivenTensorInt64Fill", [], "one_step", shape=[1], values=[1])
        hidden = b.op("GivenTensorInt64Fill", [], "hidden_size", shape=[1], values=[size])
        names = ["recurrent_mask_shape", "recurrent_mask_parts"]
        shape, _ = b.op("Concat", [one, batch, hidden], names, axis=0)
        ones = b.op("ConstantFill", [shape], "recurrent_ones", value=1.0, input_as_shape=1)
        b.op("Dropout", [ones], ["recurrent_mask", "recurrent_kept"], ratio=self.ratio, is_test=0)

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        if not self.is_test:
            mask = b.op("StopGradient", [b.scoped("recurrent_mask")], "recurrent_mask_t")
            at = replace(at, recurrent_mask=mask)
        return self.cell.step(b, at, previous)


@dataclass(frozen=True)
class ZoneoutCell(WrappedCell):
    """Keeps the old value of a unit with the probability in `ratios` for its state, independently at every step.

    Source: Krueger et al., Zoneout: Regularizing RNNs by Randomly Preserving Hidden Activations, 2017.
    """

    ratios: tuple[float, ...]
    is_test: bool = False

    def __post_init__(self):
        if len(self.ratios) != len(self.cell.states):
            names = ", ".join(spec.new for spec in self.cell.states)
            raise NetError(
                f"zoneout needs one ratio for each state ({names}), was given {list(self.ratios)}"
            )
        if getattr(getattr(self.cell, "options", None), "drop_states", False):
            raise NetError(
                "zoneout keeps what drop_states drops; build its inner cell with drop_states=False"
            )

    @property
    def states(self) -> tuple[StateSpec, ...]:
        states = []
        for spec, ratio in zip(self.cell.states, self.ratios):
            if ratio:
                spec = replace(spec, new=spec.new + "_zoneout")
            states.append(spec)
        return tuple(states)

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        states = self.cell.step(b, at, previous)
        for k, ratio in enumerate(self.ratios):
            if ratio:
                states[k] = self._zoneout(b, previous[k], states[k], ratio)
        return states

    def _zoneout(self, b: NetBuilder, before: str, new: str, ratio: float) -> str:
        """before + m (new - before), where m is 0 with probability `ratio`, else 1; with is_test, its expectation."""

        def named(suffix: str) -> str:
            return f"{new}_zoneout{suffix}"

        b.add(Op.of("Sub", [new, before], [named("_change")]))
        names = [named("_change_scaled"), named("_mask")]
        b.add(Op.of("Dropout", [named("_change")], names, ratio=ratio, is_test=int(self.is_test)))
        b.add(Op.of("Scale", [names[0]], [named("_step")], scale=1 - ratio))
        b.add(Op.of("Add", [before, named("_step")], [named("")]))
        return named("")
