"""`LanguageModel`: parameters and a family as one value, which is called, stepped, sampled and saved.

Shapes: T time, N batch, V vocabulary.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import LayerError
from jrnn.models.attention import EMPTY
from jrnn.models.family import Family, State, Weights
from jrnn.models.files import FILES, write
from jrnn.models.sampling import Choice, sample
from jrnn.nn.checks import check_array, check_integer, check_lengths, check_resets, concrete
from jrnn.nn.layers import accumulator
from jrnn.nn.span import Span


@partial(jax.tree_util.register_dataclass, data_fields=["params"], meta_fields=["family", "config", "text"])
@dataclass(frozen=True, repr=False)
class LanguageModel:
    """A recurrent language model, as `load` and `create` make it; a pytree whose leaves are its parameters.

    Attributes:
        params: the parameters by the names that transformers gives them; experts of a layer are stacked.
        family: what it computes.
        config: the keys of config.json that count.
        text: config.json.

    >>> import jrnn
    >>> config = {"model_type": "mamba2", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 4,
    ...           "num_heads": 2, "head_dim": 8, "n_groups": 1}
    >>> model = jrnn.models.create(config, jax.random.key(0))
    >>> tokens = jnp.array([[3, 1, 4, 1, 5]])
    >>> logits, state = model(tokens)
    >>> more, state = model.step(jnp.array([9]), state)
    >>> logits.shape, more.shape, bool(jnp.allclose(more, model(jnp.array([[3, 1, 4, 1, 5, 9]]))[0][:, -1], atol=1e-5))
    ((1, 5, 16), (1, 16), True)
    >>> new, state = model.generate(tokens, 8, temperature=0.8, top_k=4, key=jax.random.key(1))
    >>> new.shape
    (1, 8)
    """

    FILES: ClassVar = FILES

    params: dict[str, jax.Array]
    family: Family
    config: Any
    text: str

    def __repr__(self) -> str:
        count = sum(math.prod(jnp.shape(p)) for p in self.params.values())
        types = sorted({str(jnp.result_type(p)) for p in self.params.values()})
        return f"LanguageModel({count:,} numbers in {len(self.params)} arrays of {', '.join(types)}; {self.config})"

    def __call__(
        self, tokens: Any, state: State | None = None, *, lengths: Any = None, resets: Any = None
    ) -> tuple[jax.Array, State]:
        """Tokens [N, T] -> the logits [N, T, V] of the tokens that follow each, and the state after the last.

        Args:
            tokens: integers from 0 to V - 1.
            state: the state after earlier tokens; None is `initial_state`.
            lengths: [N] integers from 0 to T, where the sequences end; past the end logits are 0, and tokens are ignored.
            resets: booleans [N, T]; where True, a new text begins with this token.

        Raises:
            LayerError: if tokens, state, lengths or resets do not fit together.
        """
        tokens = self._checked(tokens, ("N", "T"))
        batch, steps = tokens.shape
        if resets is not None:
            resets = check_resets(self.family.name, resets, tokens.shape)
        if lengths is not None:
            lengths = check_lengths(self.family.name, lengths, steps, batch)
        state = self._with_room(state, batch, steps)
        return _call(self, tokens, state, lengths, resets, False)

    def step(self, token: Any, state: State | None = None) -> tuple[jax.Array, State]:
        """One token for each sequence, [N] -> the logits [N, V] of the next one, and the state.

        Under `jax.jit`, a family that remembers all tokens (qwen3_next) needs a state with room for them:
        `initial_state(N, room)`. Its logits are NaN when there is none left.
        """
        token = self._checked(token, ("N",))
        logits, state = _call(self, token[:, None], self._with_room(state, len(token), 1), None, None, True)
        return logits[:, 0], state

    def initial_state(self, batch: int, room: int = 0) -> State:
        """The state of `batch` sequences before their first token, a flat dict of arrays [N, ...].

        Its size does not depend on the number of tokens, except in families that attend to all of them: `room` is the number
        of tokens that these remember. Outside of jit they get more room when they need it.
        """
        dtype = accumulator(self.params[self.family.embedding].dtype)
        return self.family.fresh(self.config, batch, dtype, *([room] if self.family.remembers else []))

    def generate(
        self,
        tokens: Any,
        length: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        key: jax.Array | None = None,
        state: State | None = None,
        lengths: Any = None,
        stop: int | None = None,
    ) -> tuple[jax.Array, State]:
        """Writes `length` tokens after a prompt, in one compiled program.

        Args:
            tokens: [N, T], the prompts; T is at least 1.
            length: how many tokens follow.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: draws from that many likeliest tokens only.
            top_p: draws from the likeliest tokens only, as few as have this share of the probability.
            key: a key of `jax.random`; needed unless temperature is 0.
            state: the state after earlier tokens, such as the one that an earlier call returned.
            lengths: [N], the lengths of the prompts, each at least 1.
            stop: a token that ends a sequence, which then repeats it.

        Returns:
            The tokens [N, length], and the state after the last of them, or after the first `stop`.

        Raises:
            LayerError: if the arguments do not fit.
        """
        tokens, lengths, choice, keys, length = self._prompt(
            tokens, length, temperature, top_k, top_p, key, lengths, stop
        )
        state = self._with_room(state, len(tokens), tokens.shape[1] + length)
        return _generate(self, tokens, state, lengths, jnp.float32(temperature), keys, choice)

    def stream(self, tokens: Any, length: int, **options: Any) -> Iterator[np.ndarray]:
        """As `generate`, but an iterator of tokens [N], each as soon as it is known; ends when all sequences have stopped.

        >>> import jrnn
        >>> config = {"model_type": "rwkv", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1}
        >>> model = jrnn.models.create(config, jax.random.key(0))
        >>> prompt = jnp.array([[1, 2]])
        >>> [int(token[0]) for token in model.stream(prompt, 3, temperature=0)] == (
        ...     model.generate(prompt, 3, temperature=0)[0][0].tolist())
        True
        """
        state = options.pop("state", None)
        defaults = {"temperature": 1.0, "top_k": None, "top_p": None, "key": None, "lengths": None, "stop": None}
        temperature = options.get("temperature", 1.0)
        tokens, lengths, choice, keys, length = self._prompt(tokens, length, **(defaults | options))
        state = self._with_room(state, len(tokens), tokens.shape[1] + length)
        carry = _begin(self, tokens, state, lengths)
        for k in range(length):
            carry, token = _draw(self, carry, jnp.float32(temperature), keys[k], choice)
            yield np.asarray(token)
            if bool(carry[2].all()):
                return

    def save(self, folder: str | PathLike[str], *, shard_bytes: int = 5_000_000_000) -> None:
        """Writes config.json and the parameters as transformers reads them; see `jrnn.models.load`."""
        write(folder, self.text, self.params, self.family.parameters(self.config), shard_bytes)

    def _checked(self, tokens: Any, axes: tuple[str, ...]) -> jax.Array:
        name, size = self.family.name, self.config.vocab_size
        tokens = check_array(name, "tokens", tokens)
        if tokens.ndim != len(axes) or not jnp.issubdtype(tokens.dtype, jnp.integer):
            given = f"{tokens.dtype}{list(tokens.shape)}"
            raise LayerError(f"{name}: tokens are {given}; they must be integers [{', '.join(axes)}]")
        known = concrete(tokens)
        if known is not None and known.size and not (known.min() >= 0 and known.max() < size):
            raise LayerError(
                f"{name}: tokens lie between {known.min()} and {known.max()}; the vocabulary has those from 0 to {size - 1}"
            )
        return tokens.astype(jnp.int32)

    def _with_room(self, state: State | None, batch: int, steps: int) -> State:
        """The state, checked, with room for further tokens where that can be known."""
        if state is None:
            return self.initial_state(batch, steps)
        rooms = [leaf.shape[1] for name, leaf in state.items() if name.endswith(".places")]
        wanted = jax.eval_shape(lambda: self.initial_state(batch, max(rooms, default=0)))
        found = {name: jnp.shape(leaf) for name, leaf in state.items()}
        expected = {name: leaf.shape for name, leaf in wanted.items()}
        if found != expected:
            wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            raise LayerError(
                f"{self.family.name}: the state has {wrong[0]!r} {list(found.get(wrong[0], ()))} but must have "
                f"{list(expected.get(wrong[0], ()))}, as initial_state({batch}) has"
            )
        position = concrete(state["position"]) if self.family.remembers else None
        if position is None:
            return state
        need = int(position.max()) + steps
        return state if need <= max(rooms, default=need) else grown(state, 2 ** (need - 1).bit_length())

    def _prompt(
        self, tokens: Any, length: int, temperature: Any, top_k: Any, top_p: Any, key: Any, lengths: Any, stop: Any
    ):
        name = f"{self.family.name}: generate"
        tokens, length = self._checked(tokens, ("N", "T")), check_integer(f"{name}: length", length, 0)
        batch, steps = tokens.shape
        if not steps:
            raise LayerError(f"{name}: the prompt has no tokens; give at least one, such as the token of the beginning")
        lengths = jnp.full(batch, steps) if lengths is None else check_lengths(name, lengths, steps, batch)
        known = concrete(lengths)
        if known is not None and (known < 1).any():
            raise LayerError(f"{name}: a length is 0; a prompt needs at least one token")
        for option, value in (("temperature", temperature), ("top_p", top_p)):
            if value is not None and not isinstance(value, (numbers.Real, np.ndarray, jax.Array)):
                raise LayerError(f"{name}: {option} is {value!r:.80}; it must be a number")
        if not temperature >= 0:
            raise LayerError(f"{name}: temperature is {temperature}; it must be at least 0")
        if stop is not None:
            stop = check_integer(f"{name}: stop", stop, 0)
        if top_k is not None:
            top_k = check_integer(f"{name}: top_k", top_k, 1)
        if top_p is not None and not 0 < top_p <= 1:
            raise LayerError(f"{name}: top_p is {top_p}; it must be above 0 and at most 1")
        if temperature and key is None:
            raise LayerError(f"{name}: drawing tokens needs a key, such as jax.random.key(0); or give temperature=0")
        keys = jax.random.split(jax.random.key(0) if key is None else key, length)
        return tokens, lengths, Choice(temperature == 0, top_k, top_p, stop), keys, length


def grown(state: State, room: int) -> State:
    """The state with room for that many tokens: empty slots are put before the others."""
    after = dict(state)
    for name, leaf in state.items():
        if name.rpartition(".")[2] in ("keys", "values", "places"):
            pad = [(0, 0), (room - leaf.shape[1], 0), *[(0, 0)] * (leaf.ndim - 2)]
            after[name] = jnp.pad(leaf, pad, constant_values=EMPTY if name.endswith("places") else 0)
    return after


@partial(jax.jit, static_argnames="in_a_step")
def _call(
    model: LanguageModel, tokens: jax.Array, state: State, lengths: Any, resets: Any, in_a_step: bool
) -> tuple[jax.Array, State]:
    family, c = model.family, model.config
    w = Weights(model.params)
    dtype = w[family.embedding].dtype
    span = Span(tokens.shape[1], dtype, lengths, None if resets is None else resets.T, in_a_step=in_a_step)
    live = None
    if lengths is not None:
        live = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
        tokens = jnp.where(live, tokens, 0)
        if resets is not None:
            span = replace(span, resets=(resets & live).T)
    x = w[family.embedding][tokens.T].astype(accumulator(dtype))
    x, after = family.run(c, w, x, state, span)
    head = w[family.embedding if c.tie_word_embeddings else family.head]
    logits = jnp.swapaxes(family.logits(c, span.linear(x, head)), 0, 1)
    if live is not None:
        logits = jnp.where(live[..., None], logits, 0)
    return logits, {name: after[name].astype(leaf.dtype) for name, leaf in state.items()}


@jax.jit
def _begin(
    model: LanguageModel, tokens: jax.Array, state: State, lengths: jax.Array
) -> tuple[jax.Array, State, jax.Array]:
    logits, state = _call(model, tokens, state, lengths, None, False)
    last = jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)[:, 0]
    return last, state, jnp.zeros(len(tokens), bool)


@partial(jax.jit, static_argnames="choice")
def _draw(
    model: LanguageModel, carry: Any, temperature: jax.Array, key: jax.Array, choice: Choice
) -> tuple[Any, jax.Array]:
    """Draws a token of each sequence that has not stopped, and reads it."""
    logits, state, done = carry
    token = sample(logits, temperature, key, choice)
    if choice.stop is not None:
        token = jnp.where(done, choice.stop, token)
    logits, after = _call(model, token[:, None], state, None, None, True)

    def kept(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(done.reshape(done.shape + (1,) * (old.ndim - 1)), old, new)

    after = jax.tree.map(kept, state, after)
    done = done if choice.stop is None else done | (token == choice.stop)
    return (logits[:, 0], after, done), token


@partial(jax.jit, static_argnames="choice")
def _generate(
    model: LanguageModel,
    tokens: jax.Array,
    state: State,
    lengths: Any,
    temperature: jax.Array,
    keys: Any,
    choice: Choice,
) -> tuple[jax.Array, State]:
    carry = _begin(model, tokens, state, lengths)
    (_, state, _), drawn = jax.lax.scan(lambda carry, key: _draw(model, carry, temperature, key, choice), carry, keys)
    return drawn.T, state
