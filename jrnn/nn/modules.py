"""PyTorch's RNN, LSTM and GRU, and their cells, as flax.nnx modules.

Shapes: T time, N batch, D input, H hidden, P output of a step (the projection's size, or H without one),
L layers, K directions.

The parameters are attributes with PyTorch's names and shapes (`weight_ih_l0_reverse`). The modules compute the same as
`jrnn.nn.functional`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jrnn import jaxprs
from jrnn.errors import LayerError
from jrnn.nn.checks import check_floating
from jrnn.nn.layers import zoneout_rates
from jrnn.nn.params import Arrays, Layout, Params, Shapes, check_params, init
from jrnn.nn.settings import read, spelled_out, warn_of_dropout
from jrnn.nn.stack import run_stack, stack_state, step_cell, step_stack
from jrnn.nn.units import GRU as GRU_UNIT
from jrnn.nn.units import LSTM as LSTM_UNIT
from jrnn.nn.units import Unit, as_given, rnn_unit

Rngs = nnx.Rngs | nnx.RngStream | Array


class Parameters(nnx.Module):
    """The base of all recurrent modules: the parameters are attributes with the names and shapes in `_shapes`."""

    layout: Layout

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = inspect.signature(cls.__init__)  # flax's metaclass hides it from help() and editors
        cls.__signature__ = own.replace(
            parameters=list(own.parameters.values())[1:], return_annotation=cls
        )

    def _shapes(self) -> Shapes:
        return self.layout.shapes()

    def _name(self) -> str:
        """The module's name in messages."""
        return self.layout.unit.name

    def _initial(self, key: Array, dtype: DTypeLike) -> Arrays:
        return init(self._shapes(), self.layout.hidden_size, key, dtype)

    def _create(self, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        if not isinstance(rngs, nnx.Rngs):
            raise LayerError(
                f"{self._name()}: rngs is of type {type(rngs).__name__}; give flax.nnx.Rngs(seed)"
            )
        check_floating("param_dtype", dtype)
        for name, value in self._initial(rngs.params(), dtype).items():
            setattr(self, name, nnx.Param(value))

    def params(self) -> Arrays:
        """The parameters by their names, as the functional form takes them."""
        return {name: getattr(self, name)[...] for name in self._shapes()}

    def load(self, params: Params) -> None:
        """Sets the parameters, given by their names, and casts them to the types of this module's.

        Raises:
            LayerError: if a parameter is missing, unknown, or of another shape. Then no parameter changes.
        """
        if not isinstance(params, Mapping):
            raise LayerError(
                f"{self._name()}: load takes a dict of arrays by name, not {params!r:.80}; "
                "jrnn.interop.load_state_dict reads one from a file"
            )
        check_params(self._name(), params, self._shapes())
        for name in self._shapes():
            variable = getattr(self, name)
            variable.set_value(jnp.asarray(params[name], variable.dtype))


class _Stack(Parameters):
    """The base of RNN, LSTM and GRU: a layout, settings, parameters, and a source of random keys."""

    @spelled_out()
    def __init__(
        self,
        unit: Unit,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        *,
        bias: bool = True,
        bidirectional: bool = False,
        proj_size: int = 0,
        layer_norm: bool = False,
        learned_state: bool = False,
        deterministic: bool = False,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        self.layout = Layout(
            unit=unit,
            input_size=input_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            bias=bias,
            bidirectional=bidirectional,
            proj_size=proj_size,
            layer_norm=layer_norm,
            learned_state=learned_state,
        )
        self.settings = read(unit.name, settings, inspect.signature(_Stack.__init__).parameters)
        zoneout_rates(self.settings, unit.states)  # raises here instead of at the first call
        warn_of_dropout(unit.name, self.settings.dropout, num_layers)
        self.deterministic = deterministic
        self._create(rngs, param_dtype)
        self.rngs = rngs.dropout.fork() if self.settings.random else nnx.data(None)

    def _key(self, rngs: Rngs | None) -> Array | None:
        if self.deterministic or not self.settings.random:
            return None
        source = self.rngs if rngs is None else rngs
        if isinstance(source, nnx.Rngs):
            return source.dropout()
        if isinstance(source, nnx.RngStream):
            return source()
        if not isinstance(source, Array):
            raise LayerError(
                f"{self.layout.unit.name}: rngs is of type {type(source).__name__}; it must be flax.nnx.Rngs, one of its "
                "streams, or a key"
            )
        return source

    def set_view(self, deterministic: bool | None = None) -> None:
        """Implements `nnx.view(model, deterministic=...)`; True: nothing is random."""
        if deterministic is not None:
            self.deterministic = deterministic

    @spelled_out(run_stack, without=["key"])
    def __call__(
        self, x: Any, hx: Any = None, *, rngs: Rngs | None = None, **options: Any
    ) -> tuple[Any, Any]:
        """[T, N, D] -> output [T, N, K P] and the last states: h_n [L K, N, P], or for an LSTM (h_n, c_n [L K, N, H]).

        Takes the arguments of `jrnn.nn.functional.rnn`. `rngs` replaces the module's own source of random keys.
        """
        unit = self.layout.unit
        key = self._key(rngs)
        output, states = run_stack(
            unit, unit.name, self.params(), x, hx, self.settings, key=key, **options
        )
        return output, as_given(states)

    def initial_state(self, batch: int) -> Any:
        """The initial states of a call without `hx`, for `batch` sequences: [L K, N, P], or for an LSTM (h, c).

        They are zeros, or with `learned_state` the parameters `h_0` and `c_0`.
        """
        params = self.params()
        dtype = self.settings.dtype
        if dtype is None:
            dtype = jaxprs.promoted_type(*params.values())
        state = stack_state(self.layout.unit.name, self.layout, params, None, batch, dtype)
        return as_given(state)

    @spelled_out(step_stack)
    def step(self, x: Any, hx: Any = None, **masks: Any) -> tuple[Array, Any]:
        """One step, [N, D] -> y [N, P] and the states, which the next step takes; see `jrnn.nn.functional.lstm_step`."""
        unit = self.layout.unit
        y, states = step_stack(
            unit, f"{unit.name}.step", self.params(), x, hx, self.settings, **masks
        )
        return y, as_given(states)


class RNN(_Stack):
    """Plain recurrent layers, h' = tanh(W_ih x + b_ih + W_hh h + b_hh), or relu.

    Args:
        input_size: features of the input, D.
        hidden_size: units of the state, H.
        num_layers: layers, L.
        nonlinearity: "tanh" or "relu".
        rngs: the source of random keys for the parameters (stream `params`) and for dropout and zoneout (stream `dropout`).
        bias: whether there are biases; True by default.
        bidirectional: whether a second direction runs from the end to the start; its outputs follow the first one's.
        layer_norm: whether to normalize each product in the gates (Ba et al., 2016).
        learned_state: whether the state before the first step and after resets is trained: the parameters `h_0` [L K, P]
            and, of an LSTM, `c_0` [L K, H], which begin at 0.
        deterministic: whether dropout and zoneout are disabled; `train()` and `eval()` set it.
        param_dtype: the type of the parameters; float32 by default.
        options: the fields of `jrnn.nn.Settings`, such as batch_first, dropout, zoneout, dtype, recompute, executor.

    >>> rnn = RNN(3, 4, num_layers=2, nonlinearity="relu", batch_first=True, rngs=nnx.Rngs(0))
    >>> output, h_n = rnn(jnp.ones((2, 5, 3)), lengths=[5, 3])
    >>> output.shape, h_n.shape
    ((2, 5, 4), (2, 2, 4))
    """

    @spelled_out(_Stack.__init__, without=["proj_size"])
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        nonlinearity: str = "tanh",
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        super().__init__(
            rnn_unit(nonlinearity), input_size, hidden_size, num_layers, rngs=rngs, **options
        )


class LSTM(_Stack):
    """LSTM layers: c' = sigmoid(f) c + sigmoid(i) tanh(g), h' = sigmoid(o) tanh(c').

    Takes the arguments of `RNN`, without `nonlinearity`. If `proj_size`, P, is above 0, h' is projected to P features.

    >>> lstm = LSTM(3, 4, rngs=nnx.Rngs(0))
    >>> xs = jnp.ones((5, 2, 3))
    >>> output, (h, c) = lstm(xs[:4])
    >>> y, (h, c) = lstm.step(xs[4], (h, c))
    >>> bool(jnp.allclose(y, lstm(xs)[0][-1], atol=1e-6))
    True
    """

    @spelled_out(_Stack.__init__)
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        super().__init__(LSTM_UNIT, input_size, hidden_size, num_layers, rngs=rngs, **options)


class GRU(_Stack):
    """GRU layers: n = tanh(xn + r (W_hn h + b_hn)), h' = (1 - z) n + z h.

    Takes the arguments of `RNN`, without `nonlinearity`.

    >>> gru = GRU(3, 4, bidirectional=True, rngs=nnx.Rngs(0))
    >>> output, h_n = gru(jnp.ones((5, 3)))
    >>> output.shape, h_n.shape
    ((5, 8), (2, 4))
    """

    @spelled_out(_Stack.__init__, without=["proj_size"])
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        super().__init__(GRU_UNIT, input_size, hidden_size, num_layers, rngs=rngs, **options)


class _Cell(Parameters):
    """The base of the cells."""

    def __init__(
        self,
        unit: Unit,
        input_size: int,
        hidden_size: int,
        bias: bool,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.layout = Layout(unit, input_size, hidden_size, bias=bias)
        if dtype is not None:
            check_floating("dtype", dtype)
        self.dtype = dtype
        self._create(rngs, param_dtype)

    def _shapes(self) -> Shapes:
        return self.layout.cell_shapes(self.layout.input_size)

    def __call__(self, x: Any, hx: Any = None) -> Any:
        """[N, D], h [N, H] -> h, or for an LSTM (h, c) -> (h, c); also without N. `hx` None is zeros."""
        unit = self.layout.unit
        return as_given(step_cell(unit, f"{unit.name}Cell", self.params(), x, hx, self.dtype))


class RNNCell(_Cell):
    """One step of a plain layer; `options` are dtype and param_dtype.

    >>> RNNCell(3, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape
    (2, 4)
    """

    @spelled_out(_Cell.__init__)
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        *,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        super().__init__(
            rnn_unit(nonlinearity), input_size, hidden_size, bias, rngs=rngs, **options
        )


class _GatedCell(_Cell):
    """The base of the cells whose unit is the same for all of them."""

    _unit: ClassVar[Unit]

    @spelled_out(_Cell.__init__)
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        super().__init__(self._unit, input_size, hidden_size, bias, rngs=rngs, **options)


class LSTMCell(_GatedCell):
    """One step of an LSTM layer; `options` are dtype and param_dtype.

    >>> h, c = LSTMCell(3, 4, rngs=nnx.Rngs(0))(jnp.ones(3))
    >>> h.shape, c.shape
    ((4,), (4,))
    """

    _unit = LSTM_UNIT


class GRUCell(_GatedCell):
    """One step of a GRU layer; `options` are dtype and param_dtype.

    >>> GRUCell(3, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape
    (2, 4)
    """

    _unit = GRU_UNIT
