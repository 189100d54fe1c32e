"""GRU, with Caffe2's names, gate order and parameters, and the basic recurrent network, as step nets.

Shapes: N batch, D input, H hidden. GRU's gates are reset, update, output along the last axis; its parameters are `i2h_w`
[3H, D], `i2h_b` [3H], and `reset_gate_t_*`, `update_gate_t_*`, `output_gate_t_*`, each [H, H] and [H]. The basic network is
h = activation(W x + R h_prev + b) with parameters `i2h_w` [H, D], `i2h_b` [H], `gates_t_w` [H, H], `gates_t_b` [H].
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jrnn.errors import NetError, near
from jrnn.nets.builder import NetBuilder
from jrnn.nets.cells.base import (
    StepInputs,
    before_end,
    dropped,
    ended,
    fully_connected,
    input_gates,
    joined,
    split_gates,
)
from jrnn.nets.cells.cell_options import BasicRNNOptions, GRUOptions
from jrnn.nets.cells.gated import HiddenCell

GATES = ("reset", "update", "output")
# Blobs that the backward pass computes again with memory_optimization.
_INTERMEDIATE = (
    *input_gates(GATES),
    "reset_gate_t",
    "update_gate_t",
    "output_gate_t",
    "reset_gate_t_sigmoid",
    "modified_hidden_t_prev",
    "modified_concatenated_input_t",
    "_modified_concatenated_input_t_concat_dims",
    "output_gate_t_mul",
    "output_gate_t_summed",
    "gates_t",
    "_gates_t_concat_dims",
)


@dataclass(frozen=True)
class GRUCell(HiddenCell):
    """r, u = FC(h_prev) + x; o = FC(sigmoid(r) h_prev) + x; h = u h_prev + (1 - u) tanh(o), with u through a sigmoid.

    With linear_before_reset, o = sigmoid(r) FC(h_prev) + x.
    """

    options: GRUOptions = GRUOptions()

    rows = GATES
    recomputed = _INTERMEDIATE

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        (before,) = previous
        of_input = split_gates(b, at.input, GATES)
        masked = dropped(b, at, before)
        hidden, size = joined(b, at, masked, self.hidden_size)
        reset = fully_connected(b, hidden, "reset_gate_t", size, self.hidden_size)
        update = fully_connected(b, hidden, "update_gate_t", size, self.hidden_size)
        reset = b.op("Sum", [reset, of_input["reset"]], "reset_gate_t")
        opened = b.op("Sigmoid", [reset], "reset_gate_t_sigmoid")
        if self.options.linear_before_reset:
            output = fully_connected(b, hidden, "output_gate_t", size, self.hidden_size)
            output = b.op("Mul", [opened, output], "output_gate_t_mul")
        else:
            modified = b.op("Mul", [opened, masked], "modified_hidden_t_prev")
            hidden, _ = joined(b, at, modified, self.hidden_size, "modified")
            output = fully_connected(b, hidden, "output_gate_t", size, self.hidden_size)
        update = b.op("Sum", [update, of_input["update"]], "update_gate_t")
        output = b.op("Sum", [output, of_input["output"]], "output_gate_t_summed")
        gates = [reset, update, output]
        gates_t, _ = b.op("Concat", gates, ["gates_t", "_gates_t_concat_dims"], axis=2)
        lengths = [] if at.lengths is None else [at.lengths]
        new = b.op(
            "GRUUnit",
            [before, gates_t, *lengths, at.timestep],
            "hidden_t",
            drop_states=int(self.options.drop_states),
            sequence_lengths=len(lengths),
        )
        return [new]


ACTIVATIONS = {"tanh": "Tanh", "relu": "Relu"}


@dataclass(frozen=True)
class BasicRNNCell(HiddenCell):
    """One step. With lengths, the state of a finished sequence is held or dropped by masks."""

    options: BasicRNNOptions = BasicRNNOptions()

    rows = ("hidden",)
    recomputed = ("gates_t", "hidden_t_candidate")

    def __post_init__(self):
        if self.options.activation not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            given = self.options.activation
            raise NetError(
                f"activation must be one of {known}, is {given!r}{near(given, ACTIVATIONS)}"
            )

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        (before,) = previous
        product, size = joined(b, at, dropped(b, at, before), self.hidden_size)
        gates = fully_connected(b, product, "gates_t", size, self.hidden_size)
        gates = b.op("Sum", [gates, at.input], "gates_t")
        activation = ACTIVATIONS[self.options.activation]
        # Under a name of its own: its gradient reads it.
        new = b.op(activation, [gates], before_end(at, "hidden_t"))
        return ended(b, at, previous, [new], ["hidden_t"], self.options.drop_states)
