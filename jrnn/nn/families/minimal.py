"""MinGRU, MinLSTM and IndRNN: recurrences whose units do not see each other.

Source: Feng et al., Were RNNs all we needed?, 2024; Li et al., Independently recurrent neural network, 2018.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.nn import initializers
from jax.typing import DTypeLike

from jrnn.nn.params import Params
from jrnn.nn.recurrent import ParameterTable, RecurrentLayer, constant, uniform
from jrnn.nn.settings import spelled_out
from jrnn.nn.span import Pair, Span


class _Elementwise(RecurrentLayer):
    """A layer whose output is its state h [N, H]."""

    @spelled_out(RecurrentLayer.__init__)
    def __init__(
        self, input_size: int, hidden_size: int | None = None, *, rngs: nnx.Rngs, **options: Any
    ) -> None:
        self.hidden_size = input_size if hidden_size is None else hidden_size
        super().__init__(input_size, self.hidden_size, rngs=rngs, **options)

    def _fresh(self, batch: int, dtype: DTypeLike) -> Array:
        return jnp.zeros((batch, self.hidden_size), dtype)


def _between(h: Array, at: Any) -> Pair:
    """h' = z h + (1 - z) candidate."""
    z, candidate = at
    h = z * h + (1 - z) * candidate
    return h, h


class MinGRU(_Elementwise):
    """h' = (1 - z) h + z (W_h x + b_h) with z = sigmoid(W_z x + b_z): a GRU whose gates do not see the state.

    Args:
        input_size: features of the input, D.
        hidden_size: units, H; None: D.
        options: keyword arguments of `RecurrentLayer`.

    >>> layer = MinGRU(3, 4, rngs=nnx.Rngs(0))
    >>> y, h = layer(jnp.ones((5, 2, 3)))
    >>> y.shape, h.shape
    ((5, 2, 4), (2, 4))
    """

    def _parameters(self) -> ParameterTable:
        d = self.input_size
        h = self.hidden_size
        return {
            "weight_z": uniform(h, d),
            "bias_z": constant(0.0, h),
            "weight_h": uniform(h, d),
            "bias_h": constant(0.0, h),
        }

    def _run(self, p: Params, x: Array, h: Array, span: Span) -> Pair:
        z, candidate = (span.linear(x, p[f"weight_{gate}"], p[f"bias_{gate}"]) for gate in "zh")
        h, y = span.scan(_between, h, (jax.nn.sigmoid(-z), candidate))
        return y, h


class MinLSTM(_Elementwise):
    """h' = f/(f + i) h + i/(f + i) (W_h x + b_h) with f = sigmoid(W_f x + b_f), i = sigmoid(W_i x + b_i).

    Args:
        input_size: features of the input, D.
        hidden_size: units, H; None: D.
        options: keyword arguments of `RecurrentLayer`.

    >>> layer = MinLSTM(3, 4, batch_first=True, rngs=nnx.Rngs(0))
    >>> y, h = layer(jnp.ones((2, 5, 3)), lengths=[5, 2])
    >>> bool((y[1, 1] == h[1]).all()), float(abs(y[1, 2:]).max())
    (True, 0.0)
    """

    def _parameters(self) -> ParameterTable:
        d = self.input_size
        h = self.hidden_size
        weights = {f"weight_{gate}": uniform(h, d) for gate in "fih"}
        return weights | {
            "bias_f": constant(1.0, h),
            "bias_i": constant(0.0, h),
            "bias_h": constant(0.0, h),
        }

    def _run(self, p: Params, x: Array, h: Array, span: Span) -> Pair:
        f, i, candidate = (span.linear(x, p[f"weight_{gate}"], p[f"bias_{gate}"]) for gate in "fih")
        # f/(f + i) as a sigmoid: neither quotient is 0/0 where both gates are closed.
        forget = jax.nn.sigmoid(jax.nn.log_sigmoid(f) - jax.nn.log_sigmoid(i))
        h, y = span.scan(_between, h, (forget, candidate))
        return y, h


class IndRNN(_Elementwise):
    """h' = relu(W x + u h + b): each unit sees its own state only.

    Args:
        input_size: features of the input, D.
        hidden_size: units, H; None: D.
        options: keyword arguments of `RecurrentLayer`.

    >>> layer = IndRNN(3, 4, rngs=nnx.Rngs(0))
    >>> y, h = layer.step(jnp.ones((2, 3)))
    >>> y.shape, bool((h >= 0).all())
    ((2, 4), True)
    """

    def _parameters(self) -> ParameterTable:
        d = self.input_size
        h = self.hidden_size
        return {
            "weight": uniform(h, d),
            "recurrent": (initializers.uniform(1.0), (h,)),
            "bias": constant(0.0, h),
        }

    def _run(self, p: Params, x: Array, h: Array, span: Span) -> Pair:
        u = p["recurrent"][None]

        def step(h: Array, wx: Array) -> Pair:
            h = jax.nn.relu(wx + u * h)
            return h, h

        h, y = span.scan(step, h, span.linear(x, p["weight"], p["bias"]))
        return y, h
