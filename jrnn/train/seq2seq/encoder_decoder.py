"""An attention encoder-decoder as one net, the parts of it that decode, and beam search.

Shapes: S steps of the inputs, T of the targets, N examples, K beams, V tokens known, E encoder features (both directions), H
the decoder's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.nets.builder import NetBuilder
from jrnn.nets.cells import LSTM, AttentionOptions, Encoder, LSTMOptions, LSTMWithAttention
from jrnn.nets.cells.base import fully_connected
from jrnn.nets.graph import extract_sub_net
from jrnn.nets.lowering import to_jax
from jrnn.nets.recurrent_networks import retrieve_step_blobs
from jrnn.train.models.interface import DEFAULT, Compute, Params
from jrnn.train.models.net import NetModel
from jrnn.train.toml_codec import Positive, check_bounds

State = Any
ATTEND = "attend"  # the scope of the decoder with its attention


@dataclass(frozen=True)
class Seq2SeqConfig:
    """Embedding -> LSTMs in both directions; embedding -> LSTM that starts from their ends and attends to them -> logits."""

    kind: Literal["attention"] = "attention"
    embedding: Positive = 32  # size of a token's vector
    encoder: Positive = 64  # hidden units in each direction
    decoder: Positive = 128  # hidden units
    attention: Literal["regular", "recurrent", "dot", "coverage"] = "regular"
    forget_bias: float = 1.0  # of the LSTMs, added to the forget gate before its sigmoid

    def __post_init__(self):
        check_bounds("model", self)


@dataclass(frozen=True)
class Seq2SeqModel(NetModel):
    """An encoder-decoder as one net, and the blobs that connect its parts.

    Attributes:
        memory: the blobs that the encoder writes and each step of the decoder reads, with the axis of the examples.
        decoder_states: the blobs of the first and the last value of each state of the decoder. The first value is [1, N,
            ...], or [...] if it is the same for all examples.
    """

    memory: Mapping[str, int] = field(default_factory=dict)
    decoder_states: Mapping[str, str] = field(default_factory=dict)

    def count(self, batch: Any) -> Any:
        """The steps within the lengths of the targets, over which the loss is a mean."""
        return jnp.sum(jnp.asarray(batch.target_lengths))

    @cached_property
    def _encode(self) -> Callable:
        return to_jax(self.net, [*self.memory, *self.decoder_states])

    @cached_property
    def _decode(self) -> Callable:
        """The part of the net between the encoder and the loss, which runs for one step at a time."""
        given = ["decoder_inputs", "input_lengths", *self.memory, *self.decoder_states]
        outputs = [self.output_blob, *self.decoder_states.values()]
        return to_jax(extract_sub_net(self.net, given, outputs), outputs)

    @cached_property
    def search(self) -> Callable[..., Beams]:
        """Compiled: `search(params, inputs [S, N], input_lengths [N], end=, steps=, width=, normalization=)`.

        The keyword arguments are as in `beam_search`; the decoder starts from the token `end`.
        """
        return jax.jit(self._search, static_argnames=("end", "steps", "width", "normalization"))

    def _search(
        self,
        params: Params,
        inputs: Any,
        input_lengths: Any,
        *,
        end: int,
        width: int,
        **options: Any,
    ) -> Beams:
        n = inputs.shape[1]
        encoded = self._encode({**params, "inputs": inputs, "input_lengths": input_lengths})
        memory = {"input_lengths": jnp.repeat(input_lengths, width)}
        for name, axis in self.memory.items():
            memory[name] = jnp.repeat(encoded[name], width, axis)
        first = {}
        for name in self.decoder_states:
            state = encoded[name]
            first[name] = state if state.ndim > 1 else jnp.broadcast_to(state, (1, n, *state.shape))

        def step(states: dict[str, Any], last: Any) -> tuple[Any, dict[str, Any]]:
            blobs = self._decode({**params, **memory, **states, "decoder_inputs": last[None]})
            states = {name: blobs[after] for name, after in self.decoder_states.items()}
            return blobs[self.output_blob][0], states

        start = jnp.full(n, end, jnp.int32)
        return beam_search(step, first, start, end=end, width=width, **options)

    def attention(self, params: Params, batch: Any) -> np.ndarray:
        """Returns the weights [T, N, S] with which the decoder, fed a batch's targets, attends to the inputs."""
        blobs = retrieve_step_blobs(self.net, self._blobs(params, {}, batch), prefix="")
        weights = []
        for t in range(len(batch.decoder_inputs)):
            weights.append(blobs[f"_{ATTEND}/attention_weights_3d{t}"][..., 0])
        return np.stack(weights)


def seq2seq(config: Seq2SeqConfig, tokens_known: int, compute: Compute = DEFAULT) -> Seq2SeqModel:
    """Returns an encoder-decoder as one net of Caffe2's operators alone.

    Blobs: `inputs` int32 [S, N] with `input_lengths` int32 [N], `decoder_inputs` and `targets` int32 [T, N] with
    `target_lengths` int32 [N] -> `logits` [T, N, V], `loss` [], the mean over the steps within the lengths. Padding after
    the lengths never changes a result, and lengths may be 0.
    """
    b = NetBuilder("seq2seq")
    inputs = b.input("inputs")
    input_lengths = b.input("input_lengths")
    decoder_inputs = b.input("decoder_inputs")
    targets = b.input("targets")
    target_lengths = b.input("target_lengths")
    features = 2 * config.encoder

    def embedded(tokens: str, name: str) -> str:
        table = b.param(
            f"{name}_embedding", [tokens_known, config.embedding], "GaussianFill", std=1.0
        )
        return b.Gather([table, tokens], f"{name}_embedded")

    x = embedded(inputs, "encoder")
    options = LSTMOptions(forget_bias=config.forget_bias)
    forward = LSTM(b, x, input_lengths, None, config.embedding, config.encoder, "forward", options)
    x = b.ReversePackedSegs([x, input_lengths], "encoder_embedded_reversed")
    backward = LSTM(
        b, x, input_lengths, None, config.embedding, config.encoder, "backward", options
    )
    turned = b.ReversePackedSegs([backward.hidden_all, input_lengths], "backward_outputs")
    outputs = _joined(b, [forward.hidden_all, turned], "encoder_outputs")
    first = []
    of_ends = {
        "hidden": (forward.hidden_last, backward.hidden_last),
        "cell": (forward.cell_last, backward.cell_last),
    }
    for kind, ends in of_ends.items():
        last = _joined(b, ends, f"encoder_{kind}_last")
        first.append(fully_connected(b, last, f"decoder_{kind}_first", features, config.decoder))
    first.append(b.param("context_first", [features], "ConstantFill", value=0.0))

    y = embedded(decoder_inputs, "decoder")
    encoder = Encoder(outputs, features, input_lengths)
    options = AttentionOptions(kind=config.attention, forget_bias=config.forget_bias)
    out = LSTMWithAttention(
        b, y, None, first, config.embedding, config.decoder, encoder, ATTEND, options
    )
    logits = fully_connected(b, out.combined, "logits", config.decoder + features, tokens_known)
    weights = _within(b, targets, target_lengths)
    b.SoftmaxWithLoss([logits, targets, weights], ["probabilities", "loss"], axis=2)

    memory = {f"{ATTEND}/encoder_outputs_transposed": 0}
    if config.attention != "dot":
        memory[f"{ATTEND}/weighted_encoder_outputs"] = 1
    states = dict(zip(first, (out.hidden_last, out.cell_last, out.context_last)))
    if out.coverage_last is not None:
        memory[f"{ATTEND}/coverage_weights"] = 1
        states[f"{ATTEND}/initial_coverage"] = out.coverage_last
    names = (inputs, input_lengths, decoder_inputs, targets, target_lengths)
    feeds = dict(zip(names, names))
    return Seq2SeqModel(
        b.build(outputs=["loss"]),
        b.build_init(),
        {},
        feeds,
        compute,
        targets=(targets, target_lengths),
        memory=memory,
        decoder_states=states,
    )


def _joined(b: NetBuilder, blobs: Any, name: str) -> str:
    """Concatenates blobs [.., N, D] on their last axis."""
    return b.Concat(list(blobs), [name, f"_{name}_dims"], axis=2)[0]


def _within(b: NetBuilder, targets: str, lengths: str) -> str:
    """Returns a blob of floats [T, N]: 1 within the lengths, 0 after them."""
    ones = b.Transpose(b.ConstantFill([targets], "ones", value=1.0), "ones_by_example")
    within = b.SequenceMask([ones, lengths], "within_by_example", mode="sequence", fill_val=0.0)
    return b.Transpose(within, "within")


class Beams(NamedTuple):
    """Hypotheses, the best of each example first.

    Attributes:
        tokens: int32 [N, K, T]; `end` after the end of each hypothesis.
        lengths: int32 [N, K], the number of tokens with `end`; T if the hypothesis was cut off.
        log_probability: float [N, K], of the whole hypothesis.
        score: log_probability divided by length ** normalization; -inf if there are fewer than K hypotheses.
        finished: bool [N, K], whether `end` was reached.
    """

    tokens: Any
    lengths: Any
    log_probability: Any
    score: Any
    finished: Any


def _continued(
    beams: Beams, t: Any, logits: Any, end: int, normalization: float
) -> tuple[Beams, Any]:
    """The K best of all continuations by a token in step t, by its logits [N K, V], and the hypotheses [N K] before."""
    n, k, _ = beams.tokens.shape
    vocabulary = logits.shape[-1]
    next_ = jax.nn.log_softmax(logits.reshape(n, k, vocabulary))
    stay = jnp.where(jnp.arange(vocabulary) == end, 0.0, -jnp.inf).astype(next_.dtype)
    # A finished hypothesis has one continuation: itself.
    next_ = jnp.where(beams.finished[..., None], stay, next_)
    total = beams.log_probability[..., None] + next_  # [N, K, V]
    lengths = jnp.where(beams.finished, beams.lengths, t + 1)
    scores = total / lengths[..., None].astype(total.dtype) ** normalization
    best, chosen = lax.top_k(scores.reshape(n, -1), k)
    parent = chosen // vocabulary
    token = (chosen % vocabulary).astype(jnp.int32)

    def of_parent(a: Any) -> Any:
        return jnp.take_along_axis(a, parent.reshape(n, k, *(1,) * (a.ndim - 2)), axis=1)

    tokens = lax.dynamic_update_index_in_dim(of_parent(beams.tokens), token, t, 2)
    log_probability = jnp.take_along_axis(total.reshape(n, -1), chosen, axis=1)
    after = Beams(
        tokens,
        of_parent(lengths),
        log_probability,
        best,
        of_parent(beams.finished) | (token == end),
    )
    return after, (jnp.arange(n)[:, None] * k + parent).reshape(-1)


def beam_search(
    step: Callable[[State, Any], tuple[Any, State]],
    state: State,
    first: Any,
    *,
    end: int,
    steps: int,
    width: int = 4,
    normalization: float = 1.0,
) -> Beams:
    """Searches for the sequences of greatest score, keeping the K best prefixes of every example; jit it.

    Finished hypotheses stay among the K while they are better than unfinished ones. K = 1 is greedy search; K equal to the
    number of all sequences is an exhaustive search.

    Args:
        step: `(state, tokens) -> (logits, state)`, from the state of N K hypotheses and their last tokens, int32 [N K], to
            the logits of the next tokens [N K, V] and the next state.
        state: the state of the N examples before the first step: a pytree of arrays with the examples on axis 1, as in the
            states [1, N, H] of recurrent networks.
        first: int32 [N], the tokens that the first step reads.
        end: the token that ends a sequence.
        steps: T.
        width: K, the number of hypotheses that are kept; 1 is greedy search.
        normalization: hypotheses are compared by log probability / length ** normalization, where the length includes
            `end`: 0 favors short hypotheses, 1 compares means over the tokens.

    Returns:
        K hypotheses for each example.

    Source: Graves 2012, Sequence transduction with recurrent neural networks; Wu et al. 2016, section 7, for the lengths.

    >>> table = jnp.log(jnp.array([[0.1, 0.5, 0.4], [0.2, 0.4, 0.4], [0.9, 0.05, 0.05]]))  # of the next token, by the last
    >>> search = lambda width: beam_search(
    ...     lambda state, last: (table[last], state), (), jnp.zeros(1, int), end=0, steps=4, width=width, normalization=0.0
    ... )
    >>> search(1).tokens[0, 0].tolist(), search(2).tokens[0, 0].tolist()  # greedy starts with the likeliest token
    ([1, 1, 1, 1], [2, 0, 0, 0])
    """
    n = first.shape[0]
    k = width

    def go_on(loop: tuple[Any, Beams, State]) -> Any:
        t, beams, _ = loop
        return (t < steps) & ~jnp.all(beams.finished | jnp.isneginf(beams.score))

    def body(loop: tuple[Any, Beams, State]) -> tuple[Any, Beams, State]:
        t, beams, state = loop
        place = jnp.maximum(t - 1, 0)
        before = lax.dynamic_index_in_dim(beams.tokens, place, 2, keepdims=False)  # [N, K]
        last = jnp.where(t == 0, jnp.broadcast_to(first[:, None], (n, k)), before)
        logits, state = step(state, last.reshape(-1).astype(jnp.int32))
        beams, rows = _continued(beams, t, logits, end, normalization)
        return t + 1, beams, jax.tree.map(lambda a: jnp.take(a, rows, axis=1), state)

    state = jax.tree.map(lambda a: jnp.repeat(a, k, axis=1), state)
    dtype = jax.eval_shape(step, state, jax.ShapeDtypeStruct((n * k,), jnp.int32))[0].dtype
    # Otherwise all K beams would start the same.
    alone = jnp.where(jnp.arange(k) == 0, 0.0, -jnp.inf).astype(dtype)
    start = Beams(
        jnp.full((n, k, steps), end, jnp.int32),
        jnp.zeros((n, k), jnp.int32),
        jnp.broadcast_to(alone, (n, k)),
        jnp.broadcast_to(alone, (n, k)),
        jnp.zeros((n, k), bool),
    )
    return lax.while_loop(go_on, body, (jnp.zeros((), jnp.int32), start, state))[1]
