"""Tokens after a prompt, all in one program or one after another, from any model that reads tokens.

Shapes: T time, N batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import LayerError
from jrnn.models.sampling import Choice, sample
from jrnn.models.tokens import check_mask, check_tokens, from_the_left
from jrnn.nn.checks import check_integer, check_lengths, concrete

State = dict[str, jax.Array]
PIECE = 512  # tokens of a prompt that are read at once


class Reader(Protocol):
    """What a model has: it is a pytree, so that it goes through `jax.jit`."""

    @property
    def name(self) -> str:
        """What messages begin with."""
        ...

    @property
    def vocabulary(self) -> int:
        """V."""
        ...

    def __call__(self, tokens: Any, state: State | None = None, *, lengths: Any = None) -> tuple[jax.Array, State]: ...

    def step(self, token: Any, state: State | None = None) -> tuple[jax.Array, State]: ...

    def with_room(self, state: State | None, batch: int, steps: int) -> State:
        """The state, checked, with room for so many further tokens; the initial one for None."""
        ...


class Written(NamedTuple):
    """What a sequence goes on from."""

    logits: jax.Array  # [N, V], of the next token
    state: State
    done: jax.Array  # [N], whether a sequence has ended
    last: jax.Array  # [N], its last token
    seen: jax.Array | None  # [N, V], the tokens that it has; None without a penalty for them


class Prompt(NamedTuple):  # the arguments of `generate`, checked
    tokens: jax.Array
    lengths: jax.Array | None
    state: State
    temperature: jax.Array
    keys: jax.Array
    choice: Choice


def generate(model: Reader, tokens: Any, length: int, **options: Any) -> tuple[jax.Array, State]:
    """The tokens [N, length] after prompts [N, T], and the state; see `LanguageModel.generate`."""
    prompt = _prompt(model, "generate", tokens, length, **options)
    return _generate(model, *prompt)


def stream(model: Reader, tokens: Any, length: int, *, states: bool = False, **options: Any) -> Iterator[Any]:
    """As `generate`, but an iterator of tokens [N]; see `LanguageModel.stream`."""
    prompt = _prompt(model, "stream", tokens, length, **options)
    return _stream(model, prompt, states)


def _stream(model: Reader, prompt: Prompt, states: bool) -> Iterator[Any]:
    written = _begin(model, prompt.tokens, prompt.lengths, prompt.state, prompt.choice)
    for key in prompt.keys:
        written, token = _draw(model, written, prompt.temperature, key, prompt.choice)
        yield (np.asarray(token), written.state) if states else np.asarray(token)
        if bool(written.done.all()):
            return


def _prompt(
    model: Reader,
    what: str,
    tokens: Any,
    length: int,
    *,
    temperature: float = 1.0,
    key: jax.Array | None = None,
    state: State | None = None,
    lengths: Any = None,
    attention_mask: Any = None,
    **options: Any,
) -> Prompt:
    where = f"{model.name}: {what}"
    tokens = check_tokens(where, tokens, ("N", "T"), model.vocabulary)
    length = check_integer(f"{where}: length", length, 0)
    batch, steps = tokens.shape
    if not steps:
        raise LayerError(f"{where}: the prompt has no tokens; give at least one, such as the token of the beginning")
    if attention_mask is not None:
        if lengths is not None:
            raise LayerError(f"{where}: both lengths and attention_mask are given; one of them says where texts end")
        _, lengths, (tokens,) = from_the_left(check_mask(where, attention_mask, tokens.shape), tokens)
    lengths = None if lengths is None else check_lengths(where, lengths, steps, batch)
    known = None if lengths is None else concrete(lengths)
    if known is not None and (known < 1).any():
        raise LayerError(f"{where}: a length is 0; a prompt needs at least one token")
    choice = Choice.checked(where, model.vocabulary, temperature, **options)
    if temperature and key is None:
        raise LayerError(f"{where}: drawing tokens needs a key, such as jax.random.key(0); or give temperature=0")
    keys = jax.random.split(jax.random.key(0) if key is None else key, length)
    state = model.with_room(state, batch, steps + length)
    return Prompt(tokens, lengths, state, jnp.float32(temperature), keys, choice)


@partial(jax.jit, static_argnames="choice")
def _begin(model: Reader, tokens: jax.Array, lengths: jax.Array | None, state: State, choice: Choice) -> Written:
    """Reads the prompts, in pieces of the same length after the first one, so that memory is bounded."""
    first = (tokens.shape[1] - 1) % PIECE + 1

    def read(state: State, tokens: jax.Array, start: Any) -> tuple[jax.Array, State]:
        """The logits of the last token of each sequence in a piece, [N, V]; 0 where it has none."""
        size = tokens.shape[1]
        own = None if lengths is None else jnp.clip(lengths - start, 0, size)
        logits, state = model(tokens, state, lengths=own)
        if own is None:
            return logits[:, -1], state
        found = jnp.take_along_axis(logits, jnp.maximum(own, 1)[:, None, None] - 1, axis=1)[:, 0]
        return jnp.where(own[:, None] > 0, found, 0), state

    def further(
        carry: tuple[jax.Array, State], at: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, State], None]:
        (last, state), (tokens, start) = carry, at
        found, state = read(state, tokens, start)
        return (found if lengths is None else jnp.where((lengths > start)[:, None], found, last), state), None

    last, state = read(state, tokens[:, :first], 0)
    if first < tokens.shape[1]:
        pieces = jnp.swapaxes(tokens[:, first:].reshape(len(tokens), -1, PIECE), 0, 1)
        starts = first + PIECE * jnp.arange(len(pieces))
        (last, state), _ = jax.lax.scan(further, (last, state), (pieces, starts))
    ends = jnp.full(tokens.shape[0], tokens.shape[1]) if lengths is None else lengths
    seen = None
    if choice.repetition_penalty != 1:
        live = jnp.arange(tokens.shape[1])[None] < ends[:, None]
        rows = jnp.arange(len(tokens))[:, None]
        seen = jnp.zeros(last.shape, bool).at[rows, jnp.where(live, tokens, last.shape[1])].set(True, mode="drop")
    return Written(last, state, jnp.zeros(len(tokens), bool), jnp.zeros(len(tokens), jnp.int32), seen)


@partial(jax.jit, static_argnames="choice")
def _draw(
    model: Reader, written: Written, temperature: jax.Array, key: jax.Array, choice: Choice
) -> tuple[Written, jax.Array]:
    """Draws a token of each sequence that has not ended, and reads it."""
    logits, state, done, last, seen = written
    token = jnp.where(done, last, sample(logits, temperature, key, choice, seen))
    logits, after = model.step(token, state)

    def kept(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(done.reshape(done.shape + (1,) * (old.ndim - 1)), old, new)

    after = jax.tree.map(kept, state, after) if choice.stop else after
    if seen is not None:
        seen = seen.at[jnp.arange(len(token)), token].set(True)
    return Written(logits, after, done | choice.ends(token), token, seen), token


@partial(jax.jit, static_argnames="choice")
def _generate(
    model: Reader,
    tokens: jax.Array,
    lengths: jax.Array | None,
    state: State,
    temperature: jax.Array,
    keys: jax.Array,
    choice: Choice,
) -> tuple[jax.Array, State]:
    written = _begin(model, tokens, lengths, state, choice)
    written, drawn = jax.lax.scan(lambda w, key: _draw(model, w, temperature, key, choice), written, keys)
    return drawn.T, written.state
