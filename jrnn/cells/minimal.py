"""Minimal GRU and LSTM as step nets: their gates depend on the input only, so all steps can be computed at once.

Shapes: N batch, D input, H hidden. The parameters are `i2h_w` [G H, D] and `i2h_b` [G H], with G gates. A step is affine in
the state with a diagonal Jacobian, which the `associative` executor of `jrnn.scan` solves.

Source: Feng et al., Were RNNs All We Needed?, 2024, arXiv 2410.01201.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from jrnn.builder import NetBuilder
from jrnn.cells.base import Cell, StateSpec, StepInputs, before_end, ended, fully_connected, refuse_products
from jrnn.cells.options import LayerOptions

_OPTIONS = LayerOptions()


@dataclass(frozen=True)
class MinimalFamily(Cell):
    """h = h_prev + u (candidate - h_prev). What share u of the candidate is taken is left open."""

    input_size: int
    hidden_size: int
    options: LayerOptions = _OPTIONS

    gates: ClassVar[tuple[str, ...]]  # what the rows of i2h are for; "candidate" is among them

    @abstractmethod
    def share(self, b: NetBuilder, of_input: Mapping[str, str]) -> str:
        """u [1, N, H], `update_t`, from the gates [1, N, H]."""

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (StateSpec("hidden_t_prev", "hidden_t", "initial_hidden_state", self.hidden_size),)

    @property
    def recompute(self) -> tuple[str, ...]:
        if not self.options.memory_optimization:
            return ()
        return (*(f"input_t_{gate}" for gate in self.gates), *_ON_THE_WAY)

    def prepare_input(self, b: NetBuilder, x: str) -> str:
        return fully_connected(b, x, "i2h", self.input_size, len(self.gates) * self.hidden_size)

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        refuse_products(at, type(self).__name__)
        (before,) = previous
        of_input = dict(zip(self.gates, b.op("Split", [at.input], [f"input_t_{gate}" for gate in self.gates], axis=2)))
        share = self.share(b, of_input)
        change = b.op("Sub", [of_input["candidate"], before], "change_t")
        taken = b.op("Mul", [share, change], "change_t_taken")
        new = b.op("Add", [before, taken], before_end(at, "hidden_t"))
        return ended(b, at, previous, [new], ["hidden_t"], self.options.drop_states)


@dataclass(frozen=True)
class MinGRUCell(MinimalFamily):
    """u = sigmoid(update): h = (1 - u) h_prev + u candidate. Gates are update and candidate, in this order."""

    gates = ("update", "candidate")

    def share(self, b: NetBuilder, of_input: Mapping[str, str]) -> str:
        return b.op("Sigmoid", [of_input["update"]], "update_t")


@dataclass(frozen=True)
class MinLSTMCell(MinimalFamily):
    """f, i = sigmoid(forget), sigmoid(input): h = (f h_prev + i candidate) / (f + i). Gates are forget, input, candidate.

    i / (f + i) is computed as sigmoid(softplus(-forget) - softplus(-input)), which is never 0 / 0.
    """

    gates = ("forget", "input", "candidate")

    def share(self, b: NetBuilder, of_input: Mapping[str, str]) -> str:
        parts = []
        for gate in ("forget", "input"):
            turned = b.op("Negative", [of_input[gate]], f"{gate}_t_negative")
            parts.append(b.op("Softplus", [turned], f"{gate}_t_softplus"))
        return b.op("Sigmoid", [b.op("Sub", parts, "update_t_sum")], "update_t")


_ON_THE_WAY = (
    "forget_t_negative",
    "forget_t_softplus",
    "input_t_negative",
    "input_t_softplus",
    "update_t_sum",
    "update_t",
    "change_t",
    "change_t_taken",
)
