"""One direction of one layer over time: a scan of the unit's step, which takes the input's product out of the loop.

Shapes: T time, N batch, D input, H hidden, P output of a step (H without a projection), G gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jrnn.errors import LayerError
from jrnn.executor import LstmStep, scan
from jrnn.executor.masking import with_resets
from jrnn.nn.params import Weights
from jrnn.nn.settings import Settings
from jrnn.nn.units import LSTM, State, Unit

EPSILON = 1e-5  # of layer normalization, as in PyTorch's LayerNorm


class Noise(NamedTuple):
    """The random masks of one direction of one layer; None where there is no such noise.

    Attributes:
        recurrent: what h is multiplied by before it enters weight_hh, 0 or 1 / (1 - rate): [N, P] for a whole sequence, or
            [T, N, P] for every step.
        keep: a [T, N, width] of booleans for each state: True where it keeps its old value.
    """

    recurrent: jax.Array | None = None
    keep: tuple[jax.Array, ...] | None = None


class Restart(NamedTuple):
    """Where one direction of one layer begins anew.

    Attributes:
        resets: [T, N] booleans: True where the state goes back before that step, in the order of the direction.
        state: what it goes back to, as `run_layer` takes the initial state.
    """

    resets: jax.Array
    state: State


def draw(settings: Settings, key: jax.Array | None, steps: int, state: State) -> Noise:
    """The masks of a training run; without a key, none. Drawn before the scan, so recomputing repeats them."""
    if key is None:
        return Noise()
    recurrent_key, *keep_keys = jax.random.split(key, 1 + len(state))
    recurrent = keep = None
    if settings.recurrent_dropout:
        lead = (steps,) if settings.recurrent_dropout_mask == "step" else ()
        recurrent = mask(recurrent_key, settings.recurrent_dropout, (*lead, *state[0].shape), state[0].dtype)
    if any(zoneout_rates(settings, state)):
        keep = tuple(
            jax.random.bernoulli(k, rate, (steps, *old.shape))
            for k, rate, old in zip(keep_keys, zoneout_rates(settings, state), state, strict=True)
        )
    return Noise(recurrent, keep)


def mask(key: jax.Array, rate: float, shape: tuple[int, ...], dtype) -> jax.Array:
    """Zeros with probability `rate`, else 1 / (1 - rate)."""
    scale = 0.0 if rate == 1.0 else 1.0 / (1.0 - rate)
    return jnp.where(jax.random.bernoulli(key, 1.0 - rate, shape), jnp.asarray(scale, dtype), jnp.zeros((), dtype))


def zoneout_rates(settings: Settings, state: State) -> tuple[float, ...]:
    """The rate of zoneout for each state."""
    if not isinstance(settings.zoneout, tuple):
        return (settings.zoneout,) * len(state)
    if len(settings.zoneout) != len(state):
        has = (
            "2 states; give one probability, or a pair (h, c) of them"
            if len(state) == 2
            else "1 state; give one probability"
        )
        raise LayerError(f"zoneout is {settings.zoneout!r}, but this unit has {has}")
    return settings.zoneout


def accumulator(dtype) -> jnp.dtype:
    """The type that products accumulate in and states are kept in: float32 for 16-bit types, else the type itself.

    >>> accumulator(jnp.bfloat16), accumulator(jnp.float32)
    (dtype('float32'), dtype('float32'))
    """
    return jnp.promote_types(dtype, jnp.float32)


def contract(x: jax.Array, weight: jax.Array, dtype) -> jax.Array:
    """x weight^T, over the last axis of both, [..., D], [R, D] -> [..., R], accumulated in `accumulator(dtype)`."""
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x.astype(dtype), weight.astype(dtype), axes, preferred_element_type=accumulator(dtype))


def normalize(z: jax.Array, gain: jax.Array) -> jax.Array:
    """Layer normalization over the last axis, (z - mean) / sqrt(variance + 1e-5) gain."""
    centered = z - jnp.mean(z, axis=-1, keepdims=True)
    variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
    return centered * lax.rsqrt(variance + EPSILON) * _row(gain, z)


def _row(vector: jax.Array, like: jax.Array) -> jax.Array:
    """`vector` with the rank and type of `like`: ranks are promoted openly here."""
    return vector.astype(like.dtype).reshape((1,) * (like.ndim - 1) + vector.shape)


def early_bias(unit: Unit, weights: Weights, dtype) -> jax.Array | None:
    """Every bias that may be added to the input's share of the gates, [G H] in `accumulator(dtype)`, or None."""
    if weights.bias_ih is None:
        return None
    hidden = weights.bias_hh
    if unit.late_gates:
        first = hidden.shape[0] // unit.gates * (unit.gates - unit.late_gates)
        hidden = jnp.concatenate([hidden[:first], jnp.zeros_like(hidden[first:])])
    return weights.bias_ih.astype(accumulator(dtype)) + hidden.astype(accumulator(dtype))


def project(weights: Weights, x: jax.Array, bias: jax.Array | None, dtype) -> jax.Array:
    """The input's share of the gates, with `early_bias`. # [..., G H]"""
    zx = contract(x, weights.weight_ih, dtype)
    if weights.norm_ih is not None:
        zx = normalize(zx, weights.norm_ih)
    return zx if bias is None else zx + _row(bias, zx)


def make_step(
    unit: Unit, weights: Weights, settings: Settings, dtype, variational: jax.Array | None = None
) -> Callable[[State, tuple], tuple[State, jax.Array]]:
    """The step `(state, (x, noise)) -> (state, y)` of one direction of one layer.

    Args:
        variational: `Noise.recurrent` of the whole sequence, or None; `noise` holds what differs from step to step.
    """
    bias = early_bias(unit, weights, dtype)  # outside of the step, whose gradient would do it again at each step
    late = None
    if unit.late_gates and weights.bias_hh is not None:
        first = weights.bias_hh.shape[0] // unit.gates * (unit.gates - unit.late_gates)
        late = weights.bias_hh[None, first:].astype(accumulator(dtype))

    def step(state: State, inputs: tuple) -> tuple[State, jax.Array]:
        x, (recurrent, keep) = inputs
        zx = project(weights, x, bias, dtype)
        recurrent = variational if recurrent is None else recurrent
        h = state[0] if recurrent is None else state[0] * recurrent
        zh = contract(h, weights.weight_hh, dtype)
        if weights.norm_hh is not None:
            zh = normalize(zh, weights.norm_hh)
        new = unit.advance(zx, zh, late, state)
        if weights.weight_hr is not None:
            new = (contract(new[0], weights.weight_hr, dtype), *new[1:])
        rates = zoneout_rates(settings, state)
        if keep is not None:
            new = tuple(jnp.where(k, old, fresh) for k, old, fresh in zip(keep, state, new, strict=True))
        elif any(rates):
            new = tuple(rate * old + (1 - rate) * fresh for rate, old, fresh in zip(rates, state, new, strict=True))
        return new, new[0].astype(dtype)

    return step


def plain_lstm(unit: Unit, weights: Weights, settings: Settings, dtype) -> LstmStep | None:
    """The layer as a step that kernels of others know, or None where it is more than an LSTM."""
    more = (weights.norm_ih, weights.norm_hh, weights.weight_hr)
    zoned = any(zoneout_rates(settings, (None,) * unit.states))
    if unit is not LSTM or zoned or any(part is not None for part in more):
        return None
    biases = [b for b in (weights.bias_ih, weights.bias_hh) if b is not None]
    bias = sum(biases) if biases else jnp.zeros(weights.weight_ih.shape[:1], dtype)
    return LstmStep(weights.weight_ih, weights.weight_hh, bias)


def run_layer(
    unit: Unit,
    weights: Weights,
    settings: Settings,
    x: jax.Array,
    state: State,
    *,
    dtype,
    lengths: jax.Array | None,
    restart: Restart | None,
    reverse: bool,
    key: jax.Array | None,
    return_states: str = "last",
) -> tuple[State, jax.Array]:
    """One direction of one layer over a whole sequence, [T, N, D] -> state and [T, N, P].

    Args:
        x: past the lengths it must be finite; the values there do not matter.
        state: (h [N, P],) or (h [N, P], c [N, H]), in `accumulator(dtype)`.
        lengths: [N], or None when every sequence has T steps. A reverse run of a sequence starts at its last step.
        restart: where sequences begin anew, or None.
        key: for the masks of a training run; None when nothing is random.
        return_states: "last", "all" or "all+initial", as in `jrnn.nn.functional.rnn`.
    """
    noise = draw(settings, key, x.shape[0], state)
    variational = noise.recurrent if settings.recurrent_dropout_mask == "sequence" else None
    step = make_step(unit, weights, settings, dtype, variational)
    xs: Any = (x, Noise(noise.recurrent if variational is None else None, noise.keep))
    if restart is not None:
        step, xs = with_resets(step, restart.state, restart.resets, x.shape[0], xs)
    run = partial(
        scan,
        reverse=reverse,
        unroll=settings.unroll,
        lengths=lengths,
        recompute=settings.recompute,
        executor=settings.executor,
    )
    if return_states != "last":
        return _all_states(run, step, state, xs, lengths, reverse, return_states)
    if settings.executor == "cudnn" and all(part is None for part in noise):
        known = plain_lstm(unit, weights, settings, dtype)
        step, xs = (step, xs) if known is None else (known, x)
    return run(step, state, xs)


def run_both(
    unit: Unit,
    weights: Sequence[Weights],
    settings: Settings,
    x: jax.Array,
    states: Sequence[State],
    *,
    dtype: Any,
    lengths: jax.Array | None,
    restarts: Sequence[Restart] | None,
) -> tuple[list[State], list[jax.Array]]:
    """Both directions of a layer without noise, in one loop with batched products.

    The arguments are those of `run_layer`, for each direction. The second direction reads its sequences backward.

    Returns:
        The last state and y [T, N, P] of each direction.
    """
    steps = x.shape[0]

    def backward(value: jax.Array) -> jax.Array:
        """Each sequence of [T, N, ...] from its last step to its first; its padding stays behind it."""
        if lengths is None:
            return lax.rev(value, (0,))
        source = (lengths[None] - 1 - jnp.arange(steps)[:, None]) % steps
        return jnp.take_along_axis(value, source.reshape(*source.shape, *(1,) * (value.ndim - 2)), 0)

    def run(part: Weights, x: jax.Array, state: State, restart: Restart | None) -> tuple[State, jax.Array]:
        return run_layer(
            unit, part, settings, x, state, dtype=dtype, lengths=lengths, restart=restart, reverse=False, key=None
        )

    if restarts is not None:
        restarts = [restarts[0], Restart(backward(restarts[1].resets), restarts[1].state)]
    pairs = zip(weights, (x, backward(x)), states, restarts or (None, None))
    state, (first, second) = jax.vmap(run)(*jax.tree.map(lambda *parts: jnp.stack(parts), *pairs))
    return [tuple(leaf[k] for leaf in state) for k in range(2)], [first, backward(second)]


def _all_states(
    run: Callable, step: Callable, state: State, xs: Any, lengths: Any, reverse: bool, return_states: str
) -> tuple[State, jax.Array]:
    """The states after every step, [T, ...], instead of the last ones; past a sequence's length the one held there."""

    def with_state(state: State, inputs: Any) -> tuple[State, tuple[jax.Array, State]]:
        new, y = step(state, inputs)
        return new, (y, new)

    last, (y, states) = run(with_state, state, xs)
    if lengths is not None:
        live = (jnp.arange(y.shape[0])[:, None] < lengths[None])[..., None]
        states = tuple(jnp.where(live, s, h[None]) for s, h in zip(states, state if reverse else last, strict=True))
    if return_states == "all+initial":  # where the direction begins
        rows = [(s, h[None]) if reverse else (h[None], s) for s, h in zip(states, state, strict=True)]
        states = tuple(jnp.concatenate(row) for row in rows)
    return states, y
