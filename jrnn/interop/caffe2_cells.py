"""Weights of the cells that Caffe2's rnn_cell and gru_cell build, by the names of their blobs.

Shapes: D input, H hidden.

In a scope S, a single-layer BasicRNN or LSTM has `S/i2h_w [G H, D]`, `S/i2h_b [G H]`, `S/gates_t_w [G H, H]` and
`S/gates_t_b [G H]`. A GRU also has `S/i2h_*`, and for its hidden products `S/reset_gate_t_*`, `S/update_gate_t_*` and
`S/output_gate_t_*`, each [H, H] and [H]. In a stack, the first layer's input product is still `S/i2h_*`; everything else of
layer k is under `S/layer_k`.
"""

from __future__ import annotations

import numpy as np

from jrnn.errors import ConversionError, check_known
from jrnn.interop.cell_weights import (
    CellArrays,
    Params,
    Weights,
    from_system,
    one_direction,
    other_gru,
    to_system,
)
from jrnn.nn.conventions import convention

_GRU_BLOBS = {"r": "reset_gate_t", "z": "update_gate_t", "n": "output_gate_t"}


def from_caffe2(
    kind: str,
    blobs: Weights,
    scope: str,
    *,
    num_layers: int = 1,
    forget_bias: float = 0.0,
    linear_before_reset: bool = False,
) -> Params:
    """Converts a Caffe2 cell, or a stack of cells, to PyTorch's parameters.

    Args:
        kind: "RNN" (BasicRNN), "LSTM" or "GRU".
        blobs: arrays by the names of their blobs; other blobs are ignored.
        scope: S, such as "lstm".
        num_layers: the number of layers in S.
        forget_bias: the LSTM's argument, which its net adds to the forget gate; it is added to `bias_ih`.
        linear_before_reset: the GRU's argument; without it, the GRU is not the same function as PyTorch's.

    Raises:
        ConversionError: for a missing blob or a wrong shape, or a GRU without `linear_before_reset`.

    >>> shapes = {"i2h_w": (8, 3), "i2h_b": (8,), "gates_t_w": (8, 2), "gates_t_b": (8,)}
    >>> blobs = {f"lstm/{name}": np.ones(shape) for name, shape in shapes.items()}
    >>> from_caffe2("LSTM", blobs, "lstm", forget_bias=1.0)["bias_ih_l0"].tolist()
    [1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    """
    if kind == "GRU" and not linear_before_reset:
        raise other_gru("caffe2", "without linear_before_reset", "linear_before_reset=True")
    order = convention("caffe2", kind).order
    if num_layers < 1:
        raise ConversionError(f"caffe2 {kind}: num_layers is {num_layers}; it must be at least 1")
    params: Params = {}
    for layer in range(num_layers):
        names = _names(kind, scope, layer, num_layers)
        arrays = [_find(blobs, name, kind) for name in names]
        half = len(arrays) // 2
        weight_ih, *hidden = arrays[:half]
        bias_ih, *biases = arrays[half:]
        weight_hh = np.concatenate(hidden)
        if forget_bias:
            if kind != "LSTM":
                raise ConversionError(
                    f"caffe2 {kind}: forget_bias is {forget_bias}, but only an LSTM has one"
                )
            shift = np.zeros((len(order), weight_hh.shape[1]), bias_ih.dtype)
            shift[order.index("f")] = forget_bias
            bias_ih = bias_ih + shift.reshape(-1)
        cell = CellArrays(weight_ih, weight_hh, bias_ih, np.concatenate(biases))
        params |= from_system("caffe2", kind, cell, f"_l{layer}")
    return params


def to_caffe2(kind: str, params: Weights, scope: str) -> Params:
    """Converts PyTorch's parameters to the blobs of a Caffe2 cell, or stack of cells, with forget_bias 0.

    A GRU must be built with `linear_before_reset=True`. Missing biases become zeros, because Caffe2's cells have biases.

    Raises:
        ConversionError: for a reverse direction, a projection or layer normalization, which these cells lack.
    """
    suffixes = one_direction("caffe2", kind, params)
    blobs: Params = {}
    for layer, suffix in enumerate(suffixes):
        cell = to_system("caffe2", kind, params, suffix)
        bias_ih, bias_hh = cell.biases
        hidden = [(cell.weight_hh, bias_hh)]
        if kind == "GRU":
            hidden = list(zip(np.split(cell.weight_hh, 3), np.split(bias_hh, 3), strict=True))
        arrays = [cell.weight_ih, *(w for w, _ in hidden), bias_ih, *(b for _, b in hidden)]
        blobs |= dict(zip(_names(kind, scope, layer, len(suffixes)), arrays, strict=True))
    return blobs


def _names(kind: str, scope: str, layer: int, num_layers: int) -> list[str]:
    """Returns the blobs of a layer: the weights of the input and hidden products, then the biases in the same order."""
    inner = f"{scope}/layer_{layer}" if num_layers > 1 else scope
    order = convention("caffe2", kind).order
    hidden = [_GRU_BLOBS[gate] for gate in order] if kind == "GRU" else ["gates_t"]
    products = [f"{scope if layer == 0 else inner}/i2h", *(f"{inner}/{name}" for name in hidden)]
    weights = [f"{product}_w" for product in products]
    return weights + [f"{product}_b" for product in products]


def _find(blobs: Weights, name: str, kind: str) -> np.ndarray:
    check_known(name, blobs, ConversionError, f"caffe2 {kind}: the blob {name!r} is missing")
    return np.asarray(blobs[name])
