"""A stack of recurrent layers: any kind of input brought to [T, N, D], run through every layer and direction.

Shapes: T time, N batch, D input, H hidden, P output of a step (the projection's size, or H without one),
L layers, K directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import LayerError
from jrnn.executor import cudnn
from jrnn.nn.checks import check_array, check_features, check_key, check_lengths, check_resets, check_state
from jrnn.nn.layers import Noise, Restart, accumulator, make_step, mask, plain_lstm, run_both, run_layer
from jrnn.nn.packing import PackedSequence, pack_padded_sequence, pad_packed_sequence
from jrnn.nn.params import Layout, Weights, cell_layout_of, layout_of
from jrnn.nn.settings import Settings, check_choice
from jrnn.nn.units import State, Unit
from jrnn.nn.whole import as_equation, is_known, whole_layers

Params = Mapping[str, Any]


def compute_type(params: Params, x: jax.Array, dtype: Any) -> Any:
    return jnp.result_type(x, *params.values()) if dtype is None else jnp.dtype(dtype)


def run_stack(
    unit: Unit,
    where: str,
    params: Params,
    x: Any,
    hx: Any,
    lengths: Any,
    key: jax.Array | None,
    settings: Settings,
    return_states: str = "last",
    resets: Any = None,
    reset_state: Any = None,
) -> tuple[Any, State]:
    """A whole sequence of any kind through a stack: to [T, N, D] and lengths, through the layers, and back.

    Args:
        where: what messages call the caller; the others are those of `jrnn.nn.functional.rnn`.

    Returns:
        `(output, states)`, states a tuple of (h,) or (h, c).
    """
    layout = layout_of(unit, params)
    check_key(where, key)
    check_choice(f"{where}: ", "return_states", return_states, ("last", "all", "all+initial"))
    if reset_state is not None and resets is None:
        raise LayerError(f"{where}: reset_state is what resets go back to; give resets too")
    if resets is not None and settings.executor == "cudnn":
        raise LayerError(f"{where}: executor 'cudnn' knows no resets; use 'auto' or 'scan'")
    if isinstance(x, PackedSequence):
        if lengths is not None:
            raise LayerError(f"{where}: a PackedSequence knows its lengths; give no others")
        check_features(where, x.data, layout.input_size, {2: f"PackedSequence.data [C, {layout.input_size}]"})
        padded, lengths = pad_packed_sequence(x)
        again = _restarts(where, resets, reset_state, padded.shape[:2], settings.batch_first)
        output, states = _stack(unit, where, layout, params, padded, hx, lengths, again, key, settings, return_states)
        repacked = pack_padded_sequence(output, lengths, enforce_sorted=False, capacity=x.data.shape[0])
        return x._replace(data=repacked.data), states
    x = check_array(where, "x", x)
    size = layout.input_size
    check_features(
        where, x, size, {2: f"[T, {size}]", 3: f"[N, T, {size}]" if settings.batch_first else f"[T, N, {size}]"}
    )
    if x.ndim == 2:
        one = None if lengths is None else jnp.reshape(jnp.asarray(lengths), (-1,))
        hx = _with_batch(where, layout, params, x, hx, settings)
        if resets is not None:
            resets = check_resets(where, resets, x.shape[:1])[:, None]
            reset_state = _with_batch(where, layout, params, x, reset_state, settings, "reset_state")
        again = _restarts(where, resets, reset_state, (x.shape[0], 1), False)
        output, states = _stack(unit, where, layout, params, x[:, None], hx, one, again, key, settings, return_states)
        return output[:, 0], tuple(state[..., 0, :] for state in states)
    if settings.batch_first:
        x = jnp.swapaxes(x, 0, 1)
    again = _restarts(where, resets, reset_state, x.shape[:2], settings.batch_first)
    output, states = _stack(unit, where, layout, params, x, hx, lengths, again, key, settings, return_states)
    return (jnp.swapaxes(output, 0, 1) if settings.batch_first else output), states


def _restarts(where: str, resets: Any, reset_state: Any, sizes: tuple[int, ...], batch_first: bool) -> tuple | None:
    """`(resets [T, N], reset_state)`, or None where there are no resets."""
    if resets is None:
        return None
    resets = check_resets(where, resets, sizes[::-1] if batch_first else sizes)
    return (resets.T if batch_first else resets), reset_state


def _stack(
    unit: Unit,
    where: str,
    layout: Layout,
    params: Params,
    x: jax.Array,
    hx: Any,
    lengths: Any,
    restarts: tuple[jax.Array, Any] | None,
    key: jax.Array | None,
    settings: Settings,
    return_states: str,
) -> tuple[jax.Array, State]:
    """All layers over [T, N, D]."""
    steps, batch, _ = x.shape
    dtype = compute_type(params, x, settings.dtype)
    shapes = state_shapes(layout, batch)
    states = check_state(where, unit, hx, shapes, accumulator(dtype))
    x = x.astype(dtype)
    if lengths is not None:
        lengths = check_lengths(where, lengths, steps, batch)
        # Padding may hold NaN: it is cut off here, before any product, so that neither values nor gradients meet it.
        live = jnp.arange(steps)[:, None, None] < lengths[None, :, None]
        x = jnp.where(live, x, jnp.zeros((), dtype))
    if restarts is not None:
        resets, reset_state = restarts
        fresh = check_state(where, unit, reset_state, shapes, accumulator(dtype), "reset_state")
        if lengths is not None:
            resets &= jnp.arange(steps)[:, None] < lengths[None]
        # A reverse direction passes step t before step t - 1: a reset at t cuts between them.
        both = (resets, jax.lax.pad(resets, False, ((-1, 1, 0), (0, 0, 0))))
    if not settings.random:
        key = None
    weights = layout.split(params)
    plain = return_states == "last" and restarts is None
    if settings.executor == "cudnn" and plain and key is None:
        known = [plain_lstm(unit, part, settings, dtype) for part in weights]
        if None not in known:
            cudnn.check(known[0], states, x)
            return cudnn.run(known, states, x, lengths, layout.bidirectional)
    last: list[State] = []
    for layer in range(layout.num_layers):
        if layer and settings.dropout and key is not None:
            key, dropout_key = jax.random.split(key)
            shape = x.shape if settings.dropout_mask == "step" else (1, *x.shape[1:])
            x = x * mask(dropout_key, settings.dropout, shape, dtype)
        k = len(last)
        group = weights[k : k + layout.directions]
        initial = [tuple(s[k + d] for s in states) for d in range(layout.directions)]
        if whole_layers.value and plain and is_known(unit, group[0], settings, key, dtype):
            found, x = as_equation(unit, group, x, initial, lengths)
            last += found
            continue
        again = None
        if restarts is not None:
            again = [Restart(r, tuple(s[k + d] for s in fresh)) for d, r in enumerate(both[: layout.directions])]
        keys: list[jax.Array | None] = []
        for _ in group:
            key, layer_key = (None, None) if key is None else jax.random.split(key)
            keys.append(layer_key)
        if layout.bidirectional and return_states == "last" and settings.merges(key):
            found, outputs = run_both(unit, group, settings, x, initial, dtype=dtype, lengths=lengths, restarts=again)
        else:
            found, outputs = [], []
            for direction, part in enumerate(group):
                state, y = run_layer(
                    unit,
                    part,
                    settings,
                    x,
                    initial[direction],
                    dtype=dtype,
                    lengths=lengths,
                    restart=again and again[direction],
                    reverse=direction == 1,
                    key=keys[direction],
                    return_states=return_states,
                )
                found.append(state)
                outputs.append(y)
        last += found
        x = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=-1)
    return x, tuple(jnp.stack(leaves, -3) for leaves in zip(*last, strict=True))


def _with_batch(
    where: str, layout: Layout, params: Params, x: jax.Array, hx: Any, settings: Settings, name: str = "hx"
) -> Any:
    """The state of one sequence, which has no axis of the batch, with one of size 1."""
    shapes = tuple((rows, size) for rows, _, size in state_shapes(layout, 1))
    states = check_state(where, layout.unit, hx, shapes, accumulator(compute_type(params, x, settings.dtype)), name)
    return tuple(state[:, None] for state in states) if len(states) > 1 else states[0][:, None]


def state_shapes(layout: Layout, batch: int) -> tuple[tuple[int, ...], ...]:
    rows = layout.num_layers * layout.directions
    return ((rows, batch, layout.output_size), (rows, batch, layout.hidden_size))[: layout.unit.states]


def step_stack(unit: Unit, where: str, params: Params, x: Any, hx: Any, settings: Settings) -> tuple[jax.Array, State]:
    """One step through a stack without a reverse direction, [N, D] or [D]."""
    layout = layout_of(unit, params)
    if layout.bidirectional:
        raise LayerError(f"{where}: a bidirectional stack needs the whole sequence; it cannot go step by step")
    if isinstance(x, PackedSequence):
        raise LayerError(f"{where}: a step takes x of one step, [N, {layout.input_size}], not a PackedSequence")
    x = check_array(where, "x", x)
    check_features(where, x, layout.input_size, {1: f"[{layout.input_size}]", 2: f"[N, {layout.input_size}]"})
    single = x.ndim == 1
    if single:
        x, hx = x[None], _with_batch(where, layout, params, x, hx, settings)
    dtype = compute_type(params, x, settings.dtype)
    states = check_state(where, unit, hx, state_shapes(layout, x.shape[0]), accumulator(dtype))
    last = []
    for k, weights in enumerate(layout.split(params)):
        state = tuple(s[k] for s in states)
        state, x = make_step(unit, weights, settings, dtype)(state, (x, Noise()))
        last.append(state)
    new = tuple(jnp.stack(leaves) for leaves in zip(*last, strict=True))
    return (x[0], tuple(s[:, 0] for s in new)) if single else (x, new)


def step_cell(unit: Unit, where: str, params: Params, x: Any, hx: Any, dtype: Any) -> State:
    """One step of one cell, [N, D] or [D]."""
    layout = cell_layout_of(unit, params)
    x = check_array(where, "x", x)
    check_features(where, x, layout.input_size, {1: f"[{layout.input_size}]", 2: f"[N, {layout.input_size}]"})
    single = x.ndim == 1
    shape = (layout.hidden_size,) if single else (x.shape[0], layout.hidden_size)
    dtype = compute_type(params, x, dtype)
    state = check_state(where, unit, hx, (shape,) * unit.states, accumulator(dtype))
    if single:
        x, state = x[None], tuple(s[None] for s in state)
    weights = Weights(**{name: jnp.asarray(value) for name, value in params.items()})
    new, _ = make_step(unit, weights, Settings(), dtype)(state, (x, Noise()))
    return tuple(s[0] for s in new) if single else new
