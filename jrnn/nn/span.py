"""What the layers of `jrnn.nn.families` do with the time axis: loops, causal convolutions and positions.

A `Span` knows where sequences end and where they start again, so that a layer's own code does not mention it.

Shapes: T time, N batch, C channels, K taps of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.loops import Recompute, scan
from jrnn.nn.layers import causal_convolution, contract, whole_layers
from jrnn.nn.sequences import in_rows


@dataclass(frozen=True)
class Span:
    """The steps of one call of a layer.

    Attributes:
        steps: T.
        dtype: the type of the products with weights; they accumulate in float32 or wider.
        lengths: [N] integers or None, where sequences end.
        resets: [T, N] booleans or None, where they start again.
        dt: [T, N] or None, the time since the last step.
        recompute, executor: as in `jrnn.scan`.
        in_a_step: whether this is `layer.step`, with T = 1, which needs no loop.
    """

    steps: int
    dtype: Any
    lengths: jax.Array | None = None
    resets: jax.Array | None = None
    dt: jax.Array | None = None
    recompute: Recompute = None
    executor: str = "auto"
    in_a_step: bool = False

    def linear(self, x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        """x weight^T + bias, [..., D], [R, D], [R] -> [..., R]."""
        y = contract(x, weight, self.dtype)
        return y if bias is None else y + along_last(bias, y)

    def scan(
        self, step: Callable[[Any, Any], tuple[Any, Any]], state: Any, xs: Any, fresh: Any = None
    ) -> Any:
        """Runs the step over leaves [T, N, ...] from the state [N, ...]; a reset goes back to `fresh`, or to zeros."""
        if self.resets is not None:
            fresh = jax.tree.map(jnp.zeros_like, state) if fresh is None else fresh
        if self.in_a_step:
            old = state if self.resets is None else in_rows(self.resets[0], fresh, state)
            state, y = step(old, jax.tree.map(lambda leaf: leaf[0], xs))
            state = state if self.lengths is None else in_rows(self.lengths > 0, state, old)
            return state, jax.tree.map(lambda leaf: leaf[None], y)
        options = dict(lengths=self.lengths, recompute=self.recompute, executor=self.executor)
        if self.resets is not None:
            options["reset_state"] = fresh
        return scan(step, state, xs, resets=self.resets, **options)

    def taps(self, x: jax.Array, window: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        """The K - 1 values before each step and the step's own, oldest first, and the next window.

        Args:
            x: [T, N, C].
            window: [N, K - 1, C], the values before the first step. Values from before a reset are zeros.
        """
        size = window.shape[1]
        past = jnp.concatenate([jnp.swapaxes(window, 0, 1).astype(x.dtype), x])  # [K - 1 + T, N, C]
        taps = [past[k : k + self.steps] for k in range(size + 1)]
        ends = jnp.full(x.shape[1:2], self.steps) if self.lengths is None else self.lengths
        last = (
            ends[None] + jnp.arange(size)[:, None]
        )  # [K - 1, N], the places of the next window in `past`
        kept = jnp.take_along_axis(past, last[..., None], axis=0)
        if self.resets is not None:
            pieces = jnp.cumsum(
                self.resets, axis=0, dtype=jnp.int32
            )  # which piece of the row a step belongs to
            pieces = jnp.concatenate([jnp.zeros((size, x.shape[1]), jnp.int32), pieces])
            now = pieces[size:]
            taps = [
                jnp.where((pieces[k : k + self.steps] == now)[..., None], tap, 0)
                for k, tap in enumerate(taps)
            ]
            piece = jnp.take_along_axis(pieces, last, axis=0)
            kept = jnp.where((piece == piece[-1:])[..., None], kept, 0)
        return taps, jnp.swapaxes(kept, 0, 1).astype(window.dtype)

    def convolve(
        self, x: jax.Array, window: jax.Array, weight: jax.Array, bias: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """A causal convolution of each channel, y_t = sum_k weight_k x_(t - K + 1 + k) + bias, and the next window.

        Args:
            x: [T, N, C].
            window: [N, K - 1, C].
            weight: [C, K].
            bias: [C] or None.
        """
        is_plain = self.resets is None and x.dtype == window.dtype == weight.dtype == jnp.float32
        if "causal_convolution" in whole_layers.value and is_plain:
            y, last = causal_convolution.bind(x, window, weight, *([] if bias is None else [bias]))
            return y, last if self.lengths is None else self.taps(x, window)[1]
        taps, window = self.taps(x, window)
        y = sum(tap * weight[:, k][None, None] for k, tap in enumerate(taps))
        return (y if bias is None else y + along_last(bias, y)), window

    def positions(self, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The positions [T, N] of the steps, counted from `start` [N] or from the last reset, and the next start."""
        steps = jnp.arange(self.steps, dtype=start.dtype)[:, None]
        positions = start[None] + steps
        if self.resets is not None:
            latest = jax.lax.cummax(jnp.where(self.resets, steps, -1), axis=0)
            positions = jnp.where(latest >= 0, steps - latest, positions)
        if not self.steps:
            return positions, start
        if self.lengths is None:
            return positions, positions[-1] + 1
        last = jnp.take_along_axis(positions, jnp.maximum(self.lengths, 1)[None] - 1, axis=0)[0] + 1
        return positions, jnp.where(self.lengths > 0, last, start).astype(start.dtype)


def along_last(values: jax.Array, like: jax.Array) -> jax.Array:
    """The values [C] with leading axes, so that they combine with `like` [..., C]."""
    return values.reshape((1,) * (like.ndim - values.ndim) + values.shape)


def heads(x: jax.Array, count: int) -> jax.Array:
    """[..., heads * C] -> [..., heads, C]."""
    return x.reshape(*x.shape[:-1], count, -1)


def rotate(
    x: jax.Array, positions: jax.Array, base: float = 10000.0, size: int | None = None
) -> jax.Array:
    """Rotary positions (Su et al., 2021) of the first `size` features of each head of x [T, N, heads, C]; None: of all.

    Features c and c + size/2 turn by position base^(-2 c/size).
    """
    size = x.shape[-1] if size is None else size
    half = size // 2
    angles = (
        positions[..., None, None].astype(x.dtype)
        * base ** -(jnp.arange(half, dtype=x.dtype) / half)[None, None, None]
    )
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    a = x[..., :half]
    b = x[..., half:size]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., size:]], axis=-1)


def rms_norm(x: jax.Array, gain: jax.Array | None = None, epsilon: float = 1e-5) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon), times the gain, over the last axis (Zhang and Sennrich, 2019)."""
    y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return y if gain is None else y * along_last(gain, y)


def layer_norm(
    x: jax.Array, gain: jax.Array, bias: jax.Array | None = None, epsilon: float = 1e-5
) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) gain + bias over the last axis (Ba et al., 2016)."""
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    y = centered * jax.lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + epsilon)
    y = y * along_last(gain, y)
    return y if bias is None else y + along_last(bias, y)


def unit_length(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """x / sqrt(|x|^2 + epsilon) over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + epsilon)
