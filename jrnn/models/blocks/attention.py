"""Attention inside recurrent models: causal, in a window or to all that came before, with keys and values as state.

With grouped keys, latent (DeepSeek-V2), and to tokens that an indexer chooses (DeepSeek-V3.2) in pools of neighbors (GLM-5).

Shapes: T time, N batch, D width, Q query heads, K key heads, C features of a head, S slots of the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jrnn.models.family import (
    EMPTY,
    Block,
    Norm,
    Outputs,
    Scoped,
    Shapes,
    State,
    linear,
    products,
    under,
)
from jrnn.models.model_config import DecoderKeys, Rope, divides
from jrnn.nn.layers import accumulator
from jrnn.nn.sequences import before_end
from jrnn.nn.span import Span, heads, joined, rotate


def memory(slots: int, key_heads: int, size: int) -> Shapes:
    """A memory: keys and values, whose slots are next to each other in each head, and the positions of the slots."""
    return {
        "keys": (key_heads, slots, size),
        "values": (key_heads, slots, size),
        "places": (slots,),
    }


def attend(
    q: Array, k: Array, v: Array, state: State, span: Span, positions: Array, window: int | None = None,
    scale: float | None = None, index: Array | None = None, choose: Callable[..., Array] | None = None,
) -> Outputs:  # fmt: skip
    """Causal attention to the memory and to the steps themselves.

    A token's slot is its position modulo the number of slots, so that a step writes one slot and moves nothing. Without a
    window, outputs at positions for which there is no slot are NaN: whoever calls gives a memory with enough slots.

    Args:
        q, k, v: [T, N, Q, C], [T, N, K, C], [T, N, K, C]; q and k are already turned.
        state: what `memory` names; with a window it has that many slots.
        positions: [T, N], from `span.positions`.
        window: how many positions a query sees, itself included; None: all.
        scale: of the products of queries and keys; None: C^(-1/2).
        index: [T, N, ...], what is remembered besides, by which `choose` may choose.
        choose: from the remembered index [N, S, ...], the positions [N, S] of slots, and maybe of steps after them, and the
            mask [N, T, S] of slots that a query may see, to the mask of slots that it sees. Neighbors have neighboring
            positions. If a query sees none, y is 0.

    Returns:
        [T, N, Q, C] and the next memory.
    """
    steps, batch = q.shape[:2]
    slots = state["places"].shape[1]
    live = jnp.ones((steps, batch), bool)
    if span.lengths is not None:
        live = before_end(steps, span.lengths)
    given = {"keys": k, "values": v, "places": positions} | (
        {} if index is None else {"index": index}
    )
    rows = {}
    for name, leaf in given.items():
        rows[name] = jnp.swapaxes(leaf, 0, 1).astype(state[name].dtype)
    # [N, T]
    pieces = (
        None if span.resets is None else jnp.cumsum(span.resets & live, axis=0, dtype=jnp.int32).T
    )
    after = remember(state, rows, live.T, pieces, window is not None)
    if steps == 1 or (window is None and pieces is None):
        # no step writes what an earlier step still has to see
        whole = after
        seen = True
    else:
        old = state if choose is None else in_order(state, positions[0])
        rows["places"] = jnp.where(live.T, rows["places"], EMPTY)
        new = {}
        for name, leaf in rows.items():
            new[name] = jnp.moveaxis(leaf, 1, _axis(name))
        whole = {}
        for name, leaf in new.items():
            whole[name] = jnp.concatenate([old[name], leaf], axis=_axis(name))
        pieces = jnp.zeros((batch, steps), jnp.int32) if pieces is None else pieces
        of_piece = jnp.concatenate([jnp.zeros((batch, slots), jnp.int32), pieces], axis=1)
        seen = of_piece[:, None] == pieces[..., None]
    places = whole["places"]
    ages = positions.T[..., None] - places[:, None]  # [N, T, S]
    seen &= (places[:, None] != EMPTY) & (ages >= 0)
    if window is not None:
        seen &= ages < window
    if choose is not None:
        seen = choose(whole.get("index"), places, seen)
    y = weighted(jnp.swapaxes(q, 0, 1), whole["keys"], whole["values"], seen, scale)
    if choose is not None:
        y = jnp.where(jnp.any(seen, axis=2)[..., None, None], y, 0)
    if window is None:
        y = jnp.where((slots > positions.T)[..., None, None], y, jnp.nan)
    return jnp.swapaxes(y, 0, 1), after


def remember(state: State, rows: State, live: Array, pieces: Array | None, wraps: bool) -> State:
    """The memory after the rows [N, T, ...] of live steps; of several texts, `pieces` [N, T], only the last counts."""
    batch, steps = live.shape
    slots = state["places"].shape[1]
    keep = live
    state = dict(state)
    if pieces is not None and steps:
        state["places"] = jnp.where(pieces[:, -1:] > 0, EMPTY, state["places"])
        keep &= pieces == pieces[:, -1:]
    if wraps:  # of steps that share a slot, the last one has it
        last = jnp.max(jnp.where(keep, rows["places"], EMPTY), axis=1, keepdims=True, initial=EMPTY)
        keep &= rows["places"] > last - slots
    slot = jnp.where(keep, rows["places"] % slots if wraps else rows["places"], slots)
    each = jnp.arange(batch, dtype=slot.dtype)[:, None]
    at = {}
    for name in rows:
        at[name] = (each, slice(None), slot) if _axis(name) == 2 else (each, slot)
    after = {}
    for name, leaf in rows.items():
        after[name] = state[name].at[at[name]].set(leaf, mode="drop")
    # Without the barrier, XLA:CPU fuses the update with what reads the memory, and so copies all of it.
    return jax.lax.optimization_barrier(after)


def _axis(name: str) -> int:
    """The axis of slots of an array of a memory."""
    return 2 if name in ("keys", "values") else 1


def in_order(state: State, position: Array) -> State:
    """The memory before these positions [N], its slots in the order of their positions, and empty ones first."""
    slots = state["places"].shape[1]
    order = (position[:, None] + jnp.arange(slots)[None]) % slots

    def of(name: str, leaf: Array) -> Array:
        axis = _axis(name)
        shape = (order.shape[0], *[1] * (axis - 1), slots, *[1] * (leaf.ndim - axis - 1))
        return jnp.take_along_axis(leaf, order.reshape(shape), axis=axis)

    return {name: of(name, leaf) for name, leaf in state.items()}


def weighted(q: Array, k: Array, v: Array, seen: Array, scale: float | None = None) -> Array:
    """The softmax of q k scale over the slots that are seen, times v.

    `jax.nn.dot_product_attention` has slots before heads, for which XLA:CPU transposes all of the memory at each step.

    Args:
        q, k, v: [N, T, Q, C], [N, K, S, C], [N, K, S, C].
        seen: booleans [N, T, S].

    Returns:
        [N, T, Q, C].
    """
    batch, steps, count, size = q.shape
    groups = count // k.shape[1]
    # [N, K, G, T, C]
    q = jnp.moveaxis(q.astype(k.dtype).reshape(batch, steps, -1, groups, size), 1, 3)
    wide = accumulator(k.dtype)
    products = jnp.einsum(
        "nkrc,nksc->nkrs", q.reshape(*q.shape[:2], -1, size), k, preferred_element_type=wide
    )
    products = products.reshape(*q.shape[:4], -1) * (size**-0.5 if scale is None else scale)
    products = jnp.where(seen[:, None, None], products, -0.7 * jnp.finfo(wide).max)
    shares = jax.nn.softmax(products, axis=-1).astype(k.dtype)
    y = jnp.einsum(
        "nkrs,nksc->nkrc",
        shares.reshape(*q.shape[:2], groups * steps, -1),
        v,
        preferred_element_type=wide,
    )
    return jnp.moveaxis(y.reshape(q.shape), 3, 1).reshape(batch, steps, count, size)


@dataclass(frozen=True)
class Attention(Block):
    """Softmax attention with grouped keys.

    Attributes:
        width: D.
        heads, key_heads, size: Q, K, C.
        bias, out_bias: whether q, k and v, and the output, have biases.
        rope: rotary positions, or None.
        norm: of q and k, of C features, or of all heads together if `norm_whole`; None: none.
        norms: their names.
        gated: whether the projection of q also makes gates of the outputs.
        window: how many positions a query sees; None: all.
        scale: of the products; None: C^(-1/2).
        out: the name of the output's projection; out_width: its rows, if not D.
    """

    width: int
    heads: int
    key_heads: int
    size: int
    bias: bool = False
    out_bias: bool = False
    rope: Rope | None = None
    norm: Norm | None = None
    norm_whole: bool = False
    norms: tuple[str, str] = ("q_norm", "k_norm")
    gated: bool = False
    window: int | None = None
    scale: float | None = None
    out: str = "o_proj"
    out_width: int | None = None

    places = True

    @classmethod
    def of(cls, c: DecoderKeys, bias: bool = False, **more: Any) -> Attention:
        """With the sizes of a config; `bias`: of all products."""
        return cls(c.hidden_size, c.num_attention_heads, c.key_heads, c.head, bias, bias, **more)

    def __post_init__(self) -> None:
        divides("num_key_value_heads", self.key_heads, "num_attention_heads", self.heads)

    def tensors(self) -> Shapes:
        q = self.heads * self.size
        kv = self.key_heads * self.size
        rows = {"q_proj": q * (2 if self.gated else 1), "k_proj": kv, "v_proj": kv}
        shapes = products(rows, self.width, self.bias)
        if self.norm is not None:
            for name, size in zip(
                self.norms, (q, kv) if self.norm_whole else (self.size, self.size)
            ):
                shapes |= under(name, {"weight": (size,)})
        return shapes | linear(self.out, self.out_width or self.width, q, bias=self.out_bias)

    def holds(self, room: int) -> Shapes:
        return memory(room if self.window is None else self.window, self.key_heads, self.size)

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        q, k, v = (w.linear(f"{name}_proj", x) for name in "qkv")
        return self.mix(w, q, k, v, state)

    def mix(self, w: Scoped, q: Array, k: Array, v: Array, state: State) -> Outputs:
        """From the projections q [T, N, Q C] or [T, N, 2 Q C], k and v [T, N, K C] to the output."""
        gate = None
        if self.gated:
            q, gate = jnp.split(heads(q, self.heads), 2, axis=-1)
            q = joined(q)
        q = self._normed(w, self.norms[0], q, self.heads)
        k = self._normed(w, self.norms[1], k, self.key_heads)
        if self.rope is not None:
            q, k = (rotate(part, w.positions, *self.rope) for part in (q, k))
        y, after = attend(
            q,
            k,
            heads(v, self.key_heads),
            state,
            w.span,
            w.positions,
            self.window,
            scale=self.scale,
        )
        y = y if gate is None else y * jax.nn.sigmoid(gate)
        return w.linear(self.out, joined(y)), after

    def _normed(self, w: Scoped, name: str, x: Array, count: int) -> Array:
        """[T, N, heads C] -> [T, N, heads, C]."""
        if self.norm is None:
            return heads(x, count)
        own = w.at(name)
        return (
            heads(self.norm(own, x), count) if self.norm_whole else self.norm(own, heads(x, count))
        )


@dataclass(frozen=True)
class Latent(Block):
    """Latent attention (DeepSeek-V2): keys and values come from one product of low rank.

    Attributes:
        width: D.
        heads: Q.
        rank, query_rank: of the keys and values, and of the queries or None.
        nope, shared, value: features of a head's own key, of the key that all heads share, and of a value.
        epsilon: of the norms.
        bias: whether the products to low rank have biases.
        rope: rotary positions of pairs of neighboring features of the shared key, or None.
        gate: the name of a product that gates each head, or None.
        out: the name of the output's product.
    """

    width: int
    heads: int
    rank: int
    query_rank: int | None
    nope: int
    shared: int
    value: int
    epsilon: float = 1e-6
    bias: bool = False
    rope: Rope | None = None
    gate: str | None = None
    out: str = "o_proj"

    places = True

    @property
    def size(self) -> int:
        """Features of a head's key, and of a value with zeros after it."""
        return max(self.nope + self.shared, self.value)

    def tensors(self) -> Shapes:
        d = self.width
        key = self.nope + self.shared
        if self.query_rank is None:
            shapes = linear("q_proj", self.heads * key, d)
        else:
            shapes = linear("q_a_proj", self.query_rank, d, bias=self.bias) | linear(
                "q_a_layernorm", self.query_rank
            )
            shapes |= linear("q_b_proj", self.heads * key, self.query_rank)
        shapes |= linear("kv_a_proj_with_mqa", self.rank + self.shared, d, bias=self.bias)
        rows = self.heads * (self.nope + self.value)
        shapes |= linear("kv_a_layernorm", self.rank) | linear("kv_b_proj", rows, self.rank)
        shapes |= {} if self.gate is None else linear(self.gate, self.heads, d)
        return shapes | linear(self.out, d, self.heads * self.value, bias=self.bias)

    def holds(self, room: int) -> Shapes:
        return memory(room, self.heads, self.size)

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        if self.query_rank is None:
            query = x
            q = w.linear("q_proj", x)
        else:
            query = Norm(self.query_rank, self.epsilon)(
                w.at("q_a_layernorm"), w.linear("q_a_proj", x)
            )
            q = w.linear("q_b_proj", query)
        low, shared = jnp.split(w.linear("kv_a_proj_with_mqa", x), [self.rank], axis=-1)
        low = Norm(self.rank, self.epsilon)(w.at("kv_a_layernorm"), low)
        k, v = jnp.split(heads(w.linear("kv_b_proj", low), self.heads), [self.nope], axis=-1)
        q = heads(q, self.heads)
        shared = shared[:, :, None]
        if self.rope is not None:
            q, turned = jnp.split(q, [self.nope], axis=-1)
            turned, shared = (
                rotate(paired(part), w.positions, *self.rope) for part in (turned, shared)
            )
            q = jnp.concatenate([q, turned], axis=-1)
        shared = jnp.broadcast_to(shared, (*k.shape[:-1], self.shared))
        parts = (q, jnp.concatenate([k, shared], axis=-1), v)
        q, k, v = (
            jnp.pad(part, [(0, 0)] * 3 + [(0, self.size - part.shape[-1])]) for part in parts
        )
        scale = (self.nope + self.shared) ** -0.5
        y, after = attend(
            q, k, v, state, w.span, w.positions, scale=scale, **self.choice(w, x, query)
        )
        y = y[..., : self.value]
        y = y if self.gate is None else y * jax.nn.sigmoid(w.linear(self.gate, x))[..., None]
        return w.linear(self.out, joined(y)), after

    def choice(self, w: Scoped, x: Array, query: Array) -> dict[str, Any]:
        """The last arguments of `attend`; `query`: the queries before their last product."""
        return {}


def paired(x: Array) -> Array:
    """Features 0, 2, 4, ... and then 1, 3, 5, ..., so that `rotate` turns neighbors."""
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


@dataclass(frozen=True)
class Indexer:
    """Chooses pools of P tokens for each query, by scores of H heads of their own; the choice has no gradient.

    Attributes:
        width, rank, heads, size: D, features of a query before its last product, H, C.
        pools: how many are chosen.
        pool: P.
        tail: whether a query always sees the tokens of the pool that is not complete.
    """

    width: int
    rank: int
    heads: int
    size: int
    pools: int
    pool: int
    tail: bool

    def tensors(self) -> Shapes:
        shapes = linear("wq_b", self.heads * self.size, self.rank) | linear(
            "wk", self.size, self.width
        )
        shapes |= linear("k_norm", self.size, bias=True) | linear(
            "weights_proj", self.heads, self.width
        )
        own = {"ape": (self.pool, self.size), "gate": (self.size, self.width)}
        return shapes | {f"index_kpool_compress_{name}": shape for name, shape in own.items()}

    def index(self, w: Scoped, x: Array) -> Array:
        """What is remembered of each token: its key, and its weights in the key of its pool, [T, N, 2 C]."""
        key = Norm(self.size, 1e-6, centered=True, bias=True)(w.at("k_norm"), w.linear("wk", x))
        return jnp.concatenate([key, w.span.linear(x, w["index_kpool_compress_gate"])], axis=-1)

    def choose(
        self,
        w: Scoped,
        x: Array,
        query: Array,
        index: Array,
        places: Array,
        seen: Array,
    ) -> Array:
        """As `attend` wants it. A pool is named by the slot of its last token."""
        size = self.pool
        count = index.shape[1]
        taps = jnp.stack(
            [jnp.pad(index, [(0, 0), (k, 0), (0, 0)])[:, :count] for k in reversed(range(size))]
        )
        keys, shares = jnp.split(taps, 2, axis=-1)  # [P, N, S, C]
        shares = jax.nn.softmax(
            shares + w["index_kpool_compress_ape"][:, None, None].astype(keys.dtype), axis=0
        )
        q = heads(w.linear("wq_b", query), self.heads)
        products = jnp.einsum("tnhc,nsc->tnhs", q, jnp.sum(shares * keys, axis=0)) * self.size**-0.5
        weights = w.linear("weights_proj", x) * self.heads**-0.5
        scores = jnp.einsum("tnh,tnhs->nts", weights, jax.nn.relu(products))
        complete = seen & (places % size == size - 1)[:, None]
        best = jax.lax.top_k(jnp.where(complete, scores, -jnp.inf), min(self.pools, count))[1]
        chosen = complete & jnp.put_along_axis(
            jnp.zeros_like(seen), best, True, axis=2, inplace=False
        )
        # of the pool of each token, [N, S]
        ends = jnp.arange(count)[None] + size - 1 - places % size
        covered = (
            jnp.take_along_axis(chosen, jnp.minimum(ends, count - 1)[:, None], axis=2)
            & (ends < count)[:, None]
        )
        if self.tail:
            covered |= places[:, None] >= ((w.positions.T + 1) // size * size)[..., None]
        return seen & covered


@dataclass(frozen=True)
class Indexed(Latent):
    """Latent attention to chosen tokens; `indexer` chooses them; None: the previous layer's choice."""

    indexer: Indexer | None = None

    def tensors(self) -> Shapes:
        return super().tensors() | (
            under("indexer", self.indexer.tensors()) if self.indexer else {}
        )

    def holds(self, room: int) -> Shapes:
        return super().holds(room) | (
            {"index": (room, 2 * self.indexer.size)} if self.indexer else {}
        )

    def choice(self, w: Scoped, x: Array, query: Array) -> dict[str, Any]:
        if (indexer := self.indexer) is None:
            return {"choose": lambda *_: w.shared["seen"]}
        w = w.at("indexer")

        def choose(*given: Array) -> Array:
            w.shared["seen"] = indexer.choose(w, x, query, *given)
            return w.shared["seen"]

        return {"index": indexer.index(w, x), "choose": choose}
