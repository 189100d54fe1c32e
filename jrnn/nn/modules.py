"""PyTorch's RNN, LSTM and GRU, and their cells, as flax.nnx modules.

Shapes: T time, N batch, D input, H hidden, P output of a step (the projection's size, or H without one),
L layers, K directions.

The parameters are attributes with PyTorch's names and shapes (`weight_ih_l0_reverse`); what they compute is
`jrnn.nn.functional`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jrnn.nn.params import Layout, check_params, init
from jrnn.nn.settings import read
from jrnn.nn.stack import run_stack, step_cell, step_stack
from jrnn.nn.units import GRU as GRU_UNIT
from jrnn.nn.units import LSTM as LSTM_UNIT
from jrnn.nn.units import Unit, rnn_unit

Rngs = nnx.Rngs | nnx.RngStream | jax.Array


class _Parameters(nnx.Module):
    """A module whose parameters are attributes of the names that `_shapes` lists."""

    layout: Layout

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self.layout.shapes()

    def _create(self, rngs: nnx.Rngs, dtype: Any) -> None:
        for name, value in init(self._shapes(), self.layout.hidden_size, rngs.params(), dtype).items():
            setattr(self, name, nnx.Param(value))

    def params(self) -> dict[str, jax.Array]:
        """The parameters as `jrnn.nn.functional` takes them: PyTorch's names to arrays."""
        return {name: getattr(self, name)[...] for name in self._shapes()}

    def load(self, params: Mapping[str, Any]) -> None:
        """Takes over parameters by PyTorch's names, cast to the types of this module's.

        Raises:
            LayerError: a parameter is missing, unknown, or of another shape; then nothing has changed.
        """
        check_params(self.layout.unit, params, self._shapes())
        for name in self._shapes():
            variable = getattr(self, name)
            variable.set_value(jnp.asarray(params[name], variable.dtype))


class _Stack(_Parameters):
    """What RNN, LSTM and GRU share: a layout, settings, parameters, and a source of random keys."""

    def __init__(
        self, layout: Layout, options: dict[str, Any], deterministic: bool, param_dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.layout = layout
        self.settings = read(layout.unit.name, options)
        self.deterministic = deterministic
        self._create(rngs, param_dtype)
        self.rngs = rngs.dropout.fork() if self.settings.random else nnx.data(None)

    def _key(self, rngs: Rngs | None) -> jax.Array | None:
        if self.deterministic or not self.settings.random:
            return None
        source = self.rngs if rngs is None else rngs
        if isinstance(source, nnx.Rngs):
            return source.dropout()
        return source() if isinstance(source, nnx.RngStream) else source

    def _run(self, x: Any, hx: Any, lengths: Any, rngs: Rngs | None) -> tuple[Any, tuple[jax.Array, ...]]:
        unit = self.layout.unit
        return run_stack(unit, unit.name, self.params(), x, hx, lengths, self._key(rngs), self.settings)

    def _step(self, x: Any, hx: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return step_stack(self.layout.unit, f"{self.layout.unit.name}.step", self.params(), x, hx, self.settings)


class RNN(_Stack):
    """Plain recurrent layers, h' = tanh(W_ih x + b_ih + W_hh h + b_hh), or relu.

    Args:
        input_size: D.
        hidden_size: H.
        num_layers: L.
        nonlinearity: "tanh" or "relu".
        bias: whether there are biases.
        bidirectional: whether a second direction runs from the end to the start; its outputs follow the first's.
        layer_norm: normalise each product inside the gates (Ba et al., 2016).
        deterministic: nothing is random; `train()` and `eval()` set it.
        param_dtype: the type of the parameters.
        rngs: draws the parameters (stream `params`) and, later, dropout (stream `dropout`).
        settings: batch_first, dropout, recurrent_dropout, zoneout, dtype, recompute, unroll, executor: see
            `jrnn.nn.settings.Settings`.

    >>> rnn = RNN(3, 4, num_layers=2, nonlinearity="relu", batch_first=True, rngs=nnx.Rngs(0))
    >>> output, h_n = rnn(jnp.ones((2, 5, 3)), lengths=[5, 3])
    >>> output.shape, h_n.shape
    ((2, 5, 4), (2, 2, 4))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        nonlinearity: str = "tanh",
        bias: bool = True,
        bidirectional: bool = False,
        layer_norm: bool = False,
        deterministic: bool = False,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        unit = rnn_unit(nonlinearity)
        layout = Layout(unit, input_size, hidden_size, num_layers, bias, bidirectional, layer_norm=layer_norm)
        super().__init__(layout, settings, deterministic, param_dtype, rngs)

    def __call__(
        self, x: Any, hx: Any = None, *, lengths: Any = None, rngs: Rngs | None = None
    ) -> tuple[Any, jax.Array]:
        """[T, N, D] -> output [T, N, K H] and h_n [L K, N, H]; see `jrnn.nn.functional.rnn`."""
        output, states = self._run(x, hx, lengths, rngs)
        return output, states[0]

    def step(self, x: Any, hx: Any = None) -> tuple[jax.Array, jax.Array]:
        """One step, [N, D] -> y [N, H] and the states [L, N, H], to be handed to the next."""
        y, states = self._step(x, hx)
        return y, states[0]


class LSTM(_Stack):
    """LSTM layers: c' = sigmoid(f) c + sigmoid(i) tanh(g), h' = sigmoid(o) tanh(c').

    Args are those of `RNN`, without `nonlinearity`; `proj_size`, P, projects h' to fewer features where it is above 0.

    >>> lstm = LSTM(3, 4, rngs=nnx.Rngs(0))
    >>> xs = jnp.ones((5, 2, 3))
    >>> output, (h, c) = lstm(xs[:4])
    >>> y, (h, c) = lstm.step(xs[4], (h, c))
    >>> bool(jnp.allclose(y, lstm(xs)[0][-1], atol=1e-6))
    True
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        bidirectional: bool = False,
        proj_size: int = 0,
        layer_norm: bool = False,
        deterministic: bool = False,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        layout = Layout(
            LSTM_UNIT, input_size, hidden_size, num_layers, bias, bidirectional, proj_size, layer_norm=layer_norm
        )
        super().__init__(layout, settings, deterministic, param_dtype, rngs)

    def __call__(
        self, x: Any, hx: Any = None, *, lengths: Any = None, rngs: Rngs | None = None
    ) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        """[T, N, D] -> output [T, N, K P] and (h_n [L K, N, P], c_n [L K, N, H]); see `jrnn.nn.functional.lstm`."""
        output, (h, c) = self._run(x, hx, lengths, rngs)
        return output, (h, c)

    def step(self, x: Any, hx: Any = None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """One step, [N, D] -> y [N, P] and the states (h, c), to be handed to the next."""
        y, (h, c) = self._step(x, hx)
        return y, (h, c)


class GRU(_Stack):
    """GRU layers: n = tanh(xn + r (W_hn h + b_hn)), h' = (1 - z) n + z h; args are those of `RNN`.

    >>> gru = GRU(3, 4, bidirectional=True, rngs=nnx.Rngs(0))
    >>> output, h_n = gru(jnp.ones((5, 3)))
    >>> output.shape, h_n.shape
    ((5, 8), (2, 4))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        bidirectional: bool = False,
        layer_norm: bool = False,
        deterministic: bool = False,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        layout = Layout(GRU_UNIT, input_size, hidden_size, num_layers, bias, bidirectional, layer_norm=layer_norm)
        super().__init__(layout, settings, deterministic, param_dtype, rngs)

    def __call__(
        self, x: Any, hx: Any = None, *, lengths: Any = None, rngs: Rngs | None = None
    ) -> tuple[Any, jax.Array]:
        """[T, N, D] -> output [T, N, K H] and h_n [L K, N, H]; see `jrnn.nn.functional.gru`."""
        output, states = self._run(x, hx, lengths, rngs)
        return output, states[0]

    def step(self, x: Any, hx: Any = None) -> tuple[jax.Array, jax.Array]:
        """One step, [N, D] -> y [N, H] and the states [L, N, H], to be handed to the next."""
        y, states = self._step(x, hx)
        return y, states[0]


class _Cell(_Parameters):
    """What the cells share."""

    def __init__(
        self, unit: Unit, input_size: int, hidden_size: int, bias: bool, dtype: Any, param_dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.layout = Layout(unit, input_size, hidden_size, bias=bias)
        self.dtype = dtype
        self._create(rngs, param_dtype)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self.layout.cell_shapes(self.layout.input_size)

    def _advance(self, x: Any, hx: Any) -> tuple[jax.Array, ...]:
        return step_cell(self.layout.unit, f"{self.layout.unit.name}Cell", self.params(), x, hx, self.dtype)


class RNNCell(_Cell):
    """One step of a plain layer, [N, D], [N, H] -> [N, H], or without N.

    >>> RNNCell(3, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(rnn_unit(nonlinearity), input_size, hidden_size, bias, dtype, param_dtype, rngs)

    def __call__(self, x: Any, hx: Any = None) -> jax.Array:
        return self._advance(x, hx)[0]


class LSTMCell(_Cell):
    """One step of an LSTM layer, [N, D], (h [N, H], c [N, H]) -> (h, c), or without N.

    >>> h, c = LSTMCell(3, 4, rngs=nnx.Rngs(0))(jnp.ones(3))
    >>> h.shape, c.shape
    ((4,), (4,))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(LSTM_UNIT, input_size, hidden_size, bias, dtype, param_dtype, rngs)

    def __call__(self, x: Any, hx: Any = None) -> tuple[jax.Array, jax.Array]:
        h, c = self._advance(x, hx)
        return h, c


class GRUCell(_Cell):
    """One step of a GRU layer, [N, D], [N, H] -> [N, H], or without N.

    >>> GRUCell(3, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(GRU_UNIT, input_size, hidden_size, bias, dtype, param_dtype, rngs)

    def __call__(self, x: Any, hx: Any = None) -> jax.Array:
        return self._advance(x, hx)[0]
