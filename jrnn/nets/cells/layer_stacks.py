"""Whole recurrent layers, as functions that append to a net and return the names of blobs.

Shapes: T time, N batch, D input, H hidden, S encoder steps, E encoder features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Generic, TypeVar

from jrnn.errors import NetError
from jrnn.files import plain
from jrnn.nets.builder import NetBuilder
from jrnn.nets.cells.affine import LRUCell, MinGRUCell, MinLSTMCell
from jrnn.nets.cells.attention_cell import AttentionCell, Encoder
from jrnn.nets.cells.base import run_cell
from jrnn.nets.cells.cell_options import CommonOptions, LSTMOptions
from jrnn.nets.cells.gru import BasicRNNCell, GRUCell
from jrnn.nets.cells.lstm import (
    LayerNormLSTMCell,
    LayerNormMILSTMCell,
    LSTMCell,
    LSTMFamily,
    MILSTMCell,
)
from jrnn.nets.cells.wrappers import StackedCell
from jrnn.nets.ir import Names, Values
from jrnn.nets.recurrent_networks import RecurrentState


@dataclass(frozen=True)
class _Named:
    """Iterates over its blobs in the order of its fields, which is Caffe2's order."""

    _made_of_others: ClassVar[Names] = ()  # fields that are left out

    def __iter__(self) -> Iterator[str]:
        for field in fields(self):
            blob = getattr(self, field.name)
            if isinstance(blob, str) and field.name not in self._made_of_others:
                yield blob


@dataclass(frozen=True)
class HiddenLayer(_Named):
    """Blobs of one layer: states after every step [T, N, H], and after the last one [1, N, H]."""

    hidden_all: str
    hidden_last: str


@dataclass(frozen=True)
class HiddenOutputs(HiddenLayer):
    """The blobs of the top layer, and the blobs of all `layers`, the lowest first."""

    layers: tuple[HiddenLayer, ...]


@dataclass(frozen=True)
class LSTMLayer(_Named):
    """Blobs of one layer: states after every step [T, N, H], and after the last one [1, N, H]."""

    hidden_all: str
    hidden_last: str
    cell_all: str
    cell_last: str


@dataclass(frozen=True)
class LSTMOutputs(LSTMLayer):
    """The blobs of the top layer, and the blobs of all `layers`, the lowest first."""

    layers: tuple[LSTMLayer, ...]


@dataclass(frozen=True)
class LRULayer(_Named):
    """Blobs of one layer: both parts of the state after every step [T, N, H], and after the last one [1, N, H]."""

    real_all: str
    real_last: str
    imaginary_all: str
    imaginary_last: str


@dataclass(frozen=True)
class LRUOutputs(LRULayer):
    """The blobs of the top layer and of all `layers`, the lowest first, and y of the top layer, [T, N, H]."""

    layers: tuple[LRULayer, ...]
    output: str

    _made_of_others = ("output",)


@dataclass(frozen=True)
class AttentionOutputs(_Named):
    """The names of a decoder's outputs.

    Attributes:
        hidden_all: the hidden states, [T, N, H]; `hidden_last` is [1, N, H]. `cell_all` and `cell_last` likewise.
        context_all: the contexts, [T, N, E].
        coverage_all: for coverage attention, the coverages [T, N, S]; else None.
        combined: the hidden states joined with the contexts, [T, N, H + E].
    """

    hidden_all: str
    hidden_last: str
    cell_all: str
    cell_last: str
    context_all: str
    context_last: str
    coverage_all: str | None
    coverage_last: str | None
    combined: str

    _made_of_others = ("combined",)


Outputs = TypeVar("Outputs", HiddenOutputs, LSTMOutputs, LRUOutputs)


@dataclass(frozen=True)
class Layers(Generic[Outputs]):
    """A kind of recurrent layer. `LSTM`, `GRU` and the others are called as functions that append layers to a net.

    Attributes:
        cell: the step of one layer.
        outputs: the record of the results; `layer` is the record of one layer.
    """

    cell: Any
    layer: type
    outputs: type[Outputs]

    @property
    def default_options(self) -> CommonOptions:
        """The options of the cell where none are given."""
        options: CommonOptions = self.cell.__dataclass_fields__["options"].default
        return options

    def __call__(
        self,
        b: NetBuilder,
        x: str,
        lengths: str | None,
        initial_states: Sequence[str] | None,
        dim_in: int,
        dim_out: int | Sequence[int],
        scope: str,
        options: CommonOptions | None = None,
    ) -> Outputs:
        """Appends a layer over the sequence `x`, or several.

        Args:
            b: the net to append to.
            x: float [T, N, dim_in].
            lengths: int32 [N], how many steps of each sequence are valid; None where all are.
            initial_states: blobs of the states of each layer in turn (of an LSTM, the hidden and the cell state), [H],
                [N, H] or [1, N, H]; None for learned ones, which start at zero.
            dim_in: features of the input.
            dim_out: hidden size, or one for each layer.
            scope: the scope of all blobs and parameters.
            options: see the options of the cell, such as LSTMOptions of LSTMCell.

        Returns:
            The names of the outputs.

        Raises:
            NetError: for another number of initial states than layers need, or options of another kind of cell.

        >>> b = NetBuilder("net")
        >>> out = LSTM(b, b.input("x"), b.input("lengths"), None, 3, [8, 4], "lstm")
        >>> out.hidden_all, list(b.params)[1:3]
        ('lstm/layer_1/hidden_state_all', ['lstm/layer_0/initial_cell_state', 'lstm/layer_1/initial_hidden_state'])
        >>> out.layers[0].hidden_all
        'lstm/layer_0/hidden_state_all'
        """
        options = self.default_options if options is None else options
        if type(options) is not type(self.default_options):
            raise NetError(
                f"recurrent layers {scope!r}: {self.cell.__name__} takes {type(self.default_options).__name__}, was given "
                f"{type(options).__name__}"
            )
        dim_in = plain(dim_in)
        dim_out = plain(dim_out)
        sizes = [dim_out] if isinstance(dim_out, int) else [plain(size) for size in dim_out]
        if not sizes:
            raise NetError(f"recurrent layers {scope!r}: dim_out is empty; give at least one size")
        cells = []
        for size_in, size in zip([dim_in, *sizes], sizes):
            cells.append(self.cell(size_in, size, options))
        count = len(cells[0].states)
        run = run_cell(
            cell=cells[0] if isinstance(dim_out, int) else StackedCell(tuple(cells)),
            b=b,
            x=x,
            lengths=lengths,
            initial_states=initial_states,
            scope=scope,
            options=options.run_options(len(cells), 2 * count),
        )

        layers = []
        for first in range(0, len(run.states), count):
            layers.append(self.layer(*_blobs(run.states[first : first + count])))
        results: Values = asdict(layers[-1])
        results["layers"] = tuple(layers)
        if self.outputs is LRUOutputs:
            results["output"] = run.output
        return self.outputs(**results)


def _blobs(states: Sequence[RecurrentState]) -> list[str]:
    """The outputs of states: all and last of each."""
    blobs: list[str] = []
    for state in states:
        blobs += (state.all, state.last)
    return blobs


BasicRNN = Layers(BasicRNNCell, HiddenLayer, HiddenOutputs)
GRU = Layers(GRUCell, HiddenLayer, HiddenOutputs)
MinGRU = Layers(MinGRUCell, HiddenLayer, HiddenOutputs)
MinLSTM = Layers(MinLSTMCell, HiddenLayer, HiddenOutputs)
LSTM = Layers(LSTMCell, LSTMLayer, LSTMOutputs)
LayerNormLSTM = Layers(LayerNormLSTMCell, LSTMLayer, LSTMOutputs)
MILSTM = Layers(MILSTMCell, LSTMLayer, LSTMOutputs)
LayerNormMILSTM = Layers(LayerNormMILSTMCell, LSTMLayer, LSTMOutputs)
LRU = Layers(LRUCell, LRULayer, LRUOutputs)


def layered_LSTM(
    b: NetBuilder,
    x: str,
    lengths: str | None,
    initial_states: Sequence[str] | None,
    dim_in: int,
    dim_out: Sequence[int],
    scope: str,
    options: LSTMOptions = LSTMOptions(),
) -> LSTMOutputs:
    """LSTM layers, each a recurrent network of its own, under the scopes `scope`, `scope_layer_1`, ...

    Args:
        initial_states: the hidden and the cell state of each layer in turn; None for learned ones. Where there are only
            two, each further layer starts from the last states of the one below, as in Caffe2: their sizes must be equal.
        options: in layers below the top one, outputs that a layer above reads pass gradients on, whatever
            outputs_with_grads says.

    The other arguments and the result are as with LSTM.
    """
    chained = initial_states is not None and len(initial_states) == 2
    if initial_states is not None and len(initial_states) not in (2, 2 * len(dim_out)):
        raise NetError(
            f"layered LSTM {scope!r} takes 2 or {2 * len(dim_out)} initial states, was given {len(initial_states)}"
        )
    layers: list[LSTMLayer] = []
    asked = options.run_options(len(dim_out), 4).outputs_with_grads
    for k, (size_in, size) in enumerate(zip([dim_in, *dim_out], dim_out)):
        states = initial_states
        if chained and k:
            states = (layers[-1].hidden_last, layers[-1].cell_last)
        elif initial_states is not None:
            states = initial_states[2 * k : 2 * k + 2]
        layer_options = options
        if asked is not None:
            read = {p - 4 * k for p in asked if p // 4 == k}
            if k < len(dim_out) - 1:
                read |= {0, 1, 3} if chained else {0}
            layer_options = replace(options, outputs_with_grads=tuple(sorted(read)))
        outputs = LSTM(
            b=b,
            x=x,
            lengths=lengths,
            initial_states=states,
            dim_in=size_in,
            dim_out=size,
            scope=f"{scope}_layer_{k}" if k else scope,
            options=layer_options,
        )
        layers += outputs.layers
        x = outputs.hidden_all
    return LSTMOutputs(**asdict(layers[-1]), layers=tuple(layers))


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(LSTMOptions):
    """Options of decoders with attention.

    Attributes:
        kind: "regular", "recurrent", "dot" or "coverage".
        attention_memory_optimization: compute the sums under the tanh of the attention again in the backward pass.
    """

    kind: str = "regular"
    attention_memory_optimization: bool = False


@dataclass(frozen=True)
class AttentionLayer:
    """A decoder that attends to an encoder: `LSTMWithAttention` and `MILSTMWithAttention` are called as functions.

    cell: the decoder's step.
    """

    cell: type[LSTMFamily]

    def __call__(
        self,
        b: NetBuilder,
        x: str,
        lengths: str | None,
        initial_states: Sequence[str] | None,
        dim_in: int,
        dim_out: int,
        encoder: Encoder,
        scope: str,
        options: AttentionOptions = AttentionOptions(),
    ) -> AttentionOutputs:
        """Appends a decoder over `x`.

        Args:
            b: the net to append to.
            x: float [T, N, dim_in], the decoder's inputs.
            lengths: int32 [N], how many decoder steps are valid; None where all are.
            initial_states: blobs of the hidden state, the cell state and the context; None for learned ones, which start
                at zero. A coverage starts at zero.
            dim_in: features of the input.
            dim_out: the decoder's hidden size.
            encoder: the sequence that the decoder attends to.
            scope: the scope of all blobs and parameters.
            options: see AttentionOptions.

        >>> b = NetBuilder("net")
        >>> encoder = Encoder(b.input("encoder_outputs"), 4, b.input("encoder_lengths"))
        >>> out = LSTMWithAttention(b, b.input("x"), None, None, 3, 8, encoder, "attend")
        >>> out.context_all, len(list(out)), out.combined
        ('attend/attention_weighted_encoder_context_all', 6, 'attend/states_and_context_combination')
        """
        cell = AttentionCell(
            decoder=self.cell(dim_in, dim_out, options),
            encoder=encoder,
            kind=options.kind,
            memory_optimization=options.attention_memory_optimization,
        )
        with b.scope(scope):
            if initial_states is None:
                initial_states = [spec.learned(b) for spec in cell.states if spec.size]
            states = list(initial_states)
            if options.kind == "coverage":
                states.append(cell.initial_coverage(b))
        run = run_cell(
            cell=cell,
            b=b,
            x=x,
            lengths=lengths,
            initial_states=states,
            scope=scope,
            options=options.run_options(1, 2 * len(cell.states)),
        )
        blobs = _blobs(run.states)
        coverage_all, coverage_last = blobs[6:] or (None, None)
        return AttentionOutputs(*blobs[:6], coverage_all, coverage_last, run.output)


LSTMWithAttention = AttentionLayer(LSTMCell)
MILSTMWithAttention = AttentionLayer(MILSTMCell)
