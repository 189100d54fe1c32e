"""sLSTM and mLSTM: LSTMs with exponential gates.

Source: Beck et al., xLSTM: Extended long short-term memory, 2024.

Shapes: T time, N batch, D input, H hidden, K heads, C = H / K features of a head.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.nn import initializers
from jax.typing import DTypeLike

from jrnn.nn.checks import Shape
from jrnn.nn.families.diagonal import check_heads
from jrnn.nn.params import Params
from jrnn.nn.recurrent import Outputs, ParameterTable, RecurrentLayer, constant, uniform
from jrnn.nn.settings import spelled_out
from jrnn.nn.span import PyTree, Span, heads, joined, layer_norm, outer

NEVER = -1e30  # the logarithm of a forget gate's past that is empty; exp of it is 0


def forget_bias(key: Array, shape: Shape, dtype: DTypeLike = jnp.float32) -> Array:
    """Evenly spaced in [3, 6]: units remember for 20 to 400 steps."""
    return jnp.linspace(3.0, 6.0, shape[0]).astype(dtype)


class _Heads(RecurrentLayer):
    """A layer whose hidden features belong to heads."""

    @spelled_out(RecurrentLayer.__init__)
    def __init__(
        self,
        input_size: int,
        hidden_size: int | None = None,
        *,
        num_heads: int = 1,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        self.hidden_size = input_size if hidden_size is None else hidden_size
        self.num_heads = check_heads(self._name(), num_heads, self.hidden_size, "hidden_size")
        super().__init__(input_size, self._outputs(input_size), rngs=rngs, **options)

    def _outputs(self, input_size: int) -> int:
        """Features of the output."""
        return input_size


class SLSTM(_Heads):
    """c' = f c + i tanh(z), n' = f n + i, h' = sigmoid(o) c'/n' with i = exp(..) and f = sigmoid(..).

    The gates see h through recurrent weights R, block-diagonal with one block a head. All is kept divided by exp(m), where
    m' = max(log f + m, log i), so that no exponential overflows. Each head of the output is normalized.

    Args:
        input_size: features of the input, D.
        hidden_size: units, H; None: D.
        num_heads: heads, K; it must divide H.
        options: keyword arguments of `RecurrentLayer`.

    >>> layer = SLSTM(3, 4, num_heads=2, rngs=nnx.Rngs(0))
    >>> y, (h, c, n, m) = layer(jnp.ones((5, 2, 3)))
    >>> y.shape, h.shape, m.shape
    ((5, 2, 4), (2, 4), (2, 4))
    """

    def _outputs(self, input_size: int) -> int:
        return self.hidden_size

    def _parameters(self) -> ParameterTable:
        d = self.input_size
        h = self.hidden_size
        k = self.num_heads
        weights = {f"W_{gate}": uniform(h, d) for gate in "zifo"}
        recurrent = {}
        for gate in "zifo":
            recurrent[f"R_{gate}"] = (initializers.orthogonal(), (k, h // k, h // k))
        biases = {}
        for gate in "zifo":
            biases[f"b_{gate}"] = (forget_bias, (h,)) if gate == "f" else constant(0.0, h)
        return weights | recurrent | biases | {"norm": constant(1.0, h)}

    def _fresh(self, batch: int, dtype: DTypeLike) -> tuple[Array, ...]:
        zeros = jnp.zeros((batch, self.hidden_size), dtype)
        # A past that is empty would multiply a learned one by 0.
        scale = 0.0 if self.learned_state else NEVER
        return zeros, zeros, zeros, jnp.full_like(zeros, scale)

    def _run(self, p: Params, x: Array, state: PyTree, span: Span) -> Outputs:
        wx = [span.linear(x, p[f"W_{gate}"], p[f"b_{gate}"]) for gate in "zifo"]

        def step(state: PyTree, wx: list[Array]) -> tuple[Any, Array]:
            h, c, n, m = state
            parts = heads(h, self.num_heads).astype(span.dtype)

            def recurrent(gate: str) -> Array:
                r = p[f"R_{gate}"].astype(span.dtype)
                return jnp.einsum("nkc,kdc->nkd", parts, r, preferred_element_type=h.dtype).reshape(
                    h.shape
                )

            z, i, f, o = (w + recurrent(gate) for w, gate in zip(wx, "zifo", strict=True))
            kept = jax.nn.log_sigmoid(f) + m
            m = jnp.maximum(kept, i)
            i = jnp.exp(i - m)
            f = jnp.exp(kept - m)
            c = f * c + i * jnp.tanh(z)
            n = f * n + i
            h = jax.nn.sigmoid(o) * c / n
            return (h, c, n, m), h

        state, y = span.scan(step, state, wx)
        y = layer_norm(heads(y, self.num_heads), heads(p["norm"], self.num_heads))
        return joined(y), state


class MLSTM(_Heads):
    """S' = f S + i k v^T, n' = f n + i k, h = S'^T q / max(abs(n'^T q), 1) with i = exp(..) and f = sigmoid(..).

    S and n are kept divided by exp(m), where m' = max(log f + m, log i). Each head of h is normalized, the output gate
    sigmoid(W_o x + b_o) scales it, and `weight_out` brings it back to D features.

    Args:
        input_size: features of the input and output, D.
        hidden_size: features of q, k and v over all heads, H; None: D.
        num_heads: heads, K; it must divide H.
        options: keyword arguments of `RecurrentLayer`.

    >>> layer = MLSTM(3, 8, num_heads=2, rngs=nnx.Rngs(0))
    >>> y, (S, n, m) = layer(jnp.ones((5, 2, 3)))
    >>> y.shape, S.shape, n.shape, m.shape
    ((5, 2, 3), (2, 2, 4, 4), (2, 2, 4), (2, 2))
    """

    def _parameters(self) -> ParameterTable:
        d = self.input_size
        h = self.hidden_size
        k = self.num_heads
        weights = {f"W_{name}": uniform(h, d) for name in "qkvo"}
        gates = {
            "w_i": uniform(k, d),
            "w_f": uniform(k, d),
            "b_i": constant(-10.0, k),
            "b_f": (forget_bias, (k,)),
        }
        return (
            weights
            | gates
            | {"b_o": constant(0.0, h), "norm": constant(1.0, h), "weight_out": uniform(d, h)}
        )

    def _fresh(self, batch: int, dtype: DTypeLike) -> tuple[Array, ...]:
        k = self.num_heads
        c = self.hidden_size // self.num_heads
        return tuple(jnp.zeros((batch, *shape), dtype) for shape in ((k, c, c), (k, c), (k,)))

    def _run(self, p: Params, x: Array, state: PyTree, span: Span) -> Outputs:
        q, k, v = (heads(span.linear(x, p[f"W_{name}"]), self.num_heads) for name in "qkv")
        i, f = (span.linear(x, p[f"w_{gate}"], p[f"b_{gate}"]) for gate in "if")
        k = k / math.sqrt(k.shape[-1])
        state, y = span.scan(mlstm, state, (q, k, v, i, jax.nn.log_sigmoid(f)))
        y = layer_norm(y, heads(p["norm"], self.num_heads))
        y = jax.nn.sigmoid(span.linear(x, p["W_o"], p["b_o"])) * joined(y)
        return span.linear(y, p["weight_out"]), state


def mlstm(state: PyTree, at: PyTree, epsilon: float = 0.0) -> tuple[Any, Array]:
    """One step of all heads: q, k [N, K, C], v [N, K, V], the logarithms of i and f [N, K]; S [N, K, C, V].

    `epsilon` is added to the normalizer.
    """
    S, n, m = state
    q, k, v, log_i, log_f = at
    top = jnp.maximum(log_f + m, log_i)
    f = jnp.exp(log_f + m - top)
    i = jnp.exp(log_i - top)
    m = top
    S = f[..., None, None] * S + i[..., None, None] * (outer(k, v))
    n = f[..., None] * n + i[..., None] * k
    scale = jnp.maximum(jnp.abs(jnp.sum(n * q, axis=-1)), jnp.exp(-m)) + epsilon
    return (S, n, m), jnp.einsum("nkc,nkcv->nkv", q, S) / scale[..., None]
