"""Products of decays inside a chunk, without logarithms or divisions.

W(t, s) is the product of the decays of the steps between s and t, both excluded. A chunk needs W for all pairs s < t, for
each step from the start of the chunk, and for each step to its end:

        start | 0   1   2   s   .   .   .   t   .   . | end
                            |-- W(t, s) ----|
              |-- W(t, start) --------------|
                            |-- W(end, s) ------------|

The usual way divides cumulative products: `W(t, s) = c[t] / c[s + 1]` with `c[t] = d[0] ... d[t - 1]`, or takes the
exponential of differences of sums of logarithms. Strong decays make c underflow, so that implementations of gated linear
attention (Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", 2024) divide a chunk into
smaller blocks; logarithms have no zeros and no signs. Every W here is a product of true transitions instead. So none
overflows unless the recurrence does, and zeros, negative and growing decays are exact.

What W is depends on the decay:

- *Nothing decays*: W is 1 (`Decay`).
- *The same along K*: a number for each pair of steps, or a small matrix for states that read each other
  (`shared_decay.py`).
- *Vectors*: a decay that differs along K (`vector_decay.py`).

Shapes: C steps of a chunk, K the contracted axis of S.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn.loops.affine import rounds
from jrnn.loops.affine.chunkwise.labeled import Labeled, Labels, Product, dot, times, union, without
from jrnn.loops.affine.chunkwise.rounded_product import full
from jrnn.loops.affine.chunkwise.solve import ArrayFn, SavedForBackward

# The labels of the matrices by which states that read each other decay.
TO_STATE = "to"
FROM_STATE = "from"
STATE_LABELS = (TO_STATE, FROM_STATE)

HIGHEST = jax.lax.Precision.HIGHEST

Vectors = Sequence[Labeled]  # one for each query or key, with the label T


@dataclass(frozen=True)
class DecayedVectors:
    """Vectors of a chunk, times decays.

    Attributes:
        queries, keys: of each step, for `Decay.scores`.
        from_start: queries of the state before the chunk, each with what scales the results.
        to_end: what remains of keys at the end of the chunk.
        total: W(end, start).
    """

    queries: Vectors
    keys: Vectors
    from_start: list[tuple[Labeled, Product]]
    to_end: Vectors
    total: Product


@dataclass(frozen=True)
class Decay:
    """The decays of a chunk in which nothing decays; other chunks have subclasses.

    Attributes:
        steps: C.
        k: the label of K.
        precision: of the contractions, as of `dot`; decays are never rounded.
    """

    steps: int
    k: int
    precision: Any

    def largest(self) -> Array:
        """Returns the largest magnitude of a product of decays, at least 1."""
        return jnp.ones(())

    def of_vectors(self, queries: Vectors, keys: Vectors) -> DecayedVectors:
        """Returns vectors a_t and p_s, with the labels T and K, times decays."""
        return DecayedVectors(
            queries=list(queries),
            keys=list(map(written, keys)),
            from_start=[(query, None) for query in queries],
            to_end=list(keys),
            total=None,
        )

    def scaled(self, a: Labeled, decay: Product) -> Labeled:
        """Returns `a` times a decay; for states that read each other, `sum_j decay[i, j] a[j]`."""
        if decay is None or FROM_STATE not in decay.labels:
            return times([a, decay])
        a = a.renamed(*STATE_LABELS)
        out = without(union([a, decay]), (FROM_STATE,))
        return dot(a, decay, out, full(self.precision))

    def scores(
        self,
        query: Labeled,
        key: Labeled,
        saved: SavedForBackward,
    ) -> Labeled:
        """Returns `sum_k a_t W(t, s) p_s` for s < t, and zero for s >= t, with the labels T and S at the end.

        The products of vectors are saved for the reverse pass.
        """
        product = self.products(query, key, saved)
        all_pairs = np.ones((self.steps, self.steps), bool)
        below = np.tril(all_pairs, -1)
        return Labeled(jnp.where(below, product.array, 0), product.labels)

    def products(
        self,
        query: Labeled,
        key: Labeled,
        saved: SavedForBackward,
        merge: ArrayFn | None = None,
    ) -> Labeled:
        """Returns the products of vectors for all pairs of T and S, which are saved; `merge` joins the pairs of levels."""
        all_labels = union((query, key), ("N", "T", "S", self.k))
        labels = all_labels[:-1]

        def product(queries: Array, keys: Array) -> Array:
            query_here = Labeled(queries, query.labels)
            key_here = Labeled(keys, key.labels)
            scores = dot(query_here, key_here, labels, self.precision).array
            return scores if merge is None else merge(scores)

        scores = saved.result(product, query.array, key.array)
        return Labeled(scores, without(labels, ("N",)))

    def apply_scores(
        self,
        scores: Labeled,
        values: Labeled,
        decays: DecayedVectors,
        out: Labels,
    ) -> Labeled:
        """Returns `sum_s scores[t, s] W(t, s) v_s`, for a decay along the columns.

        Args:
            scores: with the labels T and S.
            values: v_s, of `of_vectors`.
            decays: vectors whose first query is 1.
            out: the labels of the result, T first.
        """
        return dot(scores, values, out, self.precision)


def largest_of(products: Vectors) -> Array:
    """Returns the largest magnitude in arrays, at least 1."""
    sizes = [jnp.max(jnp.abs(product.array)) for product in products]
    return functools.reduce(jnp.maximum, sizes, jnp.ones(()))


def written(key: Labeled) -> Labeled:
    """Returns a key with the labels of the steps that wrote."""
    return key.renamed("T", "S").renamed(*STATE_LABELS)


def sums(decay: Product, x: Labeled) -> tuple[Labeled, Labeled]:
    """Returns `sum_{s < t} W(t, s) x_s` for each step t, and for the end of the chunk.

    Args:
        decay: the decay of each step, with the label T; None if nothing decays.
        x: with the label T.
    """
    arrays = [x] if decay is None else [decay, x]
    labels = ("T", *without(union(arrays), ("T",)))
    values = x.along(labels)
    if decay is None:
        shape = (len(values), *[1] * (len(labels) - 1))
        d = jnp.ones(shape, x.array.dtype)
    else:
        d = decay.along(labels)
    shape = jnp.broadcast_shapes(values.shape, d.shape)
    factors = jnp.broadcast_to(d, shape)
    offsets = jnp.broadcast_to(values, shape)
    (total,) = rounds.associative_solve([[factors]], [offsets])
    before_steps = Labeled(rounds.shift_one_step(total), labels)
    return before_steps, Labeled(total[-1], labels[1:])
