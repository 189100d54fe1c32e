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

    def _half(self, a: Labeled, level: Level, which: int) -> Labeled:
        """The first or second halves of the blocks of a level, times the decay to or from their middle."""
        rest = tuple(l for l in a.labels if l not in ("T", self.k))
        array, h = a.along((*rest, "T", self.k)), level.pre.shape[-2]
        array = array.reshape(*array.shape[: len(rest)], -1, 2, h, array.shape[-1])[..., which, :, :]
        half, decay = Labeled(array, (*rest, "N", "T", self.k)), (level.suf, level.pre)[which]
        return half if h == 1 else times([half, Labeled(decay, (*level.labels, "N", "T", self.k))])

    def scores(self, reader: tuple[Labeled, ...], writer: tuple[Labeled, ...]) -> Labeled:
        """Returns `sum_k a_t W(t, s) p_s` for s < t, and zero for s >= t, with the labels T and S at the end."""
        if not self.levels:
            (a,), (p,) = reader, writer
            made = dot(a, p, union([a, p], ("T", "S", self.k))[:-1], self.precision)
            if self.between is not None:
                return times([made, self.between])
            below = np.tril(np.ones((self.steps, self.steps), bool), -1)
            return made.map(lambda m: jnp.where(below, m, 0))
        c, steps = self.steps, np.arange(self.steps)
        total: Any = 0
        for a, p in zip(reader, writer):
            labels = union([a, p], ("N", "T", "S", self.k))[:-1]
            block = dot(a, p, labels, self.precision).array
            *lead, n, h, _ = block.shape
            wide = jnp.broadcast_to(block[..., :, None, :, None, None, :], (*lead, n, 2, h, n, 2, h))
            here = (steps[:, None] // h == steps // h + 1) & (steps[:, None] // (2 * h) == steps // (2 * h))
            total = jnp.where(here, wide.reshape(*lead, c, c), total)
        return Labeled(total, tuple(l for l in labels if l != "N"))


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
