"""The linear recurrent unit as a step net: a complex diagonal recurrence, written with its two real parts.

Shapes: T time, N batch, D input, H hidden. With the eigenvalues lambda = exp(-exp(nu_log) + i exp(theta_log)) [H]:

    h[t] = lambda h[t-1] + exp(gamma_log) (B x[t] + b),   y[t] = C_re Re h[t] + C_im Im h[t] + c

The parameters are `nu_log`, `theta_log`, `gamma_log` [H]; `i2h_w` [2H, D] and `i2h_b` [2H], the real parts of B and b over
the imaginary ones; `output_w` [H, 2H], C_re beside C_im, and `output_b` [H]. What the paper adds to y, D x, is left to
a residual layer of `StackedCell`.

A step is affine in the state, and no unit reads another, but the two parts of one do: the `associative` executor of
`jrnn.scan` solves both together.

Source: Orvieto et al., Resurrecting Recurrent Neural Networks for Long Sequences, 2023, arXiv 2303.06349.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jrnn.builder import NetBuilder
from jrnn.cells.base import Cell, StateSpec, StepInputs, before_end, ended, fully_connected, refuse_products
from jrnn.cells.options import LRUOptions
from jrnn.errors import NetError
from jrnn.recurrent import RecurrentState

_OPTIONS = LRUOptions()
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class LRUCell(Cell):
    """Its states are the real and the imaginary part of h, each [1, N, H]; its output is y [T, N, H].

    The eigenvalues start evenly spread over the ring of `options.radius`: their absolute values are the quantiles of
    the paper's distribution, and their angles a golden-ratio sequence, where the paper draws both at random.
    """

    input_size: int
    hidden_size: int
    options: LRUOptions = _OPTIONS

    def __post_init__(self):
        low, high = self.options.radius
        if not 0 <= low < high <= 1:
            raise NetError(f"radius is {self.options.radius}; it must be two numbers, 0 <= least < largest <= 1")
        if not self.options.max_phase > 0:
            raise NetError(f"max_phase is {self.options.max_phase}; it must be an angle above 0")

    @property
    def states(self) -> tuple[StateSpec, ...]:
        parts = ("real", "imaginary")
        return tuple(StateSpec(f"{p}_t_prev", f"{p}_t", f"initial_{p}_state", self.hidden_size) for p in parts)

    def before_loop(self, b: NetBuilder, x: str) -> None:
        turns = [((k + 1) * _GOLDEN) % 1.0 for k in range(self.hidden_size)]
        decay = self._exp(b, "nu_log", [math.log(-0.5 * math.log(r)) for r in self._squares], "decay")
        radius = b.op("Exp", [b.op("Negative", [decay], "log_radius")], "radius")
        phase = self._exp(b, "theta_log", [math.log(turn * self.options.max_phase) for turn in turns], "phase")
        b.op("Mul", [radius, b.op("Cos", [phase], "phase_cos")], "rotation_real")
        b.op("Mul", [radius, b.op("Sin", [phase], "phase_sin")], "rotation_imaginary")

    @property
    def _squares(self) -> list[float]:
        """The squared absolute values that the eigenvalues start with."""
        low, high = (r * r for r in self.options.radius)
        return [low + (high - low) * (k + 0.5) / self.hidden_size for k in range(self.hidden_size)]

    def _exp(self, b: NetBuilder, name: str, values: list[float], blob: str) -> str:
        """The exponential of a parameter that starts with these values."""
        return b.op("Exp", [b.param(name, [self.hidden_size], "GivenTensorFill", values=values)], blob)

    def prepare_input(self, b: NetBuilder, x: str) -> str:
        plain = fully_connected(b, x, "i2h", self.input_size, 2 * self.hidden_size)
        scale = self._exp(b, "gamma_log", [0.5 * math.log1p(-r) for r in self._squares], "input_scale")
        both, _ = b.op("Concat", [scale, scale], ["input_scales", "_input_scales_concat_dims"], axis=0)
        return b.op("Mul", [plain, both], "i2h_scaled", broadcast=1)

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        refuse_products(at, "LRUCell")
        x = b.op("Split", [at.input], ["input_t_real", "input_t_imaginary"], axis=2)
        (re, im), (turn_re, turn_im) = previous, (b.scoped("rotation_real"), b.scoped("rotation_imaginary"))

        def product(state: str, factor: str, name: str) -> str:
            return b.op("Mul", [state, factor], name, broadcast=1)

        kept_re = [product(re, turn_re, "real_by_real"), product(im, turn_im, "imaginary_by_imaginary")]
        kept_im = [product(im, turn_re, "imaginary_by_real"), product(re, turn_im, "real_by_imaginary")]
        kept = [b.op("Sub", kept_re, "real_kept"), b.op("Add", kept_im, "imaginary_kept")]
        names = ["real_t", "imaginary_t"]
        new = [b.op("Add", blobs, before_end(at, name)) for *blobs, name in zip(kept, x, names)]
        return ended(b, at, previous, new, names, self.options.drop_states)

    def output(self, b: NetBuilder, new: Sequence[str]) -> str:
        return self._mixed(b, new, "output_t")

    def output_sequence(self, b: NetBuilder, states: Sequence[RecurrentState]) -> str:
        return self._mixed(b, [s.all for s in states], "output_all")

    def _mixed(self, b: NetBuilder, parts: Sequence[str], name: str) -> str:
        both, _ = b.op("Concat", list(parts), [f"{name}_parts", f"_{name}_parts_concat_dims"], axis=2)
        w = b.param("output_w", [self.hidden_size, 2 * self.hidden_size], "XavierFill")
        bias = b.param("output_b", [self.hidden_size], "ConstantFill", value=0.0)
        return b.op("FC", [both, w, bias], name, axis=2)
