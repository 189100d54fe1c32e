"""One recurrent layer over time: a scan of the unit's step for each direction.

Shapes: T time, N batch, D input, H hidden, P output of a step (H without a projection), G gates, K directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jrnn import jaxprs
from jrnn.errors import LayerError
from jrnn.jaxprs.jax_internals import Primitive
from jrnn.jaxprs.queries import along_first
from jrnn.loops import scan
from jrnn.nn.checks import Shape
from jrnn.nn.params import Weights
from jrnn.nn.sequences import before_end
from jrnn.nn.settings import Settings
from jrnn.nn.units import State, Unit

LayerOutputs = tuple[list[State], Array]
Outputs = tuple[State, Array]

EPSILON = 1e-5  # of layer normalization, as in PyTorch's LayerNorm

# Within `with whole_layers(names):` each plain layer or convolution is one equation of the primitive of this name, which can
# be converted to one operator of another system. The equation cannot run, be differentiated or be batched.
whole_layers = jax.make_user_context(frozenset[str]())

recurrent_layer = Primitive("recurrent_layer")
recurrent_layer.multiple_results = True

causal_convolution = Primitive("causal_convolution")
causal_convolution.multiple_results = True


@causal_convolution.def_abstract_eval
def _(x, window, weight, *bias):
    """x [T, N, C], window [N, K - 1, C], weight [C, K], bias [C] -> y like x, and the next window."""
    return [x, window]


class Noise(NamedTuple):
    """The random masks of one direction of one layer.

    Attributes:
        recurrent: the factor of h before the product with weight_hh, 0 or 1 / (1 - rate): [N, P] for the whole sequence,
            or [T, N, P]; None without recurrent dropout.
        keep: booleans [T, N, P or H] for each state, True where it keeps its old value; None without zoneout.
    """

    recurrent: Array | None = None
    keep: tuple[Array, ...] | None = None


class Restart(NamedTuple):
    """The resets of one direction of one layer.

    Attributes:
        resets: [T, N] booleans: where True, the state is replaced by `state` before that step of the direction.
        state: arrays like the initial state.
    """

    resets: Array
    state: State


class Common(NamedTuple):
    """What all layers and directions of a run have in common.

    Attributes:
        dtype: of products with weights and of outputs.
        lengths: [N], or None if every sequence has T steps.
        return_states: "last", "all" or "all+initial", as in `jrnn.nn.functional.rnn`.
    """

    unit: Unit
    settings: Settings
    dtype: Any
    lengths: Array | None
    return_states: str


class Direction(NamedTuple):
    """One direction of one layer, as a pytree.

    Attributes:
        state: the initial state, (h [N, P],) or (h [N, P], c [N, H]), in `accumulator(dtype)`.
        restart: its resets, or None.
        key: for the masks of a training run; None if nothing is random.
    """

    weights: Weights
    state: State
    restart: Restart | None = None
    key: Array | None = None


def draw(settings: Settings, key: Array | None, steps: int, state: State) -> Noise:
    """Draws the masks of a training run; without a key there are none.

    They are drawn before the scan, so that a step that is recomputed gets the same ones.
    """
    if key is None:
        return Noise()
    recurrent_key, *keep_keys = jax.random.split(key, 1 + len(state))
    recurrent = keep = None
    if settings.recurrent_dropout:
        lead = (steps,) if settings.recurrent_dropout_mask == "step" else ()
        recurrent = dropout_mask(
            recurrent_key, settings.recurrent_dropout, (*lead, *state[0].shape), state[0].dtype
        )
    rates = zoneout_rates(settings, len(state))
    if any(rates):
        keep = tuple(
            jax.random.bernoulli(k, rate, (steps, *old.shape))
            for k, rate, old in zip(keep_keys, rates, state)
        )
    return Noise(recurrent, keep)


def dropout_mask(key: Array, rate: float, shape: Shape, dtype) -> Array:
    """Zeros with probability `rate`, else 1 / (1 - rate)."""
    scale = 0.0 if rate == 1.0 else 1.0 / (1.0 - rate)
    return jnp.where(
        jax.random.bernoulli(key, 1.0 - rate, shape),
        jnp.asarray(scale, dtype),
        jnp.zeros((), dtype),
    )


def zoneout_rates(settings: Settings, states: int) -> tuple[float, ...]:
    """The rate of zoneout of each state."""
    if not isinstance(settings.zoneout, tuple):
        return (settings.zoneout,) * states
    if len(settings.zoneout) != states:
        if states == 1:
            has = "1 state; give one probability"
        else:
            has = "2 states; give one probability, or a pair (h, c)"
        raise LayerError(f"zoneout is {settings.zoneout!r}, but this unit has {has}")
    return settings.zoneout


def accumulator(dtype) -> jnp.dtype:
    """The type of accumulated products and of states: float32 for 16-bit types, else the type itself.

    >>> accumulator(jnp.bfloat16), accumulator(jnp.float32)
    (dtype('float32'), dtype('float32'))
    """
    return jaxprs.promoted_type(dtype, jnp.float32)


def contract(x: Array, weight: Array, dtype) -> Array:
    """x weight^T, [..., D], [R, D] -> [..., R], in `accumulator(dtype)`."""
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(
        x.astype(dtype), weight.astype(dtype), axes, preferred_element_type=accumulator(dtype)
    )


def _normalize(z: Array, gain: Array) -> Array:
    """Layer normalization, (z - mean) / sqrt(variance + 1e-5) gain, [N, G H]."""
    centered = z - jnp.mean(z, axis=-1, keepdims=True)
    variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
    return centered * lax.rsqrt(variance + EPSILON) * gain[None].astype(z.dtype)


def _biases(unit: Unit, weights: Weights, dtype) -> tuple[Array | None, Array | None]:
    """The biases in the input's contribution [1, G H], and the hidden bias of a late gate [1, H], each or None."""
    if weights.bias_ih is None:
        return None, None
    early = weights.bias_hh
    late = None
    if unit.has_late_gate:
        start = early.shape[0] // unit.gates * (unit.gates - 1)
        late = early[None, start:].astype(accumulator(dtype))
        early = jnp.concatenate([early[:start], jnp.zeros_like(early[start:])])
    return (weights.bias_ih.astype(accumulator(dtype)) + early.astype(accumulator(dtype)))[
        None
    ], late


def make_step(
    unit: Unit, weights: Weights, settings: Settings, dtype, variational: Array | None = None
) -> Callable[[State, tuple], Outputs]:
    """The step `(state, (x, noise)) -> (state, y)` of one direction of one layer.

    Args:
        weights: without weight_ih, x is its product with the input already, [N, G H]; without norm_ih, plus the biases.
        variational: the mask `Noise.recurrent` of the whole sequence, or None. `noise` holds the masks of one step.
    """
    # Computed outside the step, so that its gradient does not repeat them at each step.
    bias, late = _biases(unit, weights, dtype)
    if weights.weight_ih is None and weights.norm_ih is None:
        bias = None
    rates = zoneout_rates(settings, unit.states)

    def step(state: State, inputs: tuple) -> Outputs:
        x, (recurrent, keep) = inputs
        recurrent = variational if recurrent is None else recurrent
        h = state[0] if recurrent is None else state[0] * recurrent
        zx = x if weights.weight_ih is None else contract(x, weights.weight_ih, dtype)
        zh = contract(h, weights.weight_hh, dtype)
        if weights.norm_ih is not None:
            zx = _normalize(zx, weights.norm_ih)
            zh = _normalize(zh, weights.norm_hh)
        if bias is not None:
            zx = bias + zx
        new = unit.advance(zx, zh, late, state)
        if weights.weight_hr is not None:
            new = (contract(new[0], weights.weight_hr, dtype), *new[1:])
        if keep is not None:
            new = tuple(
                jnp.where(k, old, fresh) for k, old, fresh in zip(keep, state, new, strict=True)
            )
        elif any(rates):
            new = tuple(
                rate * old + (1 - rate) * fresh
                for rate, old, fresh in zip(rates, state, new, strict=True)
            )
        return new, new[0].astype(dtype)

    return step


def read_rows(
    unit: Unit, first: Sequence[Direction], table: Array, tokens: Array, dtype
) -> tuple[list[Direction], Any]:
    """The directions of the first layer, and their input, of rows of an embedding [V, D] by tokens [T, N].

    With fewer rows than tokens, the product with weight_ih, plus the biases, is made once for each row, and looked up.
    """
    table = table.astype(dtype)
    if (
        len(first) > 1
        or whole_layers.value
        or table.shape[0] >= tokens.size
        or jax.default_backend() != "cpu"
    ):
        return list(first), table[tokens]
    weights = first[0].weights
    products = contract(table, weights.weight_ih, dtype)
    bias = _biases(unit, weights, dtype)[0] if weights.norm_ih is None else None
    products = products if bias is None else bias + products
    return [first[0]._replace(weights=weights._replace(weight_ih=None))], _rows(products, tokens)


def _rows(table: Array, places: Array) -> Array:
    """table[places], [V, R], [...] -> [..., R].

    The gradient adds rows to rows. XLA:CPU first copies all of them, unless the lookup keeps an axis for the one row.
    """
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,)
    )
    shape = places.shape
    places = places.reshape(-1, 1)
    places = jnp.where(places < 0, places + len(table), places)
    rows = lax.gather(table, places, numbers, (1, table.shape[1]), mode="promise_in_bounds")
    return rows.reshape(*shape, table.shape[1])


def _is_plain(unit: Unit, weights: Weights, settings: Settings) -> bool:
    """Whether a layer has neither layer normalization nor a projection nor zoneout."""
    more = (weights.norm_ih, weights.weight_hr)
    return all(part is None for part in more) and not any(zoneout_rates(settings, unit.states))


def run_layer(shared: Common, directions: Sequence[Direction], x: Array) -> LayerOutputs:
    """All directions of a layer over a whole sequence, [T, N, D] -> the states of each direction and y [T, N, K P].

    `x` must be finite past the lengths; the values there do not matter.
    """
    first = directions[0]
    settings = shared.settings
    plain = shared.return_states == "last" and first.restart is None and first.key is None
    if (
        "recurrent_layer" in whole_layers.value
        and plain
        and shared.dtype == "float32"
        and _is_plain(shared.unit, first.weights, settings)
    ):
        return _run_whole(shared, directions, x)
    if len(directions) == 2 and shared.return_states == "last" and settings.merges(first.key):
        return _run_both(shared, directions, x)
    runs = []
    for one, reverse in zip(directions, (False, True)):
        runs.append(_run_direction(shared, one, x, reverse))
    outputs = [y for _, y in runs]
    return [state for state, _ in runs], outputs[0] if len(outputs) == 1 else jnp.concatenate(
        outputs, axis=-1
    )


def _run_direction(
    shared: Common, direction: Direction, x: Array, reverse: bool = False
) -> Outputs:
    """One direction of a layer, [T, N, D] -> states and y [T, N, P]. In reverse a sequence starts at its last step."""
    unit, settings, dtype, lengths, return_states = shared
    weights, state, restart, key = direction
    noise = draw(settings, key, x.shape[0], state)
    variational = noise.recurrent if settings.recurrent_dropout_mask == "sequence" else None
    step = make_step(unit, weights, settings, dtype, variational)
    xs: Any = (x, Noise(noise.recurrent if variational is None else None, noise.keep))
    restarts = {} if restart is None else dict(resets=restart.resets, reset_state=restart.state)
    run = partial(
        scan,
        **restarts,
        reverse=reverse,
        unroll=settings.unroll,
        lengths=lengths,
        recompute=settings.recompute,
        executor=settings.executor,
    )
    if return_states != "last":
        return _all_states(run, step, state, xs, lengths, reverse, return_states)
    return run(step, state, xs)


def _run_both(shared: Common, directions: Sequence[Direction], x: Array) -> LayerOutputs:
    """Both directions of a layer without noise, in one loop with batched products."""
    steps = x.shape[0]
    lengths = shared.lengths

    def backward(value: Array) -> Array:
        """Reverses each sequence of [T, N, ...]; its padding stays at the end."""
        if lengths is None:
            return lax.rev(value, (0,))
        source = (lengths[None] - 1 - jnp.arange(steps)[:, None]) % steps
        return jnp.take_along_axis(value, along_first(source, value), 0)

    ahead, back = directions
    if back.restart is not None:
        back = back._replace(restart=Restart(backward(back.restart.resets), back.restart.state))
    pairs = jax.tree.map(lambda *parts: jnp.stack(parts), (ahead, x), (back, backward(x)))
    state, (first, second) = jax.vmap(partial(_run_direction, shared))(*pairs)
    return [tuple(leaf[k] for leaf in state) for k in range(2)], jnp.concatenate(
        [first, backward(second)], axis=-1
    )


def _all_states(
    run: Callable,
    step: Callable,
    state: State,
    xs: Any,
    lengths: Any,
    reverse: bool,
    return_states: str,
) -> Outputs:
    """Runs a scan that returns the states after every step, [T, ...]. Past the end of a sequence they do not change."""

    def with_state(state: State, inputs: Any) -> tuple[State, tuple[Array, State]]:
        new, y = step(state, inputs)
        return new, (y, new)

    last, (y, states) = run(with_state, state, xs)
    if lengths is not None:
        live = before_end(y.shape[0], lengths)[..., None]
        states = tuple(
            jnp.where(live, s, h[None])
            for s, h in zip(states, state if reverse else last, strict=True)
        )
    if return_states == "all+initial":  # the initial state comes first, or last in reverse
        rows = []
        for s, h in zip(states, state, strict=True):
            rows.append((s, h[None]) if reverse else (h[None], s))
        states = tuple(map(jnp.concatenate, rows))
    return states, y


@recurrent_layer.def_abstract_eval
def _(x, *rest, unit, directions, **_):
    """x [T, N, D], the states [N, H] of each direction, weights and lengths -> y [T, N, K H] and the last states."""
    states = rest[: directions * unit.states]
    return [x.update(shape=(*x.shape[:2], directions * states[0].shape[-1])), *states]


def _run_whole(shared: Common, directions: Sequence[Direction], x: Array) -> LayerOutputs:
    """All directions of a layer as one equation."""
    unit = shared.unit
    weights = [one.weights for one in directions]
    bias = weights[0].bias_ih is not None
    arrays = []
    for w in weights:
        for name in Weights._fields[: 4 if bias else 2]:
            arrays.append(getattr(w, name).astype(x.dtype))
    flat = []
    for one in directions:
        for leaf in one.state:
            flat.append(leaf)
    more = [] if shared.lengths is None else [shared.lengths]
    y, *last = recurrent_layer.bind(
        x, *flat, *arrays, *more, unit=unit, directions=len(weights), bias=bias, lengths=bool(more)
    )
    size = unit.states
    return [tuple(last[k * size : (k + 1) * size]) for k in range(len(weights))], y
