"""What a cell is, and how it is run over a sequence.

Shapes: T time, N batch, D input, H hidden. A cell describes one step as operators of a step net; `run_cell` puts the input
projection before the loop, builds the step net, and appends the recurrent network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..builder import NetBuilder
from ..errors import NetError
from ..recurrent import RecurrentState, recurrent_net


@dataclass(frozen=True)
class StateSpec:
    """One state of a cell: the blobs of its previous and its new value, its learned first value, and its size."""

    previous: str
    new: str
    initial: str
    size: int


@dataclass(frozen=True)
class StepInputs:
    """Blobs that every step may read: the prepared input [1, N, ...], lengths int32 [N] or None, timestep int32 [1]."""

    input: str
    lengths: str | None
    timestep: str

    def with_input(self, input: str) -> StepInputs:
        return StepInputs(input, self.lengths, self.timestep)


class Cell(Protocol):
    """One step of a recurrent network. Names are relative to the builder's scope."""

    @property
    def states(self) -> tuple[StateSpec, ...]: ...

    @property
    def output_index(self) -> int:
        """Which state is the cell's output."""
        ...

    @property
    def recompute(self) -> tuple[str, ...]:
        """Blobs of the step that the backward pass computes again."""
        ...

    def prepare_input(self, b: NetBuilder, x: str) -> str:
        """What depends on the input alone, on the whole sequence or on one step: [T, N, D] -> [T, N, ...]."""
        ...

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        """Appends one step to a step net, from the blobs of the previous states to those of the new ones."""
        ...


@dataclass(frozen=True)
class RunOptions:
    """How a cell is run: see `recurrent_net`. mask_padding: put zeros into the input after the end of each sequence first.

    What padding holds never shows in the outputs, but without the mask a NaN there makes NaNs of the gradients of the input
    projection (0 x NaN), as in Caffe2.
    """

    outputs_with_grads: tuple[int, ...] | None = None
    forward_only: bool = False
    mask_padding: bool = True


def run_cell(
    cell: Cell,
    b: NetBuilder,
    x: str,
    lengths: str | None,
    initial_states: Sequence[str] | None,
    *,
    scope: str,
    options: RunOptions,
) -> list[RecurrentState]:
    """Runs a cell over the sequence `x` [T, N, D] and returns its states in the order of `cell.states`.

    Args:
        initial_states: a blob for each state, [H], [N, H] or [1, N, H]; None for learned ones, parameters [H] that
            start at zero.
        scope: the name under which all blobs and parameters stand.
        options: by default only the cell's own output, over all steps, passes gradients on.

    Raises:
        NetError: for another number of initial states than the cell has.
    """
    input_t, timestep = b.scoped("input_t"), b.scoped("timestep")
    specs = cell.states
    with b.scope(scope):
        if initial_states is None:
            initial_states = [b.param(s.initial, [s.size], "ConstantFill", value=0.0) for s in specs]
        if len(initial_states) != len(specs):
            raise NetError(
                f"cell {scope!r} has {len(specs)} states ({', '.join(s.previous for s in specs)}), was given "
                f"{len(initial_states)} initial ones: {list(initial_states)}"
            )
        if lengths is not None and options.mask_padding:
            x = _without_padding(b, x, lengths)
        prepared = cell.prepare_input(b, x)
        step = NetBuilder(scope, parent=b)
        at = StepInputs(step.input(input_t), lengths, step.input(timestep))
        previous = [step.input(step.scoped(s.previous)) for s in specs]
        new = cell.step(step, at, previous)
        prefix = b.scoped("")[:-1]
        states = recurrent_net(
            b,
            step.build(outputs=new),
            [(input_t, prepared)],
            list(zip(previous, initial_states)),
            dict(zip(previous, new)),
            timestep=timestep,
            scope=prefix,
            outputs_with_grads=options.outputs_with_grads or (2 * cell.output_index,),
            recompute_blobs_on_backward=[] if options.forward_only else [step.scoped(n) for n in cell.recompute],
            forward_only=options.forward_only,
        )
    return states


def _without_padding(b: NetBuilder, x: str, lengths: str) -> str:
    """x [T, N, D] with zeros from step lengths[n] on."""
    by_sequence = b.op("Transpose", [x], "input_by_sequence", axes=(1, 0, 2))
    mask = {"mode": "sequence", "axis": 1, "repeat_from_axis": 2, "fill_val": 0.0}
    masked = b.op("SequenceMask", [by_sequence, lengths], "input_by_sequence_masked", **mask)
    return b.op("Transpose", [masked], "input_masked", axes=(1, 0, 2))


def fully_connected(b: NetBuilder, x: str, name: str, size_in: int, size_out: int) -> str:
    """`name` = x W^T + b on the last of three axes, with parameters `name_w` [out, in] and `name_b` [out]."""
    w = b.param(name + "_w", [size_out, size_in], "XavierFill")
    bias = b.param(name + "_b", [size_out], "ConstantFill", value=0.0)
    return b.op("FC", [x, w, bias], name, axis=2)
