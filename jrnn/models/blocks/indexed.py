"""Latent attention to tokens that an indexer chooses (DeepSeek-V3.2), in pools of neighbors (GLM-5).

Shapes: T time, N batch, D width, H heads of the indexer, C features of each, P tokens of a pool, S slots and steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.models.blocks.attention import Latent
from jrnn.models.family import At, Norm, Shapes, State, Weights, linear, under
from jrnn.nn.span import heads


@dataclass(frozen=True)
class Indexer:
    """Chooses pools of tokens for each query, by scores of their own; the choice has no gradient.

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
        shapes = linear("wq_b", self.heads * self.size, self.rank) | linear("wk", self.size, self.width)
        shapes |= {"k_norm.weight": (self.size,), "k_norm.bias": (self.size,)}
        shapes |= linear("weights_proj", self.heads, self.width)
        own = {"ape": (self.pool, self.size), "gate": (self.size, self.width)}
        return shapes | {f"index_kpool_compress_{name}": shape for name, shape in own.items()}

    def index(self, w: Weights, x: jax.Array, at: At) -> jax.Array:
        """What is remembered of each token: its key, and its weights in the key of its pool, [T, N, 2 C]."""
        key = Norm(self.size, 1e-6, centered=True, bias=True)(w.at("k_norm"), w.linear(at.span, "wk", x))
        return jnp.concatenate([key, at.span.linear(x, w["index_kpool_compress_gate"])], axis=-1)

    def choose(
        self, w: Weights, x: jax.Array, query: jax.Array, at: At, index: jax.Array, places: jax.Array, seen: jax.Array
    ) -> jax.Array:
        """As `attend` wants it. A pool is named by the slot of its last token."""
        size, count = self.pool, index.shape[1]
        taps = jnp.stack([jnp.pad(index, [(0, 0), (k, 0), (0, 0)])[:, :count] for k in reversed(range(size))])
        keys, shares = jnp.split(taps, 2, axis=-1)  # [P, N, S, C]
        shares = jax.nn.softmax(shares + w["index_kpool_compress_ape"][:, None, None].astype(keys.dtype), axis=0)
        q = heads(w.linear(at.span, "wq_b", query), self.heads)
        products = jnp.einsum("tnhc,nsc->tnhs", q, jnp.sum(shares * keys, axis=0)) * self.size**-0.5
        weights = w.linear(at.span, "weights_proj", x) * self.heads**-0.5
        scores = jnp.einsum("tnh,tnhs->nts", weights, jax.nn.relu(products))
        complete = seen & (places % size == size - 1)[:, None]
        best = jax.lax.top_k(jnp.where(complete, scores, -jnp.inf), min(self.pools, count))[1]
        chosen = complete & jnp.put_along_axis(jnp.zeros_like(seen), best, True, axis=2, inplace=False)
        ends = jnp.arange(count)[None] + size - 1 - places % size  # of the pool of each token, [N, S]
        found = jnp.take_along_axis(chosen, jnp.minimum(ends, count - 1)[:, None], axis=2) & (ends < count)[:, None]
        if self.tail:
            found |= places[:, None] >= ((at.positions.T + 1) // size * size)[..., None]
        return seen & found


@dataclass(frozen=True)
class Indexed(Latent):
    """Latent attention to chosen tokens; `indexer`: chooses them, or None: they are those of the layer before."""

    indexer: Indexer | None = None

    def tensors(self) -> Shapes:
        return super().tensors() | (under("indexer", self.indexer.tensors()) if self.indexer else {})

    def fresh(self, batch: int, dtype: Any, room: int) -> State:
        own = {"index": jnp.zeros((batch, room, 2 * self.indexer.size), dtype)} if self.indexer else {}
        return super().fresh(batch, dtype, room) | own

    def choice(self, w: Weights, x: jax.Array, query: jax.Array, at: At) -> dict[str, Any]:
        if (indexer := self.indexer) is None:
            return {"choose": lambda *_: at.shared["seen"]}
        w = w.at("indexer")

        def choose(*given: jax.Array) -> jax.Array:
            at.shared["seen"] = indexer.choose(w, x, query, at, *given)
            return at.shared["seen"]

        return {"index": indexer.index(w, x, at), "choose": choose}
