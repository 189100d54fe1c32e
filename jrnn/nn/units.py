"""One step of each recurrent unit: from the two contributions to the gates and the old state to the new state.

Shapes: N batch, H hidden, G gates. States are [N, H], contributions [N, G H].

`layers.py` multiplies with the weights: `zx` is the contribution of the input, with both biases added. `zh` is the
contribution of the old hidden state. The GRU scales the hidden contribution to its last gate, the candidate n, before it is
added. So that gate is *late*: its hidden bias is not in `zx`, but is passed to `advance` as `late`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jrnn.jaxprs.unit_formulas import gru_gates, lstm
from jrnn.nn.checks import check_choice

State = tuple[Array, ...]


def as_given(states: State) -> Any:
    """The states in the form that users see: h, or the pair (h, c)."""
    return states if len(states) == 2 else states[0]


@dataclass(frozen=True)
class Unit:
    """A recurrent unit.

    Attributes:
        name: its name in messages.
        gate_names: the gates, in PyTorch's order; each is a block of H rows of the weights.
        states: 1 for (h,), 2 for (h, c).
        advance: `(zx, zh, late, state) -> state`; `late` is the hidden bias [1, H] of the late gate, or None.
        has_late_gate: whether the last gate is late.
        projects: whether the new hidden state may be projected.
    """

    name: str
    gate_names: tuple[str, ...]
    states: int
    advance: Callable[[Array, Array, Array | None, State], State]
    has_late_gate: bool = False
    projects: bool = False

    @property
    def gates(self) -> int:
        return len(self.gate_names)


def _tanh(zx: Array, zh: Array, late: Array | None, state: State) -> State:
    return (jnp.tanh(zx + zh),)


def _relu(zx: Array, zh: Array, late: Array | None, state: State) -> State:
    return (jax.nn.relu(zx + zh),)


def _lstm(zx: Array, zh: Array, late: Array | None, state: State) -> State:
    i, f, g, o = jnp.split(zx + zh, 4, axis=-1)
    return lstm(i, f, o, g, state[1])


def _gru(zx: Array, zh: Array, late: Array | None, state: State) -> State:
    # XLA:CPU computes n again for each place that reads it.
    return (gru_gates(zx, zh, late).new_hidden(state[0]),)


RNN_TANH = Unit("RNN", ("h",), 1, _tanh)
RNN_RELU = Unit("RNN", ("h",), 1, _relu)
LSTM = Unit("LSTM", ("i", "f", "g", "o"), 2, _lstm, projects=True)
GRU = Unit("GRU", ("r", "z", "n"), 1, _gru, has_late_gate=True)


def rnn_unit(nonlinearity: str) -> Unit:
    """The plain unit with the nonlinearity "tanh" or "relu".

    >>> rnn_unit("relo")
    Traceback (most recent call last):
    jrnn.errors.LayerError: RNN: nonlinearity is 'relo'; it must be 'tanh' or 'relu'; did you mean 'relu'?
    """
    check_choice("RNN: ", "nonlinearity", nonlinearity, ("tanh", "relu"))
    return RNN_TANH if nonlinearity == "tanh" else RNN_RELU
