"""`LanguageModel`: parameters and a family as one value, which is called, stepped, sampled and saved.

Shapes: T time, N batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from jrnn.errors import LayerError
from jrnn.jaxprs.mesh_axes import alike
from jrnn.models import generation
from jrnn.models.family import Decoder, Family, Outputs, Scoped, State, decoder_of
from jrnn.models.files import FILES, write
from jrnn.models.generation import apart, check_tokens, remembered
from jrnn.nn.checks import check_lengths, check_masks, concrete
from jrnn.nn.layers import accumulator
from jrnn.nn.params import Arrays
from jrnn.nn.sequences import Compaction, before_end, in_rows
from jrnn.nn.span import Span


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "first"],
    meta_fields=["family", "config", "text"],
)
@dataclass(frozen=True, repr=False)
class LanguageModel:
    """A recurrent language model, as `load` and `create` make it; a pytree whose leaves are its parameters.

    Attributes:
        params: the parameters by the names that transformers gives them; experts of a layer are stacked.
        family: what it computes.
        config: the keys of config.json that count.
        text: config.json.
        first: the recurrent state before a text, arrays [1, ...] as `with_first_state` takes them; empty if it is zeros.

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

    params: Arrays
    family: Family
    config: Any
    text: str
    first: State = field(default_factory=dict)

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

    @property
    def takes_lengths(self) -> bool:
        """Whether a call takes `lengths`."""
        return True

    def __repr__(self) -> str:
        count = sum(math.prod(jnp.shape(p)) for p in self.params.values())
        types = sorted({str(jnp.result_type(p)) for p in self.params.values()})
        return f"LanguageModel({count:,} numbers in {len(self.params)} arrays of {', '.join(types)}; {self.config})"

    def __call__(
        self,
        tokens: Any,
        state: State | None = None,
        *,
        lengths: Any = None,
        resets: Any = None,
        mask: Any = None,
    ) -> Outputs:
        """Tokens [N, T] -> the logits [N, T, V] of the tokens that follow each, and the state after the last.

        Args:
            tokens: integers from 0 to V - 1.
            state: the state after earlier tokens; None is `initial_state` with its history.
            lengths: [N] integers from 0 to T, where the sequences end; past the end logits are 0, and tokens are ignored.
            resets: booleans [N, T]; where True, a new text begins with this token.
            mask: booleans [N, T], True where a token counts, as the attention mask of transformers: padding may be anywhere.

        Raises:
            LayerError: if tokens, state, lengths, resets or mask do not fit together.
        """
        tokens = check_tokens(self.name, tokens, ("N", "T"), self.vocabulary)
        batch, steps = tokens.shape
        lengths = None if lengths is None else check_lengths(self.name, lengths, steps, batch)
        return self._called(tokens, state, lengths, resets, mask, False)

    def step(
        self, token: Any, state: State | None = None, *, resets: Any = None, mask: Any = None
    ) -> Outputs:
        """One token for each sequence, [N] -> the logits [N, V] of the next one, and the state.

        `resets` and `mask`, booleans [N], are the values for this token, as in a call.

        Under `jax.jit`, a family that remembers all tokens (qwen3_next) needs a state with room for them:
        `initial_state(N, room)`. Its logits are NaN when there is none left.
        """
        token = check_tokens(self.name, token, ("N",), self.vocabulary)
        resets, mask = (
            None if flags is None else jnp.asarray(flags)[:, None] for flags in (resets, mask)
        )
        logits, state = self._called(token[:, None], state, None, resets, mask, True)
        return logits[:, 0], state

    def _called(
        self,
        tokens: Array,
        state: State | None,
        lengths: Any,
        resets: Any,
        mask: Any,
        in_a_step: bool,
    ) -> Outputs:
        masks = check_masks(self.name, resets, mask, tokens.shape)
        return _call(self, tokens, self.with_room(state, *tokens.shape), lengths, *masks, in_a_step)

    def initial_state(self, batch: int, room: int = 0, history: bool = False) -> State:
        """The state of `batch` sequences before their first token, a flat dict of arrays [N, ...].

        Its size does not depend on the number of tokens, except in families that attend to all of them: `room` is the number
        of tokens that these remember. Outside of jit they get more room when they need it. With `history` it has what
        `generate` goes on from, and calls and steps keep it up to date: `logits` [N, V] of the next token, and `counts`
        [N, V], how often each token was read, for penalties.
        """
        dtype = accumulator(self.params[self.decoder.names.embedding].dtype)
        past = generation.history(batch, self.vocabulary, dtype) if history else {}
        return self.decoder.fresh(batch, dtype, room, self.first) | past

    def with_first_state(self, state: State) -> LanguageModel:
        """The model with this recurrent state before each text, in the place of zeros: also after resets, and in `generate`.

        It is trained in the place of parameters (`model.tune = "state"` of `jrnn train`), or by `jax.grad`: the leaves of
        `first` are leaves of the model.

        Args:
            state: arrays [1, ...], such as those of a file that `load_state` reads: S, ssm, lru or sum of each layer.

        Raises:
            LayerError: if arrays are missing, unknown, or of other shapes; if the model has no recurrent state.

        >>> import jrnn
        >>> config = {"model_type": "rwkv7", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "head_dim": 4}
        >>> model = jrnn.models.create(config, jax.random.key(0))
        >>> tuned = model.with_first_state({"0.S": jnp.ones((1, 2, 4, 4))})
        >>> float(tuned.initial_state(3)["0.S"].sum())
        96.0
        """
        wanted = self.decoder.first_shapes()
        given = {name: jnp.shape(leaf) for name, leaf in state.items()}
        if not wanted:
            raise LayerError(f"{self.name}: the model has no recurrent state")
        if given != wanted:
            names = (*given, *wanted)
            wrong = min(name for name in names if given.get(name) != wanted.get(name))
            has, needs = (list(shapes.get(wrong, ())) for shapes in (given, wanted))
            raise LayerError(
                f"{self.name}: the first state has {wrong!r} {has} but must have {needs}"
            )
        return replace(self, first={name: jnp.asarray(state[name]) for name in wanted})

    def generate(self, tokens: Any, length: int, **options: Any) -> Outputs:
        """Writes `length` tokens after a prompt, in one compiled program for the prompt and one for the tokens.

        Programs are for N and for sizes of prompts and lengths, to which these are filled up. Options are data: other
        values need no other program. `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty` are numbers, or
        arrays [N] of one for each row.

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
            mask: booleans [N, T], the tokens that count, as in a call; padding may be anywhere.
            stop: a token, or several, that end a sequence, which then repeats it; or N lists, one for each row. When all
                have ended, the work ends.

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
        wanted = jax.eval_shape(lambda: self.fresh_as(state, batch))
        wanted = {
            name: leaf
            for name, leaf in wanted.items()
            if name in state or name not in generation.HISTORY
        }
        present = {name: jnp.shape(leaf) for name, leaf in state.items()}
        expected = {name: leaf.shape for name, leaf in wanted.items()}
        if present != expected:
            wrong = min(
                name for name in {*present, *expected} if present.get(name) != expected.get(name)
            )
            given, needed = (list(shapes.get(wrong, ())) for shapes in (present, expected))
            message = f"the state has {wrong!r} {given} but must have {needed}, as initial_state({batch}) has"
            raise LayerError(f"{self.name}: {message}")
        position = concrete(state["position"]) if self.decoder.remembers else None
        if position is None:
            return state
        need = int(position.max(initial=0)) + steps
        if need <= self._room(state):
            return state
        return self._grown(state, batch, 2 ** (need - 1).bit_length())

    def fresh_as(self, state: State, batch: int) -> State:
        """The initial state with the room of this one, and with its history."""
        return self.initial_state(batch, self._room(state), history=True)

    def _room(self, state: State) -> int:
        """For how many tokens a state has room, if it needs any."""
        leaf = state.get(self.decoder.remembers or "")
        return 0 if leaf is None else int(jnp.shape(leaf)[1])

    def _grown(self, state: State, batch: int, room: int) -> State:
        """The state with room for that many tokens: empty slots follow the others."""
        fresh = self.initial_state(batch, room, history=True)
        return {
            name: fresh[name].at[tuple(map(slice, jnp.shape(leaf)))].set(leaf)
            for name, leaf in state.items()
        }


@partial(jax.jit, static_argnames="in_a_step")
def _call(
    model: LanguageModel,
    tokens: Array,
    state: State,
    lengths: Any,
    resets: Any,
    mask: Any,
    in_a_step: bool,
) -> Outputs:
    model, tokens, state, lengths, resets, mask = alike(
        (model, tokens.T, state, lengths, resets, mask)
    )
    decoder = model.decoder
    steps = None
    state, past = apart(state)
    names = decoder.names
    embeddings = model.params[names.embedding]
    dtype = embeddings.dtype
    resets = None if resets is None else resets.T
    if mask is not None:
        steps = Compaction.of(mask.T, lengths, resets)
        tokens = steps.moved(tokens)
        lengths = steps.lengths
        resets = steps.resets
    if lengths is not None:
        live = before_end(tokens.shape[0], lengths)
        tokens = jnp.where(live, tokens, 0)
        resets = None if resets is None else resets & live
    span = Span(tokens.shape[0], dtype, lengths, resets, in_a_step=in_a_step)
    embedded = embeddings[tokens].astype(accumulator(dtype))
    x, after = decoder.run(Scoped(model.params, span, first=model.first), embedded, state)
    head = model.params[names.embedding if decoder.tied else names.head]
    logits = decoder.logits(span.linear(x, head))
    if lengths is not None:
        logits = jnp.where(live[..., None], logits, 0)
    after = {name: after[name].astype(leaf.dtype) for name, leaf in state.items()}
    of_rows = tokens.T, jnp.swapaxes(logits, 0, 1), lengths, None if resets is None else resets.T
    after |= remembered(past, *of_rows)
    if steps is None:
        return of_rows[1], after
    if steps.after is not None:
        fresh = model.fresh_as(after, tokens.shape[1])
        after = in_rows(steps.after, {name: fresh[name] for name in after}, after)
    return jnp.swapaxes(steps.put_back(logits), 0, 1), after
