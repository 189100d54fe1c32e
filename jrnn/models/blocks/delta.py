"""Attention without a softmax: the gated delta rule, Kimi's, and lightning attention.

Shapes: T time, N batch, D width, K key heads, H value heads, C and V features of a key and a value in a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn.models.family import (
    Block,
    Merge,
    Norm,
    Outputs,
    Scoped,
    Shapes,
    State,
    convolution,
    linear,
    products,
)
from jrnn.models.model_config import ACTIVATIONS, divides
from jrnn.nn.families.linear_attention_layers import delta, gated_delta
from jrnn.nn.families.mamba_layer import state_space
from jrnn.nn.span import along_last, heads, joined, rms_norm, unit_length

CONVOLUTIONS = Merge(("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"), stacks=False)


@dataclass(frozen=True)
class Delta(Block):
    """The gated delta rule after a short convolution, with a gated norm.

    Attributes:
        width, key_heads, value_heads, key, value, taps: D, K, H, C, V, and of the convolution.
        act: the activation after the convolution.
        epsilon: of the norm.
        products: how the files hold the projections: "by head" (qkvz and ba, mixed by key head), "together" (qkv, z, b, a),
            or "each" (q, k, v, g, b, a, and three convolutions).
        beta: the greatest beta.
    """

    width: int
    key_heads: int
    value_heads: int
    key: int
    value: int
    taps: int
    act: str = "silu"
    epsilon: float = 1e-6
    products: str = "by head"
    beta: float = 1.0

    def __post_init__(self) -> None:
        divides("linear_num_key_heads", self.key_heads, "linear_num_value_heads", self.value_heads)

    @property
    def _sizes(self) -> tuple[int, int]:
        """Features of all keys, and of all values."""
        return self.key_heads * self.key, self.value_heads * self.value

    def tensors(self) -> Shapes:
        k, v = self._sizes
        h = self.value_heads
        d = self.width
        shapes: Shapes = {"dt_bias": (h,), "A_log": (h,)}
        if self.products == "each":
            rows = {"q_proj": k, "k_proj": k, "v_proj": v, "a_proj": h, "b_proj": h, "g_proj": v}
            for name, size in (("q", k), ("k", k), ("v", v)):
                shapes[f"{name}_conv1d.weight"] = (size, 1, self.taps)
            norm = "o_norm"
            out = "o_proj"
        else:
            rows = {"in_proj_qkvz": 2 * (k + v), "in_proj_ba": 2 * h}
            if self.products == "together":
                rows = {"in_proj_qkv": 2 * k + v, "in_proj_z": v, "in_proj_b": h, "in_proj_a": h}
            shapes |= convolution("conv1d", 2 * k + v, self.taps)
            norm = "norm"
            out = "out_proj"
        return shapes | products(rows, d) | {f"{norm}.weight": (self.value,)} | linear(out, d, v)

    def merged(self) -> dict[str, Merge]:
        return {"conv1d.weight": CONVOLUTIONS} if self.products == "each" else {}

    def holds(self, room: int) -> Shapes:
        k, v = self._sizes
        return {"conv": (self.taps - 1, 2 * k + v), "S": (self.value_heads, self.key, self.value)}

    def _projected(self, w: Scoped, x: Array) -> tuple[Array, ...]:
        """qkv [T, N, 2 K C + H V], z [T, N, H V], and b and a [T, N, H]."""
        if self.products == "each":
            qkv = jnp.concatenate([w.linear(f"{name}_proj", x) for name in "qkv"], axis=-1)
            return qkv, *(w.linear(f"{name}_proj", x) for name in "gba")
        if self.products == "together":
            return tuple(w.linear(f"in_proj_{name}", x) for name in ("qkv", "z", "b", "a"))
        each = self.value_heads // self.key_heads
        flat = (*x.shape[:2], -1)
        parts = heads(w.linear("in_proj_qkvz", x), self.key_heads)
        parts = jnp.split(
            parts, np.cumsum([self.key, self.key, each * self.value]).tolist(), axis=-1
        )
        q, k, v, z = (part.reshape(flat) for part in parts)
        b, a = jnp.split(heads(w.linear("in_proj_ba", x), self.key_heads), 2, axis=-1)
        return jnp.concatenate([q, k, v], axis=-1), z, b.reshape(flat), a.reshape(flat)

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        size, _ = self._sizes
        qkv, z, b, a = self._projected(w, x)
        qkv, conv = w.convolve("conv1d", qkv, state["conv"])
        q, k, v = jnp.split(ACTIVATIONS[self.act](qkv), [size, 2 * size], axis=-1)
        each = self.value_heads // self.key_heads
        q, k = (
            jnp.repeat(unit_length(heads(part, self.key_heads)), each, axis=-2) for part in (q, k)
        )
        v = heads(v, self.value_heads)
        z = heads(z, self.value_heads)
        beta = jax.nn.sigmoid(b) if self.beta == 1 else self.beta * jax.nn.sigmoid(b)
        rate = along_last(jnp.exp(w["A_log"].astype(a.dtype)), a) * jax.nn.softplus(
            a + along_last(w["dt_bias"], a)
        )
        S, y = w.scan(gated_delta, state, "S", (q * self.key**-0.5, k, v, beta, jnp.exp(-rate)))
        norm, out = ("o_norm", "o_proj") if self.products == "each" else ("norm", "out_proj")
        y = rms_norm(y, w[f"{norm}.weight"], self.epsilon) * jax.nn.silu(z)
        return w.linear(out, joined(y)), {"conv": conv, "S": S}


def channel_delta(S: Array, at: Any) -> tuple[Array, Array]:
    """As `delta`, from diag(alpha) S instead of S; alpha [N, K, C]."""
    *others, alpha = at
    return delta(alpha[..., None] * S, tuple(others))


@dataclass(frozen=True)
class Kda(Block):
    """Kimi delta attention: the delta rule with a decay of each feature of the keys.

    Attributes:
        width, heads, size, taps: D, heads, features of a head, and of the convolution.
        act: the activation after the convolution.
        epsilon: of the norm.
        low: whether the products of the decays and of the gate have a low rank.
        flat: whether the files hold a rate of each head without further axes.
        bound: the least logarithm of a decay, or None.
        out: the name of the output's product.
    """

    width: int
    heads: int
    size: int
    taps: int
    act: str = "silu"
    epsilon: float = 1e-5
    low: bool = True
    flat: bool = False
    bound: float | None = None
    out: str = "o_proj"

    def tensors(self) -> Shapes:
        d = self.width
        inner = self.heads * self.size
        rates = (self.heads,) if self.flat else (1, 1, self.heads, 1)
        shapes: Shapes = {"A_log": rates, "dt_bias": (inner,), "o_norm.weight": (self.size,)}
        for name in "qkv":
            shapes |= linear(f"{name}_proj", inner, d) | convolution(
                f"{name}_conv1d", inner, self.taps
            )
        for name in "fg":
            low = linear(f"{name}_a_proj", self.size, d) | linear(
                f"{name}_b_proj", inner, self.size
            )
            shapes |= low if self.low else linear(f"{name}_proj", inner, d)
        return shapes | linear("b_proj", self.heads, d) | linear(self.out, d, inner)

    def merged(self) -> dict[str, Merge]:
        return {"conv1d.weight": CONVOLUTIONS}

    def holds(self, room: int) -> Shapes:
        return {
            "conv": (self.taps - 1, 3 * self.heads * self.size),
            "S": (self.heads, self.size, self.size),
        }

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        qkv = jnp.concatenate([w.linear(f"{name}_proj", x) for name in "qkv"], axis=-1)
        qkv, conv = w.convolve("conv1d", qkv, state["conv"])
        q, k, v = (
            heads(part, self.heads) for part in jnp.split(ACTIVATIONS[self.act](qkv), 3, axis=-1)
        )

        def product(name: str) -> Array:
            if not self.low:
                return w.linear(f"{name}_proj", x)
            return w.linear(f"{name}_b_proj", w.linear(f"{name}_a_proj", x))

        f = product("f")
        f = heads(f + along_last(w["dt_bias"].astype(f.dtype), f), self.heads)
        rates = jnp.exp(w["A_log"].astype(f.dtype).reshape(1, 1, -1, 1))
        if self.bound is None:
            logs = -rates * jax.nn.softplus(f)
        else:
            logs = self.bound * jax.nn.sigmoid(rates * f)
        beta = jax.nn.sigmoid(w.linear("b_proj", x))
        xs = (unit_length(q) * self.size**-0.5, unit_length(k), v, beta, jnp.exp(logs))
        S, y = w.scan(channel_delta, state, "S", xs)
        y = rms_norm(y, w["o_norm.weight"], self.epsilon) * jax.nn.sigmoid(
            heads(product("g"), self.heads)
        )
        return w.linear(self.out, joined(y)), {"conv": conv, "S": S}


@dataclass(frozen=True)
class Lightning(Block):
    """Lightning attention (MiniMax): S' = exp(-rate) S + k v^T, y = S'^T q, with a fixed rate in each head.

    Attributes:
        width, heads, size: D, heads, features of a head.
        share: of the rates in this layer.
        act: the activation of q, k and v.
    """

    width: int
    heads: int
    size: int
    share: float
    act: str = "silu"

    def tensors(self) -> Shapes:
        d = self.width
        inner = self.heads * self.size
        shapes = (
            linear("qkv_proj", 3 * inner, d)
            | linear("output_gate", inner, d)
            | linear("out_proj", d, inner)
        )
        return shapes | {"norm.weight": (inner,)}

    def holds(self, room: int) -> Shapes:
        return {"S": (self.heads, self.size, self.size)}

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        qkv = heads(ACTIVATIONS[self.act](w.linear("qkv_proj", x)), self.heads)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        rates = 2.0 ** (-8 / self.heads * np.arange(1, self.heads + 1)) * self.share
        decay = jnp.broadcast_to(jnp.asarray(np.exp(-rates), q.dtype)[None, None], q.shape[:3])
        S, y = w.scan(state_space, state, "S", (q, k, v, decay))
        y = Norm(self.heads * self.size, 1e-6)(w.at("norm"), joined(y))
        return w.linear("out_proj", jax.nn.sigmoid(w.linear("output_gate", x)) * y), {"S": S}
