"""One step of each recurrent unit: from the two contributions to the gates and the old state to the new state.

Shapes: N batch, H hidden, G gates. States are [N, H], contributions [N, G H].

The contraction with the weights happens outside: `zx` is the input's share of the gates with every bias that may be
added early, `zh` the old hidden state's share. A unit whose hidden share is scaled before it is added (the GRU's
candidate) takes the bias of that share late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jrnn.errors import LayerError, near

State = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Unit:
    """A recurrent unit.

    Attributes:
        name: what messages call it.
        gate_names: the blocks of G H rows, in the order of PyTorch.
        states: 1 for (h,), 2 for (h, c).
        advance: `(zx, zh, late, state) -> state`; `late` is the bias [1, H] of the last gate's hidden share, or None.
        late_gates: how many of the last gates take their hidden bias late.
        projects: whether the new hidden state may be projected.
    """

    name: str
    gate_names: tuple[str, ...]
    states: int
    advance: Callable[[jax.Array, jax.Array, jax.Array | None, State], State]
    late_gates: int = 0
    projects: bool = False

    @property
    def gates(self) -> int:
        return len(self.gate_names)


def _tanh(zx: jax.Array, zh: jax.Array, late: jax.Array | None, state: State) -> State:
    return (jnp.tanh(zx + zh),)


def _relu(zx: jax.Array, zh: jax.Array, late: jax.Array | None, state: State) -> State:
    return (jax.nn.relu(zx + zh),)


def _lstm(zx: jax.Array, zh: jax.Array, late: jax.Array | None, state: State) -> State:
    """c' = sigmoid(f) c + sigmoid(i) tanh(g); h' = sigmoid(o) tanh(c')."""
    i, f, g, o = jnp.split(zx + zh, 4, axis=-1)
    c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru(zx: jax.Array, zh: jax.Array, late: jax.Array | None, state: State) -> State:
    """n = tanh(xn + sigmoid(r) (hn + late)); h' = (1 - z) n + z h: the reset gate acts after the product with W."""
    xr, xz, xn = jnp.split(zx, 3, axis=-1)
    hr, hz, hn = jnp.split(zh, 3, axis=-1)
    if late is not None:
        hn = hn + late
    n = jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)
    return (n + jax.nn.sigmoid(xz + hz) * (state[0] - n),)


RNN_TANH = Unit("RNN", ("h",), 1, _tanh)
RNN_RELU = Unit("RNN", ("h",), 1, _relu)
LSTM = Unit("LSTM", ("i", "f", "g", "o"), 2, _lstm, projects=True)
GRU = Unit("GRU", ("r", "z", "n"), 1, _gru, late_gates=1)


def rnn_unit(nonlinearity: str) -> Unit:
    """The plain unit with this nonlinearity, "tanh" or "relu".

    >>> rnn_unit("relo")
    Traceback (most recent call last):
    jrnn.errors.LayerError: RNN: nonlinearity is 'relo'; it must be 'tanh' or 'relu'; did you mean 'relu'?
    """
    units = {"tanh": RNN_TANH, "relu": RNN_RELU}
    if nonlinearity not in units:
        raise LayerError(
            f"RNN: nonlinearity is {nonlinearity!r}; it must be 'tanh' or 'relu'{near(str(nonlinearity), units)}"
        )
    return units[nonlinearity]
