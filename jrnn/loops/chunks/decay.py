"""Products of decays inside a chunk, without logarithms or divisions.

W(t, s) is the product of the decays of the steps between s and t, both excluded. Every W here is a product of true
transitions, so none overflows unless the recurrence does, and zeros, negative and growing decays are exact.

Shapes: C steps of a chunk, K the contracted axis of S.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.jaxprs.mesh_axes import like
from jrnn.loops.affine import rounds
from jrnn.loops.chunks.labeled import Label, Labeled, dot, sum_over, times, union
from jrnn.loops.chunks.solve import SavedForBackward, neighbors, unit_lower_inverse

STATE_LABELS = TO_STATE, FROM_STATE = "to", "from"  # of the matrices by which states that read each other decay


@dataclass(frozen=True)
class Decay:
    """The decays of a chunk. For states that read each other, W(t, s) are small matrices, with STATE_LABELS.

    Attributes:
        prefix: W(t, start) for each t, or None if nothing decays.
        suffix: W(end, s) for each s.
        total: W(end, start).
        between: W(t, s) below the diagonal, [T, S], for decays that are the same along K; otherwise None.
        levels: for decays that differ along K: of blocks of 1, 2, 4, ... steps, `prefix` of every second block, and
            `suffix` of the steps of the others, [..., N, C / 2, K].
    """

    steps: int
    k: int
    precision: Any
    prefix: Labeled | None = None
    suffix: Labeled | None = None
    total: Labeled | None = None
    between: Labeled | None = None
    levels: tuple[Labeled, Labeled] | None = None

    def largest(self) -> Any:
        """Returns the largest magnitude of a product of decays, at least 1."""
        products = [p for p in (self.prefix, self.suffix, self.between, *(self.levels or ())) if p is not None]
        return functools.reduce(jnp.maximum, [jnp.max(jnp.abs(p.array)) for p in products], jnp.ones(()))

    def prepare_reader(self, a: Labeled) -> Labeled:
        """Prepares a vector a_t, with the labels T and K, for `scores`."""
        return a if self.levels is None else self._level_by_level(a, 1)

    def prepare_writer(self, p: Labeled) -> Labeled:
        """Prepares a vector p_s, with the labels T and K, for `scores`."""
        return (p if self.levels is None else self._level_by_level(p, 0)).renamed("T", "S").renamed(*STATE_LABELS)

    def _level_by_level(self, a: Labeled, which: int) -> Labeled:
        """The vectors of every second block of each level, or of the others, times the decay to or from its start."""
        assert self.levels is not None
        labels = tuple(l for l in a.labels if l not in ("T", self.k))
        array = a.along((*labels, "T", self.k))
        # Each level reads a copy of its own, or XLA:CPU fuses the sums of all levels' cotangents into large kernels.
        copies = [jax.lax.optimization_barrier(array) for _ in _blocks(self.steps)]
        halves = jnp.stack([_half(copy, h, which) for copy, h in zip(copies, _blocks(self.steps))], -3)
        return times([Labeled(halves, (*labels, "N", "T", self.k)), self.levels[1 - which]])

    def from_start(self, a: Labeled) -> tuple[Labeled, Labeled | None]:
        """Returns a reader of the state before the chunk, and what scales the results."""
        if self.prefix is None or TO_STATE not in self.prefix.labels:
            return a, self.prefix
        transposed = self.prefix.renamed(TO_STATE, "old").renamed(FROM_STATE, TO_STATE).renamed("old", FROM_STATE)
        return self._scaled(a, transposed), None

    def to_end(self, p: Labeled) -> Labeled:
        """Returns what remains of a vector at the end of the chunk."""
        return self._scaled(p, self.suffix)

    def decay_state(self, start: Labeled) -> Labeled:
        """Returns what remains of the state before the chunk."""
        return self._scaled(start, self.total)

    def _scaled(self, a: Labeled, decay: Labeled | None) -> Labeled:
        """Returns `a` times a decay; for states that read each other, `sum_j decay[i, j] a[j]`."""
        if decay is None or FROM_STATE not in decay.labels:
            return times([a, decay])
        a = a.renamed(*STATE_LABELS)
        return dot(a, decay, [l for l in union([a, decay]) if l != FROM_STATE], self.precision)

    def scores(self, reader: Labeled, writer: Labeled, saved: SavedForBackward) -> Labeled:
        """Returns `sum_k a_t W(t, s) p_s` for s < t, and zero for s >= t, with the labels T and S at the end.

        The products of vectors are saved for the reverse pass.
        """
        if self.levels is not None:
            return _product(reader, writer, self.k, self.precision, saved, _merge_levels)
        product = _product(reader, writer, self.k, self.precision, saved)
        if self.between is not None:
            product = times([product, self.between])
            return sum_over(product, [l for l in STATE_LABELS if l in product.labels])
        below = np.tril(np.ones((self.steps, self.steps), bool), -1)
        return product.map(lambda m: jnp.where(below, m, 0))

    def apply_scores(self, scores: Labeled, values: Labeled, out: Sequence[Label]) -> Labeled:
        """Returns `sum_s scores[t, s] W(t, s) v_s`, for a decay along K, and values v_s with the labels S and K."""
        assert self.levels is not None
        lead = tuple(l for l in scores.labels if l not in ("T", "S"))
        blocks = Labeled(_split_levels(scores.along((*lead, "T", "S"))), (*lead, "N", "T", "S"))
        mixed = dot(blocks, self.prepare_writer(values.renamed("S", "T")), ["N", *out], self.precision)
        mixed = times([mixed, self.levels[0]])
        lead_labels = tuple(l for l in mixed.labels if l not in ("N", "T"))
        of_levels, total = mixed.along((*lead_labels, "N", "T")), []
        for i, h in enumerate(_blocks(self.steps)):
            part = of_levels[..., i, :].reshape(*of_levels.shape[:-2], -1, 1, h)
            total.append(jnp.concatenate([jnp.zeros_like(part), part], -2).reshape(*of_levels.shape[:-2], -1))
        return Labeled(sum(total), (*lead_labels, "T"))


def _product(a: Labeled, p: Labeled, k: int, precision: Any, saved: SavedForBackward, then: Any = None) -> Labeled:
    """Returns the products of vectors for all pairs of T and S, which are saved; `then` joins those of levels."""
    labels = union((a, p), ("N", "T", "S", k))[:-1]

    def product(*arrays: Any) -> Any:
        scores = dot(*(Labeled(x, v.labels) for x, v in zip(arrays, (a, p))), labels, precision).array
        return scores if then is None else then(scores)

    scores = saved.result(product, a.array, p.array)
    return Labeled(scores, tuple(l for l in labels if l != "N"))


def _blocks(steps: int) -> list[int]:
    """Returns the lengths of blocks: 1, 2, 4, ..., half of all steps."""
    return [1 << i for i in range(steps.bit_length() - 1)]


def _half(x: Any, h: int, which: int) -> Any:
    """Returns the steps of every second block of h steps, or of the others, [..., T, K] -> [..., T / 2, K]."""
    *lead, steps, k = x.shape
    half = *lead, steps // 2, k

    def blocks(x: Any) -> Any:
        return x.reshape(*lead, -1, 2, h, k)

    @jax.custom_jvp
    def half_of(x: Any) -> Any:
        return blocks(x)[..., which, :, :].reshape(half)

    @half_of.defjvp
    def _(primals: Any, tangents: Any) -> Any:  # the transpose of a slice would be a padding, which is slow on a CPU
        is_half = np.arange(2)[:, None, None] == which
        return half_of(*primals), jnp.sum(jnp.where(is_half, blocks(tangents[0]), 0), -3).reshape(half)

    return half_of(x)


@jax.custom_jvp
def _merge_levels(pairs: Any) -> Any:
    """Returns the pairs of all steps from those of each level, [..., N, T / 2, S / 2] -> [..., T, S]."""
    *lead, _, half, _ = pairs.shape
    total: Any = 0
    for i, (h, is_pair) in enumerate(zip(_blocks(2 * half), neighbors(2 * half))):
        part = pairs[..., i, :, :].reshape(*lead, -1, 1, h, half // h, 1, h)
        wide = jnp.broadcast_to(part, (*lead, half // h, 2, h, half // h, 2, h))
        total = jnp.where(is_pair, wide.reshape(*lead, 2 * half, 2 * half), total)
    return total


@_merge_levels.defjvp
def _(primals: Any, tangents: Any) -> Any:  # the transpose of a broadcast would be a sum for each level
    (pairs,), (moved,) = primals, tangents
    return _merge_levels(pairs), jax.linear_transpose(_split_levels, jnp.zeros_like(_merge_levels(pairs)))(moved)[0]


def _split_levels(scores: Any) -> Any:
    """Returns the pairs of each level, the transpose of `_merge_levels`."""
    *lead, steps, _ = scores.shape
    levels = []
    for h in _blocks(steps):
        n = steps // (2 * h)
        part = scores.reshape(*lead, n, 2, h, n, 2, h)[..., 1, :, :, 0, :]
        part = jnp.where(np.eye(n, dtype=bool)[:, None, :, None], part, 0)
        levels.append(part.reshape(*lead, steps // 2, steps // 2))
    return jnp.stack(levels, -3)


def decay_of(factor: Labeled | None, steps: int, k: int, precision: Any, saved: SavedForBackward, batched: bool) -> Decay:
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
        without_k = tuple(l for l in lead if l != k)
        return _per_row(factor.along((*without_k, "T", k)), without_k, steps, k, precision)

    def labeled(array: Any, labels: tuple[Label, ...]) -> Labeled:
        axes = [(n, l) for n, l in zip(array.shape, (*lead, *labels)) if l not in STATE_LABELS or has_states]
        return Labeled(array.reshape([n for n, _ in axes]), tuple(l for _, l in axes))

    if has_states or batched:
        products: Any = _products(factor.along((*lead, "T", *STATE_LABELS)), saved)
        labels: Any = ("T", *STATE_LABELS), (TO_STATE, "T", FROM_STATE), STATE_LABELS, ("T", TO_STATE, "S", FROM_STATE)
    else:
        products, labels = _products_of_numbers(factor.along((*lead, "T")), saved), (("T",), ("T",), (), ("T", "S"))
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
    a = jnp.where(next_step, -jnp.swapaxes(d, -3, -2)[..., None, :, :, :], 0).reshape(*lead, c * n, c * n)
    x = unit_lower_inverse(a, jax.lax.Precision.HIGHEST, saved).reshape(*lead, c, n, c, n)  # W(t, s - 1)
    end = jnp.sum(d[..., -1, :, :, None, None] * x[..., -1, None, :, :, :], -3)
    one = jnp.broadcast_to(jnp.eye(n, dtype=d.dtype)[:, None, :], (*lead, n, 1, n))
    between = jnp.concatenate([x[..., 1:, :], jnp.zeros_like(x[..., :1, :])], -2)
    return x[..., 0, :], jnp.concatenate([end[..., 1:, :], one], -2), end[..., 0, :], between


def _products_of_numbers(d: Any, saved: SavedForBackward) -> Any:
    """Returns what `_products` does for decays that are numbers, [..., C], in a loop, which takes less time to compile."""
    c = d.shape[-1]

    def run(d: Any) -> Any:
        def step(row: Any, inputs: Any) -> tuple[Any, Any]:
            factor, one = inputs
            return (new := row * factor + one, new)

        # The barrier keeps JAX from moving a loop for what it knows of the ones in front of the loop over chunks.
        ones = jnp.eye(c + 1, dtype=d.dtype).reshape(c + 1, *[1] * (d.ndim - 1), c + 1)
        times, ones = jax.lax.optimization_barrier((jnp.moveaxis(d, -1, 0)[..., None], ones))
        first = like(jnp.broadcast_to(ones[0], (*d.shape[:-1], c + 1)), d)
        _, rows = jax.lax.scan(step, first, (times, ones[1:]))
        return jnp.moveaxis(jnp.concatenate([first[None], rows]), 0, -2)

    def tangent(x: Any, _: Any, moved: Any) -> Any:
        return jnp.matmul(x[..., 1:], moved[0][..., None] * x[..., :-1, :], precision=jax.lax.Precision.HIGHEST)

    x = saved.result(run, d, tangent=tangent)  # x[t, s] is the product of the decays of s, ..., t - 1
    return x[..., :-1, 0], x[..., -1, 1:], x[..., -1, 0], x[..., :-1, 1:]


def sums(decay: Labeled | None, x: Labeled) -> tuple[Labeled, Labeled]:
    """Returns `sum_{s < t} W(t, s) x_s` for each step t, and for the end of the chunk.

    Args:
        decay: the decay of each step, with the label T; None if nothing decays.
        x: with the label T.
    """
    labels = ("T", *(l for l in union([a for a in (decay, x) if a is not None]) if l != "T"))
    steps = x.array.shape[x.labels.index("T")]
    d = decay.along(labels) if decay is not None else jnp.ones((steps, *[1] * (len(labels) - 1)), x.array.dtype)
    shape = jnp.broadcast_shapes(x.along(labels).shape, d.shape)
    (total,) = rounds.associative_solve([[jnp.broadcast_to(d, shape)]], [jnp.broadcast_to(x.along(labels), shape)])
    return Labeled(rounds.shift_one_step(total), labels), Labeled(total[-1], labels[1:])


def _per_row(d: Any, lead: tuple[Label, ...], steps: int, k: int, precision: Any) -> Decay:
    """Joins blocks of h steps: their products are those of the two, times the product of the other block."""
    joined, levels = jnp.stack([jnp.ones_like(d), jnp.ones_like(d), d], -3), []  # prefix, suffix and total of blocks
    for h in _blocks(steps):
        levels.append([_half(joined[..., i, :, :], h, 1 - i) for i in range(2)])
        total = joined[..., 2:, :, :]
        other = total.reshape(*total.shape[:-2], -1, 2, h, d.shape[-1])[..., ::-1, :, :].reshape(total.shape)
        second = np.arange(steps) // h % 2 == 1
        joined = joined * jnp.where(np.stack([second, ~second, second | True])[..., None], other, 1)
        joined = jax.lax.optimization_barrier(joined)  # or XLA:CPU fuses all levels into one
    prefix, suffix = (Labeled(joined[..., i, :, :], (*lead, "T", k)) for i in range(2))
    decay = Decay(steps, k, precision, prefix, suffix, Labeled(joined[..., 2, 0, :], (*lead, k)))
    if not levels:
        return decay
    inner = [Labeled(jnp.stack(x, -3), (*lead, "N", "T", k)) for x in zip(*levels)]
    return replace(decay, levels=(inner[0], inner[1]))
