"""LSTM as a step net, with Caffe2's names, gate order and parameters.

Shapes: T time, N batch, D input, H hidden. Gates are i, f, o, g along the last axis; the parameters are `i2h_w` [4H, D],
`i2h_b` [4H], `gates_t_w` [4H, H], `gates_t_b` [4H].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..builder import NetBuilder
from .base import RunOptions, StateSpec, StepInputs, fully_connected, run_cell
from .stack import StackedCell


@dataclass(frozen=True)
class LSTMOptions:
    """What an LSTM may do differently.

    forget_bias: added to the forget gate before its sigmoid. drop_states: the state of a finished sequence becomes zero
    instead of being held. memory_optimization: recompute the gates in the backward pass instead of storing them.
    forward_only: build no backward step net. outputs_with_grads: which of hidden_all, hidden_last, cell_all, cell_last
    (0 to 3) of the top layer pass gradients on. mask_padding: see RunOptions.
    """

    forget_bias: float = 0.0
    drop_states: bool = False
    memory_optimization: bool = False
    forward_only: bool = False
    outputs_with_grads: tuple[int, ...] = (0,)
    mask_padding: bool = True


@dataclass(frozen=True)
class LSTMCell:
    """One LSTM step: gates = FC(h_prev) + input; c = f c_prev + i g; h = o tanh(c)."""

    input_size: int
    hidden_size: int
    options: LSTMOptions = LSTMOptions()

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (
            StateSpec("hidden_t_prev", "hidden_state", "initial_hidden_state", self.hidden_size),
            StateSpec("cell_t_prev", "cell_state", "initial_cell_state", self.hidden_size),
        )

    @property
    def output_index(self) -> int:
        return 0

    @property
    def recompute(self) -> tuple[str, ...]:
        return ("gates_t",) if self.options.memory_optimization else ()

    def prepare_input(self, b: NetBuilder, x: str) -> str:
        return fully_connected(b, x, "i2h", self.input_size, 4 * self.hidden_size)

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        hidden, cell = previous
        gates = fully_connected(b, hidden, "gates_t", self.hidden_size, 4 * self.hidden_size)
        gates = b.op("Sum", [gates, at.input], "gates_t")
        lengths = [] if at.lengths is None else [at.lengths]
        return list(
            b.op(
                "LSTMUnit",
                [hidden, cell, gates, *lengths, at.timestep],
                ["hidden_state", "cell_state"],
                forget_bias=self.options.forget_bias,
                drop_states=int(self.options.drop_states),
                sequence_lengths=len(lengths),
            )
        )


@dataclass(frozen=True)
class LSTMLayer:
    """Blobs of one layer: states after every step [T, N, H], and after the last one [1, N, H]. Iterates in this order."""

    hidden_all: str
    hidden_last: str
    cell_all: str
    cell_last: str

    def __iter__(self) -> Iterator[str]:
        return iter((self.hidden_all, self.hidden_last, self.cell_all, self.cell_last))


@dataclass(frozen=True)
class LSTMOutputs(LSTMLayer):
    """The blobs of the top layer, and those of all `layers`, the lowest first."""

    layers: tuple[LSTMLayer, ...]


def LSTM(
    b: NetBuilder,
    x: str,
    lengths: str | None,
    initial_states: Sequence[str] | None,
    dim_in: int,
    dim_out: int | Sequence[int],
    scope: str,
    options: LSTMOptions = LSTMOptions(),
) -> LSTMOutputs:
    """An LSTM over the sequence `x`, of one layer or of several.

    Args:
        b: the net to append to.
        x: float [T, N, dim_in].
        lengths: int32 [N], how many steps of each sequence are valid; None where all are.
        initial_states: blobs of the hidden and the cell state of each layer in turn, [H], [N, H] or [1, N, H]; None for
            learned ones, which start at zero.
        dim_in: features of the input.
        dim_out: hidden size, or one for each layer.
        scope: the name under which all blobs and parameters stand.
        options: see LSTMOptions.

    Returns:
        The names of the outputs.

    Raises:
        NetError: for another number of initial states than layers need.

    >>> import jrnn
    >>> b = NetBuilder("net")
    >>> out = LSTM(b, b.input("x"), b.input("lengths"), None, 3, [8, 4], "lstm")
    >>> out.hidden_all, list(b.params)[:3]
    ('lstm/layer_1/hidden_state_all', ['lstm/layer_0/initial_hidden_state', 'lstm/layer_0/initial_cell_state', \
'lstm/layer_1/initial_hidden_state'])
    """
    sizes = [dim_out] if isinstance(dim_out, int) else list(dim_out)
    cells = [LSTMCell(size_in, size, options) for size_in, size in zip([dim_in, *sizes], sizes)]
    shift = 4 * (len(cells) - 1)
    states = run_cell(
        cells[0] if isinstance(dim_out, int) else StackedCell(tuple(cells)),
        b,
        x,
        lengths,
        initial_states,
        scope=scope,
        options=RunOptions(
            tuple(shift + k for k in options.outputs_with_grads), options.forward_only, options.mask_padding
        ),
    )
    layers = tuple(LSTMLayer(h.all, h.last, c.all, c.last) for h, c in zip(states[::2], states[1::2]))
    return LSTMOutputs(*layers[-1], layers=layers)
