"""How the next token is drawn: the limits of transformers (temperature, top-k and others), as data of each row.

Shapes: N batch, V vocabulary, S tokens that end a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn.errors import LayerError
from jrnn.jaxprs.jax_internals import is_traced
from jrnn.jaxprs.mesh_axes import like
from jrnn.nn.checks import check_integer, concrete

STOPS = 8  # tokens that end a sequence, at least: the others are -1, which no token is
# likeliest tokens among which top_k chooses; a sort of all takes 30 times as long
WINDOWS = (
    64,
    1024,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampler:
    """How tokens are chosen, as `LanguageModel.generate` says: numbers, one for all rows or [N]; None: without this limit.

    They are data, so that other numbers need no other program.

    Attributes:
        stop: [N, S], tokens that end a sequence, filled up with -1; None: none do.
    """

    temperature: Any
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    stop: Any = None

    @classmethod
    def checked(
        cls, where: str, vocabulary: int, batch: int, temperature: Any, *, top_k: Any = None, top_p: Any = None,
        min_p: Any = None, repetition_penalty: Any = 1.0, stop: Any = None,
    ) -> Sampler:  # fmt: skip
        """The choice of these options, of N rows. Raises a LayerError for a value that cannot be used."""

        def rows(name: str, value: Any, otherwise: float) -> Any:
            array = _rows(f"{where}: {name}", value, batch, otherwise)
            return array.astype(jax.dtypes.canonicalize_dtype(np.float64))

        temperature = rows("temperature", temperature, 1.0)
        rule = "it must be at least 0"
        _check_rows(f"{where}: temperature", temperature, temperature >= 0, rule)

        count = _rows(f"{where}: top_k", top_k, batch, vocabulary)
        if not jnp.issubdtype(count.dtype, jnp.integer):
            raise LayerError(
                f"{where}: top_k is {top_k!r:.80}; it must be an integer of at least 1"
            )
        _check_rows(f"{where}: top_k", count, count >= 1, "it must be an integer of at least 1")

        share = rows("top_p", top_p, 1.0)
        rule = "it must be above 0 and at most 1"
        _check_rows(f"{where}: top_p", share, (share > 0) & (share <= 1), rule)

        least = rows("min_p", min_p, 0.0)
        rule = "it must lie between 0 and 1"
        _check_rows(f"{where}: min_p", least, (least >= 0) & (least <= 1), rule)

        penalty = rows("repetition_penalty", repetition_penalty, 1.0)
        is_good = (penalty > 0) & (penalty < float("inf"))
        _check_rows(f"{where}: repetition_penalty", penalty, is_good, "it must be above 0")

        count = count.clip(1, vocabulary).astype(np.int32)
        stops = _stops(f"{where}: stop", stop, batch, vocabulary)
        return cls(temperature, count, share, least, penalty, stops)

    @property
    def penalizes(self) -> bool:
        """Whether a row has a penalty, as far as that is known."""
        penalty = concrete(self.repetition_penalty)
        return penalty is None or bool((penalty != 1).any())

    def ends(self, token: Array) -> Array:
        """Whether each token ends its sequence, [N] -> [N]."""
        if self.stop is None:
            return jnp.zeros(token.shape, bool)
        return jnp.any(token[:, None] == self.stop, axis=1)


def _rows(what: str, value: Any, batch: int, otherwise: float) -> Any:
    """An option as an array [N] from a number, or from one number for each row; `otherwise` stands for None."""
    if value is None:
        value = otherwise
    if isinstance(value, (list, tuple)):
        value = [otherwise if of_row is None else of_row for of_row in value]
    try:
        array = value if is_traced(value) else np.asarray(value)
    except (TypeError, ValueError):
        array = np.asarray(None)
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool):
        raise LayerError(f"{what} is {value!r:.80}; it must be a number")
    if array.shape not in ((), (batch,)):
        rule = f"it must be a number, or an array [{batch}] of one for each row"
        raise LayerError(f"{what} is an array {list(array.shape)}; {rule}")
    spread = jnp.broadcast_to if is_traced(array) else np.broadcast_to
    return spread(array, (batch,))


def _check_rows(what: str, values: Any, is_good: Any, rule: str) -> None:
    """Raises a LayerError that names the first value that is not good."""
    known = concrete(is_good)
    if known is None or known.all():
        return
    value = np.asarray(values)[np.argmin(known)]
    raise LayerError(f"{what} is {value:g}; {rule}")


def _stops(what: str, stop: Any, batch: int, vocabulary: int) -> np.ndarray | None:
    """The tokens [N, S] that end each row, from one, several, or several for each row; None if none do."""
    if stop is None:
        return None
    if hasattr(stop, "dtype"):
        stop = np.asarray(stop).tolist()
    several = list(stop) if isinstance(stop, (Sequence, Set)) else [stop]
    of_rows = [several] * batch
    if several and all(isinstance(row, (Sequence, Set)) for row in several):
        of_rows = list(map(list, several))
        if len(of_rows) != batch:
            raise LayerError(
                f"{what} has {len(of_rows)} rows; it must have {batch}, one for each prompt"
            )
    longest = max(map(len, of_rows), default=0)
    if not longest:
        return None
    size = max(STOPS, 1 << (longest - 1).bit_length())
    stops = np.full((len(of_rows), size), -1, np.int32)
    for row, tokens in zip(stops, of_rows, strict=True):
        for k, token in enumerate(tokens):
            number = check_integer(what, token, 0)
            if number >= vocabulary:
                last = vocabulary - 1
                raise LayerError(
                    f"{what} is {token}; the vocabulary has the tokens from 0 to {last}"
                )
            row[k] = number
    return stops


def sample(logits: Array, key: Array | None, choice: Sampler, seen: Array | None = None) -> Array:
    """Draws a token of each sequence, [N, V] -> [N]; a sequence's token does not depend on the others'.

    The limits act in the order of transformers: penalty, temperature, top_k, top_p, min_p. What no row needs is not
    computed: draws, or the order of the logits.

    Args:
        logits: [N, V].
        key: a key of `jax.random`.
        choice: how tokens are chosen.
        seen: booleans [N, V], the tokens that the penalty is for; None if there is no penalty.

    >>> logits = jnp.log(jnp.array([[0.1, 0.6, 0.3]]))
    >>> int(sample(logits, jax.random.key(0), Sampler(1.0, top_p=0.5))[0])
    1
    """
    batch, vocabulary = logits.shape

    def column(value: Any, otherwise: Any, dtype: Any = logits.dtype) -> Array:
        value = jnp.asarray(otherwise if value is None else value, dtype)
        return jnp.broadcast_to(value, (batch,))[:, None]

    if seen is not None:
        factor = column(choice.repetition_penalty, 1)
        logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if key is None:
        return likeliest
    temperature = column(choice.temperature, 1)
    count = column(choice.top_k, vocabulary, jnp.int32)
    share = column(choice.top_p, 1)
    is_drawn = temperature > 0
    logits = logits / jnp.where(is_drawn, temperature, 1)

    def draw() -> Array:
        bound = _bound(logits, count, share, is_drawn)
        fraction = jnp.log(column(choice.min_p, 0))
        bound = jnp.maximum(bound, jnp.max(logits, axis=-1, keepdims=True) + fraction)
        within = jnp.where(logits < bound, -jnp.inf, logits)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(batch))
        token = jax.vmap(jax.random.categorical)(keys, within).astype(jnp.int32)
        return jnp.where(is_drawn[:, 0], token, likeliest)

    def take() -> Array:
        return likeliest

    return jax.lax.cond(jnp.any(is_drawn), draw, take)


def _bound(logits: Array, count: Array, share: Array, is_drawn: Array) -> Array:
    """The least logit [N, 1] among the `count` likeliest tokens that have this share of the probability together."""
    vocabulary = logits.shape[-1]
    has_share = share < 1
    is_limited = is_drawn & ((count < vocabulary) | has_share)

    def among(falling: Array, chances: Array, least: Array) -> Array:
        """From the greatest logits in falling order, and their probabilities."""
        before = jnp.cumsum(chances, axis=-1) - chances  # the probability of all likelier tokens
        last = jnp.min(jnp.where(before < share, falling, jnp.inf), axis=-1, keepdims=True)
        return jnp.where(has_share, jnp.maximum(last, least), least)

    def unlimited() -> Array:
        return like(jnp.full(share.shape, -jnp.inf, logits.dtype), logits)

    def within(window: int) -> Array:
        falling = jax.lax.top_k(logits, min(window, vocabulary))[0]
        least = _at(falling, jnp.minimum(count, falling.shape[-1]))
        least = jnp.where(is_limited, least, -jnp.inf)
        # a slice of `falling` would become a sort of all
        top = jnp.max(logits, axis=-1, keepdims=True)
        powers = jnp.exp(logits - top)
        total = jnp.sum(jnp.where(logits < least, 0, powers), axis=-1, keepdims=True)
        falling = jnp.where(falling < least, -jnp.inf, falling)
        return among(falling, jnp.exp(falling - top) / total, least)

    def sorted_whole() -> Array:
        falling = -jnp.sort(-logits, axis=-1)
        least = jnp.where(count < vocabulary, _at(falling, count), -jnp.inf)
        falling = jnp.where(falling < least, -jnp.inf, falling)
        return among(falling, jax.nn.softmax(falling, axis=-1), least)

    # Of windows 0, 64, 1024 and all, the first that has the tokens that each row may draw.
    most = jnp.max(jnp.where(is_limited, count, 0))
    kind = jnp.sum(most > jnp.array([0, *WINDOWS]))
    windows = [partial(within, window) for window in WINDOWS]
    return jax.lax.switch(kind, [unlimited, *windows, sorted_whole])


def _at(falling: Array, count: Array) -> Array:
    """The logit [N, 1] in this place, counted from 1."""
    return jnp.take_along_axis(falling, count - 1, axis=-1)
