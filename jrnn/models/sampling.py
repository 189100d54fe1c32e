"""Drawing the next token from logits.

Shapes: N batch, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Choice(NamedTuple):
    """How tokens are chosen; each choice is a program of its own.

    Attributes:
        likeliest: whether to take the likeliest token.
        top_k: how many of the likeliest tokens are drawn from, or None.
        top_p: the share of the probability that is drawn from, or None.
        stop: the token that ends a sequence, or None.
    """

    likeliest: bool
    top_k: int | None = None
    top_p: float | None = None
    stop: int | None = None


def sample(logits: jax.Array, temperature: jax.Array, key: jax.Array, choice: Choice) -> jax.Array:
    """Draws a token of each sequence, [N, V] -> [N]; a sequence's token does not depend on the others'.

    >>> logits = jnp.log(jnp.array([[0.1, 0.6, 0.3]]))
    >>> int(sample(logits, 1.0, jax.random.key(0), Choice(False, top_p=0.5))[0])
    1
    """
    if choice.likeliest:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if choice.top_k is not None and choice.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, choice.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if choice.top_p is not None and choice.top_p < 1:
        falling = -jnp.sort(-logits, axis=-1)
        chances = jax.nn.softmax(falling, axis=-1)
        before = jnp.cumsum(chances, axis=-1) - chances  # the probability of all likelier tokens
        least = jnp.min(jnp.where(before < choice.top_p, falling, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(len(logits)))
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
