"""Products of decays inside a chunk, without logarithms or divisions.

W(t, s) is the product of the decays of the steps between s and t, both excluded. Every W here is a product of true
transitions, so none overflows unless the recurrence does, and zeros, negative and growing decays are exact.

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

from jrnn.jaxprs.jax_internals import XLA_KEEPS_BARRIERS
from jrnn.jaxprs.mesh_axes import alike, like
from jrnn.loops.affine import rounds
from jrnn.loops.chunks.labeled import Label, Labeled, dot, sum_over, times, union
from jrnn.loops.chunks.solve import SavedForBackward, unit_lower_inverse

STATE_LABELS = TO_STATE, FROM_STATE = (
    "to",
    "from",
)  # of the matrices by which states that read each other decay


@dataclass(frozen=True)
class Vectors:
    """Vectors of a chunk, times decays.

    Attributes:
        readers, writers: of each step, for `Decay.scores`.
        starts: readers of the state before the chunk, each with what scales the results.
        ends: what remains of writers at the end of the chunk.
        total: W(end, start).
    """

    readers: list[Labeled]
    writers: list[Labeled]
    starts: list[tuple[Labeled, Labeled | None]]
    ends: list[Labeled]
    total: Labeled | None


@dataclass(frozen=True)
class Decay:
    """The decays of a chunk. For states that read each other, W(t, s) are small matrices, with STATE_LABELS.

    Attributes:
        prefix: W(t, start) for each t, or None if nothing decays.
        suffix: W(end, s) for each s.
        total: W(end, start).
        between: W(t, s) below the diagonal, [T, S], for decays that are the same along K; otherwise None.
        each: the decay of each step, if it differs along K. Then vectors for scores are in levels of blocks of 1, 2, 4, ...
            steps, [N, C / 2]: readers in every second block, times the decays since its start, and writers in the others,
            times those to the end.
    """

    steps: int
    k: int
    precision: Any
    prefix: Labeled | None = None
    suffix: Labeled | None = None
    total: Labeled | None = None
    between: Labeled | None = None
    each: Labeled | None = None

    def largest(self) -> Any:
        """Returns the largest magnitude of a product of decays, at least 1."""
        products = [p for p in (self.prefix, self.suffix, self.between) if p is not None]
        if self.each is not None:
            ones = self.each.map(jnp.ones_like)
            vectors = self.of_vectors([ones], [ones])
            products = [*vectors.readers, *vectors.writers, vectors.starts[0][0], *vectors.ends]
        return functools.reduce(
            jnp.maximum, [jnp.max(jnp.abs(p.array)) for p in products], jnp.ones(())
        )

    def of_vectors(self, readers: Sequence[Labeled], writers: Sequence[Labeled]) -> Vectors:
        """Returns vectors a_t and p_s, with the labels T and K, times decays."""
        if self.each is not None:
            return self._in_levels(self.each, readers, writers)
        starts = [self._from_start(a) for a in readers]
        ends = [self.scaled(p, self.suffix) for p in writers]
        return Vectors(list(readers), list(map(_written, writers)), starts, ends, self.total)

    def _in_levels(
        self, d: Labeled, readers: Sequence[Labeled], writers: Sequence[Labeled]
    ) -> Vectors:
        """Returns vectors times decays that differ along K.

        In each round, pairs of blocks join: vectors of one are multiplied with the total of the other. The steps are in
        another order each time, with those of the first blocks of all pairs in front of those of the second. Then all rounds
        are the same program, and after the last the order is that of time.
        """
        vectors = [*readers, *writers, d]
        labels = ("T", *(l for l in union(vectors) if l not in ("T", self.k)), self.k)
        shape = jnp.broadcast_shapes(*(v.along(labels).shape for v in vectors))
        is_reader = np.arange(len(vectors) - 1) < len(readers)
        barrier = jax.lax.optimization_barrier
        is_second = np.array([False, True])[:, None, None]

        def join(rows: Any, _: Any) -> Any:
            halves = [jnp.swapaxes(x.reshape(self.steps // 2, 2, -1), 0, 1) for x in rows]
            other = halves[-1][::-1]
            new = [x * jnp.where(is_second == r, other, 1) for x, r in zip(halves, is_reader)]
            new = [barrier(x.reshape(self.steps, -1)) for x in (*new, halves[-1] * other)]
            return new, [barrier(x[int(r)]) for x, r in zip(halves, is_reader)]

        rows = [
            barrier(jnp.broadcast_to(v.along(labels), shape).reshape(self.steps, -1))
            for v in vectors
        ]
        # XLA compiles equal kernels once. Where it drops the barriers, it would compute all rounds in one kernel.
        unroll = XLA_KEEPS_BARRIERS or 1
        rows, levels = jax.lax.scan(
            join, alike(rows), None, self.steps.bit_length() - 1, unroll=unroll
        )

        def labeled(x: Any, lead: tuple[Label, ...], vector: Labeled) -> Labeled:
            """The array, without axes that neither the vector nor the decay has."""
            x = x.reshape(*x.shape[: len(lead)], *shape[1:])
            extra = [
                i for i, l in enumerate(labels[1:], len(lead)) if l not in vector.labels + d.labels
            ]
            index = tuple(0 if i in extra else slice(None) for i in range(x.ndim))
            return Labeled(
                x[index], (*lead, *(l for l in labels[1:] if l in vector.labels + d.labels))
            )

        levels = [labeled(x, ("N", "T"), v) for x, v in zip(levels, vectors)]
        n = len(readers)
        ends = [labeled(x, ("T",), v) for x, v in zip(rows, vectors)]
        total = labeled(rows[-1][0], (), d)
        return Vectors(
            levels[:n],
            list(map(_written, levels[n:])),
            [(a, None) for a in ends[:n]],
            ends[n:-1],
            total,
        )

    def _from_start(self, a: Labeled) -> tuple[Labeled, Labeled | None]:
        """Returns a reader of the state before the chunk, and what scales the results."""
        if self.prefix is None or TO_STATE not in self.prefix.labels:
            return a, self.prefix
        transposed = (
            self.prefix.renamed(TO_STATE, "old")
            .renamed(FROM_STATE, TO_STATE)
            .renamed("old", FROM_STATE)
        )
        return self.scaled(a, transposed), None

    def scaled(self, a: Labeled, decay: Labeled | None) -> Labeled:
        """Returns `a` times a decay; for states that read each other, `sum_j decay[i, j] a[j]`."""
        if decay is None or FROM_STATE not in decay.labels:
            return times([a, decay])
        a = a.renamed(*STATE_LABELS)
        return dot(a, decay, [l for l in union([a, decay]) if l != FROM_STATE], self.precision)

    def scores(self, reader: Labeled, writer: Labeled, saved: SavedForBackward) -> Labeled:
        """Returns `sum_k a_t W(t, s) p_s` for s < t, and zero for s >= t, with the labels T and S at the end.

        The products of vectors are saved for the reverse pass.
        """
        if self.each is not None:
            return _product(reader, writer, self.k, self.precision, saved, _merge_levels)
        product = _product(reader, writer, self.k, self.precision, saved)
        if self.between is not None:
            product = times([product, self.between])
            return sum_over(product, [l for l in STATE_LABELS if l in product.labels])
        below = np.tril(np.ones((self.steps, self.steps), bool), -1)
        return product.map(lambda m: jnp.where(below, m, 0))

    def apply_scores(
        self, scores: Labeled, values: Labeled, decays: Labeled, out: Sequence[Label]
    ) -> Labeled:
        """Returns `sum_s scores[t, s] W(t, s) v_s`, for a decay along K.

        Args:
            scores: with the labels T and S.
            values, decays: v_s, and readers that are 1, of `of_vectors`.
            out: the labels of the result, T first.
        """
        lead = tuple(l for l in scores.labels if l not in ("T", "S"))
        blocks = Labeled(_split_levels(scores.along((*lead, "T", "S"))), (*lead, "N", "T", "S"))
        mixed = times([dot(blocks, values, ["N", *out], self.precision), decays])
        lead = tuple(l for l in mixed.labels if l not in ("N", "T"))
        levels = mixed.along(("N", "T", *lead))
        second = _orders(self.steps)[0][1].reshape(-1) == np.arange(self.steps)[:, None]
        rows = levels.reshape(-1, *levels.shape[2:])
        total = jnp.tensordot(
            second.astype(rows.dtype), rows, 1, precision=jax.lax.Precision.HIGHEST
        )
        return Labeled(total, ("T", *lead))


def _written(p: Labeled) -> Labeled:
    """Returns a writer with the labels of the steps that wrote."""
    return p.renamed("T", "S").renamed(*STATE_LABELS)


def _product(
    a: Labeled, p: Labeled, k: int, precision: Any, saved: SavedForBackward, then: Any = None
) -> Labeled:
    """Returns the products of vectors for all pairs of T and S, which are saved; `then` joins those of levels."""
    labels = union((a, p), ("N", "T", "S", k))[:-1]

    def product(*arrays: Any) -> Any:
        scores = dot(
            *(Labeled(x, v.labels) for x, v in zip(arrays, (a, p))), labels, precision
        ).array
        return scores if then is None else then(scores)

    scores = saved.result(product, a.array, p.array)
    return Labeled(scores, tuple(l for l in labels if l != "N"))


@functools.cache
def _orders(steps: int) -> tuple[Any, Any]:
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


def _merge(pairs: Any) -> Any:
    """Returns the pairs of all steps from those of each level, [..., N, T / 2, S / 2] -> [..., T, S]."""
    *lead, levels, half, _ = pairs.shape
    t = np.arange(2 * half)[:, None]
    s = np.arange(2 * half)
    level = np.maximum(np.frexp(t ^ s)[1] - 1, 0)
    places = _orders(2 * half)[1]
    index = (level * half + places[level, t]) * half + places[level, s]
    return jnp.where(s < t, jnp.take(pairs.reshape(*lead, -1), index, -1, mode="clip"), 0)


def _split(scores: Any) -> Any:
    """Returns the pairs of each level, the transpose of `_merge`."""
    *lead, steps, _ = scores.shape
    first, second = _orders(steps)[0]
    t = second[:, :, None]
    s = first[:, None, :]
    length = 2 << np.arange(len(first))[:, None, None]
    pairs = jnp.take(scores.reshape(*lead, -1), t * steps + s, -1, mode="clip")
    return jnp.where(t // length == s // length, pairs, 0)


def _with_transpose(
    fn: Callable[[Any], Any], transpose: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Returns a linear function with its transpose, which for a lookup would be a scatter."""
    linear = jax.custom_jvp(fn)

    @linear.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        out = linear(*primals)
        return out, jax.linear_transpose(transpose, out)(*tangents)[0]

    return linear


_merge_levels = _with_transpose(_merge, _split)
_split_levels = _with_transpose(_split, _merge)


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
        batched: of all chunks, in rounds: fewer kernels run.
    """
    if factor is None:
        return Decay(steps, k, precision)
    has_states = TO_STATE in factor.labels
    lead = tuple(l for l in factor.labels if l not in ("T", *STATE_LABELS))
    if k in lead:
        return Decay(steps, k, precision, each=factor)

    def labeled(array: Any, labels: tuple[Label, ...]) -> Labeled:
        axes = [
            (n, l)
            for n, l in zip(array.shape, (*lead, *labels))
            if l not in STATE_LABELS or has_states
        ]
        return Labeled(array.reshape([n for n, _ in axes]), tuple(l for _, l in axes))

    if has_states or batched:
        products: Any = _products(factor.along((*lead, "T", *STATE_LABELS)), saved)
        labels: Any = (
            ("T", *STATE_LABELS),
            (TO_STATE, "T", FROM_STATE),
            STATE_LABELS,
            ("T", TO_STATE, "S", FROM_STATE),
        )
    else:
        products = _products_of_numbers(factor.along((*lead, "T")), saved)
        labels = (("T",), ("T",), (), ("T", "S"))
    return Decay(steps, k, precision, *map(labeled, products, labels))


def _products(d: Any, saved: SavedForBackward) -> tuple[Any, Any, Any, Any]:
    """Returns products of matrices, the decays of C steps: a block inverse has those of all neighboring steps.

    Args:
        d: [..., C, n, n].
        saved: saves the inverse.

    Returns:
        W(t, start) [..., T, n, n], W(end, s) [..., n, S, n], W(end, start) [..., n, n], and W(t, s) [..., T, n, S, n], which
        is zero for s >= t.
    """
    *lead, c, n, _ = d.shape
    next_step = np.eye(c, k=-1, dtype=bool)[:, None, :, None]
    a = jnp.where(next_step, -jnp.swapaxes(d, -3, -2)[..., None, :, :, :], 0).reshape(
        *lead, c * n, c * n
    )
    x = unit_lower_inverse(a, jax.lax.Precision.HIGHEST, saved).reshape(
        *lead, c, n, c, n
    )  # W(t, s - 1)
    end = jnp.sum(d[..., -1, :, :, None, None] * x[..., -1, None, :, :, :], -3)
    one = jnp.broadcast_to(jnp.eye(n, dtype=d.dtype)[:, None, :], (*lead, n, 1, n))
    between = jnp.concatenate([x[..., 1:, :], jnp.zeros_like(x[..., :1, :])], -2)
    return x[..., 0, :], jnp.concatenate([end[..., 1:, :], one], -2), end[..., 0, :], between


def _products_of_numbers(d: Any, saved: SavedForBackward) -> Any:
    """Returns what `_products` does for decays that are numbers, [..., C], in a loop, which takes less time to compile."""
    *lead, c = d.shape
    d = d.reshape(-1, c)  # a kernel of fewer axes compiles sooner

    def run(d: Any) -> Any:
        def step(row: Any, inputs: Any) -> tuple[Any, Any]:
            factor, one = inputs
            return row * factor + one, row

        # The barrier keeps JAX from moving a loop for what it knows of the ones in front of the loop over chunks.
        ones = jnp.eye(c + 1, k=1, dtype=d.dtype)[:, None]
        times = jnp.pad(d, [(0, 0), (0, 1)]).T[..., None]
        times, ones = jax.lax.optimization_barrier((times, ones))
        first = like(jnp.broadcast_to(jnp.eye(1, c + 1, dtype=d.dtype), (len(d), c + 1)), d)
        return jnp.swapaxes(jax.lax.scan(step, first, (times, ones))[1], 0, 1)

    def tangent(x: Any, _: Any, moved: Any) -> Any:
        return jnp.matmul(
            x[:, :, 1:], moved[0][..., None] * x[:, :-1], precision=jax.lax.Precision.HIGHEST
        )

    x = saved.result(
        run, d, tangent=tangent
    )  # x[t, s] is the product of the decays of s, ..., t - 1
    products = x[:, :-1, 0], x[:, -1, 1:], x[:, -1, 0], x[:, :-1, 1:]
    return [product.reshape(*lead, *product.shape[1:]) for product in products]


def sums(decay: Labeled | None, x: Labeled) -> tuple[Labeled, Labeled]:
    """Returns `sum_{s < t} W(t, s) x_s` for each step t, and for the end of the chunk.

    Args:
        decay: the decay of each step, with the label T; None if nothing decays.
        x: with the label T.
    """
    labels = ("T", *(l for l in union([a for a in (decay, x) if a is not None]) if l != "T"))
    steps = x.array.shape[x.labels.index("T")]
    d = (
        decay.along(labels)
        if decay is not None
        else jnp.ones((steps, *[1] * (len(labels) - 1)), x.array.dtype)
    )
    shape = jnp.broadcast_shapes(x.along(labels).shape, d.shape)
    (total,) = rounds.associative_solve(
        [[jnp.broadcast_to(d, shape)]], [jnp.broadcast_to(x.along(labels), shape)]
    )
    return Labeled(rounds.shift_one_step(total), labels), Labeled(total[-1], labels[1:])
