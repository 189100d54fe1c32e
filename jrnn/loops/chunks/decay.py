"""Products of decays inside a chunk, without logarithms or divisions.

W(t, s) is the product of the decays of the steps between s and t, both excluded. Every W here is a product of true
transitions, so none overflows unless the recurrence does, and zeros, negative and growing decays are exact.

Shapes: C steps of a chunk, K the contracted axis of S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.loops.chunks.labeled import Label, Labeled, dot, times, union

_AS_SUMS = 2  # blocks up to this length are multiplied and summed: as products of matrices they are too small


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

    def scores(self, readers: Labeled, writers: Labeled) -> Labeled:
        """Returns `sum_k a_t W(t, s) p_s` for s < t.

        Args:
            readers: a, with the labels I, T and K among others.
            writers: p, with J, S and K.

        Returns:
            An array with the labels T, I, S, J at the end, which is zero for s >= t.
        """
        if self.levels:
            return self._by_levels(readers, writers)
        out = union([readers, writers], ("T", "I", "S", "J", self.k))[:-1]
        made = dot(readers, writers, out, self.precision)
        below = np.tril(np.ones((self.steps, self.steps), bool), -1)
        made = made.map(lambda m: jnp.where(below[:, None, :, None], m, 0))
        return times([made, self.between]) if self.between is not None else made

    def _by_levels(self, readers: Labeled, writers: Labeled) -> Labeled:
        """Joins blocks: the scores of a block are those between its halves, with those inside its halves on the diagonal."""
        diagonal, corner = np.eye(2, dtype=bool), np.array([[False, False], [True, False]])
        made: Any = jnp.zeros((), readers.array.dtype)
        for level in self.levels:
            h = level.pre.shape[-2]
            pre, suf = (Labeled(x, (*level.labels, "N", t, self.k)) for x, t in ((level.pre, "T"), (level.suf, "S")))
            a = times([_halves(readers, "T", h, 1, self.k), pre])
            p = times([_halves(writers, "S", h, 0, self.k), suf])
            labels = union([a, p], ("N", "T", "I", "S", "J", self.k))[:-1]
            if h <= _AS_SUMS:
                block = jnp.sum(a.along((*labels, self.k)) * p.along((*labels, self.k)), -1)
            else:
                block = dot(a, p, labels, self.precision).array
            *lead, n, _, i, _, j = block.shape
            inside = made.reshape(*lead, n, 2, h, i, 1, h, j) if h > 1 else made
            block = block.reshape(*lead, n, 1, h, i, 1, h, j)
            at = (slice(None), None, None, slice(None), None, None)
            made = jnp.where(diagonal[at], inside, jnp.where(corner[at], block, 0))
            made = jax.lax.optimization_barrier(made.reshape(*lead, n, 2 * h, i, 2 * h, j))
        out = tuple(l for l in labels if l != "N")
        return Labeled(jax.lax.squeeze(made, [labels.index("N")]), out)


def _halves(a: Labeled, label: str, h: int, which: int, k: int) -> Labeled:
    """Returns the first or second halves of the blocks of 2h steps."""
    rest = tuple(l for l in a.labels if l not in (label, k))
    array = a.along((*rest, label, k))
    array = array.reshape(*array.shape[: len(rest)], -1, 2, h, array.shape[-1])[..., which, :, :]
    return Labeled(array, (*rest, "N", label, k))


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
    upto = jax.lax.cumprod(jnp.where(after, d, 1), axis=d.ndim - 2)  # the products of steps s+1 to u
    until = jnp.concatenate([jnp.ones_like(upto[..., :1, :]), upto[..., :-1, :]], -2)
    below = np.tril(np.ones((steps, steps), bool), -1)
    between = Labeled(jnp.where(below, until[..., 1:], 0), (*rest, "T", "S"))
    pre, suf = Labeled(until[..., 0], (*rest, "T")), Labeled(upto[..., -1, 1:], (*rest, "T"))
    return Decay(steps, k, precision, pre, suf, Labeled(upto[..., -1, 0], rest), between)


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
