"""Minimal GRU and LSTM, and the linear recurrent unit, as step nets whose steps are affine in the state.

Shapes: T time, N batch, D input, H hidden, G gates.

Gates of MinGRU and MinLSTM depend on the input only. Their parameters are `i2h_w` [G H, D] and `i2h_b` [G H]. The Jacobian
of a step is diagonal.

The LRU is a complex diagonal recurrence, written with its two real parts. With the eigenvalues
lambda = exp(-exp(nu_log) + i exp(theta_log)) [H]:

    h[t] = lambda h[t-1] + exp(gamma_log) (B x[t] + b),   y[t] = C_re Re h[t] + C_im Im h[t] + c

Its parameters are `nu_log`, `theta_log`, `gamma_log` [H]; `i2h_w` [2H, D] and `i2h_b` [2H], the real parts of B and b above
the imaginary ones; `output_w` [H, 2H], C_re next to C_im, and `output_b` [H]. The paper also adds D x to y; a residual layer
of `StackedCell` does that.

The `associative` executor of `jrnn.scan` solves all three; of the LRU, it solves both parts of the state together.

Sources: Feng et al., Were RNNs All We Needed?, 2024, arXiv 2410.01201; Orvieto et al., Resurrecting Recurrent Neural
Networks for Long Sequences, 2023, arXiv 2303.06349.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jrnn.errors import NetError
from jrnn.nets.builder import NetBuilder
from jrnn.nets.cells.base import (
    Cell,
    StateSpec,
    StepInputs,
    before_end,
    ended,
    fully_connected,
    input_gates,
    refuse_products,
    split_gates,
)
from jrnn.nets.cells.cell_options import LayerOptions, LRUOptions
from jrnn.nets.cells.gated import HiddenCell
from jrnn.nets.recurrent_networks import RecurrentState

_OPTIONS = LayerOptions()
# Blobs that the backward pass computes again with memory_optimization.
_INTERMEDIATE = (
    "forget_t_negative",
    "forget_t_softplus",
    "input_t_negative",
    "input_t_softplus",
    "update_t_sum",
    "update_t",
    "change_t",
    "change_t_taken",
)


@dataclass(frozen=True)
class MinimalFamily(HiddenCell):
    """h = h_prev + u (candidate - h_prev). Subclasses compute the share u; "candidate" is among their `rows`."""

    options: LayerOptions = _OPTIONS

    @abstractmethod
    def share(self, b: NetBuilder, of_input: Mapping[str, str]) -> str:
        """u [1, N, H], `update_t`, from the gates [1, N, H]."""

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        refuse_products(at, type(self).__name__)
        (before,) = previous
        of_input = split_gates(b, at.input, self.rows)
        share = self.share(b, of_input)
        change = b.op("Sub", [of_input["candidate"], before], "change_t")
        taken = b.op("Mul", [share, change], "change_t_taken")
        new = b.op("Add", [before, taken], before_end(at, "hidden_t"))
        return ended(b, at, previous, [new], ["hidden_t"], self.options.drop_states)


@dataclass(frozen=True)
class MinGRUCell(MinimalFamily):
    """u = sigmoid(update): h = (1 - u) h_prev + u candidate. Gates are update and candidate, in this order."""

    rows = ("update", "candidate")
    recomputed = (*input_gates(rows), *_INTERMEDIATE)

    def share(self, b: NetBuilder, of_input: Mapping[str, str]) -> str:
        return b.op("Sigmoid", [of_input["update"]], "update_t")


@dataclass(frozen=True)
class MinLSTMCell(MinimalFamily):
    """f, i = sigmoid(forget), sigmoid(input): h = (f h_prev + i candidate) / (f + i). Gates are forget, input, candidate.

    i / (f + i) is computed as sigmoid(softplus(-forget) - softplus(-input)), which is never 0 / 0.
    """

    rows = ("forget", "input", "candidate")
    recomputed = (*input_gates(rows), *_INTERMEDIATE)

    def share(self, b: NetBuilder, of_input: Mapping[str, str]) -> str:
        parts = []
        for gate in ("forget", "input"):
            negative = b.op("Negative", [of_input[gate]], f"{gate}_t_negative")
            parts.append(b.op("Softplus", [negative], f"{gate}_t_softplus"))
        logit = b.op("Sub", parts, "update_t_sum")
        return b.op("Sigmoid", [logit], "update_t")


_LRU_OPTIONS = LRUOptions()
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class LRUCell(Cell):
    """Its states are the real and the imaginary part of h, each [1, N, H]; its output is y [T, N, H].

    The eigenvalues start evenly spread over the ring of `options.radius`: their absolute values are the quantiles of
    the paper's distribution, and their angles a golden-ratio sequence, where the paper draws both at random.
    """

    input_size: int
    hidden_size: int
    options: LRUOptions = _LRU_OPTIONS

    def __post_init__(self):
        low, high = self.options.radius
        if not 0 <= low < high <= 1:
            raise NetError(
                f"radius is {self.options.radius}; it must be two numbers, 0 <= least < largest <= 1"
            )
        if not self.options.max_phase > 0:
            raise NetError(f"max_phase is {self.options.max_phase}; it must be an angle above 0")

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (self._state("real"), self._state("imaginary"))

    def _state(self, part: str) -> StateSpec:
        return StateSpec(
            previous=f"{part}_t_prev",
            new=f"{part}_t",
            initial=f"initial_{part}_state",
            size=self.hidden_size,
        )

    def before_loop(self, b: NetBuilder, x: str) -> None:
        decays = []
        phases = []
        for k, square in enumerate(self._squares):
            turn = ((k + 1) * _GOLDEN_RATIO) % 1.0
            decays.append(math.log(-0.5 * math.log(square)))
            phases.append(math.log(turn * self.options.max_phase))
        decay = self._exp(b, "nu_log", decays, "decay")
        radius = b.op("Exp", [b.op("Negative", [decay], "log_radius")], "radius")
        phase = self._exp(b, "theta_log", phases, "phase")
        b.op("Mul", [radius, b.op("Cos", [phase], "phase_cos")], "rotation_real")
        b.op("Mul", [radius, b.op("Sin", [phase], "phase_sin")], "rotation_imaginary")

    @property
    def _squares(self) -> list[float]:
        """The squared absolute values that the eigenvalues start with."""
        low, high = (r * r for r in self.options.radius)
        return [low + (high - low) * (k + 0.5) / self.hidden_size for k in range(self.hidden_size)]

    def _exp(self, b: NetBuilder, name: str, values: list[float], blob: str) -> str:
        """The exponential of a parameter that starts with these values."""
        logarithm = b.param(name, [self.hidden_size], "GivenTensorFill", values=values)
        return b.op("Exp", [logarithm], blob)

    def prepare_input(self, b: NetBuilder, x: str) -> str:
        plain = fully_connected(b, x, "i2h", self.input_size, 2 * self.hidden_size)
        scales = [0.5 * math.log1p(-square) for square in self._squares]
        scale = self._exp(b, "gamma_log", scales, "input_scale")
        names = ["input_scales", "_input_scales_concat_dims"]
        both, _ = b.op("Concat", [scale, scale], names, axis=0)
        return b.op("Mul", [plain, both], "i2h_scaled", broadcast=1)

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        refuse_products(at, "LRUCell")
        real_input, imaginary_input = b.op(
            "Split", [at.input], ["input_t_real", "input_t_imaginary"], axis=2
        )
        real, imaginary = previous
        real_factor = b.scoped("rotation_real")
        imaginary_factor = b.scoped("rotation_imaginary")

        def product(state: str, factor: str, name: str) -> str:
            return b.op("Mul", [state, factor], name, broadcast=1)

        # The complex product of the state with lambda, in its two parts.
        real_by_real = product(real, real_factor, "real_by_real")
        imaginary_by_imaginary = product(imaginary, imaginary_factor, "imaginary_by_imaginary")
        imaginary_by_real = product(imaginary, real_factor, "imaginary_by_real")
        real_by_imaginary = product(real, imaginary_factor, "real_by_imaginary")
        real_kept = b.op("Sub", [real_by_real, imaginary_by_imaginary], "real_kept")
        imaginary_kept = b.op("Add", [imaginary_by_real, real_by_imaginary], "imaginary_kept")

        new = [
            b.op("Add", [real_kept, real_input], before_end(at, "real_t")),
            b.op("Add", [imaginary_kept, imaginary_input], before_end(at, "imaginary_t")),
        ]
        return ended(
            b=b,
            at=at,
            previous=previous,
            new=new,
            names=["real_t", "imaginary_t"],
            drop_states=self.options.drop_states,
        )

    def output(self, b: NetBuilder, new: Sequence[str]) -> str:
        return self._mixed(b, new, "output_t")

    def output_sequence(self, b: NetBuilder, states: Sequence[RecurrentState]) -> str:
        return self._mixed(b, [state.all for state in states], "output_all")

    def _mixed(self, b: NetBuilder, parts: Sequence[str], name: str) -> str:
        """C_re Re h + C_im Im h + c, from both parts of h."""
        names = [f"{name}_parts", f"_{name}_parts_concat_dims"]
        both, _ = b.op("Concat", parts, names, axis=2)
        w = b.param("output_w", [self.hidden_size, 2 * self.hidden_size], "XavierFill")
        bias = b.param("output_b", [self.hidden_size], "ConstantFill", value=0.0)
        return b.op("FC", [both, w, bias], name, axis=2)
