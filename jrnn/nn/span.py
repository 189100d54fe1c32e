"""What the layers of `jrnn.nn.families` do with the time axis: loops, causal convolutions and positions.

A `Span` knows where sequences end and where they start again, so that a layer's own code does not mention it.

Shapes: T time, N batch, C channels, K taps of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jrnn.loops import Recompute, scan
from jrnn.loops.costs.target import Target
from jrnn.nn.layers import causal_convolution, contract, whole_layers
from jrnn.nn.sequences import in_rows

Pair = tuple[Array, Array]  # of a state and outputs
PyTree = Any  # of arrays
# JAX's algorithms of products that round operands to a type, and add up in float32.
_ALGORITHMS = {
    jnp.dtype(jnp.bfloat16): "BF16_BF16_F32",
    jnp.dtype(jnp.float16): "F16_F16_F32",
}


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
        fresh: the recurrent state to which a reset goes back, or None: zeros.
    """

    steps: int
    dtype: Any
    lengths: Array | None = None
    resets: Array | None = None
    dt: Array | None = None
    recompute: Recompute = None
    executor: str = "auto"
    in_a_step: bool = False
    fresh: PyTree = None

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """x weight^T + bias, [..., D], [R, D], [R] -> [..., R]."""
        y = contract(x, weight, self.dtype)
        return y if bias is None else y + along_last(bias, y)

    def scan(
        self,
        step: Callable[[Any, Any], tuple[Any, Any]],
        state: PyTree,
        xs: PyTree,
        fresh: PyTree = None,
    ) -> Any:
        """Runs the step over leaves [T, N, ...] from the state [N, ...].

        A reset goes back to `fresh`; None is the span's, or zeros.
        """
        if self.resets is not None:
            fresh = self.fresh if fresh is None else fresh
            fresh = jax.tree.map(jnp.zeros_like, state) if fresh is None else fresh
        if self.in_a_step:
            old = state if self.resets is None else in_rows(self.resets[0], fresh, state)
            state, y = step(old, jax.tree.map(lambda leaf: leaf[0], xs))
            state = state if self.lengths is None else in_rows(self.lengths > 0, state, old)
            return state, jax.tree.map(lambda leaf: leaf[None], y)
        options = dict(lengths=self.lengths, recompute=self.recompute, executor=self.executor)
        if self.resets is not None:
            options["reset_state"] = fresh
        with _products_in(self.dtype):
            return scan(step, state, xs, resets=self.resets, **options)

    def taps(self, x: Array, window: Array) -> tuple[list[Array], Array]:
        """The K - 1 values before each step and the step's own, oldest first, and the next window.

        Args:
            x: [T, N, C].
            window: [N, K - 1, C], the values before the first step. Values from before a reset are zeros.
        """
        size = window.shape[1]
        past = jnp.concatenate([jnp.swapaxes(window, 0, 1).astype(x.dtype), x])  # [K - 1 + T, N, C]
        taps = [past[k : k + self.steps] for k in range(size + 1)]
        ends = jnp.full(x.shape[1:2], self.steps) if self.lengths is None else self.lengths
        # [K - 1, N], the places of the next window in `past`
        last = ends[None] + jnp.arange(size)[:, None]
        kept = jnp.take_along_axis(past, last[..., None], axis=0)
        if self.resets is not None:
            # which piece of the row a step belongs to
            pieces = jnp.cumsum(self.resets, axis=0, dtype=jnp.int32)
            pieces = jnp.concatenate([jnp.zeros((size, x.shape[1]), jnp.int32), pieces])
            now = pieces[size:]
            for k, tap in enumerate(taps):
                is_same_piece = pieces[k : k + self.steps] == now
                taps[k] = jnp.where(is_same_piece[..., None], tap, 0)
            piece = jnp.take_along_axis(pieces, last, axis=0)
            kept = jnp.where((piece == piece[-1:])[..., None], kept, 0)
        return taps, jnp.swapaxes(kept, 0, 1).astype(window.dtype)

    def convolve(self, x: Array, window: Array, weight: Array, bias: Array | None = None) -> Pair:
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
        y = 0
        for k, tap in enumerate(taps):
            y += tap * weight[:, k][None, None]
        return (y if bias is None else y + along_last(bias, y)), window

    def positions(self, start: Array) -> Pair:
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


def _products_in(dtype: DTypeLike) -> AbstractContextManager[Any]:
    """The context in which products of a step with its state are rounded on a GPU to a type of 16 bits.

    States are float32. On other platforms products with them are, too.
    """
    algorithm = _ALGORITHMS.get(jnp.dtype(dtype))
    if algorithm is None or Target.here().platform not in ("cuda", "rocm"):
        return nullcontext()
    return jax.default_matmul_precision(algorithm)


def along_last(values: Array, like: Array) -> Array:
    """The values [C] with leading axes, so that they combine with `like` [..., C]."""
    return values.reshape((1,) * (like.ndim - values.ndim) + values.shape)


def joined(x: Array) -> Array:
    """[T, N, heads, C] -> [T, N, heads * C]."""
    return x.reshape(*x.shape[:2], -1)


def outer(k: Array, v: Array) -> Array:
    """k v^T of the last axes: [..., C], [..., V] -> [..., C, V]."""
    return k[..., :, None] * v[..., None, :]


def heads(x: Array, count: int) -> Array:
    """[..., heads * C] -> [..., heads, C]."""
    return x.reshape(*x.shape[:-1], count, -1)


def rotate(x: Array, positions: Array, base: float = 10000.0, size: int | None = None) -> Array:
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


def rms_norm(x: Array, gain: Array | None = None, epsilon: float = 1e-5) -> Array:
    """x / sqrt(mean(x^2) + epsilon), times the gain, over the last axis (Zhang and Sennrich, 2019)."""
    y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return y if gain is None else y * along_last(gain, y)


def layer_norm(x: Array, gain: Array, bias: Array | None = None, epsilon: float = 1e-5) -> Array:
    """(x - mean) / sqrt(variance + epsilon) gain + bias over the last axis (Ba et al., 2016)."""
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    y = centered * jax.lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + epsilon)
    y = y * along_last(gain, y)
    return y if bias is None else y + along_last(bias, y)


def unit_length(x: Array, epsilon: float = 1e-6) -> Array:
    """x / sqrt(|x|^2 + epsilon) over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + epsilon)
