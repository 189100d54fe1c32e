"""What training asks of a model."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

Params = dict[str, Any]
Carry = dict[str, Any]


class Outcome(NamedTuple):
    """A batch's loss, the state after it, and the gradient of each parameter."""

    loss: Any
    carry: Carry
    gradients: Params


class Model(Protocol):
    """Pure functions of parameters, of a state that is carried from batch to batch, and of a batch.

    A batch is the NamedTuple of arrays that the model's task makes. A carry is a dict of arrays that hold the examples along
    their axis 1; it is empty where examples are independent. A key of None means evaluation: no dropout.
    """

    def init(self, key: Any) -> Params: ...

    def initial_carry(self, examples: int) -> Carry:
        """The state at the start, of so many examples side by side."""
        ...

    def loss(self, params: Params, carry: Carry, batch: Any, key: Any) -> tuple[Any, Carry]:
        """The loss [], a mean over the batch, and the state after it."""
        ...

    def gradients(self, params: Params, carry: Carry, batch: Any, key: Any) -> Outcome: ...

    def predict(self, params: Params, carry: Carry, batch: Any) -> tuple[Any, Carry]:
        """What the model puts out for a batch, whose targets may be None (logits, values), and the state after it."""
        ...
