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

from jrnn.loops.chunks.labeled import Labeled, dot, times, union

_AS_SUMS = 2  # blocks up to this length are multiplied and summed: as products of matrices they are too small


@dataclass(frozen=True)
class Decay:
    """The decays of a chunk.

    Attributes:
        pre: W(t, start) for each t, or None if nothing decays.
        suf: W(end, s) for each s.
        total: W(end, start).
        between: W(t, s) below the diagonal, [T, S], for decays that are the same along K; otherwise None.
        levels: for decays that differ along K: pairs of the W from the middle of a block to each step in its second half,
            and from each step in its first half to the middle, for blocks of 2, 4, ..., C steps.
    """

    steps: int
    k: int
    precision: Any
    pre: Labeled | None = None
    suf: Labeled | None = None
    total: Labeled | None = None
    between: Labeled | None = None
    levels: tuple[tuple[Labeled, Labeled], ...] = ()

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
        labels = union([readers, writers, self.levels[0][0]], ("T", "I", "S", "J", self.k))[:-1]
        labels = ("N", *(l for l in labels if l != "N"))
        whole: Any = None
        for after, before in self.levels:
            h = after.array.shape[1]
            a = times([_half(readers, "T", h, 1), after])
            p = times([_half(writers, "S", h, 0), before.renamed("T", "S")])
            if h <= _AS_SUMS:
                every = (*labels, self.k)
                block = jnp.sum(a.along(every) * p.along(every), -1)
            else:
                block = dot(a, p, labels, self.precision).array
            t, s = labels.index("T"), labels.index("S")
            if whole is None:
                upper = lower = jnp.zeros_like(block)
            else:
                upper, lower = whole[0::2], whole[1::2]
            top = jnp.concatenate([upper, jnp.zeros_like(block)], s)
            whole = jnp.concatenate([top, jnp.concatenate([block, lower], s)], t)
        return Labeled(whole[0], labels[1:])


def _half(a: Labeled, label: str, h: int, which: int) -> Labeled:
    """Returns the first or second halves of the blocks of 2h steps, [N, h, ...]."""
    rest = tuple(l for l in a.labels if l != label)
    array = a.along((label, *rest))
    array = array.reshape(-1, 2, h, *array.shape[1:])[:, which]
    return Labeled(array, ("N", label, *rest))


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
        return _per_row(factor.along(("T", *rest)), rest, steps, k, precision)
    d = factor.along((*rest, "T"))[..., None]  # [..., u, s], s from one step before the chunk on
    after = np.arange(steps)[:, None] > np.arange(-1, steps)[None]
    upto = jax.lax.cumprod(jnp.where(after, d, 1), axis=d.ndim - 2)  # the products of steps s+1 to u
    until = jnp.concatenate([jnp.ones_like(upto[..., :1, :]), upto[..., :-1, :]], -2)
    below = np.tril(np.ones((steps, steps), bool), -1)
    between = Labeled(jnp.where(below, until[..., 1:], 0), (*rest, "T", "S"))
    pre, suf = Labeled(until[..., 0], (*rest, "T")), Labeled(upto[..., -1, 1:], (*rest, "T"))
    return Decay(steps, k, precision, pre, suf, Labeled(upto[..., -1, 0], rest), between)


def _per_row(d: Any, rest: tuple[Any, ...], steps: int, k: int, precision: Any) -> Decay:
    """Products over blocks of doubled length: [N, h, ...] for N blocks of h steps."""
    total = d
    pre = suf = jnp.ones_like(d)[:, None]
    levels = []
    for _ in range(steps.bit_length() - 1):
        first, second = total[0::2], total[1::2]
        after, before = pre[1::2], suf[0::2]
        levels.append((Labeled(after, ("N", "T", *rest)), Labeled(before, ("N", "T", *rest))))
        pre = jnp.concatenate([pre[0::2], first[:, None] * after], 1)
        suf = jnp.concatenate([before * second[:, None], suf[1::2]], 1)
        total = first * second
    labels = ("T", *rest)
    return Decay(
        steps, k, precision, Labeled(pre[0], labels), Labeled(suf[0], labels), Labeled(total[0], rest), None, tuple(levels)
    )
