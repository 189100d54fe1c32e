"""The family mamba2: blocks of a norm and a state space with a matrix in each head.

Shapes: T time, N batch, D width, I inner, K heads, G groups, S rows of a head's state, P = I / K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from jrnn.errors import ConfigError
from jrnn.files import AtLeast
from jrnn.models.config import ACTIVATIONS
from jrnn.models.families import mamba_blocks
from jrnn.models.family import Family, Shapes, State, Weights, zeros
from jrnn.nn.families.mamba import state_space
from jrnn.nn.span import Span, along_last, heads, rms_norm


@dataclass(frozen=True)
class Mamba2Config:
    """The keys of config.json, with the defaults of transformers."""

    num_heads: int = 128
    head_dim: int = 64
    vocab_size: int = 32768
    hidden_size: int = 4096
    state_size: int = 128
    num_hidden_layers: int = 64
    layer_norm_epsilon: float = 1e-5
    expand: float = 2
    conv_kernel: int = 4
    n_groups: int = 8
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    time_step_limit: tuple[float, Annotated[float, AtLeast(0, math.inf)]] = (0.0, math.inf)
    tie_word_embeddings: bool = False

    @property
    def inner(self) -> int:
        return int(self.expand * self.hidden_size)

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.n_groups * self.state_size


def check(c: Mamba2Config, where: str) -> None:
    if c.inner != c.num_heads * c.head_dim:
        raise ConfigError(
            f"{where}: expand times hidden_size is {c.inner}, but num_heads times head_dim is {c.num_heads * c.head_dim}; "
            "they must be equal"
        )
    if c.num_heads % c.n_groups:
        raise ConfigError(f"{where}: n_groups is {c.n_groups}, which does not divide num_heads, {c.num_heads}")


def tensors(c: Mamba2Config) -> Shapes:
    mixer = {"dt_bias": (c.num_heads,), "A_log": (c.num_heads,), "D": (c.num_heads,), "norm.weight": (c.inner,)}
    return mamba_blocks.tensors(c, c.inner + c.channels + c.num_heads, c.channels, mixer)


def fresh(c: Mamba2Config, batch: int, dtype: Any) -> State:
    shapes = {
        "conv": (batch, c.conv_kernel - 1, c.channels),
        "ssm": (batch, c.num_heads, c.state_size, c.head_dim),
    }
    return zeros(c.num_hidden_layers, shapes, dtype)


def _mixer(c: Mamba2Config, w: Weights, x: jax.Array, state: State, span: Span) -> tuple[jax.Array, State]:
    gate, xbc, dt = jnp.split(w.linear(span, "in_proj", x), [c.inner, c.inner + c.channels], axis=-1)
    xbc, conv = span.convolve(xbc, state["conv"], w["conv1d.weight"][:, 0], w.get("conv1d.bias"))
    ends = [c.inner, c.inner + c.n_groups * c.state_size]
    u, b, by = jnp.split(ACTIVATIONS[c.hidden_act](xbc), ends, axis=-1)
    u = heads(u, c.num_heads)
    b, by = (jnp.repeat(heads(part, c.n_groups), c.num_heads // c.n_groups, axis=-2) for part in (b, by))
    dt = jnp.clip(jax.nn.softplus(dt + along_last(w["dt_bias"], dt)), *c.time_step_limit)
    decay = jnp.exp(-along_last(jnp.exp(w["A_log"].astype(dt.dtype)), dt) * dt)
    S, y = span.scan(state_space, state["ssm"], (by, dt[..., None] * b, u, decay))
    y = (y + w["D"][None, None, :, None] * u).reshape(gate.shape) * jax.nn.silu(gate)
    y = rms_norm(heads(y, c.n_groups), heads(w["norm.weight"], c.n_groups), c.layer_norm_epsilon)
    return w.linear(span, "out_proj", y.reshape(gate.shape)), {"conv": conv, "ssm": S}


MAMBA2 = Family(
    name="mamba2",
    config=Mamba2Config,
    ignored=(
        "chunk_size residual_in_fp32 rescale_prenorm_residual time_step_floor time_step_max time_step_min time_step_rank "
        "layer_types"
    ),
    check=check,
    tensors=tensors,
    embedding="backbone.embeddings.weight",
    head="lm_head.weight",
    fresh=fresh,
    run=mamba_blocks.blocks(_mixer),
    renamed=mamba_blocks.RENAMED,
)
