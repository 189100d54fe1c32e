"""The families mamba and falcon_mamba: blocks of a norm and a selective state space.

Shapes: T time, N batch, D width, I inner, S states of an inner feature, K taps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jrnn.models.config import ACTIVATIONS
from jrnn.models.families import mamba_blocks
from jrnn.models.family import Family, Shapes, State, Weights, zeros
from jrnn.nn.families.mamba import selective
from jrnn.nn.span import Span, along_last, rms_norm


@dataclass(frozen=True)
class MambaConfig:
    """The keys of config.json, with the defaults of transformers."""

    vocab_size: int = 50280
    hidden_size: int = 768
    state_size: int = 16
    num_hidden_layers: int = 32
    layer_norm_epsilon: float = 1e-5
    expand: float = 2
    intermediate_size: int | None = None
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    time_step_rank: int | Literal["auto"] = "auto"
    tie_word_embeddings: bool = True
    mixer_rms_eps: float | None = None  # of falcon_mamba, which normalizes dt, B and C

    @property
    def inner(self) -> int:
        return self.intermediate_size or int(self.expand * self.hidden_size)

    @property
    def rank(self) -> int:
        return -(-self.hidden_size // 16) if self.time_step_rank == "auto" else self.time_step_rank


@dataclass(frozen=True)
class FalconMambaConfig(MambaConfig):
    mixer_rms_eps: float | None = 1e-6


def tensors(c: MambaConfig) -> Shapes:
    mixer = {
        "x_proj.weight": (c.rank + 2 * c.state_size, c.inner),
        "dt_proj.weight": (c.inner, c.rank),
        "dt_proj.bias": (c.inner,),
        "A_log": (c.inner, c.state_size),
        "D": (c.inner,),
    }
    return mamba_blocks.tensors(c, 2 * c.inner, c.inner, mixer)


def fresh(c: MambaConfig, batch: int, dtype: Any) -> State:
    shapes = {"conv": (batch, c.conv_kernel - 1, c.inner), "ssm": (batch, c.inner, c.state_size)}
    return zeros(c.num_hidden_layers, shapes, dtype)


def _mixer(c: MambaConfig, w: Weights, x: jax.Array, state: State, span: Span) -> tuple[jax.Array, State]:
    act = ACTIVATIONS[c.hidden_act]
    u, gate = jnp.split(w.linear(span, "in_proj", x), 2, axis=-1)
    u, conv = span.convolve(u, state["conv"], w["conv1d.weight"][:, 0], w.get("conv1d.bias"))
    u = act(u)
    parts = jnp.split(span.linear(u, w["x_proj.weight"]), [c.rank, c.rank + c.state_size], axis=-1)
    if c.mixer_rms_eps is not None:
        parts = [rms_norm(part, epsilon=c.mixer_rms_eps) for part in parts]
    dt, b, by = parts
    dt = jax.nn.softplus(w.linear(span, "dt_proj", dt))
    step = selective(-jnp.exp(w["A_log"].astype(state["ssm"].dtype)))
    ssm, y = span.scan(step, state["ssm"], (u, dt, b, by))
    y = (y + along_last(w["D"], u) * u) * jax.nn.silu(gate)
    return w.linear(span, "out_proj", y), {"conv": conv, "ssm": ssm}


MAMBA = Family(
    name="mamba",
    config=MambaConfig,
    ignored=(
        "residual_in_fp32 rescale_prenorm_residual time_step_floor time_step_init_scheme time_step_max time_step_min "
        "time_step_scale use_associative_scan use_mambapy use_falcon_mambapy layer_types"
    ),
    tensors=tensors,
    embedding="backbone.embeddings.weight",
    head="lm_head.weight",
    fresh=fresh,
    run=mamba_blocks.blocks(_mixer),
    renamed=mamba_blocks.RENAMED,
)
FALCON_MAMBA = replace(MAMBA, name="falcon_mamba", config=FalconMambaConfig, renamed=())
