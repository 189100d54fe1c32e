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
from typing import ClassVar

from jrnn.errors import NetError
from jrnn.nets.builder import NetBuilder
from jrnn.nets.cells.base import (
    Cell,
    HiddenCell,
    StateSpec,
    StepInputs,
    before_end,
    ended,
    fully_connected,
    refuse_products,
)
from jrnn.nets.cells.cell_options import LayerOptions, LRUOptions
from jrnn.nets.recurrent_networks import RecurrentState

_OPTIONS = LayerOptions()


@dataclass(frozen=True)
class MinimalFamily(HiddenCell):
    """h = h_prev + u (candidate - h_prev). Subclasses compute the share u of the candidate."""

    options: LayerOptions = _OPTIONS

    gates: ClassVar[tuple[str, ...]]  # the gates in the rows of i2h, "candidate" among them

    @abstractmethod
    def share(self, b: NetBuilder, of_input: Mapping[str, str]) -> str:
        """u [1, N, H], `update_t`, from the gates [1, N, H]."""

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
        of_input = dict(
            zip(
                self.gates,
                b.op("Split", [at.input], [f"input_t_{gate}" for gate in self.gates], axis=2),
            )
        )
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


_LRU_OPTIONS = LRUOptions()
_GOLDEN = (math.sqrt(5) - 1) / 2


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
        parts = ("real", "imaginary")
        return tuple(
            StateSpec(f"{p}_t_prev", f"{p}_t", f"initial_{p}_state", self.hidden_size)
            for p in parts
        )

    def before_loop(self, b: NetBuilder, x: str) -> None:
        turns = [((k + 1) * _GOLDEN) % 1.0 for k in range(self.hidden_size)]
        decay = self._exp(
            b, "nu_log", [math.log(-0.5 * math.log(r)) for r in self._squares], "decay"
        )
        radius = b.op("Exp", [b.op("Negative", [decay], "log_radius")], "radius")
        phase = self._exp(
            b, "theta_log", [math.log(turn * self.options.max_phase) for turn in turns], "phase"
        )
        b.op("Mul", [radius, b.op("Cos", [phase], "phase_cos")], "rotation_real")
        b.op("Mul", [radius, b.op("Sin", [phase], "phase_sin")], "rotation_imaginary")

    @property
    def _squares(self) -> list[float]:
        """The squared absolute values that the eigenvalues start with."""
        low, high = (r * r for r in self.options.radius)
        return [low + (high - low) * (k + 0.5) / self.hidden_size for k in range(self.hidden_size)]

    def _exp(self, b: NetBuilder, name: str, values: list[float], blob: str) -> str:
        """The exponential of a parameter that starts with these values."""
        return b.op(
            "Exp", [b.param(name, [self.hidden_size], "GivenTensorFill", values=values)], blob
        )

    def prepare_input(self, b: NetBuilder, x: str) -> str:
        plain = fully_connected(b, x, "i2h", self.input_size, 2 * self.hidden_size)
        scale = self._exp(
            b, "gamma_log", [0.5 * math.log1p(-r) for r in self._squares], "input_scale"
        )
        both, _ = b.op(
            "Concat", [scale, scale], ["input_scales", "_input_scales_concat_dims"], axis=0
        )
        return b.op("Mul", [plain, both], "i2h_scaled", broadcast=1)

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        refuse_products(at, "LRUCell")
        x = b.op("Split", [at.input], ["input_t_real", "input_t_imaginary"], axis=2)
        (re, im), (turn_re, turn_im) = (
            previous,
            (b.scoped("rotation_real"), b.scoped("rotation_imaginary")),
        )

        def product(state: str, factor: str, name: str) -> str:
            return b.op("Mul", [state, factor], name, broadcast=1)

        kept_re = [
            product(re, turn_re, "real_by_real"),
            product(im, turn_im, "imaginary_by_imaginary"),
        ]
        kept_im = [
            product(im, turn_re, "imaginary_by_real"),
            product(re, turn_im, "real_by_imaginary"),
        ]
        kept = [b.op("Sub", kept_re, "real_kept"), b.op("Add", kept_im, "imaginary_kept")]
        names = ["real_t", "imaginary_t"]
        new = [b.op("Add", blobs, before_end(at, name)) for *blobs, name in zip(kept, x, names)]
        return ended(b, at, previous, new, names, self.options.drop_states)

    def output(self, b: NetBuilder, new: Sequence[str]) -> str:
        return self._mixed(b, new, "output_t")

    def output_sequence(self, b: NetBuilder, states: Sequence[RecurrentState]) -> str:
        return self._mixed(b, [s.all for s in states], "output_all")

    def _mixed(self, b: NetBuilder, parts: Sequence[str], name: str) -> str:
        both, _ = b.op(
            "Concat", list(parts), [f"{name}_parts", f"_{name}_parts_concat_dims"], axis=2
        )
        w = b.param("output_w", [self.hidden_size, 2 * self.hidden_size], "XavierFill")
        bias = b.param("output_b", [self.hidden_size], "ConstantFill", value=0.0)
        return b.op("FC", [both, w, bias], name, axis=2)
