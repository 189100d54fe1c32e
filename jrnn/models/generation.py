"""Tokens before and after: prompts as users give them, how the next token is drawn, and texts from any model of tokens.

Shapes: T time, N batch, V vocabulary.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import LayerError
from jrnn.jaxprs.mesh_axes import like
from jrnn.nn.checks import check_flags, check_integer, check_lengths, concrete
from jrnn.nn.sequences import Compaction

State = dict[str, jax.Array]
HISTORY = ("logits", "counts")  # what a state has of the text that it has read
PIECE = 512  # tokens of a prompt that are read at once


def check_tokens(where: str, tokens: Any, axes: tuple[str, ...], vocabulary: int) -> jax.Array:
    """Tokens as int32 of these axes, each from 0 to `vocabulary` - 1. Inside jit, only type and rank are checked.

    >>> check_tokens("mamba", [[3, 16]], ("N", "T"), 16)
    Traceback (most recent call last):
    jrnn.errors.LayerError: mamba: tokens lie between 3 and 16; the vocabulary has those from 0 to 15
    """
    if not isinstance(tokens, jax.Array):
        try:
            tokens = np.asarray(
                tokens
            )  # not jnp.asarray, which wraps 64-bit integers before they are checked
        except ValueError:
            raise LayerError(
                f"{where}: tokens are no array: their rows have several lengths; pad them, and give lengths"
            ) from None
    if tokens.ndim != len(axes) or not jnp.issubdtype(tokens.dtype, jnp.integer):
        given = f"{tokens.dtype}{list(tokens.shape)}"
        raise LayerError(f"{where}: tokens are {given}; they must be integers [{', '.join(axes)}]")
    known = concrete(tokens)
    if known is not None and known.size and not (known.min() >= 0 and known.max() < vocabulary):
        problem = f"tokens lie between {known.min()} and {known.max()}"
        raise LayerError(f"{where}: {problem}; the vocabulary has those from 0 to {vocabulary - 1}")
    return jnp.asarray(tokens, jnp.int32)


def history(batch: int, vocabulary: int, dtype: Any = jnp.float32) -> State:
    """The history of N texts without a token: the logits of the next token, and how often each was read, [N, V]."""
    return {
        "logits": jnp.zeros((batch, vocabulary), dtype),
        "counts": jnp.zeros((batch, vocabulary), jnp.int32),
    }


def apart(state: State) -> tuple[State, State]:
    """A state without the history of its texts, and the history, of which a state may have less or nothing."""
    past = {name: leaf for name, leaf in state.items() if name in HISTORY}
    return {name: leaf for name, leaf in state.items() if name not in past}, past


def remembered(
    past: State, tokens: jax.Array, logits: jax.Array, lengths: Any = None, resets: Any = None
) -> State:
    """The history after further tokens.

    Args:
        past: the history before them.
        tokens: [N, T].
        logits: [N, T, V], of the tokens that follow each.
        lengths: [N] or None, where the tokens end.
        resets: booleans [N, T] or None, where a new text begins.

    >>> past = remembered(history(1, 3), jnp.array([[2, 0, 2]]), jnp.ones((1, 3, 3)))
    >>> past["counts"].tolist(), past["logits"].tolist()
    ([[1, 0, 2]], [[1.0, 1.0, 1.0]])
    """
    batch, steps = tokens.shape
    if not past or not steps:
        return past
    ends = jnp.full(batch, steps) if lengths is None else lengths
    after = dict(past)
    if "logits" in past:
        last = jnp.take_along_axis(logits, jnp.maximum(ends, 1)[:, None, None] - 1, axis=1)[:, 0]
        after["logits"] = jnp.where(ends[:, None] > 0, last, past["logits"]).astype(
            past["logits"].dtype
        )
    if "counts" in past:
        counts = past["counts"]
        live = jnp.arange(steps)[None] < ends[:, None]
        if resets is not None:
            resets = resets & live
            live &= (
                jnp.flip(jnp.cumsum(jnp.flip(resets, 1), axis=1), 1) - resets == 0
            )  # no reset after the token
            counts = jnp.where(resets.any(axis=1, keepdims=True), 0, counts)
        places = jnp.where(live, tokens, counts.shape[1])
        after["counts"] = counts.at[jnp.arange(batch)[:, None], places].add(1, mode="drop")
    return after


LIMITS = ("likeliest", "top_k", "top_p", "min_p", "repetition_penalty", "stop")


@partial(jax.tree_util.register_dataclass, data_fields=["temperature"], meta_fields=LIMITS)
@dataclass(frozen=True)
class Sampler:
    """How tokens are chosen, as `LanguageModel.generate` says; all but the temperature makes a program of its own."""

    temperature: Any
    likeliest: bool = False
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: tuple[int, ...] = ()

    @classmethod
    def checked(
        cls, where: str, vocabulary: int, temperature: float, *, top_k: int | None = None, top_p: float | None = None,
        min_p: float | None = None, repetition_penalty: float = 1.0, stop: int | Sequence[int] | None = None,
    ) -> Sampler:  # fmt: skip
        """The choice of these options. Raises a LayerError for a value that cannot be used."""
        named = {
            "temperature": temperature,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
        }
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
            raise LayerError(
                f"{where}: repetition_penalty is {repetition_penalty}; it must be above 0"
            )
        given = (
            ()
            if stop is None
            else tuple(stop)
            if isinstance(stop, (Sequence, set, frozenset))
            else (stop,)
        )
        stops = tuple(check_integer(f"{where}: stop", token, 0) for token in given)
        for token in stops:
            if token >= vocabulary:
                raise LayerError(
                    f"{where}: stop is {token}; the vocabulary has the tokens from 0 to {vocabulary - 1}"
                )
        limits = (temperature == 0, top_k, top_p, min_p, float(repetition_penalty), stops)
        return cls(jnp.float32(temperature), *limits)

    def ends(self, token: jax.Array) -> jax.Array:
        """Whether each token ends its sequence, [N] -> [N]."""
        return (
            jnp.isin(token, jnp.array(self.stop, jnp.int32))
            if self.stop
            else jnp.zeros(token.shape, bool)
        )


def sample(
    logits: jax.Array, key: jax.Array, choice: Sampler, seen: jax.Array | None = None
) -> jax.Array:
    """Draws a token of each sequence, [N, V] -> [N]; a sequence's token does not depend on the others'.

    The limits act in the order of transformers: penalty, temperature, top_k, top_p, min_p.

    Args:
        logits: [N, V].
        key: a key of `jax.random`.
        choice: how tokens are chosen.
        seen: booleans [N, V], the tokens that the penalty is for; None if there is no penalty.

    >>> logits = jnp.log(jnp.array([[0.1, 0.6, 0.3]]))
    >>> int(sample(logits, jax.random.key(0), Sampler(1.0, top_p=0.5))[0])
    1
    """
    if seen is not None and choice.repetition_penalty != 1:
        factor = choice.repetition_penalty
        logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    if choice.likeliest:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / choice.temperature
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
        least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(
            jnp.asarray(choice.min_p, logits.dtype)
        )
        logits = jnp.where(logits < least, -jnp.inf, logits)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(len(logits)))
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


class TokenModel(Protocol):
    """What a model has: it is a pytree, so that it goes through `jax.jit`."""

    @property
    def name(self) -> str:
        """What messages begin with."""
        ...

    @property
    def vocabulary(self) -> int:
        """V."""
        ...

    def __call__(
        self, tokens: Any, state: State | None = None, *, lengths: Any = None
    ) -> tuple[jax.Array, State]: ...

    def step(
        self, token: Any, state: State | None = None, *, mask: Any = None
    ) -> tuple[jax.Array, State]: ...

    def with_room(self, state: State | None, batch: int, steps: int) -> State:
        """The state, checked, with room for so many further tokens; the initial one with its history for None."""
        ...


class Prefix(NamedTuple):
    """What a sequence goes on from."""

    state: State  # with the logits of the next token
    done: jax.Array  # [N], whether a sequence has ended
    last: jax.Array  # [N], its last token


DATA = ["tokens", "lengths", "state", "key", "choice"]


@partial(jax.tree_util.register_dataclass, data_fields=DATA, meta_fields=["length"])
@dataclass(frozen=True)
class Prompt:
    """The arguments of `generate`, checked."""

    tokens: jax.Array
    lengths: jax.Array | None
    state: State
    key: jax.Array
    choice: Sampler
    length: int

    @classmethod
    def checked(
        cls, model: TokenModel, what: str, tokens: Any, length: int, *, temperature: float = 1.0, lengths: Any = None,
        key: jax.Array | None = None, state: State | None = None, mask: Any = None, **options: Any,
    ) -> Prompt:  # fmt: skip
        where = f"{model.name}: {what}"
        tokens = check_tokens(where, tokens, ("N", "T"), model.vocabulary)
        length = check_integer(f"{where}: length", length, 0)
        batch, steps = tokens.shape
        lengths = (
            None if lengths is None or not steps else check_lengths(where, lengths, steps, batch)
        )
        if mask is not None:
            prompts = Compaction.of(check_flags(where, "mask", mask, tokens.shape).T, lengths)
            tokens = prompts.moved(tokens.T).T
            lengths = prompts.lengths if steps else None
        choice = Sampler.checked(where, model.vocabulary, temperature, **options)
        if temperature and key is None:
            raise LayerError(
                f"{where}: drawing tokens needs a key, such as jax.random.key(0); or give temperature=0"
            )
        _check_history(where, state, choice, steps, lengths)
        key = jax.random.key(0) if key is None else key
        state = model.with_room(state, batch, steps + length)
        if "logits" not in state:
            state |= {"logits": history(batch, model.vocabulary)["logits"]}
        return cls(tokens, lengths, state, key, choice, length)


def _check_history(
    where: str, state: State | None, choice: Sampler, steps: int, lengths: Any
) -> None:
    """Raises a LayerError if there is nothing to go on from, or if tokens were read that the penalty does not know."""
    past = {} if state is None else apart(state)[1]
    known = None if lengths is None else concrete(lengths)
    counts = concrete(past["counts"]) if "counts" in past else None
    unread = "logits" not in past or (counts is not None and not counts.any(axis=1).all())
    if unread and not steps:
        problem = "the prompt has no tokens; give at least one, such as the token of the beginning"
        raise LayerError(f"{where}: {problem}, or the state of a text to go on with")
    if unread and known is not None and (known < 1).any():
        raise LayerError(
            f"{where}: a prompt has no tokens, by its length or mask; it needs one, or the state of a text to go on with"
        )
    if state is not None and choice.repetition_penalty != 1 and "counts" not in past:
        raise LayerError(
            f"{where}: repetition_penalty needs the tokens that the state has read, and the state has no counts of them; "
            "give one that generate, stream or a call without a state returned, or that began with "
            "initial_state(N, history=True)"
        )


def generate(
    model: TokenModel, tokens: Any, length: int, **options: Any
) -> tuple[jax.Array, State]:
    """The tokens [N, length] after prompts [N, T], and the state; see `LanguageModel.generate`."""
    return _generate(model, Prompt.checked(model, "generate", tokens, length, **options))


def stream(
    model: TokenModel, tokens: Any, length: int, *, states: bool = False, **options: Any
) -> Iterator[Any]:
    """As `generate`, but an iterator of tokens [N]; see `LanguageModel.stream`."""
    return _stream(model, Prompt.checked(model, "stream", tokens, length, **options), states)


def _stream(model: TokenModel, prompt: Prompt, states: bool) -> Iterator[Any]:
    written = _begin(model, prompt)
    draw = _draw if states else _draw_in_place
    if not states:  # JAX returns arrays that a program does not change as they are, and these may be the caller's
        written = jax.tree.map(jnp.copy, written)
    for count in range(prompt.length):
        written = draw(model, written, prompt.key, count, prompt.choice)
        token = np.array(written.last)
        yield (token, written.state) if states else token
        if np.asarray(written.done).all():
            return


@jax.jit
def _begin(model: TokenModel, prompt: Prompt) -> Prefix:
    """Reads the prompts, in pieces of the same length after the first one, so that memory is bounded."""
    tokens = prompt.tokens
    lengths = prompt.lengths
    batch, steps = tokens.shape
    first = (steps - 1) % PIECE + 1

    def read(state: State, piece: tuple[jax.Array, Any]) -> tuple[State, None]:
        tokens, start = piece
        own = None if lengths is None else jnp.clip(lengths - start, 0, tokens.shape[1])
        return model(tokens, state, lengths=own)[1], None

    state = prompt.state
    if steps:
        state, _ = read(state, (tokens[:, :first], 0))
    if first < steps:
        pieces = jnp.swapaxes(tokens[:, first:].reshape(batch, -1, PIECE), 0, 1)
        state, _ = jax.lax.scan(read, state, (pieces, first + PIECE * jnp.arange(len(pieces))))
    done, none = like((jnp.zeros(batch, bool), jnp.zeros(batch, jnp.int32)), state)
    return Prefix(state, done, none)


def _drawn(
    model: TokenModel, written: Prefix, key: jax.Array, count: Any, choice: Sampler
) -> Prefix:
    """Draws a token of each sequence that has not ended, and reads it; `count`: of tokens drawn before."""
    (state, done, last), key = written, jax.random.fold_in(key, count)
    seen = state["counts"] > 0 if choice.repetition_penalty != 1 else None
    token = jnp.where(done, last, sample(state["logits"], key, choice, seen))
    _, after = model.step(token, state, mask=~done) if choice.stop else model.step(token, state)
    return Prefix(after, done | choice.ends(token), token)


_draw = jax.jit(_drawn)
_draw_in_place = jax.jit(_drawn, donate_argnames="written")


@jax.jit
def _generate(model: TokenModel, prompt: Prompt) -> tuple[jax.Array, State]:
    """Draws tokens until all sequences have ended; then each repeats its last one."""

    def goes_on(carry: tuple[jax.Array, Prefix, jax.Array]) -> jax.Array:
        count, written, _ = carry
        return (count < prompt.length) & ~jnp.all(written.done)

    def draw(carry: tuple[jax.Array, Prefix, jax.Array]) -> tuple[jax.Array, Prefix, jax.Array]:
        count, written, tokens = carry
        written = _drawn(model, written, prompt.key, count, prompt.choice)
        return count + 1, written, tokens.at[count].set(written.last)

    start = _begin(model, prompt)
    if prompt.length == 0:
        return jnp.zeros((*start.last.shape, 0), jnp.int32), start.state
    tokens = like(jnp.zeros((prompt.length, *start.last.shape), jnp.int32), start)
    count, written, tokens = jax.lax.while_loop(goes_on, draw, (jnp.int32(0), start, tokens))
    unwritten = jnp.arange(prompt.length)[:, None] >= count
    return jnp.where(unwritten, written.last[None], tokens).T, written.state
