"""A stack of recurrent layers: runs every layer and direction on input of any kind.

Shapes: T time, N batch, D input, H hidden, P output of a step (the projection's size, or H without one),
L layers, K directions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jrnn.errors import LayerError
from jrnn.jaxprs.mesh_axes import alike
from jrnn.loops import compiled_once, hashable
from jrnn.nn.checks import check_array, check_choice, check_features, check_key, check_state
from jrnn.nn.layers import (
    Common,
    Direction,
    Noise,
    Restart,
    accumulator,
    dropout_mask,
    make_step,
    read_rows,
    run_layer,
)
from jrnn.nn.packing import PackedSequence, pack_padded_sequence, pad_packed_sequence
from jrnn.nn.params import (
    LEARNED_STATES,
    Layout,
    Params,
    Weights,
    cell_layout_of,
    layout_of,
)
from jrnn.nn.sequences import (
    Compaction,
    Sequences,
    Steps,
    before_end,
    compute_type,
    in_rows,
    where_live,
)
from jrnn.nn.settings import Settings
from jrnn.nn.units import State, Unit


def stack_state(
    where: str,
    layout: Layout,
    params: Params,
    hx: Any,
    batch: int | None,
    dtype: DTypeLike,
    name: str = "hx",
) -> State:
    """The state of a stack as (h [L K, N, P],) or (h, c [L K, N, H]); for None the learned states, or zeros.

    With `batch` None, for one sequence, `hx` has no axis N, and the result has N = 1.
    """
    count = 1 if batch is None else batch
    if hx is None and layout.learned_state:
        learned = []
        for parameter, (rows, size) in zip(LEARNED_STATES, layout.state_shapes()):
            state = jnp.asarray(params[parameter], accumulator(dtype))
            learned.append(jnp.broadcast_to(state[:, None], (rows, count, size)))
        return tuple(learned)
    shapes = []
    for rows, size in layout.state_shapes():
        shapes.append((rows, size) if batch is None else (rows, batch, size))
    states = check_state(where, hx, tuple(shapes), accumulator(dtype), name)
    return tuple(s[:, None] for s in states) if batch is None else states


def run_stack(
    unit: Unit, where: str, params: Params, x: Any, hx: Any, settings: Settings, *, lengths: Any = None, resets: Any = None,
    reset_state: Any = None, mask: Any = None, key: Array | None = None, return_states: str = "last",
    embedding: Any = None,
) -> tuple[Any, State]:  # fmt: skip
    """Runs a stack over whole sequences of any kind.

    Args:
        where: the caller's name in messages. The others are as in `jrnn.nn.functional.rnn`.

    Returns:
        `(output, states)`, where states is a tuple (h,) or (h, c).
    """
    layout = layout_of(unit, params)
    check_key(where, key)
    check_choice(f"{where}: ", "return_states", return_states, ("last", "all", "all+initial"))
    if mask is not None and return_states != "last":
        raise LayerError(
            f"{where}: return_states is {return_states!r}; with a mask only the last states are known"
        )
    size = layout.input_size
    batch_first = settings.batch_first
    given = x
    table = None
    if embedding is not None:
        x = _tokens_and_rows(where, x, embedding, size)
        table = jnp.asarray(embedding)
        size = 1
    if isinstance(given, PackedSequence):
        if lengths is not None:
            raise LayerError(f"{where}: a PackedSequence has its own lengths; do not give lengths")
        check_features(where, given.data, size, {2: f"PackedSequence.data [C, {size}]"})
        x, lengths = pad_packed_sequence(given, batch_first)
    sequences = Sequences.of(where, x, size, batch_first, lengths=lengths, resets=resets, mask=mask)
    x = sequences.x
    lengths = sequences.lengths
    batch = None if sequences.single else x.shape[1]
    dtype = compute_type(params, x if table is None else table, settings.dtype)
    states = stack_state(where, layout, params, hx, batch, dtype)
    fresh = _fresh_state(where, layout, params, resets, reset_state, batch, dtype)
    key = key if settings.random else None
    settings = replace(settings, recompute=hashable(settings.recompute))
    shared = Common(unit, settings, dtype, None, return_states)
    arrays = (
        layout.split(params),
        states,
        fresh,
        (lengths, sequences.resets, sequences.mask),
        x,
        key,
        table,
    )
    output, states = compiled_once(_run_layers, (), (shared, layout.directions), arrays)
    if isinstance(given, PackedSequence):
        repacked = pack_padded_sequence(
            output, lengths, enforce_sorted=False, capacity=given.data.shape[0]
        )
        return given._replace(data=repacked.data), states
    if sequences.single:
        states = tuple(state[..., 0, :] for state in states)
    return sequences.given_back(output), states


def _tokens_and_rows(where: str, x: Any, table: Any, size: int) -> Array:
    """Tokens [..., T] of rows of an embedding [V, D], as input with one feature."""
    if isinstance(x, PackedSequence):
        raise LayerError(
            f"{where}: embedding is given with a PackedSequence; give padded tokens [T, N] and lengths"
        )
    x = check_array(where, "x", x)
    table = check_array(where, "embedding", table)
    if table.ndim != 2 or table.shape[1] != size:
        raise LayerError(f"{where}: embedding is {list(table.shape)} but must be [V, {size}]")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise LayerError(
            f"{where}: x is {x.dtype}{list(x.shape)}; with embedding it must be integers, rows of it"
        )
    return x[..., None]


def _fresh_state(
    where: str,
    layout: Layout,
    params: Params,
    resets: Any,
    reset_state: Any,
    batch: int | None,
    dtype: DTypeLike,
) -> State | None:
    """The states after resets, or None without resets."""
    if resets is not None:
        return stack_state(where, layout, params, reset_state, batch, dtype, "reset_state")
    if reset_state is not None:
        raise LayerError(f"{where}: reset_state is given without resets; give resets too")
    return None


def _run_layers(
    functions: tuple[()], options: tuple[Common, int], arrays: Any
) -> tuple[Array, State]:
    """Runs all layers, each of `width` directions, over [T, N, D]."""
    shared, width = options
    weights, states, fresh, (lengths, resets, mask), x, key, table = alike(arrays)
    settings = shared.settings
    dtype = shared.dtype
    steps = None
    x = x if table is not None else x.astype(dtype)
    if mask is not None:
        steps = Compaction.of(mask, lengths, resets)
        x = steps.moved(x)
        lengths = steps.lengths
        resets = steps.resets
        # a reverse direction begins with the resets after the last step
        if steps.after is not None and width == 2:
            states = _in_direction(1, width, steps.after, fresh, states)
    if lengths is not None:
        live = before_end(x.shape[0], lengths)
        x = where_live(live, x)
        resets = None if resets is None else resets & live
    starts = [None] * len(weights) if resets is None else _restarts(resets, fresh, width)
    directions = [
        Direction(own, tuple(s[k] for s in states), starts[k]) for k, own in enumerate(weights)
    ]
    if table is not None:
        directions[:width], x = read_rows(shared.unit, directions[:width], table, x[..., 0], dtype)
    shared = shared._replace(lengths=lengths)
    last = []
    for start in range(0, len(directions), width):
        if start and settings.dropout and key is not None:
            key, dropout_key = jax.random.split(key)
            shape = x.shape if settings.dropout_mask == "step" else (1, *x.shape[1:])
            x = x * dropout_mask(dropout_key, settings.dropout, shape, dtype)
        layer = directions[start : start + width]
        if key is not None:
            for k in range(width):
                key, own = jax.random.split(key)
                layer[k] = layer[k]._replace(key=own)
        last_of_layer, x = run_layer(shared, layer, x)
        last += last_of_layer
    states = tuple(jnp.stack(leaves, -3) for leaves in zip(*last, strict=True))
    if steps is None:
        return x, states
    for direction, rows in enumerate((steps.after, steps.before)[:width]):
        states = states if rows is None else _in_direction(direction, width, rows, fresh, states)
    return steps.put_back(x), states


def _in_direction(direction: int, width: int, rows: Array, then: State, otherwise: State) -> State:
    """The states [L K, N, ...]: `then` for one direction and the chosen rows [N], `otherwise` elsewhere."""
    own = jnp.arange(otherwise[0].shape[0])[:, None] % width == direction
    chosen = (own & rows[None])[..., None]
    return tuple(jnp.where(chosen, a, b) for a, b in zip(then, otherwise, strict=True))


def _restarts(resets: Array, fresh: State, width: int) -> list[Restart]:
    """The resets of each direction of each layer, in the order of the states."""
    # The reverse direction runs step t before step t - 1, so a reset at t acts before step t - 1.
    both = (resets, jax.lax.pad(resets, False, ((-1, 1, 0), (0, 0, 0))))
    return [Restart(both[k % width], tuple(s[k] for s in fresh)) for k in range(fresh[0].shape[0])]


def step_stack(
    unit: Unit, where: str, params: Params, x: Any, hx: Any, settings: Settings, *, resets: Any = None,
    reset_state: Any = None, mask: Any = None,
) -> tuple[Array, State]:  # fmt: skip
    """One step through a stack without a reverse direction, [N, D] or [D]; see `jrnn.nn.functional.lstm_step`."""
    layout = layout_of(unit, params)
    if layout.bidirectional:
        raise LayerError(
            f"{where}: a bidirectional stack needs the whole sequence; it cannot go step by step"
        )
    if isinstance(x, PackedSequence):
        raise LayerError(
            f"{where}: a step takes x of one step, [N, {layout.input_size}], not a PackedSequence"
        )
    given = Steps.of(where, x, layout.input_size, resets=resets, mask=mask)
    x = given.x
    batch = None if given.single else given.x.shape[0]
    dtype = compute_type(params, x, settings.dtype)
    old = stack_state(where, layout, params, hx, batch, dtype)
    fresh = _fresh_state(where, layout, params, resets, reset_state, batch, dtype)
    if given.resets is not None:
        old = in_rows(given.resets, fresh, old, axis=1)
    if given.mask is not None:
        x = where_live(given.mask, x)
    last = []
    for k, weights in enumerate(layout.split(params)):
        state, x = make_step(unit, weights, settings, dtype)(tuple(s[k] for s in old), (x, Noise()))
        last.append(state)
    new = tuple(map(jnp.stack, zip(*last, strict=True)))
    if given.mask is not None:
        x = where_live(given.mask, x)
        new = in_rows(given.mask, new, old, axis=1)
    return (x[0], tuple(s[:, 0] for s in new)) if given.single else (x, new)


def step_cell(unit: Unit, where: str, params: Params, x: Any, hx: Any, dtype: DTypeLike) -> State:
    """One step of one cell, [N, D] or [D]."""
    layout = cell_layout_of(unit, params)
    given = Steps.of(where, x, layout.input_size)
    x = given.x
    single = given.single
    dtype = compute_type(params, x, dtype)
    shape = (layout.hidden_size,) if single else (x.shape[0], layout.hidden_size)
    state = check_state(where, hx, (shape,) * unit.states, accumulator(dtype))
    state = tuple(s[None] for s in state) if single else state
    weights = Weights(**{name: jnp.asarray(value) for name, value in params.items()})
    new, _ = make_step(unit, weights, Settings(), dtype)(state, (x, Noise()))
    return tuple(s[0] for s in new) if single else new
