"""A stack of recurrent layers: runs every layer and direction on input of any kind.

Shapes: T time, N batch, D input, H hidden, P output of a step (the projection's size, or H without one),
L layers, K directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import LayerError
from jrnn.jaxprs.mesh_axes import alike
from jrnn.loops import compiled_once, hashable
from jrnn.nn.checks import check_array, check_choice, check_features, check_key, check_state
from jrnn.nn.layers import Common, Direction, Noise, Restart, accumulator, make_step, mask, read_rows, run_layer
from jrnn.nn.packing import PackedSequence, pack_padded_sequence, pad_packed_sequence
from jrnn.nn.params import Layout, Weights, cell_layout_of, layout_of
from jrnn.nn.sequences import Sequences, compute_type, step_input, where_live
from jrnn.nn.settings import Settings
from jrnn.nn.units import State, Unit

Params = Mapping[str, Any]


def stack_state(where: str, layout: Layout, hx: Any, batch: int | None, dtype: Any, name: str = "hx") -> State:
    """The state of a stack as (h [L K, N, P],) or (h, c [L K, N, H]); zeros for None.

    With `batch` None, for one sequence, `hx` has no axis N, and the result has N = 1.
    """
    rows = layout.num_layers * layout.directions
    sizes = (layout.output_size, layout.hidden_size)[: layout.unit.states]
    shapes = tuple((rows, size) if batch is None else (rows, batch, size) for size in sizes)
    states = check_state(where, hx, shapes, accumulator(dtype), name)
    return tuple(s[:, None] for s in states) if batch is None else states


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
    embedding: Any = None,
) -> tuple[Any, State]:
    """Runs a stack over whole sequences of any kind.

    Args:
        where: the caller's name in messages. The other arguments are those of `jrnn.nn.functional.rnn`.

    Returns:
        `(output, states)`, where states is a tuple (h,) or (h, c).
    """
    layout = layout_of(unit, params)
    check_key(where, key)
    check_choice(f"{where}: ", "return_states", return_states, ("last", "all", "all+initial"))
    if reset_state is not None and resets is None:
        raise LayerError(f"{where}: reset_state is given without resets; give resets too")
    size, batch_first = layout.input_size, settings.batch_first
    given, table = x, None
    if embedding is not None:
        x, table, size = _tokens_and_rows(where, x, embedding, size), jnp.asarray(embedding), 1
    if isinstance(given, PackedSequence):
        if lengths is not None:
            raise LayerError(f"{where}: a PackedSequence has its own lengths; do not give lengths")
        check_features(where, given.data, size, {2: f"PackedSequence.data [C, {size}]"})
        x, lengths = pad_packed_sequence(given, batch_first)
    sequences = Sequences.of(where, x, lengths, resets, size, batch_first)
    x, lengths = sequences.x, sequences.lengths
    batch = None if sequences.single else x.shape[1]
    dtype = compute_type(params, x if table is None else table, settings.dtype)
    states = stack_state(where, layout, hx, batch, dtype)
    restarts = None
    if sequences.resets is not None:
        fresh = stack_state(where, layout, reset_state, batch, dtype, "reset_state")
        restarts = _restarts(layout, sequences.resets, fresh, lengths)
    key = key if settings.random else None
    settings = replace(settings, recompute=hashable(settings.recompute))
    shared = Common(unit, settings, dtype, None, return_states)
    starts = restarts or [None] * (layout.num_layers * layout.directions)
    directions = [
        Direction(weights, tuple(s[k] for s in states), starts[k]) for k, weights in enumerate(layout.split(params))
    ]
    arrays = lengths, directions, x, key, table
    output, states = compiled_once(_run_layers, (), (shared, layout.directions), arrays)
    if isinstance(given, PackedSequence):
        repacked = pack_padded_sequence(output, lengths, enforce_sorted=False, capacity=given.data.shape[0])
        return given._replace(data=repacked.data), states
    if sequences.single:
        states = tuple(state[..., 0, :] for state in states)
    return sequences.given_back(output), states


def _tokens_and_rows(where: str, x: Any, table: Any, size: int) -> jax.Array:
    """Tokens [..., T] of rows of an embedding [V, D], as input with one feature."""
    if isinstance(x, PackedSequence):
        raise LayerError(f"{where}: embedding is given with a PackedSequence; give padded tokens [T, N] and lengths")
    x, table = check_array(where, "x", x), check_array(where, "embedding", table)
    if table.ndim != 2 or table.shape[1] != size:
        raise LayerError(f"{where}: embedding is {list(table.shape)} but must be [V, {size}]")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise LayerError(f"{where}: x is {x.dtype}{list(x.shape)}; with embedding it must be integers, rows of it")
    return x[..., None]


def _restarts(layout: Layout, resets: jax.Array, fresh: State, lengths: jax.Array | None) -> list[Restart]:
    """The resets of each direction of each layer, in the order of the states."""
    if lengths is not None:
        resets &= jnp.arange(resets.shape[0])[:, None] < lengths[None]
    # The reverse direction runs step t before step t - 1, so a reset at t acts before step t - 1.
    both = (resets, jax.lax.pad(resets, False, ((-1, 1, 0), (0, 0, 0))))
    rows = range(layout.num_layers * layout.directions)
    return [Restart(both[k % layout.directions], tuple(s[k] for s in fresh)) for k in rows]


def _run_layers(functions: tuple[()], options: tuple[Common, int], arrays: Any) -> tuple[jax.Array, State]:
    """All layers over [T, N, D], each of so many directions."""
    (shared, width), (lengths, directions, x, key, table) = options, arrays
    x = x if table is not None else x.astype(shared.dtype)
    lengths, directions, x, key, table = alike((lengths, directions, x, key, table))
    settings, dtype, shared = shared.settings, shared.dtype, shared._replace(lengths=lengths)
    if lengths is not None:
        x = where_live(jnp.arange(x.shape[0])[:, None] < lengths[None], x)
    if table is not None:
        directions[:width], x = read_rows(directions[:width], table, x[..., 0], dtype)
    last: list[State] = []
    for start in range(0, len(directions), width):
        if start and settings.dropout and key is not None:
            key, dropout_key = jax.random.split(key)
            shape = x.shape if settings.dropout_mask == "step" else (1, *x.shape[1:])
            x = x * mask(dropout_key, settings.dropout, shape, dtype)
        layer = directions[start : start + width]
        if key is not None:
            for k in range(width):
                key, own = jax.random.split(key)
                layer[k] = layer[k]._replace(key=own)
        last_of_layer, x = run_layer(shared, layer, x)
        last += last_of_layer
    return x, tuple(jnp.stack(leaves, -3) for leaves in zip(*last, strict=True))


def step_stack(unit: Unit, where: str, params: Params, x: Any, hx: Any, settings: Settings) -> tuple[jax.Array, State]:
    """One step through a stack without a reverse direction, [N, D] or [D]."""
    layout = layout_of(unit, params)
    if layout.bidirectional:
        raise LayerError(f"{where}: a bidirectional stack needs the whole sequence; it cannot go step by step")
    if isinstance(x, PackedSequence):
        raise LayerError(f"{where}: a step takes x of one step, [N, {layout.input_size}], not a PackedSequence")
    x = step_input(where, x, layout.input_size)
    single = x.ndim == 1
    dtype = compute_type(params, x, settings.dtype)
    states = stack_state(where, layout, hx, None if single else x.shape[0], dtype)
    x = x[None] if single else x
    last = []
    for k, weights in enumerate(layout.split(params)):
        state, x = make_step(unit, weights, settings, dtype)(tuple(s[k] for s in states), (x, Noise()))
        last.append(state)
    new = tuple(jnp.stack(leaves) for leaves in zip(*last, strict=True))
    return (x[0], tuple(s[:, 0] for s in new)) if single else (x, new)


def step_cell(unit: Unit, where: str, params: Params, x: Any, hx: Any, dtype: Any) -> State:
    """One step of one cell, [N, D] or [D]."""
    layout = cell_layout_of(unit, params)
    x = step_input(where, x, layout.input_size)
    dtype = compute_type(params, x, dtype)
    shape = (*x.shape[:-1], layout.hidden_size)
    state = check_state(where, hx, (shape,) * unit.states, accumulator(dtype))
    single = x.ndim == 1
    if single:
        x, state = x[None], tuple(s[None] for s in state)
    weights = Weights(**{name: jnp.asarray(value) for name, value in params.items()})
    new, _ = make_step(unit, weights, Settings(), dtype)(state, (x, Noise()))
    return tuple(s[0] for s in new) if single else new
