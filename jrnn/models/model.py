"""`LanguageModel`: parameters and a family as one value, which is called, stepped, sampled and saved.

Shapes: T time, N batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jrnn.errors import LayerError
from jrnn.jaxprs.mesh_axes import alike
from jrnn.models import generation
from jrnn.models.family import EMPTY, Decoder, Family, Scoped, State, decoder_of
from jrnn.models.files import FILES, write
from jrnn.models.generation import apart, check_tokens, from_the_left, remembered, rotated
from jrnn.nn.checks import check_resets, concrete
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

    @property
    def decoder(self) -> Decoder:
        """The parts of the model."""
        return decoder_of(self.family, self.config)

    @property
    def name(self) -> str:
        """The family's name, with which messages begin."""
        return self.family.name

    @property
    def vocabulary(self) -> int:
        """V."""
        return int(self.config.vocab_size)

    def __repr__(self) -> str:
        count = sum(math.prod(jnp.shape(p)) for p in self.params.values())
        types = sorted({str(jnp.result_type(p)) for p in self.params.values()})
        return f"LanguageModel({count:,} numbers in {len(self.params)} arrays of {', '.join(types)}; {self.config})"

    def __call__(
        self, tokens: Any, state: State | None = None, *, lengths: Any = None, resets: Any = None,
        attention_mask: Any = None,
    ) -> tuple[jax.Array, State]:  # fmt: skip
        """Tokens [N, T] -> the logits [N, T, V] of the tokens that follow each, and the state after the last.

        Args:
            tokens: integers from 0 to V - 1.
            state: the state after earlier tokens; None is `initial_state` with its history.
            lengths: [N] integers from 0 to T, where the sequences end; past the end logits are 0, and tokens are ignored.
            resets: booleans [N, T]; where True, a new text begins with this token.
            attention_mask: [N, T] as in transformers, instead of lengths: 0 where a row is padded, on the left or the right.

        Raises:
            LayerError: if tokens, state, lengths or resets do not fit together.
        """
        tokens = check_tokens(self.name, tokens, ("N", "T"), self.vocabulary)
        batch, steps = tokens.shape
        if resets is not None:
            resets = check_resets(self.name, resets, tokens.shape)
        starts, lengths, (tokens, resets) = from_the_left(self.name, attention_mask, lengths, tokens, resets)
        logits, state = _call(self, tokens, self.with_room(state, batch, steps), lengths, resets, False)
        return logits if starts is None else rotated(logits, -starts), state

    def step(self, token: Any, state: State | None = None) -> tuple[jax.Array, State]:
        """One token for each sequence, [N] -> the logits [N, V] of the next one, and the state.

        Under `jax.jit`, a family that remembers all tokens (qwen3_next) needs a state with room for them:
        `initial_state(N, room)`. Its logits are NaN when there is none left.
        """
        token = check_tokens(self.name, token, ("N",), self.vocabulary)
        logits, state = _call(self, token[:, None], self.with_room(state, token.shape[0], 1), None, None, True)
        return logits[:, 0], state

    def initial_state(self, batch: int, room: int = 0, history: bool = False) -> State:
        """The state of `batch` sequences before their first token, a flat dict of arrays [N, ...].

        Its size does not depend on the number of tokens, except in families that attend to all of them: `room` is the number
        of tokens that these remember. Outside of jit they get more room when they need it. With `history` it has what
        `generate` goes on from, and calls and steps keep it up to date: `logits` [N, V] of the next token, and `counts`
        [N, V], how often each token was read, for penalties.
        """
        dtype = accumulator(self.params[self.decoder.names.embedding].dtype)
        past = generation.history(batch, self.vocabulary, dtype) if history else {}
        return self.decoder.fresh(batch, dtype, room) | past

    def generate(self, tokens: Any, length: int, **options: Any) -> tuple[jax.Array, State]:
        """Writes `length` tokens after a prompt, in one compiled program.

        Args:
            tokens: [N, T], the prompts. T is at least 1, or 0 to go on with the text of a state.
            length: how many tokens follow.
            temperature: divides the logits; 1 by default; 0 takes the likeliest token.
            top_k: draws from that many likeliest tokens only.
            top_p: draws from the likeliest tokens only, as few as have this share of the probability.
            min_p: draws only from tokens with at least this share of the greatest probability.
            repetition_penalty: divides the logits of tokens that the state has read, or that the prompt or the text has, or
                multiplies negative ones.
            key: a key of `jax.random`; needed unless temperature is 0.
            state: the state after earlier tokens, such as the one that an earlier call returned.
            lengths: [N], the lengths of the prompts, each at least 1, or 0 to go on with the text of a state.
            attention_mask: [N, T] as in transformers, instead of lengths; padding may stand on either side.
            stop: a token, or several, that end a sequence, which then repeats it.

        Returns:
            The tokens [N, length], and the state after the last of them, or after the first that ends a sequence. It has the
            logits of the next token and the counts of all tokens read, so that another call goes on exactly.

        Raises:
            LayerError: if the arguments do not fit.
        """
        return generation.generate(self, tokens, length, **options)

    def stream(self, tokens: Any, length: int, **options: Any) -> Iterator[Any]:
        """As `generate`, but an iterator of tokens [N], each as soon as it is known; ends when all sequences have stopped.

        With `states=True`, each item is a pair of the tokens and the state after them. A state is a value: keep one to go
        back to it.

        >>> import jrnn
        >>> config = {"model_type": "rwkv", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1}
        >>> model = jrnn.models.create(config, jax.random.key(0))
        >>> prompt = jnp.array([[1, 2]])
        >>> [int(token[0]) for token in model.stream(prompt, 3, temperature=0)] == (
        ...     model.generate(prompt, 3, temperature=0)[0][0].tolist())
        True
        """
        return generation.stream(self, tokens, length, **options)

    def save(self, folder: str | PathLike[str], *, shard_bytes: int = 5_000_000_000) -> None:
        """Writes config.json and the parameters as transformers reads them; see `jrnn.models.load`."""
        write(folder, self.text, self.params, self.decoder, shard_bytes)

    def with_room(self, state: State | None, batch: int, steps: int) -> State:
        """The state, checked, with room for `steps` further tokens where that can be known; the initial one for None."""
        if state is None:
            return self.initial_state(batch, steps, history=True)
        remembers = self.decoder.remembers
        rooms = [leaf.shape[1] for name, leaf in state.items() if remembers and name.endswith(".places")]
        wanted = jax.eval_shape(lambda: self.initial_state(batch, max(rooms, default=0), history=True))
        wanted = {name: leaf for name, leaf in wanted.items() if name in state or name not in generation.HISTORY}
        present = {name: jnp.shape(leaf) for name, leaf in state.items()}
        expected = {name: leaf.shape for name, leaf in wanted.items()}
        if present != expected:
            wrong = min(name for name in {*present, *expected} if present.get(name) != expected.get(name))
            given, needed = (list(shapes.get(wrong, ())) for shapes in (present, expected))
            message = f"the state has {wrong!r} {given} but must have {needed}, as initial_state({batch}) has"
            raise LayerError(f"{self.name}: {message}")
        position = concrete(state["position"]) if remembers else None
        if position is None:
            return state
        need = int(position.max()) + steps
        return state if need <= max(rooms, default=need) else grown(state, 2 ** (need - 1).bit_length())


def grown(state: State, room: int) -> State:
    """The state with room for that many tokens: empty slots are put before the others."""
    after = dict(state)
    for name, leaf in state.items():
        if name.rpartition(".")[2] in ("keys", "values", "index", "places"):
            pad = [(0, 0), (room - leaf.shape[1], 0), *[(0, 0)] * (leaf.ndim - 2)]
            after[name] = jnp.pad(leaf, pad, constant_values=EMPTY if name.endswith("places") else 0)
    return after


@partial(jax.jit, static_argnames="in_a_step")
def _call(
    model: LanguageModel, tokens: jax.Array, state: State, lengths: Any, resets: Any, in_a_step: bool
) -> tuple[jax.Array, State]:
    model, tokens, state, lengths, resets = alike((model, tokens, state, lengths, resets))
    decoder, w = model.decoder, Scoped(model.params)
    (state, past), names = apart(state), decoder.names
    dtype = w[names.embedding].dtype
    live = None if lengths is None else jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    if live is not None:
        tokens, resets = jnp.where(live, tokens, 0), None if resets is None else resets & live
    span = Span(tokens.shape[1], dtype, lengths, None if resets is None else resets.T, in_a_step=in_a_step)
    x = w[names.embedding][tokens.T].astype(accumulator(dtype))
    x, after = decoder.run(w, x, state, span)
    head = w[names.embedding if decoder.tied else names.head]
    logits = jnp.swapaxes(decoder.logits(span.linear(x, head)), 0, 1)
    if live is not None:
        logits = jnp.where(live[..., None], logits, 0)
    state = {name: after[name].astype(leaf.dtype) for name, leaf in state.items()}
    return logits, state | remembered(past, tokens, logits, lengths, resets)
