"""Decays that are the same along K: a number for each pair of steps, or a matrix for states that read each other.

- *Numbers*: a loop over rows makes the [C, C] numbers: `W(t + 1, s) = W(t, s) d[t]`. It compiles sooner than an inverse.
- *Small matrices*: `X = (I - A)^-1`, where A has the decay of step t in row t + 1 and column t, has all products:

                [  I               ]                 [ I                   ]
        I - A = [ -d[0]   I        ]    (I - A)^-1 = [ d[0]       I        ]
                [        -d[1]   I ]                 [ d[1] d[0]  d[1]   I ]

  a block inverse (`solve.py`). On accelerators numbers are made so, too: few kernels.

Shapes: C steps of a chunk, n states that read each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn.jaxprs.mesh_axes import like
from jrnn.loops.affine.chunkwise.decay import (
    FROM_STATE,
    HIGHEST,
    STATE_LABELS,
    TO_STATE,
    Decay,
    DecayedVectors,
    Vectors,
    largest_of,
    written,
)
from jrnn.loops.affine.chunkwise.guarded import Arrays
from jrnn.loops.affine.chunkwise.labeled import (
    Labeled,
    Labels,
    Product,
    dot,
    sum_over,
    times,
    union,
    without,
)
from jrnn.loops.affine.chunkwise.rounded_product import full
from jrnn.loops.affine.chunkwise.solve import SavedForBackward, unit_lower_inverse


@dataclass(frozen=True)
class SharedDecay(Decay):
    """The decays of a chunk, the same along K. For states that read each other, they are matrices with STATE_LABELS.

    Attributes:
        prefix: W(t, start) for each t.
        suffix: W(end, s) for each s.
        total: W(end, start).
        between: W(t, s) below the diagonal, [T, S].
    """

    prefix: Labeled
    suffix: Labeled
    total: Labeled
    between: Labeled

    def largest(self) -> Array:
        return largest_of([self.prefix, self.suffix, self.between])

    def of_vectors(self, queries: Vectors, keys: Vectors) -> DecayedVectors:
        return DecayedVectors(
            queries=list(queries),
            keys=list(map(written, keys)),
            from_start=list(map(self._from_start, queries)),
            to_end=[self.scaled(key, self.suffix) for key in keys],
            total=self.total,
        )

    def _from_start(self, query: Labeled) -> tuple[Labeled, Product]:
        """Returns a query of the state before the chunk, and what scales the results."""
        if TO_STATE not in self.prefix.labels:
            return query, self.prefix
        labels = without(union([query, self.prefix]), (TO_STATE,))
        product = dot(query, self.prefix, labels, full(self.precision))
        return product.renamed(FROM_STATE, TO_STATE), None

    def scores(
        self,
        query: Labeled,
        key: Labeled,
        saved: SavedForBackward,
    ) -> Labeled:
        product = times([self.products(query, key, saved), self.between])
        return sum_over(product, tuple(l for l in STATE_LABELS if l in product.labels))

    @staticmethod
    def of(
        decay: Decay,
        factor: Labeled,
        saved: SavedForBackward,
        batched: bool,
    ) -> SharedDecay:
        """Returns the products of decays.

        Args:
            decay: the settings of the chunk.
            factor: the decay of each step, with the label T, and for states that read each other with STATE_LABELS.
            saved: saves the products.
            batched: of all chunks, by a block inverse: fewer kernels run.
        """
        steps = decay.steps
        has_states = TO_STATE in factor.labels
        lead = without(factor.labels, ("T", *STATE_LABELS))
        if has_states or batched:
            products = _by_inverse(factor.along((*lead, "T", *STATE_LABELS)), saved)
        else:
            products = _by_rows(factor.along((*lead, "T")), saved)

        def labeled(array: Array, labels: Labels) -> Labeled:
            """The array with labels; labels of states only if there are several states."""
            if not has_states:
                labels = without(labels, STATE_LABELS)
                sizes = array.shape[: len(lead)]
                array = array.reshape(*sizes, *(steps,) * len(labels))
            return Labeled(array, (*lead, *labels))

        prefix, suffix, total, between = products
        return SharedDecay(
            steps,
            decay.k,
            decay.precision,
            prefix=labeled(prefix, ("T", *STATE_LABELS)),
            suffix=labeled(suffix, (TO_STATE, "T", FROM_STATE)),
            total=labeled(total, STATE_LABELS),
            between=labeled(between, ("T", TO_STATE, "S", FROM_STATE)),
        )


def _by_inverse(d: Array, saved: SavedForBackward) -> Arrays:
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
    columns = -jnp.swapaxes(d, -3, -2)[..., None, :, :, :]
    matrix = jnp.where(is_next_step, columns, 0)
    matrix = matrix.reshape(*lead, c * n, c * n)
    inverse = unit_lower_inverse(matrix, HIGHEST, saved)
    x = inverse.reshape(*lead, c, n, c, n)  # W(t, s - 1)
    last_decay = d[..., -1, :, :, None, None]
    before_last = x[..., -1, None, :, :, :]
    end = jnp.sum(last_decay * before_last, -3)
    eye = jnp.eye(n, dtype=d.dtype)[:, None, :]
    one = jnp.broadcast_to(eye, (*lead, n, 1, n))
    following = x[..., 1:, :]
    zero = jnp.zeros_like(x[..., :1, :])
    between = jnp.concatenate([following, zero], -2)
    prefix = x[..., 0, :]
    suffix = jnp.concatenate([end[..., 1:, :], one], -2)
    return prefix, suffix, end[..., 0, :], between


def _by_rows(d: Array, saved: SavedForBackward) -> Arrays:
    """Returns what `_by_inverse` does for decays that are numbers, [..., C], in a loop over rows."""
    *lead, c = d.shape
    d = d.reshape(-1, c)  # a kernel of fewer axes compiles sooner

    def run(d: Array) -> Array:
        def step(row: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
            factor, one = inputs
            return row * factor + one, row

        # The barrier keeps JAX from moving a loop for what it knows of the ones in front of the loop over chunks.
        ones = jnp.eye(c + 1, k=1, dtype=d.dtype)[:, None]
        factors = jnp.pad(d, [(0, 0), (0, 1)])
        factors = factors.T[..., None]
        factors, ones = jax.lax.optimization_barrier((factors, ones))
        first = jnp.eye(1, c + 1, dtype=d.dtype)
        first = like(jnp.broadcast_to(first, (len(d), c + 1)), d)
        _, rows = jax.lax.scan(step, first, (factors, ones))
        return jnp.swapaxes(rows, 0, 1)

    def tangent(x: Array, _: Arrays, tangents: Arrays) -> Array:
        (moved,) = tangents
        after = x[:, :, 1:]
        before = moved[..., None] * x[:, :-1]
        return jnp.matmul(after, before, precision=HIGHEST)

    # x[t, s] is the product of the decays of s, ..., t - 1.
    x = saved.result(run, d, tangent=tangent)
    prefix = x[:, :-1, 0]
    suffix = x[:, -1, 1:]
    total = x[:, -1, 0]
    between = x[:, :-1, 1:]
    products = (prefix, suffix, total, between)
    return [product.reshape(*lead, *product.shape[1:]) for product in products]
