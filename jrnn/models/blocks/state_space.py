"""Selective state spaces: Mamba's and Mamba-2's mixers, with the options of the families.

Shapes: T time, N batch, D width, I inner, S states, K heads, P = I / K, G groups of heads, taps of a convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn.errors import ConfigError
from jrnn.models.family import Block, Outputs, Scoped, Shapes, State, convolution, linear
from jrnn.models.model_config import ACTIVATIONS, Mamba2Keys, divides
from jrnn.nn.families.mamba_layer import selective, state_space
from jrnn.nn.span import along_last, heads, rms_norm


@dataclass(frozen=True)
class Mamba1(Block):
    """Mamba's mixer.

    Attributes:
        width, inner, states, rank, taps: D, I, S, features of the time step before its projection, and of the convolution.
        bias, conv_bias: whether the products, and the convolution, have biases.
        act: the activation after the convolution.
        epsilon: of norms of the time step, B and C; None: there are none.
        norms: their names; None: they have no gains.
    """

    width: int
    inner: int
    states: int
    rank: int
    taps: int
    bias: bool = False
    conv_bias: bool = True
    act: str = "silu"
    epsilon: float | None = None
    norms: tuple[str, str, str] | None = None

    def tensors(self) -> Shapes:
        inner = self.inner
        sizes = (self.rank, self.states, self.states)
        shapes = linear("in_proj", 2 * inner, self.width, bias=self.bias)
        shapes |= convolution("conv1d", inner, self.taps, self.conv_bias) | linear(
            "x_proj", sum(sizes), inner
        )
        shapes |= linear("dt_proj", inner, self.rank, bias=True) | {
            "A_log": (inner, self.states),
            "D": (inner,),
        }
        for name, size in zip(self.norms or (), sizes):
            shapes[f"{name}.weight"] = (size,)
        return shapes | linear("out_proj", self.width, inner, bias=self.bias)

    def holds(self, room: int) -> Shapes:
        return {"conv": (self.taps - 1, self.inner), "ssm": (self.inner, self.states)}

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        u, gate = jnp.split(w.linear("in_proj", x), 2, axis=-1)
        u, conv = w.convolve("conv1d", u, state["conv"])
        u = ACTIVATIONS[self.act](u)
        parts = jnp.split(w.linear("x_proj", u), [self.rank, self.rank + self.states], axis=-1)
        if self.epsilon is not None:
            gains = (
                [None] * 3 if self.norms is None else [w[f"{name}.weight"] for name in self.norms]
            )
            parts = [rms_norm(part, gain, self.epsilon) for part, gain in zip(parts, gains)]
        dt, b, by = parts
        dt = jax.nn.softplus(w.linear("dt_proj", dt))
        step = selective(-jnp.exp(w["A_log"].astype(state["ssm"].dtype)))
        ssm, y = w.scan(step, state, "ssm", (u, dt, b, by))
        y = (y + along_last(w["D"], u) * u) * jax.nn.silu(gate)
        return w.linear("out_proj", y), {"conv": conv, "ssm": ssm}


@dataclass(frozen=True)
class Mamba2(Block):
    """Mamba-2's mixer.

    Attributes:
        width, heads, size, states, groups, taps: D, K, P, S, G, and of the convolution.
        bias, out_bias, conv_bias: whether the products, the output's product and the convolution have biases.
        act: the activation after the convolution.
        limit: between which the time step lies.
        epsilon: of the norm.
        norm: where the norm of the output is: after the gate, before it, or nowhere.
        factors: of the gate, x, B, C and the time step in the first product; None: 1.
    """

    width: int
    heads: int
    size: int
    states: int
    groups: int
    taps: int
    bias: bool = False
    out_bias: bool | None = None
    conv_bias: bool = True
    act: str = "silu"
    limit: tuple[float, float] = (0.0, float("inf"))
    epsilon: float = 1e-5
    norm: str | None = "after"
    factors: tuple[float, ...] | None = None

    @classmethod
    def of(cls, c: Mamba2Keys, **more: Any) -> Mamba2:
        """With the sizes and options of a config."""
        size = divides("mamba_n_heads", c.mamba_n_heads, "the inner size", c.inner)
        if c.mamba_d_head not in ("auto", size):
            problem = f"mamba_d_head is {c.mamba_d_head!r}; the inner size {c.inner} and mamba_n_heads make it {size}"
            raise ConfigError(problem)
        sizes = (
            c.hidden_size,
            c.mamba_n_heads,
            size,
            c.mamba_d_state,
            c.mamba_n_groups,
            c.mamba_d_conv,
        )
        given = {"bias": c.mamba_proj_bias, "conv_bias": c.mamba_conv_bias, "act": c.hidden_act}
        return cls(*sizes, **given | {"limit": c.time_step_limit, "epsilon": c.rms_norm_eps} | more)

    def __post_init__(self) -> None:
        divides("n_groups", self.groups, "num_heads", self.heads)

    @property
    def inner(self) -> int:
        return self.heads * self.size

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.states

    def tensors(self) -> Shapes:
        k = self.heads
        channels = self.channels
        shapes = linear("in_proj", self.inner + channels + k, self.width, bias=self.bias)
        shapes |= convolution("conv1d", channels, self.taps, self.conv_bias)
        shapes |= {"dt_bias": (k,), "A_log": (k,), "D": (k,)} | (
            {"norm.weight": (self.inner,)} if self.norm else {}
        )
        out_bias = self.bias if self.out_bias is None else self.out_bias
        return shapes | linear("out_proj", self.width, self.inner, bias=out_bias)

    def holds(self, room: int) -> Shapes:
        return {"conv": (self.taps - 1, self.channels), "ssm": (self.heads, self.states, self.size)}

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        inner = self.inner
        rows = self.groups * self.states
        z = w.linear("in_proj", x)
        if self.factors is not None:
            z = z * along_last(
                jnp.asarray(
                    np.repeat(self.factors, [inner, inner, rows, rows, self.heads]), z.dtype
                ),
                z,
            )
        gate, xbc, dt = jnp.split(z, [inner, inner + self.channels], axis=-1)
        xbc, conv = w.convolve("conv1d", xbc, state["conv"])
        u, b, by = jnp.split(ACTIVATIONS[self.act](xbc), [inner, inner + rows], axis=-1)
        u = heads(u, self.heads)
        b, by = (
            jnp.repeat(heads(part, self.groups), self.heads // self.groups, axis=-2)
            for part in (b, by)
        )
        dt = jnp.clip(jax.nn.softplus(dt + along_last(w["dt_bias"], dt)), *self.limit)
        decay = jnp.exp(-along_last(jnp.exp(w["A_log"].astype(dt.dtype)), dt) * dt)
        S, y = w.scan(state_space, state, "ssm", (by, dt[..., None] * b, u, decay))
        y = (y + w["D"][None, None, :, None] * u).reshape(gate.shape)
        return w.linear("out_proj", self._gated(w, y, gate)), {"conv": conv, "ssm": S}

    def _gated(self, w: Scoped, y: Array, gate: Array) -> Array:
        gate = jax.nn.silu(gate)
        if self.norm is None:
            return y * gate
        y = y * gate if self.norm == "after" else y
        y = rms_norm(
            heads(y, self.groups), heads(w["norm.weight"], self.groups), self.epsilon
        ).reshape(gate.shape)
        return y if self.norm == "after" else y * gate
