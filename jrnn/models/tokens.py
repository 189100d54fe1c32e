"""Tokens that users give: checked, and moved where the computation wants them.

Shapes: T time, N batch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import LayerError
from jrnn.nn.checks import check_array, concrete


def check_tokens(where: str, tokens: Any, axes: tuple[str, ...], vocabulary: int) -> jax.Array:
    """Tokens as int32 of these axes, each from 0 to `vocabulary` - 1. Inside jit, only type and rank are checked.

    >>> check_tokens("mamba", [[3, 16]], ("N", "T"), 16)
    Traceback (most recent call last):
    jrnn.errors.LayerError: mamba: tokens lie between 3 and 16; the vocabulary has those from 0 to 15
    """
    if not isinstance(tokens, jax.Array):
        try:
            tokens = np.asarray(tokens)  # not jnp.asarray, which wraps 64-bit integers before they are checked
        except ValueError:
            raise LayerError(
                f"{where}: tokens are no array: their rows have several lengths; pad them, and give lengths"
            ) from None
    if tokens.ndim != len(axes) or not jnp.issubdtype(tokens.dtype, jnp.integer):
        given = f"{tokens.dtype}{list(tokens.shape)}"
        raise LayerError(f"{where}: tokens are {given}; they must be integers [{', '.join(axes)}]")
    known = concrete(tokens)
    if known is not None and known.size and not (known.min() >= 0 and known.max() < vocabulary):
        raise LayerError(
            f"{where}: tokens lie between {known.min()} and {known.max()}; the vocabulary has those from 0 to "
            f"{vocabulary - 1}"
        )
    return jnp.asarray(tokens, jnp.int32)


def check_mask(where: str, mask: Any, shape: tuple[int, ...]) -> jax.Array:
    """An attention mask of transformers as booleans [N, T]; the ones of a row must be next to each other."""
    mask = check_array(where, "attention_mask", mask)
    if mask.shape != shape:
        raise LayerError(f"{where}: attention_mask is {list(mask.shape)}; it must be {list(shape)}, as the tokens are")
    mask = mask.astype(bool)
    known = concrete(mask)
    if known is not None and (np.diff(known.astype(int), axis=1, prepend=0) == 1).sum(axis=1).max(initial=0) > 1:
        raise LayerError(f"{where}: attention_mask has zeros between ones; padding must stand before or after a text")
    return mask


def from_the_left(mask: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Moves the texts of rows to their beginnings.

    Args:
        mask: booleans [N, T], with the ones of a row next to each other.
        arrays: [N, T, ...].

    Returns:
        Where they began [N], their lengths [N], and the arrays, each row rotated.

    >>> start, lengths, (tokens,) = from_the_left(jnp.array([[False, True, True]]), jnp.array([[0, 7, 8]]))
    >>> start.tolist(), lengths.tolist(), tokens.tolist()
    ([1], [2], [[7, 8, 0]])
    """
    starts = jnp.argmax(mask, axis=1)
    return starts, jnp.sum(mask, axis=1, dtype=jnp.int32), [rotated(array, starts) for array in arrays]


def rotated(array: jax.Array, by: jax.Array) -> jax.Array:
    """[N, T, ...] with row n rotated to the left by `by[n]` steps."""
    places = (jnp.arange(array.shape[1])[None] + by[:, None]) % array.shape[1]
    return jnp.take_along_axis(array, places.reshape(places.shape + (1,) * (array.ndim - 2)), axis=1)
