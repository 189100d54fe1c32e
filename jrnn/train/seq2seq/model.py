"""An attention encoder-decoder as one net, and the parts of it that decode.

Shapes: S steps of the inputs, T of the targets, N examples, K beams, V tokens known, E encoder features (both directions), H
the decoder's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.builder import NetBuilder
from jrnn.cells import LSTM, AttentionOptions, Encoder, LSTMOptions, LSTMWithAttention
from jrnn.cells.base import fully_connected
from jrnn.graph import extract_sub_net
from jrnn.lowering import to_jax
from jrnn.recurrent import retrieve_step_blobs
from jrnn.train.models.model import DEFAULT, Compute, Params
from jrnn.train.models.net import NetModel
from jrnn.train.seq2seq.beam import Beams, beam_search
from jrnn.train.toml_codec import require_at_least

ATTEND = "attend"  # the scope of the decoder with its attention


@dataclass(frozen=True)
class Seq2SeqConfig:
    """Embedding -> LSTMs in both directions; embedding -> LSTM that starts from their ends and attends to them -> logits."""

    kind: Literal["attention"] = "attention"
    embedding: int = 32
    encoder: int = 64  # hidden units in each direction
    decoder: int = 128  # hidden units
    attention: Literal["regular", "recurrent", "dot", "coverage"] = "regular"
    forget_bias: float = 1.0

    def __post_init__(self):
        require_at_least(1, "model", self, "embedding", "encoder", "decoder")


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

        The arguments by name are those of `beam_search`; the decoder starts from the token `end`.
        """
        return jax.jit(self._search, static_argnames=("end", "steps", "width", "normalization"))

    def _search(
        self, params: Params, inputs: Any, input_lengths: Any, *, end: int, width: int, **options: Any
    ) -> Beams:
        n = inputs.shape[1]
        encoded = self._encode({**params, "inputs": inputs, "input_lengths": input_lengths})
        memory = {name: jnp.repeat(encoded[name], width, axis) for name, axis in self.memory.items()}
        memory["input_lengths"] = jnp.repeat(input_lengths, width)
        first = {name: encoded[name] for name in self.decoder_states}
        first = {name: v if v.ndim > 1 else jnp.broadcast_to(v, (1, n, *v.shape)) for name, v in first.items()}

        def step(states: dict[str, Any], last: Any) -> tuple[Any, dict[str, Any]]:
            blobs = self._decode({**params, **memory, **states, "decoder_inputs": last[None]})
            return blobs[self.output_blob][0], {name: blobs[after] for name, after in self.decoder_states.items()}

        return beam_search(step, first, jnp.full(n, end, jnp.int32), end=end, width=width, **options)

    def attention(self, params: Params, batch: Any) -> np.ndarray:
        """Returns the weights [T, N, S] with which the decoder, fed a batch's targets, attends to the inputs."""
        blobs = retrieve_step_blobs(self.net, self._blobs(params, {}, batch), prefix="")
        steps = len(batch.decoder_inputs)
        return np.stack([blobs[f"_{ATTEND}/attention_weights_3d{t}"][..., 0] for t in range(steps)])


def seq2seq(config: Seq2SeqConfig, tokens_known: int, compute: Compute = DEFAULT) -> Seq2SeqModel:
    """Returns an encoder-decoder as one net of Caffe2's operators alone.

    Blobs: `inputs` int32 [S, N] with `input_lengths` int32 [N], `decoder_inputs` and `targets` int32 [T, N] with
    `target_lengths` int32 [N] -> `logits` [T, N, V], `loss` [], the mean over the steps within the lengths. Padding after
    the lengths never changes a result, and lengths may be 0.
    """
    b = NetBuilder("seq2seq")
    inputs, input_lengths = b.input("inputs"), b.input("input_lengths")
    decoder_inputs, targets, target_lengths = b.input("decoder_inputs"), b.input("targets"), b.input("target_lengths")
    features = 2 * config.encoder

    def embedded(tokens: str, name: str) -> str:
        table = b.param(f"{name}_embedding", [tokens_known, config.embedding], "GaussianFill", std=1.0)
        return b.Gather([table, tokens], f"{name}_embedded")

    x = embedded(inputs, "encoder")
    options = LSTMOptions(forget_bias=config.forget_bias)
    forward = LSTM(b, x, input_lengths, None, config.embedding, config.encoder, "forward", options)
    x = b.ReversePackedSegs([x, input_lengths], "encoder_embedded_reversed")
    backward = LSTM(b, x, input_lengths, None, config.embedding, config.encoder, "backward", options)
    turned = b.ReversePackedSegs([backward.hidden_all, input_lengths], "backward_outputs")
    outputs = _joined(b, [forward.hidden_all, turned], "encoder_outputs")
    first = []
    for kind, ends in {
        "hidden": (forward.hidden_last, backward.hidden_last),
        "cell": (forward.cell_last, backward.cell_last),
    }.items():
        last = _joined(b, ends, f"encoder_{kind}_last")
        first.append(fully_connected(b, last, f"decoder_{kind}_first", features, config.decoder))
    first.append(b.param("context_first", [features], "ConstantFill", value=0.0))

    y = embedded(decoder_inputs, "decoder")
    encoder = Encoder(outputs, features, input_lengths)
    options = AttentionOptions(kind=config.attention, forget_bias=config.forget_bias)
    out = LSTMWithAttention(b, y, None, first, config.embedding, config.decoder, encoder, ATTEND, options)
    logits = fully_connected(b, out.combined, "logits", config.decoder + features, tokens_known)
    b.SoftmaxWithLoss([logits, targets, _within(b, targets, target_lengths)], ["probabilities", "loss"], axis=2)

    memory = {f"{ATTEND}/encoder_outputs_transposed": 0}
    if config.attention != "dot":
        memory[f"{ATTEND}/weighted_encoder_outputs"] = 1
    states = dict(zip(first, (out.hidden_last, out.cell_last, out.context_last)))
    if out.coverage_last is not None:
        memory[f"{ATTEND}/coverage_weights"] = 1
        states[f"{ATTEND}/initial_coverage"] = out.coverage_last
    feeds = {name: name for name in (inputs, input_lengths, decoder_inputs, targets, target_lengths)}
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
