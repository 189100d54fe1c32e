"""Mamba and Mamba-2: state spaces whose time step, input and output depend on the input.

Source: Gu and Dao, Mamba, 2023; Dao and Gu, Transformers are SSMs, 2024.

Shapes: T time, N batch, D input and output, I inner, S states of a unit, K heads, P = I / K features of a head.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jrnn.nn.checks import Shape, check_integer
from jrnn.nn.families.diagonal import check_heads
from jrnn.nn.params import Params
from jrnn.nn.recurrent import Outputs, ParameterTable, RecurrentLayer, constant, uniform
from jrnn.nn.settings import spelled_out
from jrnn.nn.span import Pair, PyTree, Span, along_last, heads, outer, rms_norm


def time_steps(key: Array, shape: Shape, dtype: DTypeLike = jnp.float32) -> Array:
    """Biases whose softplus is between 0.001 and 0.1, uniform in its logarithm."""
    dt = jnp.exp(jax.random.uniform(key, shape, minval=math.log(0.001), maxval=math.log(0.1)))
    return jnp.log(jnp.expm1(dt)).astype(dtype)


def elapsed(dt: Array, span: Span) -> Array:
    """The time steps [T, N, C] of a layer, each times the time since the last step, if it is given."""
    return dt if span.dt is None else dt * span.dt[..., None]


class Mamba(RecurrentLayer):
    """h' = exp(dt A) h + dt B x, y = C h + D x, where dt, B and C depend on x; between a convolution and a gate.

    The argument `dt` of a call multiplies the layer's own dt. The convolution counts steps, whatever their times.

    Args:
        input_size: features of the input and output, D.
        hidden_size: inner features, I; None: 2 D.
        state_size: states of each inner feature, S.
        conv_size: taps of the convolution.
        dt_rank: rank of the weight of dt; None: D / 16, rounded up.
        options: keyword arguments of `RecurrentLayer`.

    >>> layer = Mamba(4, state_size=3, rngs=nnx.Rngs(0))
    >>> y, (window, h) = layer(jnp.ones((5, 2, 4)))
    >>> y.shape, window.shape, h.shape
    ((5, 2, 4), (2, 3, 8), (2, 8, 3))
    """

    _timed = True
    _leads = 1

    @spelled_out(RecurrentLayer.__init__)
    def __init__(
        self,
        input_size: int,
        hidden_size: int | None = None,
        *,
        state_size: int = 16,
        conv_size: int = 4,
        dt_rank: int | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        self.hidden_size = 2 * input_size if hidden_size is None else hidden_size
        self.state_size = check_integer("Mamba: state_size", state_size, 1)
        self.conv_size = check_integer("Mamba: conv_size", conv_size, 2)
        self.dt_rank = -(-input_size // 16) if dt_rank is None else dt_rank
        super().__init__(input_size, input_size, rngs=rngs, **options)

    def _parameters(self) -> ParameterTable:
        d = self.input_size
        i = self.hidden_size
        s = self.state_size
        rank = self.dt_rank

        def log_states(key: Array, shape: Shape, dtype: DTypeLike = jnp.float32) -> Array:
            return jnp.broadcast_to(jnp.log(jnp.arange(1, s + 1, dtype=dtype))[None], shape)

        return {
            "in_proj": uniform(2 * i, d),
            "conv_weight": uniform(i, self.conv_size),
            "conv_bias": constant(0.0, i),
            "x_proj": uniform(rank + 2 * s, i),
            "dt_proj": uniform(i, rank),
            "dt_bias": (time_steps, (i,)),
            "A_log": (log_states, (i, s)),
            "D": constant(1.0, i),
            "out_proj": uniform(d, i),
        }

    def _fresh(self, batch: int, dtype: DTypeLike) -> Pair:
        window = jnp.zeros((batch, self.conv_size - 1, self.hidden_size), dtype)
        return window, jnp.zeros((batch, self.hidden_size, self.state_size), dtype)

    def _run(self, p: Params, x: Array, state: PyTree, span: Span) -> Outputs:
        window, h = state
        x, gate = jnp.split(span.linear(x, p["in_proj"]), 2, axis=-1)
        x, window = span.convolve(x, window, p["conv_weight"], p["conv_bias"])
        x = jax.nn.silu(x)
        rank = self.dt_rank
        s = self.state_size
        dt, b, c = jnp.split(span.linear(x, p["x_proj"]), [rank, rank + s], axis=-1)
        dt = elapsed(jax.nn.softplus(span.linear(dt, p["dt_proj"], p["dt_bias"])), span)
        h, y = span.scan(selective(-jnp.exp(p["A_log"]).astype(h.dtype)), h, (x, dt, b, c))
        y = (y + along_last(p["D"], x) * x) * jax.nn.silu(gate)
        return span.linear(y, p["out_proj"]), (window, h)


def selective(A: Array) -> Any:
    """The step of Mamba's recurrence: h [N, I, S]; x, dt [N, I]; b, c [N, S]; A [I, S]."""

    def step(h: Array, at: PyTree) -> Pair:
        x, dt, b, c = at
        h = jnp.exp(dt[..., None] * A[None]) * h + (dt * x)[..., None] * b[:, None]
        return h, jnp.einsum("nis,ns->ni", h, c)

    return step


class Mamba2(RecurrentLayer):
    """S' = exp(dt A) S + dt B x^T, y = S'^T C + D x in each head, where A and dt are numbers; with convolution and gate.

    The argument `dt` of a call multiplies the layer's own dt. The convolution counts steps, whatever their times.

    Args:
        input_size: features of the input and output, D.
        hidden_size: inner features, I; None: 2 D.
        num_heads: heads, K; it must divide I.
        state_size: rows of the state of a head, S.
        num_groups: groups of heads that share B and C; it must divide K.
        conv_size: taps of the convolution.
        options: keyword arguments of `RecurrentLayer`.

    >>> layer = Mamba2(4, num_heads=2, state_size=3, rngs=nnx.Rngs(0))
    >>> y, (window, S) = layer(jnp.ones((5, 2, 4)))
    >>> y.shape, window.shape, S.shape
    ((5, 2, 4), (2, 3, 14), (2, 2, 3, 4))
    """

    _timed = True
    _leads = 1

    @spelled_out(RecurrentLayer.__init__)
    def __init__(
        self,
        input_size: int,
        hidden_size: int | None = None,
        *,
        num_heads: int = 1,
        state_size: int = 64,
        num_groups: int = 1,
        conv_size: int = 4,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        self.hidden_size = 2 * input_size if hidden_size is None else hidden_size
        self.num_heads = check_heads("Mamba2", num_heads, self.hidden_size, "hidden_size")
        self.num_groups = check_heads("Mamba2: groups", num_groups, num_heads, "num_heads")
        self.state_size = check_integer("Mamba2: state_size", state_size, 1)
        self.conv_size = check_integer("Mamba2: conv_size", conv_size, 2)
        super().__init__(input_size, input_size, rngs=rngs, **options)

    @property
    def _channels(self) -> int:
        return self.hidden_size + 2 * self.num_groups * self.state_size

    def _parameters(self) -> ParameterTable:
        d = self.input_size
        i = self.hidden_size
        k = self.num_heads

        def log_decays(key: Array, shape: Shape, dtype: DTypeLike = jnp.float32) -> Array:
            return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0)).astype(dtype)

        return {
            "in_proj": uniform(i + self._channels + k, d),
            "conv_weight": uniform(self._channels, self.conv_size),
            "conv_bias": constant(0.0, self._channels),
            "dt_bias": (time_steps, (k,)),
            "A_log": (log_decays, (k,)),
            "D": constant(1.0, k),
            "norm": constant(1.0, i),
            "out_proj": uniform(d, i),
        }

    def _fresh(self, batch: int, dtype: DTypeLike) -> Pair:
        width = self.hidden_size // self.num_heads
        window = jnp.zeros((batch, self.conv_size - 1, self._channels), dtype)
        return window, jnp.zeros((batch, self.num_heads, self.state_size, width), dtype)

    def _run(self, p: Params, x: Array, state: PyTree, span: Span) -> Outputs:
        window, S = state
        i = self.hidden_size
        k = self.num_heads
        groups = self.num_groups
        gate, xbc, dt = jnp.split(span.linear(x, p["in_proj"]), [i, i + self._channels], axis=-1)
        xbc, window = span.convolve(xbc, window, p["conv_weight"], p["conv_bias"])
        x, b, c = jnp.split(jax.nn.silu(xbc), [i, i + groups * self.state_size], axis=-1)
        x = heads(x, k)
        b = jnp.repeat(heads(b, groups), k // groups, axis=-2)
        c = jnp.repeat(heads(c, groups), k // groups, axis=-2)
        dt = elapsed(jax.nn.softplus(dt + along_last(p["dt_bias"], dt)), span)
        decay = jnp.exp(-along_last(jnp.exp(p["A_log"]), dt) * dt)
        S, y = span.scan(state_space, S, (c, dt[..., None] * b, x, decay))
        y = (y + p["D"][None, None, :, None] * x).reshape(gate.shape)
        y = rms_norm(y * jax.nn.silu(gate), p["norm"])
        return span.linear(y, p["out_proj"]), (window, S)


def state_space(S: Array, at: PyTree) -> Pair:
    """S' = decay S + k v^T, y = S'^T q in each head: q, k [N, K, S], v [N, K, P], decay [N, K]; S [N, K, S, P]."""
    q, k, v, decay = at
    S = decay[..., None, None] * S + outer(k, v)
    return S, jnp.einsum("nks,nksp->nkp", q, S)
