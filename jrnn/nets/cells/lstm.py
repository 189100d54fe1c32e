"""LSTM as a step net, with Caffe2's names, gate order and parameters; and variants that compute the gates differently.

Shapes: T time, N batch, D input, H hidden. Gates are i, f, o, g along the last axis; the parameters are `i2h_w` [4H, D],
`i2h_b` [4H], `gates_t_w` [4H, H], `gates_t_b` [4H].

A cell (`base.py`) has `states`, the blobs of its previous and new states; `prepare_input`, operators on the whole
sequence [T, N, D] before the loop; and `step`, operators of the step net. `base.run_cell` builds the step net from them and
calls `recurrent_net`. `StepInputs` names the blobs that a step may read: the prepared `input` [1, N, ...], `lengths`,
`timestep`, extra blobs, which `joined` concatenates to the hidden state, and a recurrent mask, with which `dropped`
multiplies it. `NetBuilder.op` appends an operator and returns its outputs; `param` declares a parameter.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from jrnn.nets.builder import NetBuilder
from jrnn.nets.cells.base import StateSpec, StepInputs, dropped, fully_connected, joined
from jrnn.nets.cells.cell_options import LSTMOptions
from jrnn.nets.cells.gated import GatedCell

EPSILON = 1e-4  # of layer normalization
# Blobs of normalized gates.
_NORMALIZED = (
    "gates_t",
    "gates_t_norm",
    "gates_t_norm_mean",
    "gates_t_norm_std",
)


@dataclass(frozen=True)
class LSTMFamily(GatedCell):
    """One step from gates [1, N, 4H]: c = f c_prev + i g; h = o tanh(c). Subclasses compute the gates."""

    options: LSTMOptions = LSTMOptions()

    rows = ("input", "forget", "output", "candidate")
    recomputed = ("gates_t",)

    @property
    @abstractmethod
    def new_names(self) -> tuple[str, str]:
        """Blobs of the new hidden and the new cell state."""

    @abstractmethod
    def gates(self, b: NetBuilder, at: StepInputs, hidden: str) -> str:
        """The gates [1, N, 4H] from the previous hidden state and the prepared input."""

    @property
    def states(self) -> tuple[StateSpec, ...]:
        hidden, cell = self.new_names
        return (
            StateSpec("hidden_t_prev", hidden, "initial_hidden_state", self.hidden_size),
            StateSpec("cell_t_prev", cell, "initial_cell_state", self.hidden_size),
        )

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        hidden, cell = previous
        gates = self.gates(b, at, hidden)
        lengths = [] if at.lengths is None else [at.lengths]
        return list(
            b.op(
                "LSTMUnit",
                [hidden, cell, gates, *lengths, at.timestep],
                self.new_names,
                forget_bias=self.options.forget_bias,
                drop_states=int(self.options.drop_states),
                sequence_lengths=len(lengths),
            )
        )


@dataclass(frozen=True)
class LSTMCell(LSTMFamily):
    """gates = FC(h_prev) + input."""

    new_names = ("hidden_state", "cell_state")

    def gates(self, b: NetBuilder, at: StepInputs, hidden: str) -> str:
        return additive_gates(b, at, hidden, self.hidden_size)


@dataclass(frozen=True)
class LayerNormLSTMCell(LSTMFamily):
    """gates = LayerNorm(FC(h_prev) + input), with parameters `gates_t_norm_scale` and `gates_t_norm_bias` [4H]."""

    new_names = ("hidden_t", "cell_t")
    recomputed = _NORMALIZED

    def gates(self, b: NetBuilder, at: StepInputs, hidden: str) -> str:
        return normalized(b, additive_gates(b, at, hidden, self.hidden_size), 4 * self.hidden_size)


@dataclass(frozen=True)
class MILSTMCell(LSTMFamily):
    """Multiplicative integration, with p = FC(h_prev): gates = alpha x p + beta1 p + beta2 x + b.

    The parameters are `prev_t_w` [4H, H], `prev_t_b`, `alpha`, `beta1`, `beta2` and `b` [4H].
    Source: Wu et al., On Multiplicative Integration with Recurrent Neural Networks, 2016.
    """

    new_names = ("hidden_t_intermediate", "cell_t")

    def gates(self, b: NetBuilder, at: StepInputs, hidden: str) -> str:
        return integrated_gates(b, at, hidden, self.hidden_size)


@dataclass(frozen=True)
class LayerNormMILSTMCell(LSTMFamily):
    """The gates of MILSTMCell, normalized as in LayerNormLSTMCell."""

    new_names = ("hidden_t_intermediate", "cell_t")
    recomputed = _NORMALIZED

    def gates(self, b: NetBuilder, at: StepInputs, hidden: str) -> str:
        return normalized(
            b, integrated_gates(b, at, hidden, self.hidden_size), 4 * self.hidden_size
        )


def additive_gates(b: NetBuilder, at: StepInputs, hidden: str, size: int) -> str:
    """FC(h_prev) + input."""
    gates = _recurrent_product(b, at, hidden, "gates_t", size)
    return b.op("Sum", [gates, at.input], "gates_t")


def integrated_gates(b: NetBuilder, at: StepInputs, hidden: str, size: int) -> str:
    """(alpha x + beta1) p + beta2 x + b, where p = FC(h_prev)."""
    product = _recurrent_product(b, at, hidden, "prev_t", size)
    alpha, beta1, beta2 = (
        b.param(name, [4 * size], "ConstantFill", value=1.0) for name in ("alpha", "beta1", "beta2")
    )
    bias = b.param("b", [4 * size], "ConstantFill", value=0.0)
    scaled = b.op(
        "ElementwiseLinear", [at.input, alpha, beta1], "alpha_by_input_t_plus_beta_h", axis=2
    )
    both = b.op("Mul", [scaled, product], "alpha_by_input_t_plus_beta_h_by_prev_t")
    alone = b.op("ElementwiseLinear", [at.input, beta2, bias], "beta_i_by_input_t_plus_b", axis=2)
    return b.op("Sum", [both, alone], "gates_t")


def normalized(b: NetBuilder, gates: str, size: int) -> str:
    """Layer normalization of the gates over their last axis."""
    scale = b.param("gates_t_norm_scale", [size], "ConstantFill", value=1.0)
    bias = b.param("gates_t_norm_bias", [size], "ConstantFill", value=0.0)
    names = ["gates_t_norm", "gates_t_norm_mean", "gates_t_norm_std"]
    return b.op(
        "LayerNorm", [gates, scale, bias], names, axis=-1, epsilon=EPSILON, elementwise_affine=1
    )[0]


def _recurrent_product(b: NetBuilder, at: StepInputs, hidden: str, name: str, size: int) -> str:
    """FC(h_prev), with the recurrent mask and the extra blobs of the step applied to h_prev."""
    blob, size_in = joined(b, at, dropped(b, at, hidden), size)
    return fully_connected(b, blob, name, size_in, 4 * size)
