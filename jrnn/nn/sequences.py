"""The arguments of a call over sequences in one form, [T, N, ...], and its results in the form that the caller uses.

Shapes: T time, N batch, D input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jrnn import jaxprs
from jrnn.jaxprs.queries import along_first
from jrnn.nn.checks import check_array, check_dt, check_features, check_lengths, check_masks
from jrnn.nn.params import Params


def compute_type(params: Params, x: Array, dtype: DTypeLike) -> Any:
    """The type of the products with weights: `dtype`, or the common type of the input and the parameters."""
    return jaxprs.promoted_type(x, *params.values()) if dtype is None else jnp.dtype(dtype)


@dataclass(frozen=True)
class Sequences:
    """The sequences of a call.

    Attributes:
        x: [T, N, D].
        lengths: int32 [N], or None.
        resets, mask: bool [T, N], or None.
        dt: [T, N], or None.
        single: whether the caller has one sequence, [T, D].
        batch_first: whether the caller has [N, T, D].
    """

    x: Array
    lengths: Array | None
    resets: Array | None
    mask: Array | None
    dt: Array | None
    single: bool
    batch_first: bool

    @classmethod
    def of(
        cls, where: str, x: Any, size: int, batch_first: bool, *, lengths: Any = None, resets: Any = None,
        mask: Any = None, dt: Any = None, batched: bool = False,
    ) -> Sequences:  # fmt: skip
        """Checks x [T, N, D], [N, T, D] with `batch_first`, or [T, D] unless `batched`, and what belongs to it."""
        x = check_array(where, "x", x)
        ranks = {} if batched else {2: f"[T, {size}]"}
        check_features(
            where, x, size, {**ranks, 3: f"[N, T, {size}]" if batch_first else f"[T, N, {size}]"}
        )
        single = x.ndim == 2
        shape = x.shape[:-1]
        swap = batch_first and not single

        def time_first(array: Array) -> Array:
            if single:
                return array[:, None]
            return jnp.swapaxes(array, 0, 1) if swap else array

        given = (
            *check_masks(where, resets, mask, shape),
            None if dt is None else check_dt(where, dt, shape, mask),
        )
        x, resets, mask, dt = jax.tree.map(time_first, (x, *given))
        if single and lengths is not None:
            lengths = jnp.reshape(jnp.asarray(lengths), (-1,))
        if lengths is not None:
            lengths = check_lengths(where, lengths, *x.shape[:2])
        return cls(x, lengths, resets, mask, dt, single, batch_first)

    def given_back(self, y: Any) -> Any:
        """A tree of arrays [T, N, ...] in the caller's form."""
        if self.single:
            return jax.tree.map(lambda leaf: leaf[:, 0], y)
        return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), y) if self.batch_first else y


@dataclass(frozen=True)
class Steps:
    """The arguments of one step.

    Attributes:
        x: [N, D].
        resets, mask: bool [N], or None.
        dt: [N], or None.
        single: whether the caller has one sequence, [D].
    """

    x: Array
    resets: Array | None
    mask: Array | None
    dt: Array | None
    single: bool

    @classmethod
    def of(
        cls, where: str, x: Any, size: int, *, resets: Any = None, mask: Any = None, dt: Any = None
    ) -> Steps:
        """Checks x [N, D] or [D], and what belongs to it."""
        x = check_array(where, "x", x)
        check_features(where, x, size, {1: f"[{size}]", 2: f"[N, {size}]"})
        dt = None if dt is None else check_dt(where, dt, x.shape[:-1], mask)
        given = x, *check_masks(where, resets, mask, x.shape[:-1]), dt
        if x.ndim == 1:
            given = jax.tree.map(lambda leaf: leaf[None], given)
        return cls(*given, single=x.ndim == 1)


def before_end(steps: int, lengths: Array) -> Array:
    """Which steps are before the ends of their sequences: lengths [N] -> [T, N]."""
    return jnp.arange(steps)[:, None] < lengths[None]


def where_live(live: Array, x: Array) -> Array:
    """x [T, N, ...] where `live` [T, N], and 0 elsewhere.

    Padding may hold NaN. It is replaced before any product, so that it reaches neither values nor gradients.
    """
    return jnp.where(along_first(live, x), x, jnp.zeros((), x.dtype))


def in_rows(rows: Array, then: Any, otherwise: Any, axis: int = 0) -> Any:
    """Selects by rows [N] of an axis: the arrays of `then` where True, the arrays of `otherwise` elsewhere."""

    def of(a: Array, b: Array) -> Array:
        return jnp.where(
            rows.reshape((1,) * axis + rows.shape + (1,) * (jnp.ndim(b) - axis - 1)), a, b
        )

    return jax.tree.map(of, then, otherwise)


class Compaction(NamedTuple):
    """The steps that count, moved to the beginning of their sequences: a mask becomes lengths.

    A reset at a step that does not count acts before the next one that does.

    Attributes:
        mask: bool [T, N], the steps that count.
        order: [T, N], these steps in their order, and then the others.
        lengths: [N], how many they are.
        resets: bool [T, N] of the moved steps, or None.
        before, after: bool [N], whether there are resets before the first, or after the last step that counts; or None.
            `before` leaves out a reset at step 0, which means nothing to a reverse direction.
    """

    mask: Array
    order: Array
    lengths: Array
    resets: Array | None = None
    before: Array | None = None
    after: Array | None = None

    @classmethod
    def of(
        cls, mask: Array, lengths: Array | None = None, resets: Array | None = None
    ) -> Compaction:
        """From a mask [T, N], lengths [N] or None, and resets [T, N] or None, which end with the lengths.

        >>> moved = Compaction.of(jnp.array([[False], [True], [False], [True]]))
        >>> moved.lengths.tolist(), moved.moved(jnp.arange(4)[:, None]).T.tolist()
        ([2], [[1, 3, 0, 2]])
        >>> moved.put_back(jnp.array([[5], [6], [7], [8]])).T.tolist()
        [[0, 5, 0, 6]]
        """
        if lengths is not None:
            live = before_end(mask.shape[0], lengths)
            mask = mask & live
            resets = None if resets is None else resets & live
        order = jnp.argsort(~mask, axis=0, stable=True).astype(jnp.int32)
        compaction = cls(mask, order, jnp.sum(mask, axis=0, dtype=jnp.int32))
        if resets is None or mask.shape[0] == 0:
            return compaction._replace(resets=resets)
        # which piece between resets a step belongs to
        pieces = jnp.cumsum(resets, axis=0, dtype=jnp.int32)
        own = compaction.moved(pieces)
        end = pieces[-1]
        earlier = jnp.concatenate([jnp.zeros_like(own[:1]), own[:-1]])
        any_left = compaction.lengths > 0
        last = jnp.take_along_axis(own, jnp.maximum(compaction.lengths, 1)[None] - 1, axis=0)[0]
        return compaction._replace(
            resets=(own > earlier) & before_end(mask.shape[0], compaction.lengths),
            before=jnp.where(any_left, own[0], end) > resets[0],
            after=end > jnp.where(any_left, last, 0),
        )

    def moved(self, leaf: Array) -> Array:
        """The steps [T, N, ...] that count first."""
        return jnp.take_along_axis(leaf, along_first(self.order, leaf), axis=0)

    def put_back(self, leaf: Array) -> Array:
        """Moved steps [T, N, ...] where they were, and zeros at steps that do not count."""
        if self.mask.shape[0] == 0:
            return leaf
        place = jnp.maximum(jnp.cumsum(self.mask, axis=0, dtype=jnp.int32) - 1, 0)
        return where_live(
            self.mask,
            jnp.take_along_axis(leaf, along_first(place, leaf), axis=0),
        )
