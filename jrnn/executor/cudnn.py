"""NVIDIA's LSTM kernels, through `jax.experimental.rnn`.

They take float32 `LstmStep`s on CUDA, several layers and both directions in one call. cuDNN picks its STANDARD algorithm.
It uses TF32 unless `jax_default_matmul_precision` is "highest" or "float32".

Shapes: T time, N batch, D input, H hidden, L layers, K directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from jrnn.errors import ScanError
from jrnn.executor.lstm_step import LstmStep
from jrnn.executor.masking import with_lengths

States = tuple[Any, Any]  # h and c, [L K, N, H] each
# What `jax_default_matmul_precision` may be; the others ask for bfloat16, which the kernels do not have.
_PRECISIONS = (None, "high", "highest", "tensorfloat32", "float32", "bfloat16_3x")


def platform() -> str:
    """JAX's default platform, "rocm" for AMD's GPUs, which JAX calls "gpu" too."""
    name = jax.default_backend()
    return "rocm" if name == "gpu" and "rocm" in jax.devices()[0].client.platform_version.lower() else name


def refusal(step: Any, carry: Any, xs: Any, reverse: bool, resets: Any, platform: str) -> str | None:
    """Why cuDNN cannot run a scan, or None when it can."""
    if not isinstance(step, LstmStep):
        return "the step is not an LstmStep"
    if platform == "rocm":
        return "AMD's library orders the gates in another way, and jrnn does not know it"
    if platform not in ("gpu", "cuda"):
        return f"there is no CUDA device (the platform is {platform})"
    if reverse:
        return "time runs backwards"
    if resets is not None:
        return "cuDNN knows no resets"
    leaves = jax.tree.leaves((step, carry, xs))
    if any(jnp.result_type(leaf) != jnp.float32 for leaf in leaves):
        return "cuDNN's LSTM is float32 only"
    asked = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if asked not in _PRECISIONS:
        return f"jax_default_matmul_precision is {asked!r}, and cuDNN's LSTM has float32 and TF32"
    if jnp.ndim(xs) != 3:
        return f"the input must be [T, N, D], but is {list(jnp.shape(xs))}"
    return None


def packed_weights(steps: Sequence[LstmStep]) -> Any:
    """The weights in cuDNN's one vector: of each step w_x and w_h, then of each two biases, of which the second is zero."""
    matrices = [w for step in steps for w in (step.w_x, step.w_h)]
    return jnp.concatenate([jnp.ravel(w) for w in (*matrices, *(b for s in steps for b in (s.b, jnp.zeros_like(s.b))))])


def scan(step: Any, carry: Any, xs: Any, reverse: bool, lengths: Any, resets: Any) -> tuple[Any, Any]:
    """The scan's `((h, c), hs)`; raises a ScanError where cuDNN cannot run it."""
    check(step, carry, xs, reverse, resets)
    ys, (h, c) = run((step,), tuple(v[None] for v in carry), xs, lengths)
    return (h[0], c[0]), ys


def check(step: Any, carry: Any, xs: Any, reverse: bool = False, resets: Any = None) -> None:
    """Raises a ScanError where cuDNN cannot run a scan here."""
    why = refusal(step, carry, xs, reverse, resets, platform())
    if why is not None:
        raise ScanError(f"scan: executor 'cudnn' cannot run this step ({why}); use 'auto' or 'scan'")


def run(
    steps: Sequence[LstmStep], states: States, xs: Any, lengths: Any = None, bidirectional: bool = False
) -> tuple[Any, States]:
    """All layers and directions in one call; gradients of higher order are those of the loop.

    Args:
        steps: the layers, of a bidirectional stack both directions of each, the forward one first.
        states: h and c, [L K, N, H].
        xs: [T, N, D].
        lengths: [N] integers, or None; they act as if cut to 0 to T.
        bidirectional: whether each layer has two directions.

    Returns:
        `(ys, (h, c))`: [T, N, K H], and the last states.
    """
    length = xs.shape[0]
    ends = jnp.full(xs.shape[1], length) if lengths is None else jnp.clip(jnp.asarray(lengths), 0, length)
    ys, *last = _layers((tuple(steps), *states, xs), ends.astype(jnp.int32), bidirectional)
    return ys, tuple(last)


def _sizes(given: Any, bidirectional: bool) -> tuple[Any, ...]:
    """What JAX's functions for the kernels take last: D, H, L, the rate of dropout, K > 1, and the precision, JAX's own."""
    steps, _, _, xs = given
    return xs.shape[2], steps[0].w_h.shape[1], len(steps) // (1 + bidirectional), 0.0, bidirectional, None


def _swapped(v: Any) -> Any:
    return jnp.swapaxes(v, 0, 1)  # cuDNN's batch comes first


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _kernel(given: Any, lengths: Any, bidirectional: bool) -> tuple[Any, Any]:
    """cuDNN's `(ys, h, c)`, and what it keeps for the gradient. Its derivative is that of the loop."""
    from jax.experimental import rnn  # loads much, and only for this

    for primitive in (rnn.rnn_fwd_p, rnn.rnn_bwd_p):
        batching.primitive_batchers[primitive] = partial(_one_by_one, primitive)
    steps, h, c, xs = given
    packed = packed_weights(steps)
    (y, h, c), (*_, reserve) = rnn.lstm_fwd(_swapped(xs), h, c, packed, lengths, *_sizes(given, bidirectional))
    return (_swapped(y), h, c), reserve


@_kernel.defjvp
def _(bidirectional: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    given, lengths = primals
    out, reserve = _kernel(given, lengths, bidirectional)
    moved = jax.jvp(lambda given: _loop(given, lengths, bidirectional), (given,), tangents[:1])[1]
    still = jnp.zeros(reserve.shape, jax.typeof(reserve).to_tangent_aval().dtype)
    return (out, reserve), (moved, still)


def _one_by_one(primitive: Any, args: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """The rule of `jax.vmap` for a kernel that has none: one call after the other."""
    moved = [jnp.moveaxis(a, axis, 0) for a, axis in zip(args, axes) if axis is not None]

    def call(mapped: Sequence[Any]) -> Any:
        rest = iter(mapped)
        full = [a if axis is None else next(rest) for a, axis in zip(args, axes)]
        return primitive.bind(*full, **params)

    outs = jax.lax.map(call, moved)
    return outs, [0] * len(outs)


def _loop(given: Any, lengths: Any, bidirectional: bool) -> tuple[Any, Any, Any]:
    """What `_kernel` computes, as loops."""
    steps, h, c, xs = given
    last: list[Any] = []
    for k in range(0, len(steps), 1 + bidirectional):
        outs = []
        for j in range(k, k + 1 + bidirectional):
            timed = jnp.arange(xs.shape[0]), xs
            masked = with_lengths(steps[j], lengths, xs)
            state, ys = jax.lax.scan(masked, (h[j], c[j]), timed, reverse=j > k)
            last.append(state)
            outs.append(ys)
        xs = jnp.concatenate(outs, axis=-1)
    return xs, *(jnp.stack(part) for part in zip(*last))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _layers(given: Any, lengths: Any, bidirectional: bool) -> tuple[Any, Any, Any]:
    return _kernel(given, lengths, bidirectional)[0]


def _forward(given: Any, lengths: Any, bidirectional: bool) -> tuple[Any, Any]:
    out, reserve = _kernel(given, lengths, bidirectional)
    return out, (given, lengths, out[0], reserve)


def _backward(bidirectional: bool, kept: Any, cotangents: Any) -> tuple[Any, None]:
    return _gradient(*kept, cotangents, bidirectional), None


_layers.defvjp(_forward, _backward)


@partial(jax.custom_jvp, nondiff_argnums=(5,))
def _gradient(given: Any, lengths: Any, ys: Any, reserve: Any, cotangents: Any, bidirectional: bool) -> Any:
    """cuDNN's gradient with respect to `given`. Its derivative is that of the loop's gradient."""
    from jax.experimental import rnn

    steps, h, c, xs = given
    packed, unpack = jax.vjp(packed_weights, steps)
    residuals = (_swapped(xs), h, c, packed, lengths, _swapped(ys), reserve)
    of_ys, *of_states = cotangents
    asked = _sizes(given, bidirectional)
    dx, dh, dc, dw, _ = rnn.lstm_bwd(*asked, residuals, (_swapped(of_ys), *of_states))
    return *unpack(dw), dh, dc, _swapped(dx)


@_gradient.defjvp
def _(bidirectional: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    given, lengths, _, _, cotangents = primals

    def by_the_loop(given: Any, cotangents: Any) -> Any:
        return jax.vjp(lambda given: _loop(given, lengths, bidirectional), given)[1](cotangents)[0]

    moved = jax.jvp(by_the_loop, (given, cotangents), (tangents[0], tangents[4]))[1]
    return _gradient(*primals, bidirectional), moved
