"""Whole recurrent layers, one or several, as functions that append to a net. Their results are named.

Shapes: T time, N batch, D input, H hidden, S encoder steps, E encoder features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace

from ..builder import NetBuilder
from ..errors import NetError
from ..recurrent import RecurrentState
from .attention import AttentionCell, Encoder
from .base import Cell, run_cell
from .basic import BasicRNNCell
from .gru import GRUCell
from .lstm import LayerNormLSTMCell, LayerNormMILSTMCell, LSTMCell, LSTMFamily, MILSTMCell
from .options import BasicRNNOptions, GRUOptions, LayerOptions, LSTMOptions
from .stack import StackedCell


@dataclass(frozen=True)
class _Named:
    """Iterates over its blobs in the order of its fields, which is Caffe2's."""

    def __iter__(self) -> Iterator[str]:
        return (value for f in fields(self) if isinstance(value := getattr(self, f.name), str))


@dataclass(frozen=True)
class HiddenLayer(_Named):
    """Blobs of one layer: states after every step [T, N, H], and after the last one [1, N, H]."""

    hidden_all: str
    hidden_last: str


@dataclass(frozen=True)
class HiddenOutputs(HiddenLayer):
    """The blobs of the top layer, and those of all `layers`, the lowest first."""

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
    """The blobs of the top layer, and those of all `layers`, the lowest first."""

    layers: tuple[LSTMLayer, ...]


@dataclass(frozen=True)
class AttentionOutputs(_Named):
    """The decoder's states, the context [T, N, E] and, of coverage attention, the coverage [T, N, S].

    combined: the hidden states with the contexts beside them, [T, N, H + E].
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

    def __iter__(self) -> Iterator[str]:
        return (blob for blob in super().__iter__() if blob != self.combined)


def run_layers(
    make_cell: Callable[[int, int], Cell],
    b: NetBuilder,
    x: str,
    lengths: str | None,
    initial_states: Sequence[str] | None,
    dim_in: int,
    dim_out: int | Sequence[int],
    scope: str,
    options: LayerOptions,
) -> list[list[str]]:
    """Runs one cell, or a stack of them where `dim_out` is a list: the blobs of each layer's states, all and last in turn.

    `make_cell` makes the cell of a layer from the sizes of its input and of its state. The rest is described at LSTM.
    """
    sizes = [dim_out] if isinstance(dim_out, int) else list(dim_out)
    if not sizes:
        raise NetError(f"recurrent layers {scope!r}: dim_out is empty; give at least one size")
    cells = tuple(make_cell(size_in, size) for size_in, size in zip([dim_in, *sizes], sizes))
    count = len(cells[0].states)
    run = run_cell(
        cells[0] if isinstance(dim_out, int) else StackedCell(cells),
        b,
        x,
        lengths,
        initial_states,
        scope=scope,
        options=options.run_options(2 * count * (len(cells) - 1)),
    )
    return [_blobs(run.states[k : k + count]) for k in range(0, len(run.states), count)]


def _blobs(states: Sequence[RecurrentState]) -> list[str]:
    return [blob for s in states for blob in (s.all, s.last)]


def _lstm(cell: type[LSTMFamily], b, x, lengths, initial_states, dim_in, dim_out, scope, options) -> LSTMOutputs:
    made = run_layers(lambda d, h: cell(d, h, options), b, x, lengths, initial_states, dim_in, dim_out, scope, options)
    layers = tuple(LSTMLayer(*blobs) for blobs in made)
    return LSTMOutputs(**asdict(layers[-1]), layers=layers)


def LSTM(
    b: NetBuilder,
    x: str,
    lengths: str | None,
    initial_states: Sequence[str] | None,
    dim_in: int,
    dim_out: int | Sequence[int],
    scope: str,
    options: LSTMOptions = LSTMOptions(),
) -> LSTMOutputs:
    """An LSTM over the sequence `x`, of one layer or of several.

    Args:
        b: the net to append to.
        x: float [T, N, dim_in].
        lengths: int32 [N], how many steps of each sequence are valid; None where all are.
        initial_states: blobs of the hidden and the cell state of each layer in turn, [H], [N, H] or [1, N, H]; None for
            learned ones, which start at zero.
        dim_in: features of the input.
        dim_out: hidden size, or one for each layer.
        scope: the name under which all blobs and parameters stand.
        options: see LSTMOptions.

    Returns:
        The names of the outputs.

    Raises:
        NetError: for another number of initial states than layers need.

    >>> import jrnn
    >>> b = NetBuilder("net")
    >>> out = LSTM(b, b.input("x"), b.input("lengths"), None, 3, [8, 4], "lstm")
    >>> out.hidden_all, list(b.params)[:3]
    ('lstm/layer_1/hidden_state_all', ['lstm/layer_0/initial_hidden_state', 'lstm/layer_0/initial_cell_state', \
'lstm/layer_1/initial_hidden_state'])
    """
    return _lstm(LSTMCell, b, x, lengths, initial_states, dim_in, dim_out, scope, options)


def LayerNormLSTM(
    b: NetBuilder,
    x: str,
    lengths: str | None,
    initial_states: Sequence[str] | None,
    dim_in: int,
    dim_out: int | Sequence[int],
    scope: str,
    options: LSTMOptions = LSTMOptions(),
) -> LSTMOutputs:
    """An LSTM whose gates are normalized, see LayerNormLSTMCell; everything else is as with LSTM."""
    return _lstm(LayerNormLSTMCell, b, x, lengths, initial_states, dim_in, dim_out, scope, options)


def MILSTM(
    b: NetBuilder,
    x: str,
    lengths: str | None,
    initial_states: Sequence[str] | None,
    dim_in: int,
    dim_out: int | Sequence[int],
    scope: str,
    options: LSTMOptions = LSTMOptions(),
) -> LSTMOutputs:
    """An LSTM with multiplicative integration, see MILSTMCell; everything else is as with LSTM."""
    return _lstm(MILSTMCell, b, x, lengths, initial_states, dim_in, dim_out, scope, options)


def LayerNormMILSTM(
    b: NetBuilder,
    x: str,
    lengths: str | None,
    initial_states: Sequence[str] | None,
    dim_in: int,
    dim_out: int | Sequence[int],
    scope: str,
    options: LSTMOptions = LSTMOptions(),
) -> LSTMOutputs:
    """An LSTM with normalized multiplicative integration, see LayerNormMILSTMCell; everything else is as with LSTM."""
    return _lstm(LayerNormMILSTMCell, b, x, lengths, initial_states, dim_in, dim_out, scope, options)


def _hidden(made: list[list[str]]) -> HiddenOutputs:
    layers = tuple(HiddenLayer(*blobs) for blobs in made)
    return HiddenOutputs(**asdict(layers[-1]), layers=layers)


def GRU(
    b: NetBuilder,
    x: str,
    lengths: str | None,
    initial_states: Sequence[str] | None,
    dim_in: int,
    dim_out: int | Sequence[int],
    scope: str,
    options: GRUOptions = GRUOptions(),
) -> HiddenOutputs:
    """A GRU, of one layer or of several; a layer has one initial state, everything else is as with LSTM."""

    def cell(size_in: int, size: int) -> Cell:
        return GRUCell(size_in, size, options)

    return _hidden(run_layers(cell, b, x, lengths, initial_states, dim_in, dim_out, scope, options))


def BasicRNN(
    b: NetBuilder,
    x: str,
    lengths: str | None,
    initial_states: Sequence[str] | None,
    dim_in: int,
    dim_out: int | Sequence[int],
    scope: str,
    options: BasicRNNOptions = BasicRNNOptions(),
) -> HiddenOutputs:
    """A basic recurrent network; a layer has one initial state, everything else is as with LSTM."""

    def cell(size_in: int, size: int) -> Cell:
        return BasicRNNCell(size_in, size, options)

    return _hidden(run_layers(cell, b, x, lengths, initial_states, dim_in, dim_out, scope, options))


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
        options: outputs_with_grads is that of the top layer; of the others, the outputs that a layer above reads.

    The other arguments and the result are as with LSTM.
    """
    chained = initial_states is not None and len(initial_states) == 2
    if initial_states is not None and len(initial_states) not in (2, 2 * len(dim_out)):
        raise NetError(
            f"layered LSTM {scope!r} takes 2 initial states or {2 * len(dim_out)}, was given {len(initial_states)}"
        )
    layers: list[LSTMLayer] = []
    top = len(dim_out) - 1
    for k, (size_in, size) in enumerate(zip([dim_in, *dim_out], dim_out)):
        states = initial_states
        if chained and k:
            states = (layers[-1].hidden_last, layers[-1].cell_last)
        elif initial_states is not None:
            states = initial_states[2 * k : 2 * k + 2]
        read = options.outputs_with_grads if k == top else (0, 1, 3) if chained else (0,)
        made = run_layers(
            lambda d, h: LSTMCell(d, h, options),
            b,
            x,
            lengths,
            states,
            size_in,
            size,
            f"{scope}_layer_{k}" if k else scope,
            replace(options, outputs_with_grads=read),
        )
        layers.append(LSTMLayer(*made[0]))
        x = layers[-1].hidden_all
    return LSTMOutputs(**asdict(layers[-1]), layers=tuple(layers))


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(LayerOptions):
    """kind: see AttentionCell. forget_bias, memory_optimization: of the LSTM, see LSTMOptions.

    attention_memory_optimization: see AttentionCell. outputs_with_grads: of the outputs as they iterate; by default the
    hidden states and the contexts over time. The rest is in LayerOptions.
    """

    kind: str = "regular"
    forget_bias: float = 0.0
    memory_optimization: bool = False
    attention_memory_optimization: bool = False
    outputs_with_grads: tuple[int, ...] = (0, 4)


def _with_attention(
    cell: type[LSTMFamily], b, x, lengths, initial_states, dim_in, dim_out, encoder: Encoder, scope, options
) -> AttentionOutputs:
    lstm = LSTMOptions(
        forget_bias=options.forget_bias,
        memory_optimization=options.memory_optimization,
        drop_states=options.drop_states,
    )
    attention = AttentionCell(cell(dim_in, dim_out, lstm), encoder, options.kind, options.attention_memory_optimization)
    specs = [s for s in attention.states if s.size]
    with b.scope(scope):
        if initial_states is None:
            initial_states = [b.param(s.initial, [s.size], "ConstantFill", value=0.0) for s in specs]
        coverage = [attention.initial_coverage(b)] if options.kind == "coverage" else []
    states = [*initial_states, *coverage]
    run = run_cell(attention, b, x, lengths, states, scope=scope, options=options.run_options(0))
    blobs = _blobs(run.states)
    coverage_all, coverage_last = blobs[6:] or (None, None)
    return AttentionOutputs(*blobs[:6], coverage_all, coverage_last, run.output)


def LSTMWithAttention(
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
    """An LSTM decoder over `x` that attends to an encoder.

    Args:
        b: the net to append to.
        x: float [T, N, dim_in], the decoder's inputs.
        lengths: int32 [N], how many decoder steps are valid; None where all are.
        initial_states: blobs of the hidden state, the cell state and the context; None for learned ones, which start at
            zero. A coverage starts at zero.
        dim_in: features of the input.
        dim_out: the decoder's hidden size.
        encoder: what is attended to.
        scope: the name under which all blobs and parameters stand.
        options: see AttentionOptions.

    >>> b = NetBuilder("net")
    >>> encoder = Encoder(b.input("encoder_outputs"), 4, b.input("encoder_lengths"))
    >>> out = LSTMWithAttention(b, b.input("x"), None, None, 3, 8, encoder, "attend")
    >>> out.context_all, len(list(out)), out.combined
    ('attend/attention_weighted_encoder_context_all', 6, 'attend/states_and_context_combination')
    """
    return _with_attention(LSTMCell, b, x, lengths, initial_states, dim_in, dim_out, encoder, scope, options)


def MILSTMWithAttention(
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
    """An MILSTM decoder that attends to an encoder; everything is as with LSTMWithAttention."""
    return _with_attention(MILSTMCell, b, x, lengths, initial_states, dim_in, dim_out, encoder, scope, options)
