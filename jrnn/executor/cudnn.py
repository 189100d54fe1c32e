"""NVIDIA's LSTM kernels, through `jax.experimental.rnn`.

They take a float32 `LstmStep` on CUDA. cuDNN picks its STANDARD algorithm there, and may use TF32 unless JAX is set to
`jax_default_matmul_precision="highest"`.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import ScanError
from jrnn.executor.lstm_step import LstmStep


def refusal(step: Any, carry: Any, xs: Any, reverse: bool, resets: Any, platform: str) -> str | None:
    """Why cuDNN cannot run a scan, or None when it can."""
    if not isinstance(step, LstmStep):
        return "the step is not an LstmStep"
    if platform not in ("gpu", "cuda"):
        return f"there is no CUDA device (the platform is {platform})"
    if reverse:
        return "time runs backwards"
    if resets is not None:
        return "cuDNN knows no resets"
    leaves = jax.tree.leaves((step, carry, xs))
    if any(jnp.result_type(leaf) != jnp.float32 for leaf in leaves):
        return "cuDNN's LSTM is float32 only"
    if jnp.ndim(xs) != 3:
        return f"the input must be [T, N, D], but is {list(jnp.shape(xs))}"
    return None


def packed_weights(step: LstmStep) -> Any:
    """The step's weights in cuDNN's one vector: w_x, w_h, and two biases, of which the second is zero."""
    return jnp.concatenate([jnp.ravel(w) for w in (step.w_x, step.w_h, step.b, jnp.zeros_like(step.b))])


def scan(step: Any, carry: Any, xs: Any, reverse: bool, lengths: Any, resets: Any) -> tuple[Any, Any]:
    """The scan's `((h, c), hs)`; raises a ScanError where cuDNN cannot run it."""
    why = refusal(step, carry, xs, reverse, resets, jax.default_backend())
    if why is not None:
        raise ScanError(f"scan: executor 'cudnn' cannot run this step ({why}); use 'auto' or 'scan'")
    return run(step, carry, xs, lengths)


def run(step: LstmStep, carry: tuple[Any, Any], xs: Any, lengths: Any = None) -> tuple[tuple[Any, Any], Any]:
    """The scan's `((h, c), hs)`."""
    from jax.experimental import rnn  # loads much, and only for this

    steps, rows, features = xs.shape
    hidden = step.w_h.shape[1]
    if lengths is None:
        lengths = jnp.full((rows,), steps, jnp.int32)
    y, h, c = rnn.lstm(
        jnp.swapaxes(xs, 0, 1),
        *(v[None] for v in carry),
        packed_weights(step),
        lengths,
        features,
        hidden,
        num_layers=1,
        dropout=0.0,
        bidirectional=False,
    )
    return (h[0], c[0]), jnp.swapaxes(y, 0, 1)
