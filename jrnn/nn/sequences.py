"""The arguments of a call over sequences in one form, [T, N, ...], and its results in the form that the caller uses.

Shapes: T time, N batch, D input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.nn.checks import check_array, check_features, check_lengths, check_resets


def compute_type(params: Mapping[str, Any], x: jax.Array, dtype: Any) -> Any:
    """The type of the products with weights: `dtype`, or that of the input and the parameters."""
    return jnp.result_type(x, *params.values()) if dtype is None else jnp.dtype(dtype)


def step_input(where: str, x: Any, size: int) -> jax.Array:
    """The input of one step, [N, D] or [D]."""
    x = check_array(where, "x", x)
    check_features(where, x, size, {1: f"[{size}]", 2: f"[N, {size}]"})
    return x


@dataclass(frozen=True)
class Sequences:
    """The sequences of a call.

    Attributes:
        x: [T, N, D].
        lengths: int32 [N], or None.
        resets: bool [T, N], or None.
        single: whether the caller has one sequence, [T, D].
        batch_first: whether the caller has [N, T, D].
    """

    x: jax.Array
    lengths: jax.Array | None
    resets: jax.Array | None
    single: bool
    batch_first: bool

    @classmethod
    def of(
        cls, where: str, x: Any, lengths: Any, resets: Any, size: int, batch_first: bool, batched: bool = False
    ) -> Sequences:
        """Checks x [T, N, D], [N, T, D] with `batch_first`, or [T, D] unless `batched`, and what belongs to it."""
        x, ranks = check_array(where, "x", x), {} if batched else {2: f"[T, {size}]"}
        check_features(where, x, size, {**ranks, 3: f"[N, T, {size}]" if batch_first else f"[T, N, {size}]"})
        single = x.ndim == 2
        if resets is not None:
            resets = check_resets(where, resets, x.shape[:-1])
        if single:
            x, resets = x[:, None], None if resets is None else resets[:, None]
            lengths = None if lengths is None else jnp.reshape(jnp.asarray(lengths), (-1,))
        elif batch_first:
            x, resets = jnp.swapaxes(x, 0, 1), None if resets is None else resets.T
        if lengths is not None:
            lengths = check_lengths(where, lengths, *x.shape[:2])
        return cls(x, lengths, resets, single, batch_first)

    def given_back(self, y: Any) -> Any:
        """A tree of arrays [T, N, ...] in the caller's form."""
        if self.single:
            return jax.tree.map(lambda leaf: leaf[:, 0], y)
        return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), y) if self.batch_first else y


def where_live(live: jax.Array, x: jax.Array) -> jax.Array:
    """x [T, N, ...] where `live` [T, N], and 0 elsewhere.

    Padding may hold NaN. It is replaced before any product, so that it reaches neither values nor gradients.
    """
    return jnp.where(live.reshape(live.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))
