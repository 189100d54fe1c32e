"""The interface of cells, and how a cell is run over a sequence.

Shapes: T time, N batch, D input, H hidden. A cell describes one step as operators of a step net; `run_cell` puts the input
projection before the loop, builds the step net, and appends the recurrent network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from jrnn.errors import NetError
from jrnn.nets.builder import NetBuilder
from jrnn.nets.ir import Ints, Names, Values
from jrnn.nets.recurrent_networks import RecurrentState, recurrent_net, unrolled_net


@dataclass(frozen=True)
class StateSpec:
    """One state of a cell.

    Attributes:
        previous: the blob of its previous value.
        new: the blob of its new value.
        initial: the parameter of its learned initial value.
        size: H.
    """

    previous: str
    new: str
    initial: str
    size: int

    def within(self, scope: str) -> StateSpec:
        """The same state, of a cell under a scope."""
        return StateSpec(
            previous=f"{scope}/{self.previous}",
            new=f"{scope}/{self.new}",
            initial=f"{scope}/{self.initial}",
            size=self.size,
        )

    def learned(self, b: NetBuilder) -> str:
        """Declares the parameter of the learned initial value, which starts at zero."""
        return b.param(self.initial, [self.size], "ConstantFill", value=0.0)


@dataclass(frozen=True)
class StepInputs:
    """The blobs that every step may read.

    Attributes:
        input: the prepared input [1, N, ...].
        lengths: int32 [N], or None.
        timestep: int32 [1].
        extra: blobs [1, N, E] with their sizes E, which are joined to the hidden state in the recurrent products.
        recurrent_mask: [1, N, H], or None. It multiplies the hidden state in the recurrent products only.
    """

    input: str
    lengths: str | None
    timestep: str
    extra: tuple[tuple[str, int], ...] = ()
    recurrent_mask: str | None = None


class Cell(ABC):
    """One step of a recurrent network, as operators of a step net. Names are relative to the builder's scope."""

    @property
    @abstractmethod
    def states(self) -> tuple[StateSpec, ...]:
        """The states that a step reads and writes."""

    @property
    def output_index(self) -> int:
        """Which state is the cell's output."""
        return 0

    @property
    def recompute(self) -> Names:
        """Blobs of the step that the backward pass computes again."""
        return ()

    @abstractmethod
    def prepare_input(self, b: NetBuilder, x: str) -> str:
        """Appends the operators that depend only on the input, of all steps or of one: [T, N, D] -> [T, N, ...]."""

    def before_loop(self, b: NetBuilder, x: str) -> None:
        """Appends to the outer net the blobs that steps read and that do not depend on the input x [T, N, D]."""
        return None

    @abstractmethod
    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        """Appends one step to a step net, from the blobs of the previous states to the blobs of the new ones."""

    def output(self, b: NetBuilder, new: Sequence[str]) -> str:
        """The output of one step, which a layer above reads."""
        return new[self.output_index]

    def output_sequence(self, b: NetBuilder, states: Sequence[RecurrentState]) -> str:
        """The output over time [T, N, H], made outside of the loop."""
        return states[self.output_index].all


@dataclass(frozen=True)
class RunOptions:
    """How a cell is run: see `recurrent_net`.

    Attributes:
        outputs_with_grads: the positions of the outputs that pass gradients on; None: all of them.
        forward_only: build no backward step net.
        mask_padding: set the input to zero after the end of each sequence. Outputs never depend on the padding, but
            without the mask, a NaN in the padding makes the gradients of the input projection NaN (0 x NaN), as in Caffe2.
        unroll_steps: the number of steps T. The operators of every step are appended, instead of a recurrent network. Caffe2
            then takes only initial states [1, N, H].
    """

    outputs_with_grads: Ints | None = None
    forward_only: bool = False
    mask_padding: bool = True
    unroll_steps: int | None = None


@dataclass(frozen=True)
class CellRun:
    """The result of `run_cell`.

    Attributes:
        output: the output over time, [T, N, H].
        states: the outputs of each state, in the order of `cell.states`.
    """

    output: str
    states: tuple[RecurrentState, ...]


def run_cell(
    cell: Cell,
    b: NetBuilder,
    x: str,
    lengths: str | None,
    initial_states: Sequence[str] | None,
    *,
    scope: str,
    options: RunOptions = RunOptions(),
) -> CellRun:
    """Runs a cell over the sequence `x` [T, N, D].

    Args:
        initial_states: a blob for each state, [H], [N, H] or [1, N, H]; None for learned ones, parameters [H] that
            start at zero.
        scope: the scope of all blobs and parameters.
        options: see RunOptions.

    Raises:
        NetError: for another number of initial states than the cell has.
    """
    input_t = b.scoped("input_t")
    timestep = b.scoped("timestep")
    specs = cell.states
    with b.scope(scope):
        if initial_states is None:
            initial_states = [spec.learned(b) for spec in specs]
        if len(initial_states) != len(specs):
            names = ", ".join(spec.previous for spec in specs)
            raise NetError(
                f"cell {scope!r} has {len(specs)} states ({names}), was given "
                f"{len(initial_states)} initial ones: {list(initial_states)}"
            )

        # What does not depend on the state is computed before the loop.
        if lengths is not None and options.mask_padding:
            x = without_padding(b, x, lengths, "input")
        cell.before_loop(b, x)
        prepared = cell.prepare_input(b, x)

        # The step net.
        step = NetBuilder(scope, parent=b)
        at = StepInputs(step.input(input_t), lengths, step.input(timestep))
        previous = [step.input(step.scoped(spec.previous)) for spec in specs]
        new = cell.step(step, at, previous)

        # The loop, or a copy of the step net for each step.
        common: Values = {
            "step_net": step.build(outputs=new),
            "inputs": [(input_t, prepared)],
            "links": dict(zip(previous, new)),
            "timestep": timestep,
            "outputs_with_grads": options.outputs_with_grads,
        }
        if options.unroll_steps is not None:
            broadcast = []
            for spec, initial in zip(specs, initial_states):
                broadcast.append(_for_each_sequence(b, prepared, spec, initial))
            states = unrolled_net(
                b,
                **common,
                initial_states=list(zip(previous, broadcast)),
                steps=options.unroll_steps,
            )
        else:
            recompute = () if options.forward_only else cell.recompute
            states = recurrent_net(
                b,
                **common,
                initial_states=list(zip(previous, initial_states)),
                scope=b.scoped("")[:-1],
                recompute_blobs_on_backward=list(map(step.scoped, recompute)),
                forward_only=options.forward_only,
            )
        return CellRun(cell.output_sequence(b, states), tuple(states))


def _for_each_sequence(b: NetBuilder, x: str, spec: StateSpec, initial: str) -> str:
    """An initial state [H], [N, H] or [1, N, H] as [1, N, H], for a sequence x [T, N, ...]."""
    name = spec.initial + "_spread"
    input_shape = b.op("Shape", [x], name + "_input_shape")
    batch = b.op("Slice", [input_shape], name + "_batch", starts=[1], ends=[2])
    one = b.op("GivenTensorInt64Fill", [], name + "_one", shape=[1], values=[1])
    shape, _ = b.op("Concat", [one, batch, one], [name + "_shape", name + "_shape_parts"], axis=0)
    zeros = b.op("ConstantFill", [shape], name + "_zeros", value=0.0, input_as_shape=1)  # [1, N, 1]
    return b.op("Add", [zeros, initial], name)


def without_padding(b: NetBuilder, x: str, lengths: str, name: str) -> str:
    """x [T, N, D] with zeros from step lengths[n] on."""
    by_sequence = b.op("Transpose", [x], f"{name}_by_sequence", axes=(1, 0, 2))
    mask = {"mode": "sequence", "axis": 1, "repeat_from_axis": 2, "fill_val": 0.0}
    masked = b.op("SequenceMask", [by_sequence, lengths], f"{name}_by_sequence_masked", **mask)
    return b.op("Transpose", [masked], f"{name}_masked", axes=(1, 0, 2))


def fully_connected(
    b: NetBuilder, x: str, name: str, size_in: int, size_out: int, **args: int
) -> str:
    """`name` = x W^T + b on the last of three axes, with parameters `name_w` [out, in] and `name_b` [out]."""
    w = b.param(name + "_w", [size_out, size_in], "XavierFill")
    bias = b.param(name + "_b", [size_out], "ConstantFill", value=0.0)
    return b.op("FC", [x, w, bias], name, axis=2, **args)


def input_gates(gates: Sequence[str]) -> list[str]:
    """The names of the gates of one step's prepared input."""
    return [f"input_t_{gate}" for gate in gates]


def split_gates(b: NetBuilder, x: str, gates: Sequence[str]) -> dict[str, str]:
    """The gates of one step's prepared input [1, N, G H], each [1, N, H], by name."""
    return dict(zip(gates, b.op("Split", [x], input_gates(gates), axis=2)))


def dropped(b: NetBuilder, at: StepInputs, hidden: str) -> str:
    """The hidden state for the recurrent products: times the recurrent mask, if there is one."""
    if at.recurrent_mask is None:
        return hidden
    return b.op("Mul", [hidden, at.recurrent_mask], "hidden_t_prev_dropped")


def joined(
    b: NetBuilder, at: StepInputs, hidden: str, size: int, name: str = "gates"
) -> tuple[str, int]:
    """The hidden state concatenated with the extra blobs, and their total size."""
    if not at.extra:
        return hidden, size
    name += "_concatenated_input_t"
    blobs = [hidden]
    for blob, extra_size in at.extra:
        blobs.append(blob)
        size += extra_size
    b.op("Concat", blobs, [name, f"_{name}_concat_dims"], axis=2)
    return b.scoped(name), size


def before_end(at: StepInputs, name: str) -> str:
    """The name of a new state before lengths are applied: its own name if there are none."""
    return name if at.lengths is None else name + "_candidate"


def ended(
    b: NetBuilder,
    at: StepInputs,
    previous: Sequence[str],
    new: Sequence[str],
    names: Sequence[str],
    drop_states: bool,
) -> list[str]:
    """Writes the states `names`: the new ones, or after the end of a sequence the previous ones (zeros with drop_states).

    For cells whose operators ignore lengths; `new` are blobs named by `before_end`.
    """
    if at.lengths is None:
        return list(new)

    def masked(blob: str, mask: str, name: str) -> str:
        return b.op("Mul", [blob, mask], name, broadcast=1, axis=1)

    valid = _mask(b, "GT", at, "valid")
    if drop_states:
        return [masked(blob, valid, name) for blob, name in zip(new, names)]
    invalid = _mask(b, "LE", at, "invalid")
    states = []
    for before, blob, name in zip(previous, new, names):
        running = masked(blob, valid, name + "_valid")
        finished = masked(before, invalid, name + "_invalid")
        states.append(b.op("Add", [running, finished], name))
    return states


def _mask(b: NetBuilder, comparison: str, at: StepInputs, name: str) -> str:
    """1.0 where the comparison of the lengths with the timestep holds, else 0.0: float [N]."""
    mask = b.op(comparison, [at.lengths, at.timestep], name + "_b", broadcast=1)
    mask = b.op("Cast", [mask], name, to="float")
    return b.op("StopGradient", [mask], name)


def refuse_products(at: StepInputs, cell: str) -> None:
    """Raises NetError for inputs to recurrent products, in a cell that has none."""
    if at.extra or at.recurrent_mask is not None:
        raise NetError(
            f"{cell} has no product of its state with weights, which attention and recurrent dropout change; use another "
            "cell within them, or DropoutCell or ZoneoutCell around this one"
        )
