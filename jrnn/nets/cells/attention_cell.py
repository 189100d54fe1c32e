"""Attention over the outputs of an encoder, around a decoder cell.

Shapes: T decoder steps, S encoder steps, N batch, E encoder features, H decoder's hidden size. The decoder's gates read the
concatenated hidden state and context of the previous step. Its new hidden state h determines the next context:

    scores[s, n] = v . tanh(W_e enc[s, n] + W_h h[n])                       regular (additive)
                 = v . tanh(W_e enc[s, n] + W_c context_prev[n] + W_h h[n]) recurrent
                 = enc[s, n] . (W_h h[n])                                   dot; W_h only where H is not E
                 = v . tanh(W_e enc[s, n] + W_h h[n] + coverage_prev[n, s] W_v enc[s, n])   coverage
    weights = softmax of scores over s;  context[n] = sum_s weights[s, n] enc[s, n];  coverage = all weights so far

If the encoder has lengths, s runs over the valid steps of each sequence. A sequence of length 0 has weights 0 and context 0.
(Caffe2 has NaN there; see `Encoder.mask_padding`.)

Sources: Bahdanau et al. 2015 (additive), Luong et al. 2015 (dot), Tu et al. 2016 (coverage).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jrnn.errors import NetError, check_known
from jrnn.nets.builder import NetBuilder
from jrnn.nets.cells.base import Cell, StateSpec, StepInputs, fully_connected, without_padding
from jrnn.nets.ir import Names
from jrnn.nets.recurrent_networks import RecurrentState

KINDS = ("regular", "recurrent", "dot", "coverage")
# The score of padding: its exp is 0; unlike with -inf, a softmax of such scores alone is not NaN.
MASKED = -3e38


@dataclass(frozen=True)
class Encoder:
    """The sequence that a decoder attends to.

    Attributes:
        outputs: the encoder's outputs [S, N, E].
        size: E.
        lengths: int32 [N], or None.
        weighted: W_e outputs [S, N, E], if they are already computed.
        mask_padding: see `RunOptions`. Without it the attention consists of Caffe2's operators, and is NaN for a sequence
            of length 0.
    """

    outputs: str
    size: int
    lengths: str | None = None
    weighted: str | None = None
    mask_padding: bool = True


@dataclass(frozen=True)
class AttentionCell(Cell):
    """A decoder cell that attends to an encoder. The decoder is under the scope `decoder`.

    Its states are the decoder's (the output state is named `hidden_t_external`), the context, and for coverage attention the
    coverage [1, N, S]. Its output is the hidden state concatenated with the context [T, N, H + E].

    Attributes:
        decoder: the cell.
        encoder: the sequence that it attends to.
        kind: "regular", "recurrent", "dot" or "coverage": the module's docstring has the formulas.
        memory_optimization: compute the sums under the tanh again in the backward pass.
    """

    decoder: Cell
    encoder: Encoder
    kind: str = "regular"
    memory_optimization: bool = False

    def __post_init__(self):
        check_known(
            self.kind,
            KINDS,
            NetError,
            f"attention must be one of {', '.join(KINDS)}, is {self.kind!r}",
        )

    @property
    def states(self) -> tuple[StateSpec, ...]:
        specs = [spec.within("decoder") for spec in self.decoder.states]
        k = self.output_index
        specs[k] = replace(specs[k], previous="hidden_t_external_prev", new="hidden_t_external")
        context = "attention_weighted_encoder_context"
        specs.append(
            StateSpec(
                previous=context + "_t_prev",
                new=context,
                initial="initial_" + context,
                size=self.encoder.size,
            )
        )
        if self.kind == "coverage":
            specs.append(StateSpec("coverage_t_prev", "coverage_t", "initial_coverage", 0))
        return tuple(specs)

    @property
    def output_index(self) -> int:
        return self.decoder.output_index

    @property
    def _context_index(self) -> int:
        return len(self.decoder.states)

    @property
    def _masks(self) -> bool:
        return self.encoder.lengths is not None and self.encoder.mask_padding

    @property
    def recompute(self) -> Names:
        names = [f"decoder/{name}" for name in self.decoder.recompute]
        if self.memory_optimization and self.kind != "dot":
            names.insert(0, "decoder_hidden_encoder_outputs_sum")
        return tuple(names)

    def prepare_input(self, b: NetBuilder, x: str) -> str:
        with b.scope("decoder"):
            return self.decoder.prepare_input(b, x)

    def before_loop(self, b: NetBuilder, x: str) -> None:
        enc = self.encoder
        size = self.encoder.size
        outputs = enc.outputs
        if self._masks:
            outputs = without_padding(b, outputs, enc.lengths, "encoder_outputs")
            if enc.weighted is not None:
                without_padding(b, enc.weighted, enc.lengths, "weighted_encoder_outputs")
        if self.kind == "coverage":
            fully_connected(b, outputs, "coverage_weights", size, size)
        b.op("Transpose", [outputs], "encoder_outputs_transposed", axes=(1, 2, 0))
        if self.kind != "dot" and enc.weighted is None:
            fully_connected(b, outputs, "weighted_encoder_outputs", size, size)
        with b.scope("decoder"):
            self.decoder.before_loop(b, x)

    def step(self, b: NetBuilder, at: StepInputs, previous: Sequence[str]) -> list[str]:
        k = self._context_index
        context = previous[k]
        with b.scope("decoder"):
            new = self.decoder.step(
                b, replace(at, extra=((context, self.encoder.size),)), previous[:k]
            )
            hidden = self.decoder.output(b, new)
        scores = (
            self._dot_scores(b, hidden)
            if self.kind == "dot"
            else self._additive_scores(b, hidden, previous)
        )
        more = self._attend(b, scores, previous)
        new[self.output_index] = b.op("Copy", [new[self.output_index]], "hidden_t_external")
        return [*new, *more]

    def output(self, b: NetBuilder, new: Sequence[str]) -> str:
        return self._with_context(
            b, new[self.output_index], new[self._context_index], "state_and_context"
        )

    def output_sequence(self, b: NetBuilder, states: Sequence[RecurrentState]) -> str:
        with b.scope("decoder"):
            hidden = self.decoder.output_sequence(b, states[: self._context_index])
        return self._with_context(b, hidden, states[self._context_index].all, "states_and_context")

    def _with_context(self, b: NetBuilder, hidden: str, context: str, name: str) -> str:
        names = [f"{name}_combination", f"_{name}_combination_concat_dims"]
        return b.op("Concat", [hidden, context], names, axis=2)[0]

    def _attend(self, b: NetBuilder, scores: str, previous: Sequence[str]) -> list[str]:
        """Scores [N, S, 1] -> the context [1, N, E], and for coverage attention the coverage [1, N, S]."""
        lengths = self.encoder.lengths
        masks = self._masks
        if lengths is not None:
            fill = {"fill_val": MASKED} if masks else {}
            scores = b.op(
                "SequenceMask",
                [scores, lengths],
                "masked_attention_logits",
                mode="sequence",
                **fill,
            )
        weights = b.op(
            "Softmax", [scores], "attention_shares_3d" if masks else "attention_weights_3d", axis=1
        )
        if masks:  # a sequence of length 0 has equal weights on padding
            weights = b.op(
                "SequenceMask",
                [weights, lengths],
                "attention_weights_3d",
                mode="sequence",
                fill_val=0.0,
            )
        names = [
            "attention_weighted_encoder_context",
            "attention_weighted_encoder_context_old_shape",
        ]
        outputs = b.scoped("encoder_outputs_transposed")
        context = b.op("BatchMatMul", [outputs, weights], names[0])  # [N, E, 1]
        context, _ = b.op("Reshape", [context], names, shape=(1, -1, self.encoder.size))
        if self.kind != "coverage":
            return [context]
        flat = b.op("Squeeze", [weights], "attention_weights_2d", dims=[2])  # [N, S]
        return [context, b.op("Add", [previous[-1], flat], "coverage_t", broadcast=1)]

    def _weighted(self, b: NetBuilder) -> str:
        """W_e outputs [S, N, E], made before the loop."""
        if self.encoder.weighted is None:
            return b.scoped("weighted_encoder_outputs")
        return b.scoped("weighted_encoder_outputs_masked") if self._masks else self.encoder.weighted

    def _query(self, b: NetBuilder, blob: str, name: str, size: int) -> str:
        """W blob, [N, E]."""
        projected = fully_connected(b, blob, name, size, self.encoder.size)
        return b.op("Squeeze", [projected], name, dims=[0])

    @property
    def _hidden_size(self) -> int:
        return self.decoder.states[self.output_index].size

    def _additive_scores(self, b: NetBuilder, hidden: str, previous: Sequence[str]) -> str:
        """The scores [N, S, 1] of all kinds but dot."""
        name = "decoder_hidden_encoder_outputs_sum"
        if self.kind == "recurrent":
            context = previous[self._context_index]
            of_context = self._query(
                b, context, "weighted_prev_attention_context", self.encoder.size
            )
        query = self._query(b, hidden, "weighted_decoder_hidden_state", self._hidden_size)
        if self.kind == "recurrent":
            query = b.op("Add", [of_context, query], name + "_tmp")
        blobs = [self._weighted(b), query]
        if self.kind == "coverage":
            both = b.op("Add", blobs, name + "_tmp", broadcast=1)
            coverage = b.op("Squeeze", [previous[-1]], "coverage_t_prev_2d", dims=[0])
            coverage = b.op("Transpose", [coverage], "coverage_t_prev_transposed")  # [S, N]
            weights = [b.scoped("coverage_weights"), coverage]
            scaled = b.op("Mul", weights, "scaled_coverage_weights", broadcast=1, axis=0)
            sums = b.op("Add", [both, scaled], name)
        else:
            sums = b.op("Add", blobs, name, broadcast=1)
        activated = b.op("Tanh", [sums], name)
        # [S, N, 1]
        scores = fully_connected(
            b, activated, "attention_logits", self.encoder.size, 1, freeze_bias=1
        )
        return b.op("Transpose", [scores], "attention_logits_transposed", axes=(1, 0, 2))

    def _dot_scores(self, b: NetBuilder, hidden: str) -> str:
        if self._hidden_size != self.encoder.size:
            name = "weighted_decoder_hidden_state"
            hidden = fully_connected(b, hidden, name, self._hidden_size, self.encoder.size)
        query = b.op("Squeeze", [hidden], "squeezed_weighted_decoder_hidden_state", dims=[0])
        # [N, E, 1]
        query = b.op("ExpandDims", [query], "squeezed_weighted_decoder_hidden_state", dims=[2])
        outputs = b.scoped("encoder_outputs_transposed")
        return b.op("BatchMatMul", [outputs, query], "attention_logits", trans_a=1)

    def initial_coverage(self, b: NetBuilder) -> str:
        """A coverage of zeros [S]."""
        shape = b.op("Shape", [self.encoder.outputs], "encoder_outputs_shape")
        steps = b.op("Slice", [shape], "encoder_steps", starts=[0], ends=[1])
        return b.op("ConstantFill", [steps], "initial_coverage", value=0.0, input_as_shape=1)
