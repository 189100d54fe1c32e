"""Products of decays inside a chunk, without logarithms or divisions.

W(t, s) is the product of the decays of the steps between s and t, both excluded. Every W here is a product of true
transitions, so none overflows unless the recurrence does, and zeros, negative and growing decays are exact.

Shapes: C steps of a chunk, K the contracted axis of S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.loops.chunks.labeled import Label, Labeled, dot, plus, times, union
from jrnn.loops.chunks.solve import Kept


def _product(vectors: Sequence[Labeled], k: int, precision: Any, keep: Kept) -> Labeled:
    """Returns the products of vectors for all pairs of T and S, which are kept."""
    labels = union(vectors, ("T", "S", k))[:-1]

    def product(*arrays: Any) -> Any:
        a, p = (Labeled(x, v.labels) for x, v in zip(arrays, vectors))
        return dot(a, p, labels, precision).array

    return Labeled(keep.result(product, *(v.array for v in vectors)), labels)


@dataclass(frozen=True)
class Level:
    """Blocks of 2h steps.

    Attributes:
        pre: W from the middle of a block to each step of its second half, [..., N, h, K].
        suf: W from each step of its first half to its middle, [..., N, h, K].
        labels: of the axes before N.
    """

    pre: Any
    suf: Any
    labels: tuple[Label, ...]


@dataclass(frozen=True)
class Decay:
    """The decays of a chunk.

    Attributes:
        pre: W(t, start) for each t, or None if nothing decays.
        suf: W(end, s) for each s.
        total: W(end, start).
        between: W(t, s) below the diagonal, [T, S], for decays that are the same along K; otherwise None.
        levels: for decays that differ along K: the blocks, from the smallest on.
    """

    steps: int
    k: int
    precision: Any
    pre: Labeled | None = None
    suf: Labeled | None = None
    total: Labeled | None = None
    between: Labeled | None = None
    levels: tuple[Level, ...] = ()

    def reader(self, a: Labeled) -> tuple[Labeled, ...]:
        """Prepares a vector a_t, with the labels T and K, for `scores`."""
        if not self.levels:
            return (a,)
        return tuple(self._half(a, l, 1) for l in self.levels)

    def writer(self, p: Labeled) -> tuple[Labeled, ...]:
        """Prepares a vector p_s, with the labels T and K, for `scores`."""
        if not self.levels:
            return (p.renamed("T", "S"),)
        return tuple(self._half(p, l, 0).renamed("T", "S") for l in self.levels)

    def from_start(self, a: Labeled) -> tuple[Labeled, Labeled | None]:
        """Returns a reader of the state before the chunk, and what scales the results."""
        return a, self.pre

    def to_end(self, p: Labeled) -> Labeled:
        """Returns what is left of a vector at the end of the chunk."""
        return times([p, self.suf]) if self.suf is not None else p

    def after(self, start: Labeled) -> Labeled:
        """Returns what is left of the state before the chunk."""
        return times([start, self.total]) if self.total is not None else start

    def _half(self, a: Labeled, level: Level, which: int) -> Labeled:
        """The first or second halves of the blocks of a level, times the decay to or from their middle."""
        rest = tuple(l for l in a.labels if l not in ("T", self.k))
        array, h = a.along((*rest, "T", self.k)), level.pre.shape[-2]
        array = array.reshape(*array.shape[: len(rest)], -1, 2, h, array.shape[-1])[..., which, :, :]
        half, decay = Labeled(array, (*rest, "N", "T", self.k)), (level.suf, level.pre)[which]
        return half if h == 1 else times([half, Labeled(decay, (*level.labels, "N", "T", self.k))])

    def scores(self, reader: tuple[Labeled, ...], writer: tuple[Labeled, ...], keep: Kept) -> Labeled:
        """Returns `sum_k a_t W(t, s) p_s` for s < t, and zero for s >= t, with the labels T and S at the end.

        The products of vectors are kept for the reverse pass.
        """
        if not self.levels:
            made = _product((*reader, *writer), self.k, self.precision, keep)
            if self.between is not None:
                return times([made, self.between])
            below = np.tril(np.ones((self.steps, self.steps), bool), -1)
            return made.map(lambda m: jnp.where(below, m, 0))
        labels = tuple(l for l in union([*reader, *writer], ("T", "S")) if l not in ("N", self.k))
        n = len(self.levels)

        def joined(*arrays: Any) -> Any:
            parts = [Labeled(x, a.labels) for x, a in zip(arrays, (*reader, *writer))]
            return self._joined(parts[:n], parts[n:])

        return Labeled(keep.result(joined, *(a.array for a in (*reader, *writer))), labels)

    def _joined(self, reader: Sequence[Labeled], writer: Sequence[Labeled]) -> Any:
        """Returns the scores from those of the blocks of each level."""
        c, steps = self.steps, np.arange(self.steps)
        total: Any = 0
        for a, p in zip(reader, writer):
            labels = union([a, p], ("N", "T", "S", self.k))[:-1]
            block = dot(a, p, labels, self.precision).array
            *lead, n, h, _ = block.shape
            wide = jnp.broadcast_to(block[..., :, None, :, None, None, :], (*lead, n, 2, h, n, 2, h))
            here = (steps[:, None] // h == steps // h + 1) & (steps[:, None] // (2 * h) == steps // (2 * h))
            total = jnp.where(here, wide.reshape(*lead, c, c), total)
        return total

    def spread(self, scores: Labeled, values: Labeled, out: Sequence[Label]) -> Labeled:
        """Returns `sum_s scores[t, s] W(t, s) v_s`, for a decay along K, and values v_s with the labels S and K."""
        lead, total = tuple(l for l in scores.labels if l not in ("T", "S")), []
        for level in self.levels:
            n, h = level.pre.shape[-3:-1]
            array = scores.along((*lead, "T", "S"))
            array = array.reshape(*array.shape[:-2], n, 2, h, n, 2, h)[..., 1, :, :, 0, :]
            block = jnp.sum(jnp.where(np.eye(n, dtype=bool)[:, None, :, None], array, 0), -2)
            written = self._half(values.renamed("S", "T"), level, 0).renamed("T", "S")
            made = dot(Labeled(block, (*lead, "N", "T", "S")), written, [*out, "N"], self.precision)
            made = times([made, Labeled(level.pre, (*level.labels, "N", "T", self.k))]) if h > 1 else made
            rest = tuple(l for l in made.labels if l not in ("N", "T"))
            found = made.along((*rest, "N", "T"))
            halves = jnp.stack([jnp.zeros_like(found), found], -2)  # only steps of second halves read
            total.append(Labeled(halves.reshape(*found.shape[:-2], self.steps), (*rest, "T")))
        return plus(total)


@dataclass(frozen=True)
class Mixing:
    """The decays of a chunk for states that read each other: W(t, s) are small matrices, with the labels MIXED.

    Attributes:
        pre, suf, total, between: as in `Decay`, none of them along K.
    """

    k: int
    precision: Any
    pre: Labeled
    suf: Labeled
    total: Labeled
    between: Labeled

    def reader(self, a: Labeled) -> Labeled:
        return a

    def writer(self, p: Labeled) -> Labeled:
        return p.renamed("T", "S").renamed(*MIXED)

    def scores(self, a: Labeled, p: Labeled, keep: Kept) -> Labeled:
        made = times([_product((a, p), self.k, self.precision, keep), self.between])
        labels = tuple(l for l in made.labels if l not in MIXED)
        return Labeled(jnp.sum(made.array, tuple(map(made.labels.index, MIXED))), labels)

    def from_start(self, a: Labeled) -> tuple[Labeled, None]:
        made = self._product(a, self.pre.renamed(MIXED[0], "old").renamed(MIXED[1], MIXED[0]).renamed("old", MIXED[1]))
        return made, None

    def to_end(self, p: Labeled) -> Labeled:
        return self._product(p, self.suf)

    def after(self, start: Labeled) -> Labeled:
        return self._product(start, self.total)

    def _product(self, a: Labeled, matrix: Labeled) -> Labeled:
        """Returns `sum_j matrix[i, j] a[j]`."""
        a = a.renamed(*MIXED)
        return dot(a, matrix, [l for l in union([a, matrix]) if l != MIXED[1]], self.precision)


MIXED = ("of", "from")  # labels: the state that a decay leads to, and the state that it leads from


def mixing_of(factor: Labeled, k: int, precision: Any) -> Mixing:
    """Returns the products of decays that mix states.

    Args:
        factor: the decay of each step, with the labels T and MIXED.
        k: the label of K.
        precision: of the contractions.
    """
    rest = tuple(l for l in factor.labels if l not in ("T", *MIXED))
    d = factor.along((*MIXED, *rest, "T"))[..., None]  # [i, j, ..., u, s], s from one step before the chunk on
    steps, count = d.shape[-2], range(len(d))
    one = jnp.eye(len(d), dtype=d.dtype).reshape(*d.shape[:2], *[1] * (d.ndim - 2))
    after = np.arange(steps)[:, None] > np.arange(-1, steps)[None]
    upto, reach = jnp.where(after, d, one), 1  # of steps s+1 to u
    while reach < steps:
        first = jnp.broadcast_to(one, upto[..., :reach, :].shape)
        before = jnp.concatenate([first, upto[..., :-reach, :]], -2)
        rows = [[sum(upto[i, m] * before[m, j] for m in count) for j in count] for i in count]
        upto, reach = jax.lax.optimization_barrier(jnp.stack(list(map(jnp.stack, rows)))), 2 * reach
    until = jnp.concatenate([jnp.broadcast_to(one, upto[..., :1, :].shape), upto[..., :-1, :]], -2)
    below = np.tril(np.ones((steps, steps), bool), -1)
    between = Labeled(jnp.where(below, until[..., 1:], 0), (*MIXED, *rest, "T", "S"))
    pre, suf = (Labeled(x, (*MIXED, *rest, "T")) for x in (until[..., 0], upto[..., -1, 1:]))
    total = Labeled(upto[..., -1, 0], (*MIXED, *rest))
    return Mixing(k, precision, pre, suf, total, between)


def decay_of(factor: Labeled | None, steps: int, k: int, precision: Any) -> Decay:
    """Returns the products of decays.

    Args:
        factor: the decay of each step, with the label T; None if nothing decays.
        steps: C, a power of two.
        k: the label of K.
        precision: of the contractions.
    """
    if factor is None:
        return Decay(steps, k, precision)
    rest = tuple(l for l in factor.labels if l != "T")
    if k in rest:
        lead = tuple(l for l in rest if l != k)
        return _per_row(factor.along((*lead, "T", k)), lead, steps, k, precision)
    d = factor.along((*rest, "T"))[..., None]  # [..., u, s], s from one step before the chunk on
    after = np.arange(steps)[:, None] > np.arange(-1, steps)[None]
    upto = _running_products(jnp.where(after, d, 1))  # of steps s+1 to u
    until = jnp.concatenate([jnp.ones_like(upto[..., :1, :]), upto[..., :-1, :]], -2)
    below = np.tril(np.ones((steps, steps), bool), -1)
    between = Labeled(jnp.where(below, until[..., 1:], 0), (*rest, "T", "S"))
    pre, suf = Labeled(until[..., 0], (*rest, "T")), Labeled(upto[..., -1, 1:], (*rest, "T"))
    return Decay(steps, k, precision, pre, suf, Labeled(upto[..., -1, 0], rest), between)


def _running_products(x: Any) -> Any:
    """Returns `prod_{v <= u} x[..., v, s]`, in rounds of doubled reach."""
    reach, steps = 1, x.shape[-2]
    while reach < steps:
        x = x * jnp.concatenate([jnp.ones_like(x[..., :reach, :]), x[..., :-reach, :]], -2)
        x = jax.lax.optimization_barrier(x)  # or XLA:CPU fuses all rounds into one, and computes each many times
        reach *= 2
    return x


def sums(decay: Labeled | None, x: Labeled) -> tuple[Labeled, Labeled]:
    """Returns `sum_{s < t} W(t, s) x_s` for each step t, and for the end of the chunk.

    Args:
        decay: the decay of each step, with the label T; None if nothing decays.
        x: with the label T.
    """
    labels = ("T", *(l for l in union([a for a in (decay, x) if a is not None]) if l != "T"))
    steps = x.array.shape[x.labels.index("T")]
    d = decay.along(labels) if decay is not None else jnp.ones((steps, *[1] * (len(labels) - 1)), x.array.dtype)
    total = jnp.broadcast_to(x.along(labels), jnp.broadcast_shapes(x.along(labels).shape, d.shape))
    d = jnp.broadcast_to(d, total.shape)
    reach = 1
    while reach < steps:
        total = jnp.concatenate([total[:reach], total[reach:] + d[reach:] * total[:-reach]])
        d = jnp.concatenate([d[:reach], d[reach:] * d[:-reach]])
        total, d = jax.lax.optimization_barrier((total, d))
        reach *= 2
    before = jnp.concatenate([jnp.zeros_like(total[:1]), total[:-1]])
    return Labeled(before, labels), Labeled(total[-1], labels[1:])


def _per_row(d: Any, lead: tuple[Label, ...], steps: int, k: int, precision: Any) -> Decay:
    """Joins blocks: their products are those of their halves, times the product of the other half."""
    pre = suf = jnp.ones_like(d)[..., None, :]  # [..., N, h, K]
    levels, total = [], d
    for _ in range(steps.bit_length() - 1):
        *_, n, h, size = pre.shape
        pre, suf = (x.reshape(*x.shape[:-3], n // 2, 2, h, size) for x in (pre, suf))
        levels.append(Level(pre[..., 1, :, :], suf[..., 0, :, :], lead))
        parts = total.reshape(*total.shape[:-2], n // 2, 2, 1, size)
        first, second = parts[..., :1, :, :], parts[..., 1:, :, :]
        one = jnp.ones_like(first)
        pre, suf = pre * jnp.concatenate([one, first], -3), suf * jnp.concatenate([second, one], -3)
        pre, suf = (x.reshape(*x.shape[:-4], n // 2, 2 * h, size) for x in (pre, suf))
        total = (first * second)[..., 0, 0, :]
        pre, suf, total = jax.lax.optimization_barrier((pre, suf, total))  # or XLA:CPU fuses all levels into one
    pre, suf = (Labeled(x[..., 0, :, :], (*lead, "T", k)) for x in (pre, suf))
    return Decay(steps, k, precision, pre, suf, Labeled(total[..., 0, :], (*lead, k)), None, tuple(levels))
