"""Products of decays inside a chunk, without logarithms or divisions.

W(t, s) is the product of the decays of the steps between s and t, both excluded. A chunk needs W for all pairs s < t, for
each step from the start of the chunk, and for each step to its end.

The usual way divides cumulative products: `W(t, s) = c[t] / c[s + 1]` with `c[t] = d[0] ... d[t - 1]`, or takes the
exponential of differences of sums of logarithms. Strong decays make c underflow, so that implementations of gated linear
attention (Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", 2024) divide a chunk into
smaller blocks; logarithms have no zeros and no signs. Every W here is a product of true transitions instead. So none
overflows unless the recurrence does, and zeros, negative and growing decays are exact.

What W is depends on the decay:

- *Numbers*: a decay that is the same along K. A loop over rows makes the [C, C] numbers: `W(t + 1, s) = W(t, s) d[t]`.
- *Small matrices*: for several states that read each other. `X = (I - A)^-1`, where A has the decay of step t in row t + 1
  and column t, has all products: a block inverse (`solve.py`). On accelerators numbers are made so, too: few kernels.
- *Vectors*: a decay that differs along K. Then `sum_k a_t W(t, s) p_s` is no product of scores with a matrix W, and W would
  have C * C * K numbers. The pairs s < t are divided into levels. In level n, blocks of 2^n steps are neighbors, and t is in
  the second and s in the first block of two. W(t, s) is then the decays from s to the border, times those from there to t:

        level 0:  s|t s|t s|t s|t      level 1:  s s|t t s s|t t      level 2:  s s s s|t t t t

  So a level is one product of queries, times the decays since the border, and keys, times the decays to it. The vectors of
  the next level follow from those of the level before by one product with the total decay of the neighboring block: this
  is Blelloch's up-sweep ("Prefix Sums and Their Applications", 1990), with vectors in place of sums.

Shapes: C steps of a chunk, K the contracted axis of S.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn.jaxprs.jax_internals import XLA_KEEPS_BARRIERS
from jrnn.jaxprs.mesh_axes import alike, like
from jrnn.loops.affine import rounds
from jrnn.loops.affine.chunkwise.labeled import Label, Labeled, dot, sum_over, times, union
from jrnn.loops.affine.chunkwise.solve import SavedForBackward, unit_lower_inverse

# The labels of the matrices by which states that read each other decay.
TO_STATE = "to"
FROM_STATE = "from"
STATE_LABELS = (TO_STATE, FROM_STATE)

HIGHEST = jax.lax.Precision.HIGHEST


@dataclass(frozen=True)
class DecayedVectors:
    """Vectors of a chunk, times decays.

    Attributes:
        queries, keys: of each step, for `Decay.scores`.
        from_start: queries of the state before the chunk, each with what scales the results.
        to_end: what remains of keys at the end of the chunk.
        total: W(end, start).
    """

    queries: list[Labeled]
    keys: list[Labeled]
    from_start: list[tuple[Labeled, Labeled | None]]
    to_end: list[Labeled]
    total: Labeled | None


@dataclass(frozen=True)
class Decay:
    """The decays of a chunk. For states that read each other, W(t, s) are small matrices, with STATE_LABELS.

    Attributes:
        steps: C.
        k: the label of K.
        precision: of the contractions.
        prefix: W(t, start) for each t, or None if nothing decays.
        suffix: W(end, s) for each s.
        total: W(end, start).
        between: W(t, s) below the diagonal, [T, S], for decays that are the same along K; otherwise None.
        each: the decay of each step, if it differs along K. Then vectors for scores are in levels, [N, C / 2].
    """

    steps: int
    k: int
    precision: Any
    prefix: Labeled | None = None
    suffix: Labeled | None = None
    total: Labeled | None = None
    between: Labeled | None = None
    each: Labeled | None = None

    def largest(self) -> Array:
        """Returns the largest magnitude of a product of decays, at least 1."""
        products = [p for p in (self.prefix, self.suffix, self.between) if p is not None]
        if self.each is not None:
            ones = self.each.map(jnp.ones_like)
            vectors = self.of_vectors([ones], [ones])
            from_start = vectors.from_start[0][0]
            products = [*vectors.queries, *vectors.keys, from_start, *vectors.to_end]
        sizes = [jnp.max(jnp.abs(product.array)) for product in products]
        return functools.reduce(jnp.maximum, sizes, jnp.ones(()))

    def of_vectors(self, queries: Sequence[Labeled], keys: Sequence[Labeled]) -> DecayedVectors:
        """Returns vectors a_t and p_s, with the labels T and K, times decays."""
        if self.each is not None:
            return self._in_levels(self.each, queries, keys)
        return DecayedVectors(
            queries=list(queries),
            keys=list(map(_written, keys)),
            from_start=list(map(self._from_start, queries)),
            to_end=[self.scaled(key, self.suffix) for key in keys],
            total=self.total,
        )

    def _in_levels(
        self, d: Labeled, queries: Sequence[Labeled], keys: Sequence[Labeled]
    ) -> DecayedVectors:
        """Returns vectors times decays that differ along K.

        In each doubling step, pairs of blocks join: vectors of one are multiplied with the total of the other. The steps are
        in another order each time, with the steps of the first blocks of all pairs in front of the steps of the second. Then
        all doubling steps are the same program, and after the last the order is the order of time.
        """
        vectors = [*queries, *keys, d]
        n = len(queries)
        labels = ("T", *(l for l in union(vectors) if l not in ("T", self.k)), self.k)
        shape = jnp.broadcast_shapes(*(v.along(labels).shape for v in vectors))
        barrier = jax.lax.optimization_barrier
        is_second = np.array([False, True])[:, None, None]

        def join(rows: Sequence[Array], _: None) -> tuple[list[Array], list[Array]]:
            """Joins pairs of blocks. The last of the rows are the totals of blocks."""
            halves = [jnp.swapaxes(x.reshape(self.steps // 2, 2, -1), 0, 1) for x in rows]
            other = halves[-1][::-1]
            joined = []
            for i, x in enumerate(halves[:-1]):
                of_query = i < n
                joined.append(x * jnp.where(is_second == of_query, other, 1))
            joined.append(halves[-1] * other)
            level = [barrier(x[int(i < n)]) for i, x in enumerate(halves[:-1])]
            return [barrier(x.reshape(self.steps, -1)) for x in joined], level

        rows = []
        for vector in vectors:
            row = jnp.broadcast_to(vector.along(labels), shape)
            rows.append(barrier(row.reshape(self.steps, -1)))
        # XLA compiles equal kernels once. Where it drops the barriers, it would compute all doubling steps in one kernel.
        unroll = XLA_KEEPS_BARRIERS or 1
        levels_count = self.steps.bit_length() - 1
        rows, levels = jax.lax.scan(join, alike(rows), None, levels_count, unroll=unroll)

        def labeled(x: Array, lead: tuple[Label, ...], vector: Labeled) -> Labeled:
            """The array, without axes that neither the vector nor the decay has."""
            x = x.reshape(*x.shape[: len(lead)], *shape[1:])
            has_axis = [l in vector.labels + d.labels for l in labels[1:]]
            index = tuple(slice(None) if has else 0 for has in has_axis)
            remaining = (l for l, has in zip(labels[1:], has_axis) if has)
            return Labeled(x[(slice(None),) * len(lead) + index], (*lead, *remaining))

        in_levels = [labeled(x, ("N", "T"), v) for x, v in zip(levels, vectors)]
        ends = [labeled(x, ("T",), v) for x, v in zip(rows, vectors)]
        return DecayedVectors(
            queries=in_levels[:n],
            keys=list(map(_written, in_levels[n:])),
            from_start=[(query, None) for query in ends[:n]],
            to_end=ends[n:-1],
            total=labeled(rows[-1][0], (), d),
        )

    def _from_start(self, query: Labeled) -> tuple[Labeled, Labeled | None]:
        """Returns a query of the state before the chunk, and what scales the results."""
        if self.prefix is None or TO_STATE not in self.prefix.labels:
            return query, self.prefix
        transposed = (
            self.prefix.renamed(TO_STATE, "old")
            .renamed(FROM_STATE, TO_STATE)
            .renamed("old", FROM_STATE)
        )
        return self.scaled(query, transposed), None

    def scaled(self, a: Labeled, decay: Labeled | None) -> Labeled:
        """Returns `a` times a decay; for states that read each other, `sum_j decay[i, j] a[j]`."""
        if decay is None or FROM_STATE not in decay.labels:
            return times([a, decay])
        a = a.renamed(*STATE_LABELS)
        return dot(a, decay, [l for l in union([a, decay]) if l != FROM_STATE], self.precision)

    def scores(self, query: Labeled, key: Labeled, saved: SavedForBackward) -> Labeled:
        """Returns `sum_k a_t W(t, s) p_s` for s < t, and zero for s >= t, with the labels T and S at the end.

        The products of vectors are saved for the reverse pass.
        """
        if self.each is not None:
            return _product(query, key, self.k, self.precision, saved, _merge_levels)
        product = _product(query, key, self.k, self.precision, saved)
        if self.between is not None:
            product = times([product, self.between])
            return sum_over(product, [l for l in STATE_LABELS if l in product.labels])
        below = np.tril(np.ones((self.steps, self.steps), bool), -1)
        return Labeled(jnp.where(below, product.array, 0), product.labels)

    def apply_scores(
        self, scores: Labeled, values: Labeled, decays: Labeled, out: Sequence[Label]
    ) -> Labeled:
        """Returns `sum_s scores[t, s] W(t, s) v_s`, for a decay along K.

        Args:
            scores: with the labels T and S.
            values, decays: v_s, and queries that are 1, of `of_vectors`.
            out: the labels of the result, T first.
        """
        lead = tuple(l for l in scores.labels if l not in ("T", "S"))
        blocks = Labeled(_split_levels(scores.along((*lead, "T", "S"))), (*lead, "N", "T", "S"))
        mixed = times([dot(blocks, values, ["N", *out], self.precision), decays])
        lead = tuple(l for l in mixed.labels if l not in ("N", "T"))
        levels = mixed.along(("N", "T", *lead))
        # Adds the rows of all levels to the steps that they belong to.
        is_step = _orders(self.steps)[0][1].reshape(-1) == np.arange(self.steps)[:, None]
        rows = levels.reshape(-1, *levels.shape[2:])
        total = jnp.tensordot(is_step.astype(rows.dtype), rows, 1, precision=HIGHEST)
        return Labeled(total, ("T", *lead))


def _written(key: Labeled) -> Labeled:
    """Returns a key with the labels of the steps that wrote."""
    return key.renamed("T", "S").renamed(*STATE_LABELS)


def _product(
    query: Labeled,
    key: Labeled,
    k: int,
    precision: Any,
    saved: SavedForBackward,
    merge: Callable[[Array], Array] | None = None,
) -> Labeled:
    """Returns the products of vectors for all pairs of T and S, which are saved; `merge` joins the pairs of levels."""
    labels = union((query, key), ("N", "T", "S", k))[:-1]

    def product(queries: Array, keys: Array) -> Array:
        vectors = (Labeled(queries, query.labels), Labeled(keys, key.labels))
        scores = dot(*vectors, labels, precision).array
        return scores if merge is None else merge(scores)

    scores = saved.result(product, query.array, key.array)
    return Labeled(scores, tuple(l for l in labels if l != "N"))


# Levels of pairs of steps


@functools.cache
def _orders(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns where steps are in each level, whose blocks have 1, 2, 4, ... steps.

    Returns:
        the steps of the first and of the second blocks of all pairs of blocks, [2, N, C / 2], and the place of each step in
        one of the two, [N, C].
    """
    order = np.arange(steps)
    orders = []
    for _ in range(steps.bit_length() - 1):
        order = order.reshape(-1, 2).T.reshape(-1)
        orders.append(order)
    halves = np.stack(orders).reshape(-1, 2, steps // 2).swapaxes(0, 1)
    return halves, np.argsort(np.stack(orders), -1) % (steps // 2)


def _merge(pairs: Array) -> Array:
    """Returns the pairs of all steps from the pairs of each level, [..., N, T / 2, S / 2] -> [..., T, S]."""
    *lead, _, half, _ = pairs.shape
    t = np.arange(2 * half)[:, None]
    s = np.arange(2 * half)
    level = np.maximum(np.frexp(t ^ s)[1] - 1, 0)
    places = _orders(2 * half)[1]
    index = (level * half + places[level, t]) * half + places[level, s]
    return jnp.where(s < t, jnp.take(pairs.reshape(*lead, -1), index, -1, mode="clip"), 0)


def _split(scores: Array) -> Array:
    """Returns the pairs of each level, the transpose of `_merge`."""
    *lead, steps, _ = scores.shape
    first, second = _orders(steps)[0]
    t = second[:, :, None]
    s = first[:, None, :]
    length = 2 << np.arange(len(first))[:, None, None]
    pairs = jnp.take(scores.reshape(*lead, -1), t * steps + s, -1, mode="clip")
    return jnp.where(t // length == s // length, pairs, 0)


def _with_transpose(
    fn: Callable[[Array], Array], transpose: Callable[[Array], Array]
) -> Callable[[Array], Array]:
    """Returns a linear function with its transpose, which for a lookup would be a scatter."""
    linear = jax.custom_jvp(fn)

    @linear.defjvp
    def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        out = linear(*primals)
        return out, jax.linear_transpose(transpose, out)(*tangents)[0]

    return linear


_merge_levels = _with_transpose(_merge, _split)
_split_levels = _with_transpose(_split, _merge)


# Products of decays that are the same along K


def decay_of(
    factor: Labeled | None,
    steps: int,
    k: int,
    precision: Any,
    saved: SavedForBackward,
    batched: bool,
) -> Decay:
    """Returns the products of decays.

    Args:
        factor: the decay of each step, with the label T, and for states that read each other with STATE_LABELS; None if
            nothing decays.
        steps: C, a power of two.
        k: the label of K.
        precision: of the contractions.
        saved: saves the products of decays that are the same along K.
        batched: of all chunks, by a block inverse: fewer kernels run.
    """
    if factor is None:
        return Decay(steps, k, precision)
    has_states = TO_STATE in factor.labels
    lead = tuple(l for l in factor.labels if l not in ("T", *STATE_LABELS))
    if k in lead:
        return Decay(steps, k, precision, each=factor)
    if has_states or batched:
        products = _products(factor.along((*lead, "T", *STATE_LABELS)), saved)
    else:
        products = _products_of_numbers(factor.along((*lead, "T")), saved)

    def labeled(array: Array, labels: tuple[Label, ...]) -> Labeled:
        """The array with labels, those of states only where there are several states."""
        if not has_states:
            sizes = [array.shape[i] for i in range(len(lead))]
            labels = tuple(l for l in labels if l not in STATE_LABELS)
            return Labeled(array.reshape(*sizes, *(steps,) * len(labels)), (*lead, *labels))
        return Labeled(array, (*lead, *labels))

    prefix, suffix, total, between = products
    return Decay(
        steps,
        k,
        precision,
        prefix=labeled(prefix, ("T", *STATE_LABELS)),
        suffix=labeled(suffix, (TO_STATE, "T", FROM_STATE)),
        total=labeled(total, STATE_LABELS),
        between=labeled(between, ("T", TO_STATE, "S", FROM_STATE)),
    )


def _products(d: Array, saved: SavedForBackward) -> tuple[Array, Array, Array, Array]:
    """Returns products of matrices, the decays of C steps: a block inverse has the products of all neighboring steps.

    Args:
        d: [..., C, n, n].
        saved: saves the inverse.

    Returns:
        W(t, start) [..., T, n, n], W(end, s) [..., n, S, n], W(end, start) [..., n, n], and W(t, s) [..., T, n, S, n], which
        is zero for s >= t.
    """
    *lead, c, n, _ = d.shape
    is_next_step = np.eye(c, k=-1, dtype=bool)[:, None, :, None]
    blocks = jnp.where(is_next_step, -jnp.swapaxes(d, -3, -2)[..., None, :, :, :], 0)
    matrix = blocks.reshape(*lead, c * n, c * n)
    inverse = unit_lower_inverse(matrix, HIGHEST, saved)
    x = inverse.reshape(*lead, c, n, c, n)  # W(t, s - 1)
    end = jnp.sum(d[..., -1, :, :, None, None] * x[..., -1, None, :, :, :], -3)
    one = jnp.broadcast_to(jnp.eye(n, dtype=d.dtype)[:, None, :], (*lead, n, 1, n))
    between = jnp.concatenate([x[..., 1:, :], jnp.zeros_like(x[..., :1, :])], -2)
    prefix = x[..., 0, :]
    suffix = jnp.concatenate([end[..., 1:, :], one], -2)
    return prefix, suffix, end[..., 0, :], between


def _products_of_numbers(d: Array, saved: SavedForBackward) -> list[Array]:
    """Returns what `_products` does for decays that are numbers, [..., C], in a loop, which takes less time to compile."""
    *lead, c = d.shape
    d = d.reshape(-1, c)  # a kernel of fewer axes compiles sooner

    def run(d: Array) -> Array:
        def step(row: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
            factor, one = inputs
            return row * factor + one, row

        # The barrier keeps JAX from moving a loop for what it knows of the ones in front of the loop over chunks.
        ones = jnp.eye(c + 1, k=1, dtype=d.dtype)[:, None]
        factors = jnp.pad(d, [(0, 0), (0, 1)]).T[..., None]
        factors, ones = jax.lax.optimization_barrier((factors, ones))
        first = like(jnp.broadcast_to(jnp.eye(1, c + 1, dtype=d.dtype), (len(d), c + 1)), d)
        _, rows = jax.lax.scan(step, first, (factors, ones))
        return jnp.swapaxes(rows, 0, 1)

    def tangent(x: Array, _: Sequence[Array], tangents: Sequence[Array]) -> Array:
        return jnp.matmul(x[:, :, 1:], tangents[0][..., None] * x[:, :-1], precision=HIGHEST)

    # x[t, s] is the product of the decays of s, ..., t - 1.
    x = saved.result(run, d, tangent=tangent)
    products = [x[:, :-1, 0], x[:, -1, 1:], x[:, -1, 0], x[:, :-1, 1:]]
    return [product.reshape(*lead, *product.shape[1:]) for product in products]


def sums(decay: Labeled | None, x: Labeled) -> tuple[Labeled, Labeled]:
    """Returns `sum_{s < t} W(t, s) x_s` for each step t, and for the end of the chunk.

    Args:
        decay: the decay of each step, with the label T; None if nothing decays.
        x: with the label T.
    """
    arrays = [x] if decay is None else [decay, x]
    labels = ("T", *(l for l in union(arrays) if l != "T"))
    values = x.along(labels)
    if decay is None:
        d = jnp.ones((len(values), *[1] * (len(labels) - 1)), x.array.dtype)
    else:
        d = decay.along(labels)
    shape = jnp.broadcast_shapes(values.shape, d.shape)
    factors = jnp.broadcast_to(d, shape)
    (total,) = rounds.associative_solve([[factors]], [jnp.broadcast_to(values, shape)])
    return Labeled(rounds.shift_one_step(total), labels), Labeled(total[-1], labels[1:])
