"""Decays that differ along K: vectors are multiplied with decays level by level.

W(t, s) is a vector here. So `sum_k a_t W(t, s) p_s` is no product of scores with a matrix W, and W would have C * C * K
numbers. The pairs s < t are divided into levels. In level n, blocks of 2^n steps are neighbors, and t is in the second and s
in the first block of two. W(t, s) is then the decays from s to the border, times the decays from the border to t:

        level 0:  s|t s|t s|t s|t      level 1:  s s|t t s s|t t      level 2:  s s s s|t t t t

So a level is one product of queries, times the decays since the border, and keys, times the decays to it. The vectors of the
next level follow from the vectors of the level before by one product with the total decay of the neighboring block: this is
Blelloch's up-sweep ("Prefix Sums and Their Applications", 1990), with vectors in place of sums.

A level is a permutation of the steps, and its pairs are a lookup in the scores. The transpose of a lookup is a scatter,
which XLA:CPU runs element by element. `merge_levels` and `split_levels` are each other's transpose instead: two lookups.

Shapes: C steps of a chunk, N levels, K the contracted axis of S.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn.jaxprs.jax_internals import XLA_KEEPS_BARRIERS
from jrnn.jaxprs.mesh_axes import alike
from jrnn.loops.affine.chunkwise.decay import (
    HIGHEST,
    Decay,
    DecayedVectors,
    Vectors,
    largest_of,
    written,
)
from jrnn.loops.affine.chunkwise.guarded import Arrays, Pair
from jrnn.loops.affine.chunkwise.labeled import Labeled, Labels, dot, times, union, without
from jrnn.loops.affine.chunkwise.rounded_product import rounded
from jrnn.loops.affine.chunkwise.solve import ArrayFn, SavedForBackward


@dataclass(frozen=True)
class VectorDecay(Decay):
    """The decays of a chunk that differ along K. Vectors for scores are in levels, [N, C / 2].

    Attributes:
        each: the decay of each step.
        batched: all chunks are prepared at once.
    """

    each: Labeled
    batched: bool

    def largest(self) -> Array:
        labels = ("T", *without(self.each.labels, ("T",)))
        totals = jnp.abs(self.each.along(labels))
        # The largest products from the start of each block, and to its end.
        from_start = jnp.ones_like(totals)
        to_end = jnp.ones_like(totals)
        while len(totals) > 1:
            first = totals[0::2]
            second = totals[1::2]
            from_start = jnp.maximum(from_start[0::2], first * from_start[1::2])
            to_end = jnp.maximum(to_end[1::2], second * to_end[0::2])
            totals = first * second
        return largest_of([Labeled(from_start, labels), Labeled(to_end, labels)])

    def of_vectors(self, queries: Vectors, keys: Vectors) -> DecayedVectors:
        """Returns vectors times decays.

        In each doubling step, pairs of blocks join: vectors of one are multiplied with the total of the other.
        """
        d = self.each
        vectors = [*queries, *keys, d]
        n = len(queries)
        labels = ("T", *without(union(vectors), ("T", self.k)), self.k)
        shape = jnp.broadcast_shapes(*(v.along(labels).shape for v in vectors))
        rows = [jnp.broadcast_to(vector.along(labels), shape) for vector in vectors]
        if self.batched:
            rows, levels = jax.checkpoint(functools.partial(self._at_once, n))(rows)
        else:
            rows, levels = self._one_by_one(n, rows)

        def labeled(x: Array, lead: Labels, vector: Labeled) -> Labeled:
            """The array, without axes that neither the vector nor the decay has."""
            sizes = x.shape[: len(lead)]
            own_labels = labels[1:]
            array = x.reshape(*sizes, *shape[1:])
            missing = without(own_labels, vector.labels + d.labels)
            return Labeled(array, (*lead, *own_labels)).at_first(missing)

        in_levels = [labeled(x, ("N", "T"), v) for x, v in zip(levels, vectors)]
        ends = [labeled(x, ("T",), v) for x, v in zip(rows, vectors)]
        return DecayedVectors(
            queries=in_levels[:n],
            keys=list(map(written, in_levels[n:])),
            from_start=[(query, None) for query in ends[:n]],
            to_end=ends[n:-1],
            total=labeled(rows[-1][0], (), d),
        )

    def _one_by_one(self, n: int, arrays: Arrays) -> Pair:
        """Joins pairs of blocks in doubling steps that are the same program, for CPUs.

        The steps are in another order each time: first the steps of the first blocks of all pairs, then the others. After
        the last doubling step the order is the order of time.

        Args:
            n: the number of queries.
            arrays: queries, keys and decays, [T, ...].

        Returns:
            the arrays times decays, with totals of all steps for the decays, and the queries and keys of each level.
        """
        barrier = jax.lax.optimization_barrier
        is_second = np.array([False, True])[:, None, None]

        def join(rows: Arrays, _: None) -> Pair:
            """Joins pairs of blocks. The last of the rows are the totals of blocks."""
            halves = []
            for row in rows:
                pairs = row.reshape(self.steps // 2, 2, -1)
                halves.append(jnp.swapaxes(pairs, 0, 1))
            totals = halves.pop()
            other = totals[::-1]
            joined = []
            for i, x in enumerate(halves):
                of_query = i < n
                joined.append(x * jnp.where(is_second == of_query, other, 1))
            joined.append(totals * other)
            level = [barrier(x[int(i < n)]) for i, x in enumerate(halves)]
            return [barrier(x.reshape(self.steps, -1)) for x in joined], level

        rows = [barrier(row.reshape(self.steps, -1)) for row in arrays]
        # XLA compiles equal kernels once. Where it drops the barriers, it would compute all doubling steps in one kernel.
        unroll = XLA_KEEPS_BARRIERS or 1
        levels_count = self.steps.bit_length() - 1
        return jax.lax.scan(join, alike(rows), None, levels_count, unroll=unroll)

    def _at_once(self, n: int, arrays: Arrays) -> Pair:
        """Joins pairs of blocks as `_one_by_one` does, for accelerators.

        XLA:GPU computes a chain of products in one kernel, which reads each vector once and writes it once for each level.
        Only the totals of blocks are arrays of their own, [C / 2^level, ...]. The reverse pass computes all of it again.
        """
        *rows, totals = arrays
        rest = totals.shape[1:]
        one_axis = (1,) * len(rest)
        is_second = np.array([False, True]).reshape(1, 2, 1, *one_axis)
        levels: list[list[Array]] = [[] for _ in rows]
        length = 1
        while length < self.steps:
            pairs = totals.reshape(-1, 2, 1, *rest)
            other = pairs[:, ::-1]
            for i, row in enumerate(rows):
                of_query = i < n
                blocks = row.reshape(-1, 2, length, *rest)
                half = jnp.swapaxes(blocks[:, int(of_query)], 0, 1)
                half = half.reshape(self.steps // 2, *rest)
                levels[i].append(rounded(half, self.precision))
                joined = blocks * jnp.where(is_second == of_query, other, 1)
                rows[i] = joined.reshape(self.steps, *rest)
            totals = (pairs[:, 0] * pairs[:, 1]).reshape(-1, *rest)
            length *= 2
        return [*rows, totals], list(map(jnp.stack, levels))

    def scores(
        self,
        query: Labeled,
        key: Labeled,
        saved: SavedForBackward,
    ) -> Labeled:
        return self.products(query, key, saved, merge_levels)

    def apply_scores(
        self,
        scores: Labeled,
        values: Labeled,
        decays: DecayedVectors,
        out: Labels,
    ) -> Labeled:
        lead = without(scores.labels, ("T", "S"))
        pairs = split_levels(scores.along((*lead, "T", "S")))
        blocks = Labeled(pairs, (*lead, "N", "T", "S"))
        product = dot(blocks, values, ("N", *out), self.precision)
        mixed = times([product, decays.queries[0]])
        lead = without(mixed.labels, ("N", "T"))
        levels = mixed.along(("N", "T", *lead))
        # Adds the rows of all levels to the steps that they belong to.
        _, second = _blocks(self.steps)
        steps = np.arange(self.steps)[:, None]
        is_step = second.reshape(-1) == steps
        rows = levels.reshape(-1, *levels.shape[2:])
        total = jnp.tensordot(is_step.astype(rows.dtype), rows, 1, precision=HIGHEST)
        return Labeled(total, ("T", *lead))


# Levels of pairs of steps


@functools.cache
def _orders(steps: int) -> np.ndarray:
    """Returns the order of the steps in each level, [N, C]: the first blocks of all pairs, and then the second ones."""
    order = np.arange(steps)
    orders = []
    for _ in range(steps.bit_length() - 1):
        order = order.reshape(-1, 2).T.reshape(-1)
        orders.append(order)
    return np.stack(orders)


def _blocks(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps of the first blocks of all pairs in each level, and of the second blocks, [N, C / 2]."""
    first, second = np.split(_orders(steps), 2, -1)
    return first, second


def _merge(pairs: Array) -> Array:
    """Returns the pairs of all steps from the pairs of each level, [..., N, T / 2, S / 2] -> [..., T, S]."""
    *lead, _, half, _ = pairs.shape
    t = np.arange(2 * half)[:, None]
    s = np.arange(2 * half)
    level = np.maximum(np.frexp(t ^ s)[1] - 1, 0)
    places = np.argsort(_orders(2 * half), -1) % half
    t_place = places[level, t]
    s_place = places[level, s]
    index = (level * half + t_place) * half + s_place
    rows = pairs.reshape(*lead, -1)
    scores = jnp.take(rows, index, -1, mode="clip")
    return jnp.where(s < t, scores, 0)


def _split(scores: Array) -> Array:
    """Returns the pairs of each level, the transpose of `_merge`."""
    *lead, steps, _ = scores.shape
    first, second = _blocks(steps)
    t = second[:, :, None]
    s = first[:, None, :]
    length = 2 << np.arange(len(first))[:, None, None]
    rows = scores.reshape(*lead, -1)
    pairs = jnp.take(rows, t * steps + s, -1, mode="clip")
    return jnp.where(t // length == s // length, pairs, 0)


def _with_transpose(fn: ArrayFn, transpose: ArrayFn) -> ArrayFn:
    """Returns a linear function with its transpose, which for a lookup would be a scatter."""
    linear = jax.custom_jvp(fn)

    @linear.defjvp
    def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        out = linear(*primals)
        return out, jax.linear_transpose(transpose, out)(*tangents)[0]

    return linear


merge_levels = _with_transpose(_merge, _split)
split_levels = _with_transpose(_split, _merge)
