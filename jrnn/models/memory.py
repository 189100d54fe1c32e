"""Attention inside recurrent models: causal, in a window or over all that came before, with its keys and values as state.

Shapes: T time, N batch, Q query heads, K key heads, C features of a head, S slots of the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.models.family import State
from jrnn.nn.span import Span

EMPTY = -1  # the position of an empty slot


def memory(batch: int, slots: int, key_heads: int, size: int, dtype: Any) -> State:
    """An empty memory: keys and values [N, S, K, C], and the positions [N, S] of the slots."""
    empty = jnp.zeros((batch, slots, key_heads, size), dtype)
    return {"keys": empty, "values": empty, "places": jnp.full((batch, slots), EMPTY, jnp.int32)}


def turn(x: jax.Array, positions: jax.Array, base: float, size: int) -> jax.Array:
    """Rotary positions (Su et al., 2021) for the first `size` features of each head of x [T, N, heads, C]."""
    half = size // 2
    rates = base ** -(jnp.arange(0, size, 2, dtype=x.dtype) / size)
    angles = positions[..., None, None] * rates[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b, rest = x[..., :half], x[..., half:size], x[..., size:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    state: State,
    span: Span,
    positions: jax.Array,
    window: int | None = None,
    scale: float | None = None,
    index: jax.Array | None = None,
    choose: Callable[..., jax.Array] | None = None,
) -> tuple[jax.Array, State]:
    """Causal attention to the memory and to the steps themselves.

    The memory keeps the latest slots. Without a window, an entry that would be lost makes the outputs NaN: whoever calls
    gives a memory with enough slots.

    Args:
        q, k, v: [T, N, Q, C], [T, N, K, C], [T, N, K, C]; q and k are already turned.
        state: as `memory` makes it.
        positions: [T, N], from `span.positions`.
        window: how many positions a query sees, itself included; None: all.
        scale: of the products of queries and keys; None: C^(-1/2).
        index: [T, N, ...], what is remembered besides, by which `choose` may choose.
        choose: from the remembered index [N, S + T, ...], the positions [N, S + T] of slots and steps, and the mask
            [N, T, S + T] of those that a query may see, to the mask of those that it sees. If it sees none, y is 0.

    Returns:
        [T, N, Q, C] and the next memory.
    """
    steps, batch = q.shape[:2]
    slots = state["places"].shape[1]
    live = jnp.ones((steps, batch), bool)
    if span.lengths is not None:
        live = jnp.arange(steps)[:, None] < span.lengths[None]
    pieces = jnp.zeros((steps, batch), jnp.int32)
    if span.resets is not None:
        pieces = jnp.cumsum(span.resets, axis=0, dtype=jnp.int32)
    places = jnp.concatenate([state["places"], jnp.where(live, positions, EMPTY).T], axis=1)  # [N, S + T]
    of_piece = jnp.concatenate([jnp.zeros((batch, slots), jnp.int32), pieces.T], axis=1)
    given = {"keys": k, "values": v} | ({} if index is None else {"index": index})
    whole = {
        name: jnp.concatenate([state[name], jnp.swapaxes(leaf, 0, 1).astype(state[name].dtype)], axis=1)
        for name, leaf in given.items()
    }
    ages = positions.T[..., None] - places[:, None]  # [N, T, S + T]
    seen = (places[:, None] != EMPTY) & (ages >= 0) & (of_piece[:, None] == pieces.T[..., None])
    if window is not None:
        seen &= ages < window
    if choose is not None:
        seen = choose(whole.get("index"), places, seen)
    q = jnp.swapaxes(q, 0, 1).astype(whole["keys"].dtype)
    y = jax.nn.dot_product_attention(q, whole["keys"], whole["values"], mask=seen[:, None], scale=scale)
    if choose is not None:
        y = jnp.where(jnp.any(seen, axis=2)[..., None, None], y, 0)
    ends = jnp.full(batch, steps) if span.lengths is None else span.lengths
    kept = ends[:, None] + jnp.arange(slots)[None]  # the latest slots

    def latest(leaf: jax.Array) -> jax.Array:
        return jnp.take_along_axis(leaf, kept.reshape(kept.shape + (1,) * (leaf.ndim - 2)), axis=1)

    last_piece = jnp.zeros((batch, 1), jnp.int32)
    if span.resets is not None and steps:
        last_piece = jnp.where(ends > 0, pieces[jnp.maximum(ends, 1) - 1, jnp.arange(batch)], 0)[:, None]
    left = jnp.where(latest(of_piece) == last_piece, latest(places), EMPTY)
    if window is None:
        index = jnp.arange(slots + steps)[None]
        lost = (index < ends[:, None]) & (places != EMPTY) & (of_piece == last_piece)
        y = jnp.where(jnp.any(lost, axis=1)[:, None, None, None], jnp.nan, y)
    return jnp.swapaxes(y, 0, 1), {name: latest(leaf) for name, leaf in whole.items()} | {"places": left}
