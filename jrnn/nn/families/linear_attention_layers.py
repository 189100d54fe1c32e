"""RetNet, GLA, DeltaNet, Gated DeltaNet: attention without a softmax, whose state is a matrix in each head.

Source: Sun et al., Retentive network, 2023; Yang et al., Gated linear attention transformers, 2024; Yang et al.,
Parallelizing linear transformers with the delta rule, 2024; Yang et al., Gated delta networks, 2024.

Shapes: T time, N batch, D input and output, K heads, C features of a key, V features of a value.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.nn import initializers
from jax.typing import DTypeLike

from jrnn.errors import LayerError
from jrnn.nn.checks import Shape, check_integer
from jrnn.nn.families.diagonal import check_heads
from jrnn.nn.families.mamba_layer import state_space, time_steps
from jrnn.nn.params import Params
from jrnn.nn.recurrent import Outputs, ParameterTable, RecurrentLayer, constant, uniform
from jrnn.nn.settings import spelled_out
from jrnn.nn.span import (
    Pair,
    PyTree,
    Span,
    along_last,
    heads,
    joined,
    layer_norm,
    outer,
    rms_norm,
    rotate,
    unit_length,
)


class _Attention(RecurrentLayer):
    """Projections to q, k, v, and from the heads' values to the output, with a normalized and gated output."""

    key_size: int
    value_size: int

    @spelled_out(RecurrentLayer.__init__)
    def __init__(
        self,
        input_size: int,
        *,
        key_size: int | None = None,
        value_size: int | None = None,
        num_heads: int = 1,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        given = {"key_size": key_size, "value_size": value_size}
        for (name, size), default in zip(given.items(), self._default_sizes(input_size)):
            size = check_integer(f"{self._name()}: {name}", default if size is None else size, 1)
            self.num_heads = check_heads(self._name(), num_heads, size, name)
            setattr(self, name, size)
        super().__init__(input_size, input_size, rngs=rngs, **options)

    def _default_sizes(self, input_size: int) -> tuple[int, int]:
        """The features of keys and of values where none are given."""
        return input_size, input_size

    def _parameters(self) -> ParameterTable:
        d = self.input_size
        c = self.key_size
        v = self.value_size
        weights = {
            "W_q": uniform(c, d),
            "W_k": uniform(c, d),
            "W_v": uniform(v, d),
            "W_o": uniform(d, v),
        }
        return weights | {"norm": constant(1.0, v // self.num_heads)}

    def _fresh(self, batch: int, dtype: DTypeLike) -> Any:
        k = self.num_heads
        return jnp.zeros((batch, k, self.key_size // k, self.value_size // k), dtype)

    def _projected(self, p: Params, x: Array, span: Span) -> list[Array]:
        return [heads(span.linear(x, p[name]), self.num_heads) for name in ("W_q", "W_k", "W_v")]


class RetNet(_Attention):
    """S' = gamma S + k v^T, y = S'^T q in each head: retention, with rotary positions, fixed decays and a gated output.

    gamma is 1 - 2^(-5 - h) in head h.

    Args:
        input_size: features of the input and output, D.
        key_size: features of q and k over all heads, even in each; None: D.
        value_size: features of v over all heads; None: 2 D.
        num_heads: heads, K; it must divide both.
        options: keyword arguments of `RecurrentLayer`.

    >>> layer = RetNet(8, num_heads=2, rngs=nnx.Rngs(0))
    >>> y, (position, S) = layer(jnp.ones((5, 2, 8)), lengths=[5, 3])
    >>> y.shape, S.shape, position.tolist()
    ((5, 2, 8), (2, 2, 4, 8), [5, 3])
    """

    _leads = 1

    @spelled_out(_Attention.__init__)
    def __init__(self, input_size: int, *, rngs: nnx.Rngs, **options: Any) -> None:
        super().__init__(input_size, rngs=rngs, **options)
        if (width := self.key_size // self.num_heads) % 2:
            raise LayerError(
                f"RetNet: a head has {width} features of keys; rotation needs an even number"
            )

    def _default_sizes(self, input_size: int) -> tuple[int, int]:
        return input_size, 2 * input_size

    def _parameters(self) -> ParameterTable:
        shared = super()._parameters()
        del shared["norm"]  # RetNet's has no parameters
        return shared | {"W_g": uniform(self.value_size, self.input_size)}

    def _fresh(self, batch: int, dtype: DTypeLike) -> Pair:
        return jnp.zeros(batch, jnp.int32), super()._fresh(batch, dtype)

    def _run(self, p: Params, x: Array, state: PyTree, span: Span) -> Outputs:
        position, S = state
        q, k, v = self._projected(p, x, span)
        positions, position = span.positions(position)
        gamma = jnp.log1p(-(2.0 ** (-5 - jnp.arange(self.num_heads, dtype=S.dtype))))
        decay = jnp.broadcast_to(jnp.exp(gamma)[None, None], q.shape[:3])
        k = k * k.shape[-1] ** -0.5
        S, y = span.scan(state_space, S, (rotate(q, positions), rotate(k, positions), v, decay))
        y = layer_norm(y, jnp.ones(y.shape[-1], y.dtype)).reshape(*y.shape[:2], -1)
        y = jax.nn.silu(span.linear(x, p["W_g"])) * y
        return span.linear(y, p["W_o"]), (position, S)


class GLA(_Attention):
    """S' = diag(a) S + k v^T, y = S'^T q in each head, with a = sigmoid(W_a2 W_a1 x + b_a)^(1/16) and a gated output.

    Args:
        input_size: features of the input and output, D.
        key_size: features of q and k over all heads; None: D / 2.
        value_size: features of v over all heads; None: D.
        num_heads: heads, K; it must divide both.
        gate_rank: rank of the weight of a.
        options: keyword arguments of `RecurrentLayer`.

    >>> layer = GLA(8, num_heads=2, gate_rank=2, rngs=nnx.Rngs(0))
    >>> y, S = layer(jnp.ones((5, 2, 8)))
    >>> y.shape, S.shape
    ((5, 2, 8), (2, 2, 2, 4))
    """

    @spelled_out(_Attention.__init__)
    def __init__(
        self, input_size: int, *, gate_rank: int = 16, rngs: nnx.Rngs, **options: Any
    ) -> None:
        self.gate_rank = check_integer("GLA: gate_rank", gate_rank, 1)
        super().__init__(input_size, rngs=rngs, **options)

    def _default_sizes(self, input_size: int) -> tuple[int, int]:
        return input_size // 2, input_size

    def _parameters(self) -> ParameterTable:
        d = self.input_size
        c = self.key_size
        v = self.value_size
        gates = {
            "W_a1": uniform(self.gate_rank, d),
            "W_a2": uniform(c, self.gate_rank),
            "b_a": constant(0.0, c),
        }
        return super()._parameters() | gates | {"W_r": uniform(v, d), "b_r": constant(0.0, v)}

    def _run(self, p: Params, x: Array, S: Array, span: Span) -> Pair:
        q, k, v = self._projected(p, x, span)
        a = span.linear(span.linear(x, p["W_a1"]), p["W_a2"], p["b_a"])
        a = heads(jnp.exp(jax.nn.log_sigmoid(a) / 16), self.num_heads)
        S, y = span.scan(gated, S, (q * q.shape[-1] ** -0.5, k, v, a))
        y = rms_norm(y, p["norm"]).reshape(*y.shape[:2], -1)
        y = jax.nn.silu(span.linear(x, p["W_r"], p["b_r"])) * y
        return span.linear(y, p["W_o"]), S


def gated(S: Array, at: PyTree) -> Pair:
    """S' = diag(a) S + k v^T, y = S'^T q: q, k, a [N, K, C], v [N, K, V]; S [N, K, C, V]."""
    q, k, v, a = at
    S = a[..., :, None] * S + outer(k, v)
    return S, jnp.einsum("nkc,nkcv->nkv", q, S)


class DeltaNet(_Attention):
    """S' = S + beta k (v - S^T k)^T, y = S'^T q in each head: what k had stored is replaced by v.

    q, k and v go through short convolutions, and q and k have length 1.

    Args:
        input_size: features of the input and output, D.
        key_size, value_size: features of q and k, and of v, over all heads; None: D.
        num_heads: heads, K; it must divide both.
        conv_size: taps of the convolutions.
        options: keyword arguments of `RecurrentLayer`.

    >>> layer = DeltaNet(8, num_heads=2, rngs=nnx.Rngs(0))
    >>> y, (window, S) = layer(jnp.ones((5, 2, 8)))
    >>> y.shape, window.shape, S.shape
    ((5, 2, 8), (2, 3, 24), (2, 2, 4, 4))
    """

    _leads = 1

    @spelled_out(_Attention.__init__)
    def __init__(
        self, input_size: int, *, conv_size: int = 4, rngs: nnx.Rngs, **options: Any
    ) -> None:
        self.conv_size = check_integer(f"{self._name()}: conv_size", conv_size, 2)
        super().__init__(input_size, rngs=rngs, **options)

    @property
    def _channels(self) -> int:
        return 2 * self.key_size + self.value_size

    def _parameters(self) -> ParameterTable:
        beta = {"W_beta": uniform(self.num_heads, self.input_size)}
        return (
            super()._parameters() | beta | {"conv_weight": uniform(self._channels, self.conv_size)}
        )

    def _fresh(self, batch: int, dtype: DTypeLike) -> Pair:
        return jnp.zeros((batch, self.conv_size - 1, self._channels), dtype), super()._fresh(
            batch, dtype
        )

    def _convolved(
        self, p: Params, x: Array, window: Array, span: Span
    ) -> tuple[list[Array], Array]:
        """q, k, v after their convolutions, with q scaled by C^(-1/2), and the next window."""
        qkv = jnp.concatenate([span.linear(x, p[name]) for name in ("W_q", "W_k", "W_v")], axis=-1)
        qkv, window = span.convolve(qkv, window, p["conv_weight"])
        parts = jnp.split(jax.nn.silu(qkv), [self.key_size, 2 * self.key_size], axis=-1)
        q, k, v = (heads(part, self.num_heads) for part in parts)
        return [unit_length(q) * q.shape[-1] ** -0.5, unit_length(k), v], window

    def _run(self, p: Params, x: Array, state: PyTree, span: Span) -> Outputs:
        window, S = state
        qkv, window = self._convolved(p, x, window, span)
        S, y = self._recurrence(p, x, S, (*qkv, jax.nn.sigmoid(span.linear(x, p["W_beta"]))), span)
        return span.linear(joined(y), p["W_o"]), (window, S)

    def _recurrence(self, p: Params, x: Array, S: Array, xs: PyTree, span: Span) -> Pair:
        """The last S, and the normalized outputs of the heads; xs are q, k, v and beta."""
        S, y = span.scan(delta, S, xs)
        return S, rms_norm(y, p["norm"])


def delta(S: Array, at: PyTree) -> Pair:
    """S' = S + beta k (v - S^T k)^T, y = S'^T q: q, k [N, K, C], v [N, K, V], beta [N, K]; S [N, K, C, V]."""
    q, k, v, beta = at
    stored = jnp.einsum("nkc,nkcv->nkv", k, S)
    S = S + k[..., :, None] * (beta[..., None] * (v - stored))[..., None, :]
    return S, jnp.einsum("nkc,nkcv->nkv", q, S)


class GatedDeltaNet(DeltaNet):
    """As `DeltaNet`, from the decayed state alpha S instead of S, and with a gated output.

    alpha = exp(-exp(A_log) softplus(W_a x + dt_bias)), a number in each head.

    Args:
        input_size: features of the input and output, D.
        key_size, value_size: features of q and k, and of v, over all heads; None: D.
        num_heads: heads, K; it must divide both.
        conv_size: taps of the convolutions.
        options: keyword arguments of `RecurrentLayer`.

    >>> layer = GatedDeltaNet(8, num_heads=2, rngs=nnx.Rngs(0))
    >>> y, (window, S) = layer(jnp.ones((5, 2, 8)))
    >>> y.shape, window.shape, S.shape
    ((5, 2, 8), (2, 3, 24), (2, 2, 4, 4))
    """

    def _parameters(self) -> ParameterTable:
        d = self.input_size
        v = self.value_size
        k = self.num_heads

        def log_decays(key: Array, shape: Shape, dtype: DTypeLike = jnp.float32) -> Array:
            return jnp.log(initializers.uniform(16.0)(key, shape, dtype) + 1e-3)

        decays = {"W_a": uniform(k, d), "A_log": (log_decays, (k,)), "dt_bias": (time_steps, (k,))}
        return super()._parameters() | decays | {"W_g": uniform(v, d)}

    def _recurrence(self, p: Params, x: Array, S: Array, xs: PyTree, span: Span) -> Pair:
        dt = jax.nn.softplus(span.linear(x, p["W_a"], p["dt_bias"]))
        S, y = span.scan(gated_delta, S, (*xs, jnp.exp(-along_last(jnp.exp(p["A_log"]), dt) * dt)))
        return S, rms_norm(y, p["norm"]) * jax.nn.silu(
            heads(span.linear(x, p["W_g"]), self.num_heads)
        )


def gated_delta(S: Array, at: PyTree) -> Pair:
    """As `delta`, from alpha S instead of S; alpha [N, K]."""
    *others, alpha = at
    return delta(alpha[..., None, None] * S, tuple(others))
