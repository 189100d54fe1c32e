"""Weights of Keras' SimpleRNN, LSTM and GRU layers, as `layer.get_weights()` lists them.

Shapes: D input, H hidden, G gates.

A layer's list is [kernel [D, G H], recurrent_kernel [H, G H], bias]; a Bidirectional layer's is the forward one's list
followed by the backward one's. The bias is [G H], but [2, 3H] for a GRU with `reset_after=True`, the only one that is the
same function as PyTorch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrnn.errors import ConversionError
from jrnn.interop.cells import CellArrays, Params, from_system, suffixes_of_layer, to_system
from jrnn.interop.gates import other_gru


def from_keras(
    kind: str, weights: Sequence[Any], *, layer: int = 0, bidirectional: bool = False, use_bias: bool = True
) -> Params:
    """Converts one Keras layer to PyTorch's parameters.

    Args:
        kind: "RNN" (SimpleRNN), "LSTM" or "GRU".
        weights: `layer.get_weights()`.
        layer: which layer of the stack they become.
        bidirectional: whether the list is a Bidirectional layer's.
        use_bias: whether the layer has biases.

    Raises:
        ConversionError: a list of another length, wrong shapes, or a GRU with `reset_after=False`.

    >>> params = from_keras("GRU", [np.ones((3, 12)), np.ones((4, 12)), np.zeros((2, 12))])
    >>> sorted(params)
    ['bias_hh_l0', 'bias_ih_l0', 'weight_hh_l0', 'weight_ih_l0']
    """
    each = 3 if use_bias else 2
    ways = ("", "_reverse") if bidirectional else ("",)
    arrays = [np.asarray(weight) for weight in weights]
    if len(arrays) != each * len(ways):
        raise ConversionError(
            f"keras {kind}: there are {len(arrays)} weights, but use_bias={use_bias}, bidirectional={bidirectional} has "
            f"{each * len(ways)}"
        )
    params: Params = {}
    for k, way in enumerate(ways):
        cell = _split_bias(kind, *arrays[k * each : (k + 1) * each])
        params |= from_system("keras", kind, cell, f"_l{layer}{way}")
    return params


def to_keras(kind: str, params: Mapping[str, Any], *, layer: int = 0) -> list[np.ndarray]:
    """The list for `layer.set_weights(...)` of one layer of a stack; both directions' lists where it has two."""
    weights: list[np.ndarray] = []
    for suffix in suffixes_of_layer("keras", kind, params, layer):
        cell = to_system("keras", kind, params, suffix)
        weights += [cell.weight_ih, cell.weight_hh]
        if cell.bias_ih is not None:
            weights.append(cell.bias_ih if cell.bias_hh is None else np.stack([cell.bias_ih, cell.bias_hh]))
    return weights


def _split_bias(kind: str, kernel: np.ndarray, recurrent: np.ndarray, bias: np.ndarray | None = None) -> CellArrays:
    if kind != "GRU" or bias is None:
        return CellArrays(kernel, recurrent, bias)
    if bias.ndim != 2 or bias.shape[0] != 2:
        given = f"the bias is {list(bias.shape)}, so reset_after is False:"
        raise other_gru("keras", given, "reset_after=True, with a bias [2, 3H],")
    return CellArrays(kernel, recurrent, bias[0], bias[1])
