"""Models whose recurrent layers come from `jrnn.nets.cells`: one net from the input to the loss.

Shapes: T steps, B examples side by side, E embedding, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jrnn.nets import cells
from jrnn.nets.builder import NetBuilder
from jrnn.nets.cells.wrappers import WrappedCell
from jrnn.train.models.interface import DEFAULT, Compute, Embedding, LayersConfig, Signature
from jrnn.train.models.net import NetModel
from jrnn.train.toml_codec import require

LSTMS = {
    "lstm": cells.LSTMCell,
    "layer_norm_lstm": cells.LayerNormLSTMCell,
    "mi_lstm": cells.MILSTMCell,
    "layer_norm_mi_lstm": cells.LayerNormMILSTMCell,
}
# They have no product of the state with weights.
AFFINE = {"min_gru": cells.MinGRUCell, "min_lstm": cells.MinLSTMCell, "lru": cells.LRUCell}
OTHERS = {"gru": cells.GRUCell, "basic_rnn": cells.BasicRNNCell, **AFFINE}


@dataclass(frozen=True)
class CellsConfig(LayersConfig):
    """Recurrent layers of `jrnn.nets.cells` and an output layer: all of them operators of one net."""

    kind: Literal["cells"] = "cells"
    cell: Literal[
        "lstm", "layer_norm_lstm", "mi_lstm", "layer_norm_mi_lstm", "gru", "basic_rnn", "min_gru", "min_lstm", "lru",
    ] = "lstm"  # fmt: skip
    residual: bool = False  # from the second layer on, a layer's input is added to its output
    forget_bias: float = 1.0  # of the LSTMs, added to the forget gate before its sigmoid
    # of the hidden state inside the recurrent products, the same units at every step
    recurrent_dropout: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        rule = f"model.recurrent_dropout must be 0 for model.cell = {self.cell!r}, which has no recurrent products"
        require(not (self.recurrent_dropout and self.cell in AFFINE), rule, self.recurrent_dropout)


@dataclass(frozen=True)
class TokenCellsConfig(CellsConfig, Embedding):
    """Embedding -> recurrent layers of `jrnn.nets.cells` -> output layer: all of them operators of one net."""


def cells_model(config: CellsConfig, signature: Signature, compute: Compute = DEFAULT) -> NetModel:
    """Returns the model as one net: (Gather ->) layers -> FC -> loss.

    Blobs: the members of a batch, by their names -> `logits` or `values`, and `loss` []. If the state is carried, the
    states of layer k are the inputs `hidden_k` and `cell_k`, [1, B, H].
    """
    b = NetBuilder("model")
    inputs = b.input("tokens" if signature.tokens else "inputs")
    targets = b.input("targets")
    lengths = b.input("lengths") if signature.lengths else None
    if isinstance(config, Embedding):
        table = b.param("embedding", [signature.inputs, config.embedding], "GaussianFill", std=1.0)
        cell: cells.Cell = _stack(config, config.embedding)
        if signature.inputs < signature.tokens_of_a_batch and not config.embedding_dropout:
            x = inputs
            cell = TokensCell(cell, table)
        else:
            x = _dropout(b, b.Gather([table, inputs], "embedded"), config.embedding_dropout)
    else:
        x = inputs
        cell = _stack(config, signature.inputs)
    initial = _initial_states(b, config.layers, cell) if signature.carried else None
    # Tokens after the lengths are looked up like others: they hold no NaN that could spread.
    options = cells.RunOptions(mask_padding=not isinstance(cell, TokensCell))
    run = cells.run_cell(cell, b, x, lengths, initial, scope=config.cell, options=options)
    read = run.output if signature.every_step else _last_step(b, run.output)
    output = _output(b, _dropout(b, read, config.dropout), config.hidden, targets, signature)
    states = {}
    for first, state in zip(initial or (), run.states):
        states[first] = state.last, config.hidden
    fed = list(filter(None, (inputs, targets, lengths)))
    last = [name for name, _ in states.values()]
    return NetModel(
        net=b.build(outputs=["loss", *last]),
        init_net=b.build_init(),
        states=states,
        feeds=dict(zip(fed, fed)),
        compute=compute,
        output_blob=output,
        signature=signature,
        rebuild=lambda other: cells_model(config, other, compute),
    )


@dataclass(frozen=True)
class TokensCell(WrappedCell):
    """Takes tokens [T, B] instead of their embeddings, the rows of the parameter `table`.

    The part of `cell` that depends on the input alone is computed once for each row of the table, and looked up. This is
    less work if the table has fewer rows than a batch has tokens.
    """

    table: str

    def prepare_input(self, b: NetBuilder, x: str) -> str:
        in_turn = b.op("ExpandDims", [self.table], "tokens_in_turn", dims=[0])  # [1, tokens, E]
        rows = b.op("Squeeze", [super().prepare_input(b, in_turn)], "rows", dims=[0])
        tokens = b.op("FlattenToVec", [x], "flat_tokens")
        flat = b.op("Gather", [rows, tokens], "flat_rows", dense_gradient=1)
        rest = b.op("GivenTensorInt64Fill", [], "row_size", shape=[1], values=[-1])
        parts = [b.op("Shape", [x], "tokens_shape"), rest]
        shape, _ = b.op("Concat", parts, ["rows_shape", "rows_shape_parts"], axis=0)
        return b.op("Reshape", [flat, shape], ["looked_up", "flat_shape"])[0]


def _stack(config: CellsConfig, size_in: int) -> cells.StackedCell:
    stacked: list[cells.Cell] = []
    for k in range(config.layers):
        size = config.hidden if k else size_in
        if config.cell in LSTMS:
            options = cells.LSTMOptions(forget_bias=config.forget_bias)
            cell: cells.Cell = LSTMS[config.cell](size, config.hidden, options)
        else:
            cell = OTHERS[config.cell](size, config.hidden)
        if config.recurrent_dropout:
            cell = cells.RecurrentDropoutCell(cell, config.recurrent_dropout)
        between = config.layer_dropout and k < config.layers - 1
        stacked.append(cells.DropoutCell(cell, config.layer_dropout) if between else cell)
    residual = range(1, config.layers) if config.residual else ()
    return cells.StackedCell(tuple(stacked), tuple(residual))


def _initial_states(b: NetBuilder, layers: int, cell: cells.Cell) -> list[str]:
    """Declares inputs for the states of all layers: hidden_0, cell_0, hidden_1, ..."""
    of_a_layer = len(cell.states) // layers
    inputs = []
    for k, state in enumerate(cell.states):
        kind = state.previous.rpartition("/")[2].partition("_")[0]
        inputs.append(b.input(f"{kind}_{k // of_a_layer}"))
    return inputs


def _dropout(b: NetBuilder, blob: str, ratio: float) -> str:
    if not ratio:
        return blob
    return b.Dropout([blob], [f"{blob}_dropped", f"{blob}_dropped_mask"], ratio=ratio, is_test=0)[0]


def _last_step(b: NetBuilder, sequence: str) -> str:
    """[T, B, H] -> [B, H]; a sequence that ends earlier keeps its state until the last step."""
    last = b.Slice([sequence], "last_step", starts=[-2, 0, 0], ends=[-1, -1, -1])
    return b.Squeeze([last], "last_output", dims=[0])


def _output(b: NetBuilder, x: str, size: int, targets: str, signature: Signature) -> str:
    """Adds the output layer and the loss; returns the blob of logits or values."""
    w = b.param("output_w", [signature.outputs, size])
    bias = b.param("output_b", [signature.outputs], "ConstantFill", value=0.0)
    axis = 2 if signature.every_step else 1
    if signature.loss == "cross_entropy":
        output = b.FC([x, w, bias], "logits", axis=axis)
        b.SoftmaxWithLoss([output, targets], ["probabilities", "loss"], axis=axis)
    else:
        output = b.FC([x, w, bias], "values", axis=axis)
        b.AveragedLoss(b.Sqr(b.Sub([output, targets], "error"), "squared_error"), "loss")
    return output
