"""Tokens before and after: prompts as users give them, and texts from any model of tokens.

Shapes: T time, N batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn.errors import LayerError
from jrnn.jaxprs.jax_internals import is_traced
from jrnn.jaxprs.mesh_axes import like
from jrnn.models.family import Outputs
from jrnn.models.sampling import Sampler, sample
from jrnn.nn.checks import check_flags, check_integer, check_lengths, concrete

State = dict[str, Array]
HISTORY = ("logits", "counts")  # what a state has of the text that it has read
PIECE = 512  # tokens of a prompt that are read at once


def check_tokens(where: str, tokens: Any, axes: tuple[str, ...], vocabulary: int) -> Array:
    """Tokens as int32 of these axes, each from 0 to `vocabulary` - 1. Inside jit, only type and rank are checked.

    >>> check_tokens("mamba", [[3, 16]], ("N", "T"), 16)
    Traceback (most recent call last):
    jrnn.errors.LayerError: mamba: tokens lie between 3 and 16; the vocabulary has 0 to 15
    """
    return jnp.asarray(_checked_tokens(where, tokens, axes, vocabulary), jnp.int32)


def _checked_tokens(where: str, tokens: Any, axes: tuple[str, ...], vocabulary: int) -> Any:
    """As `check_tokens`, but other arrays than JAX's stay in numpy, so that the check compiles nothing."""
    if not isinstance(tokens, Array):
        try:
            # not jnp.asarray, which wraps 64-bit integers before they are checked
            tokens = np.asarray(tokens)
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
        raise LayerError(f"{where}: {problem}; the vocabulary has 0 to {vocabulary - 1}")
    return tokens if tokens.dtype == np.int32 else tokens.astype(np.int32)


def history(batch: int, vocabulary: int, dtype: Any = jnp.float32) -> State:
    """The history of N texts without a token: the logits of the next token, and how often each was read, [N, V]."""
    return {
        "logits": jnp.zeros((batch, vocabulary), dtype),
        "counts": jnp.zeros((batch, vocabulary), jnp.int32),
    }


def apart(state: State) -> tuple[State, State]:
    """Splits a state into what the model reads and the history of its texts, which may be missing in part."""
    past = {}
    for name, leaf in state.items():
        if name in HISTORY:
            past[name] = leaf
    return {name: leaf for name, leaf in state.items() if name not in past}, past


def remembered(
    past: State, tokens: Array, logits: Array, lengths: Any = None, resets: Any = None
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
            # no reset after the token
            live &= jnp.flip(jnp.cumsum(jnp.flip(resets, 1), axis=1), 1) - resets == 0
            counts = jnp.where(resets.any(axis=1, keepdims=True), 0, counts)
        places = jnp.where(live, tokens, counts.shape[1])
        after["counts"] = counts.at[jnp.arange(batch)[:, None], places].add(1, mode="drop")
    return after


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

    @property
    def takes_lengths(self) -> bool:
        """Whether a call takes `lengths`; else prompts are not padded, and each length of a prompt is compiled."""
        ...

    def __call__(
        self, tokens: Any, state: State | None = None, *, lengths: Any = None
    ) -> Outputs: ...

    def step(self, token: Any, state: State | None = None, *, mask: Any = None) -> Outputs: ...

    def with_room(self, state: State | None, batch: int, steps: int) -> State:
        """The state, checked, with capacity for `steps` more tokens; for None the initial state with its history."""
        ...


class Prefix(NamedTuple):
    """What a sequence goes on from."""

    state: State  # with the logits of the next token
    done: Array  # [N], whether a sequence has ended
    last: Array  # [N], its last token


@dataclass(frozen=True)
class Prompt:
    """The arguments of `generate`, checked.

    Outside of jit they are made so that calls of other lengths need no other program: prompts are padded, and there is
    room for more tokens.

    Attributes:
        tokens: [N, T], numpy's on one device outside of jit.
        lengths: [N] or None.
        is_padded: whether pieces of the prompts are padded to sizes of `bucket`.
    """

    tokens: Any
    lengths: Any
    state: State
    key: Array
    choice: Sampler
    length: int
    is_padded: bool

    @classmethod
    def checked(
        cls, model: TokenModel, what: str, tokens: Any, length: int, *, temperature: Any = 1.0, lengths: Any = None,
        key: Array | None = None, state: State | None = None, mask: Any = None, **options: Any,
    ) -> Prompt:  # fmt: skip
        where = f"{model.name}: {what}"
        tokens = _checked_tokens(where, tokens, ("N", "T"), model.vocabulary)
        length = check_integer(f"{where}: length", length, 0)
        batch, steps = tokens.shape
        leaves = jax.tree.leaves((model, tokens, lengths, mask, state, jnp.zeros(())))
        inside_jit = any(map(is_traced, leaves))
        if inside_jit:
            tokens = jnp.asarray(tokens)
        elif not _is_divided(tokens):
            tokens = np.asarray(tokens)

        lengths = (
            None if lengths is None or not steps else check_lengths(where, lengths, steps, batch)
        )
        if mask is not None:
            if not inside_jit and np.asarray(mask).dtype == bool:
                mask = jax.device_put(np.asarray(mask))  # which compiles nothing
            mask = check_flags(where, "mask", mask, tokens.shape)
            tokens, lengths = _compacted(tokens, mask, lengths)
        lengths = lengths if inside_jit or lengths is None else np.asarray(lengths)

        choice = Sampler.checked(where, model.vocabulary, batch, temperature, **options)
        temperatures = concrete(choice.temperature)
        if key is None and (temperatures is None or temperatures.any()):
            raise LayerError(
                f"{where}: drawing tokens needs a key, such as jax.random.key(0); or give temperature=0"
            )
        _check_history(where, state, choice, steps, lengths)
        key = jax.random.key(0) if key is None else key

        is_padded = not inside_jit and model.takes_lengths
        needed = length + (steps - _first(steps) + _padded_size(steps) if is_padded else steps)
        new = state is None and not inside_jit
        state = model.with_room(state, batch, bucket(needed) if new else needed)
        if "logits" not in state:
            state = state | {"logits": history(batch, model.vocabulary)["logits"]}
        return cls(tokens, lengths, state, key, choice, length, is_padded)


def _is_divided(array: Any) -> bool:
    """Whether an array is on several devices."""
    return isinstance(array, Array) and len(array.devices()) > 1


def bucket(size: int, least: int = 64) -> int:
    """The size, or some more, so that there are few sizes: multiples of `least`, and of an eighth of a power of two.

    >>> [bucket(size) for size in (1, 65, 512, 513, 2000)]
    [64, 128, 512, 640, 2048]
    """
    unit = max(least, 1 << max((size - 1).bit_length() - 3, 0))
    return -(-size // unit) * unit


def _first(steps: int) -> int:
    """How many tokens of a prompt are read first, so that pieces of the same length follow."""
    return (steps - 1) % PIECE + 1 if steps else 0


def _padded_size(steps: int) -> int:
    """To how many tokens the first piece of a prompt is padded."""
    return min(bucket(_first(steps), 16), PIECE) if steps else 0


def _compacted(tokens: Any, mask: Any, lengths: Any) -> tuple[Any, Any]:
    """Prompts [N, T] whose tokens that count come first, and how many they are."""
    steps = tokens.shape[1]
    xp: Any = np if isinstance(tokens, np.ndarray) else jnp
    mask = xp.asarray(mask)
    places = xp.arange(steps)[None]
    if lengths is not None:
        mask = mask & (places < xp.asarray(lengths)[:, None])
    order = xp.argsort(xp.where(mask, places, places + steps), axis=1)
    compacted = xp.take_along_axis(tokens, order, axis=1)
    return compacted, xp.sum(mask, axis=1, dtype=np.int32) if steps else None


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
    if state is not None and choice.penalizes and "counts" not in past:
        raise LayerError(
            f"{where}: repetition_penalty needs the tokens that the state has read, and the state has no counts of them; "
            "give one that generate, stream or a call without a state returned, or that began with "
            "initial_state(N, history=True)"
        )


def generate(model: TokenModel, tokens: Any, length: int, **options: Any) -> Outputs:
    """The tokens [N, length] after prompts [N, T], and the state; see `LanguageModel.generate`."""
    prompt = Prompt.checked(model, "generate", tokens, length, **options)
    start = _begin(model, prompt)
    if not prompt.length:
        return jnp.zeros((*start.last.shape, 0), jnp.int32), start.state
    capacity = prompt.length
    if not is_traced(start.last):
        capacity = max(64, 1 << (prompt.length - 1).bit_length())
    length = np.int32(prompt.length)
    new, state = _write(model, start, prompt.key, prompt.choice, length, capacity=capacity)
    return _cut(new, prompt.length), state


def _cut(tokens: Array, length: int) -> Array:
    """The first tokens, [N, C] -> [N, length]; on one device by numpy, which needs no program for each length."""
    if tokens.shape[1] == length:
        return tokens
    if is_traced(tokens) or _is_divided(tokens):
        return tokens[:, :length]
    first = np.asarray(tokens)[:, :length]
    return jax.device_put(first, tokens.sharding if tokens.committed else None)


def stream(
    model: TokenModel, tokens: Any, length: int, *, states: bool = False, **options: Any
) -> Iterator[Any]:
    """As `generate`, but an iterator of tokens [N]; see `LanguageModel.stream`."""
    return _stream(model, Prompt.checked(model, "stream", tokens, length, **options), states)


def _stream(model: TokenModel, prompt: Prompt, states: bool) -> Iterator[Any]:
    written = _begin(model, prompt)
    choice = jax.device_put(prompt.choice)  # once for all tokens
    draw = _draw if states else _draw_in_place
    if not states:  # JAX returns arrays that a program does not change as they are, and these may be the caller's
        written = jax.tree.map(jnp.copy, written)
    for count in range(prompt.length):
        written = draw(model, written, prompt.key, count, choice)
        token = np.array(written.last)
        yield (token, written.state) if states else token
        if np.asarray(written.done).all():
            return


def _begin(model: TokenModel, prompt: Prompt) -> Prefix:
    """Reads the prompts, in pieces of the same length after the first one, so that memory is bounded."""
    tokens = prompt.tokens
    lengths = prompt.lengths
    batch, steps = tokens.shape
    first = _first(steps)

    def own(start: Any, size: int) -> Any:
        """Where the sequences end in a piece."""
        return None if lengths is None else (lengths - start).clip(0, size)

    state = prompt.state
    if steps:
        piece = tokens[:, :first]
        ends = own(0, first)
        if prompt.is_padded:
            xp: Any = np if isinstance(tokens, np.ndarray) else jnp
            piece = xp.pad(piece, ((0, 0), (0, _padded_size(steps) - first)))
            ends = np.full(batch, first, np.int32) if ends is None else ends
        state = _read(model, state, piece, ends)
    if first < steps and is_traced(state["logits"]):
        pieces = jnp.swapaxes(tokens[:, first:].reshape(batch, -1, PIECE), 0, 1)
        starts = first + PIECE * jnp.arange(len(pieces))

        def read(state: State, piece: tuple[Array, Any]) -> tuple[State, None]:
            return _read(model, state, piece[0], own(piece[1], PIECE)), None

        state, _ = jax.lax.scan(read, state, (pieces, starts))
    else:
        for start in range(first, steps, PIECE):
            state = _read(model, state, tokens[:, start : start + PIECE], own(start, PIECE))
    done, none = like((jnp.zeros(batch, bool), jnp.zeros(batch, jnp.int32)), state)
    return Prefix(state, done, none)


@jax.jit
def _read(model: TokenModel, state: State, tokens: Array, lengths: Any) -> State:
    """The state after tokens [N, T]."""
    return model(tokens, state, lengths=lengths)[1]


def _drawn(model: TokenModel, written: Prefix, key: Array, count: Any, choice: Sampler) -> Prefix:
    """Draws a token of each sequence that has not ended, and reads it; `count`: of tokens drawn before."""
    state, done, last = written
    key = jax.random.fold_in(key, count)
    seen = state["counts"] > 0 if "counts" in state else None
    token = jnp.where(done, last, sample(state["logits"], key, choice, seen))
    if choice.stop is None:
        _, after = model.step(token, state)
    else:
        _, after = model.step(token, state, mask=~done)
    return Prefix(after, done | choice.ends(token), token)


_draw = jax.jit(_drawn)
_draw_in_place = jax.jit(_drawn, donate_argnames="written")


@partial(jax.jit, static_argnames="capacity")
def _write(
    model: TokenModel, start: Prefix, key: Array, choice: Sampler, length: Any, *, capacity: int
) -> Outputs:
    """Draws tokens until all sequences have ended; then each repeats its last one. Returns [N, capacity] and the state."""

    def goes_on(carry: tuple[Array, Prefix, Array]) -> Array:
        count, written, _ = carry
        return (count < length) & ~jnp.all(written.done)

    def draw(carry: tuple[Array, Prefix, Array]) -> tuple[Array, Prefix, Array]:
        count, written, tokens = carry
        written = _drawn(model, written, key, count, choice)
        return count + 1, written, tokens.at[count].set(written.last)

    tokens = like(jnp.zeros((capacity, *start.last.shape), jnp.int32), start)
    count, written, tokens = jax.lax.while_loop(goes_on, draw, (jnp.int32(0), start, tokens))
    unwritten = jnp.arange(capacity)[:, None] >= count
    return jnp.where(unwritten, written.last[None], tokens).T, written.state
