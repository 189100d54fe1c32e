"""`LstmStep`, and NVIDIA's LSTM kernels for it, through `jax.experimental.rnn`.

The kernels run float32 `LstmStep`s on CUDA, several layers and both directions in one call. cuDNN picks its STANDARD
algorithm. It uses TF32 unless `jax_default_matmul_precision` is "highest" or "float32".

Shapes: T time, N batch, D input, H hidden, L layers, K directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from jrnn.errors import ScanError
from jrnn.jaxprs.names import platform_of
from jrnn.loops.wrappers.masking import with_lengths

States = tuple[Any, Any]  # h and c, [L K, N, H] each
# The supported values of `jax_default_matmul_precision`; the others ask for bfloat16, which the kernels do not have.
_PRECISIONS = (None, "high", "highest", "tensorfloat32", "float32", "bfloat16_3x")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class LstmStep:
    """An LSTM step with its weights, which the executor "cudnn" can run. Rows are in cuDNN's order of gates: i, f, g, o.

    Attributes:
        w_x: [4H, D].
        w_h: [4H, H].
        b: [4H].
    """

    w_x: Any
    w_h: Any
    b: Any

    def __call__(self, state: tuple[Any, Any], x: Any) -> tuple[tuple[Any, Any], Any]:
        """`((h, c), x) -> ((h, c), h)`: [N, H], [N, H], [N, D]."""
        h, c = state
        z = x @ self.w_x.T + h @ self.w_h.T + self.b[None]  # [N, 4H]
        i, f, g, o = jnp.split(z, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h


def refusal(step: Any, carry: Any, xs: Any, reverse: bool, resets: Any, platform: str) -> str | None:
    """Returns the reason why cuDNN cannot run a scan, or None."""
    if not isinstance(step, LstmStep):
        return "the step is not an LstmStep"
    if platform == "rocm":
        return "AMD's library orders the gates differently, and jrnn does not support it"
    if platform != "cuda":
        return f"there is no CUDA device (the platform is {platform})"
    if reverse:
        return "time runs backwards"
    if resets is not None:
        return "cuDNN has no resets"
    leaves = jax.tree.leaves((step, carry, xs))
    if any(jnp.result_type(leaf) != jnp.float32 for leaf in leaves):
        return "cuDNN's LSTM is float32 only"
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if precision not in _PRECISIONS:
        return f"jax_default_matmul_precision is {precision!r}, and cuDNN's LSTM has float32 and TF32"
    if jnp.ndim(xs) != 3:
        return f"the input must be [T, N, D], but is {list(jnp.shape(xs))}"
    return None


def packed_weights(steps: Sequence[LstmStep]) -> Any:
    """Packs the weights into one vector for cuDNN: w_x and w_h of each step, then two biases of each, the second zero."""
    matrices = [w for step in steps for w in (step.w_x, step.w_h)]
    return jnp.concatenate([jnp.ravel(w) for w in (*matrices, *(b for s in steps for b in (s.b, jnp.zeros_like(s.b))))])


def scan(step: Any, carry: Any, xs: Any, reverse: bool, lengths: Any, resets: Any) -> tuple[Any, Any]:
    """Runs a scan of one layer: `((h, c), hs)`; raises a ScanError if cuDNN cannot run it."""
    check(step, carry, xs, reverse, resets)
    ys, (h, c) = run((step,), tuple(v[None] for v in carry), xs, lengths)
    return (h[0], c[0]), ys


def check(step: Any, carry: Any, xs: Any, reverse: bool = False, resets: Any = None) -> None:
    """Raises a ScanError if cuDNN cannot run a scan here."""
    why = refusal(step, carry, xs, reverse, resets, platform_of(jax.devices()[0].client))
    if why is not None:
        raise ScanError(f"scan: executor 'cudnn' cannot run this step ({why}); use 'auto' or 'scan'")


def run(
    steps: Sequence[LstmStep], states: States, xs: Any, lengths: Any = None, bidirectional: bool = False
) -> tuple[Any, States]:
    """Runs all layers and directions in one call. Gradients of higher order are computed with loops.

    Args:
        steps: the layers; for bidirectional ones, the forward and the reverse step of each.
        states: h and c, [L K, N, H].
        xs: [T, N, D].
        lengths: [N] integers, or None; they are clipped to 0 to T.
        bidirectional: whether each layer has two directions.

    Returns:
        `(ys, (h, c))`: [T, N, K H], and the last states.
    """
    length = xs.shape[0]
    ends = jnp.full(xs.shape[1], length) if lengths is None else jnp.clip(jnp.asarray(lengths), 0, length)
    ys, *last = _layers((tuple(steps), *states, xs), ends.astype(jnp.int32), bidirectional)
    return ys, tuple(last)


def _sizes(given: Any, bidirectional: bool) -> tuple[Any, ...]:
    """Returns the last arguments of `jax.experimental.rnn`: D, H, L, the dropout rate, whether K > 1, and the precision."""
    steps, _, _, xs = given
    return xs.shape[2], steps[0].w_h.shape[1], len(steps) // (1 + bidirectional), 0.0, bidirectional, None


def _swapped(v: Any) -> Any:
    return jnp.swapaxes(v, 0, 1)  # cuDNN's batch comes first


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _kernel(given: Any, lengths: Any, bidirectional: bool) -> tuple[Any, Any]:
    """Returns cuDNN's `(ys, h, c)`, and the reserve that it keeps for the gradient. Its derivative is the loop's."""
    from jax.experimental import rnn  # slow to import, and needed only here

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
    """The batching rule for a kernel that has none: calls it for one example after the other."""
    moved = [jnp.moveaxis(a, axis, 0) for a, axis in zip(args, axes) if axis is not None]

    def call(mapped: Sequence[Any]) -> Any:
        rest = iter(mapped)
        full = [a if axis is None else next(rest) for a, axis in zip(args, axes)]
        return primitive.bind(*full, **params)

    outs = jax.lax.map(call, moved)
    return outs, [0] * len(outs)


def _loop(given: Any, lengths: Any, bidirectional: bool) -> tuple[Any, Any, Any]:
    """Computes what `_kernel` computes, with loops."""
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
    """Returns cuDNN's gradient with respect to `given`. Its derivative is that of the loop's gradient."""
    from jax.experimental import rnn

    steps, h, c, xs = given
    packed, unpack = jax.vjp(packed_weights, steps)
    residuals = (_swapped(xs), h, c, packed, lengths, _swapped(ys), reserve)
    of_ys, *of_states = cotangents
    sizes = _sizes(given, bidirectional)
    dx, dh, dc, dw, _ = rnn.lstm_bwd(*sizes, residuals, (_swapped(of_ys), *of_states))
    return *unpack(dw), dh, dc, _swapped(dx)


@_gradient.defjvp
def _(bidirectional: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    given, lengths, _, _, cotangents = primals

    def by_the_loop(given: Any, cotangents: Any) -> Any:
        return jax.vjp(lambda given: _loop(given, lengths, bidirectional), given)[1](cotangents)[0]

    moved = jax.jvp(by_the_loop, (given, cotangents), (tangents[0], tangents[4]))[1]
    return _gradient(*primals, bidirectional), moved
