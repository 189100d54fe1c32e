"""Drawing the next token from logits.

Shapes: N batch, V vocabulary.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import LayerError
from jrnn.nn.checks import check_integer


class Choice(NamedTuple):
    """How tokens are chosen, as `LanguageModel.generate` says; each choice is a program of its own."""

    likeliest: bool
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: tuple[int, ...] = ()

    @classmethod
    def checked(
        cls, where: str, vocabulary: int, temperature: float, *, top_k: int | None = None, top_p: float | None = None,
        min_p: float | None = None, repetition_penalty: float = 1.0, stop: int | Sequence[int] | None = None,
    ) -> Choice:  # fmt: skip
        """The choice of these options. Raises a LayerError for a value that cannot be used."""
        named = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
        for name, value in named.items():
            if value is not None and not isinstance(value, (numbers.Real, np.ndarray, jax.Array)):
                raise LayerError(f"{where}: {name} is {value!r:.80}; it must be a number")
        if not temperature >= 0:
            raise LayerError(f"{where}: temperature is {temperature}; it must be at least 0")
        if top_k is not None:
            top_k = check_integer(f"{where}: top_k", top_k, 1)
        if top_p is not None and not 0 < top_p <= 1:
            raise LayerError(f"{where}: top_p is {top_p}; it must be above 0 and at most 1")
        if min_p is not None and not 0 <= min_p <= 1:
            raise LayerError(f"{where}: min_p is {min_p}; it must lie between 0 and 1")
        if not 0 < repetition_penalty < float("inf"):
            raise LayerError(f"{where}: repetition_penalty is {repetition_penalty}; it must be above 0")
        given = () if stop is None else tuple(stop) if isinstance(stop, (Sequence, set, frozenset)) else (stop,)
        stops = tuple(check_integer(f"{where}: stop", token, 0) for token in given)
        for token in stops:
            if token >= vocabulary:
                raise LayerError(f"{where}: stop is {token}; the vocabulary has the tokens from 0 to {vocabulary - 1}")
        return cls(temperature == 0, top_k, top_p, min_p, float(repetition_penalty), stops)

    def ends(self, token: jax.Array) -> jax.Array:
        """Whether each token ends its sequence, [N] -> [N]."""
        return jnp.isin(token, jnp.array(self.stop, jnp.int32)) if self.stop else jnp.zeros(token.shape, bool)


def sample(
    logits: jax.Array, temperature: Any, key: jax.Array, choice: Choice, seen: jax.Array | None = None
) -> jax.Array:
    """Draws a token of each sequence, [N, V] -> [N]; a sequence's token does not depend on the others'.

    The limits act in the order of transformers: penalty, temperature, top_k, top_p, min_p.

    Args:
        logits: [N, V].
        temperature: a number; it divides the logits.
        key: a key of `jax.random`.
        choice: how tokens are chosen.
        seen: booleans [N, V], the tokens that the penalty is for; None if there is no penalty.

    >>> logits = jnp.log(jnp.array([[0.1, 0.6, 0.3]]))
    >>> int(sample(logits, 1.0, jax.random.key(0), Choice(False, top_p=0.5))[0])
    1
    """
    if seen is not None and choice.repetition_penalty != 1:
        factor = choice.repetition_penalty
        logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
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
    if choice.min_p:
        least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(jnp.asarray(choice.min_p, logits.dtype))
        logits = jnp.where(logits < least, -jnp.inf, logits)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(len(logits)))
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
