"""The basic recurrent network as a step net: h = activation(W x + R h_prev + b).

Shapes: N batch, D input, H hidden. The parameters are `i2h_w` [H, D], `i2h_b` [H], `gates_t_w` [H, H], `gates_t_b` [H].
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jrnn.builder import NetBuilder
from jrnn.cells.base import Cell, StateSpec, StepInputs, before_end, dropped, ended, fully_connected, joined
from jrnn.cells.options import BasicRNNOptions
from jrnn.errors import NetError, near

ACTIVATIONS = {"tanh": "Tanh", "relu": "Relu"}


@dataclass(frozen=True)
class BasicRNNCell(Cell):
    """One step. With lengths, the state of a finished sequence is held or dropped by masks."""

    input_size: int
    hidden_size: int
    options: BasicRNNOptions = BasicRNNOptions()

    def __post_init__(self):
        if self.options.activation not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            raise NetError(
                f"activation must be one of {known}, is {self.options.activation!r}"
                f"{near(self.options.activation, ACTIVATIONS)}"
            )

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (StateSpec("hidden_t_prev", "hidden_t", "initial_hidden_state", self.hidden_size),)

    @property
    def recompute(self) -> tuple[str, ...]:
        return ("gates_t", "hidden_t_candidate") if self.options.memory_optimization else ()

    def prepare_input(self, b: NetBuilder, x: str) -> str:
        return fully_connected(b, x, "i2h", self.input_size, self.hidden_size)

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        (before,) = previous
        product, size = joined(b, at, dropped(b, at, before), self.hidden_size)
        gates = fully_connected(b, product, "gates_t", size, self.hidden_size)
        gates = b.op("Sum", [gates, at.input], "gates_t")
        activation = ACTIVATIONS[self.options.activation]
        new = b.op(activation, [gates], before_end(at, "hidden_t"))  # not overwritten: its gradient reads it
        return ended(b, at, previous, [new], ["hidden_t"], self.options.drop_states)
