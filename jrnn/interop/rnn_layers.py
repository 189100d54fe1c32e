"""Weights of Keras' layers, ONNX's operators and Arraymancer's stacked GRU (`jrnn.nn.stacked_gru`).

Shapes: D input, H hidden, G gates, K directions.

Keras: `layer.get_weights()` of a SimpleRNN, LSTM or GRU is [kernel [D, G H], recurrent_kernel [H, G H], bias]; of a
Bidirectional layer, it is the forward list followed by the backward list. The bias is [G H], but [2, 3H] for a GRU with
`reset_after=True`, the only GRU of Keras that is the same function as PyTorch's.

ONNX: the tensors of an RNN, LSTM or GRU are W [K, G H, D], R [K, G H, H] and B [K, 2 G H]: the input's bias, then the hidden
bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jrnn.errors import ConversionError
from jrnn.interop.cell_weights import (
    CellArrays,
    Params,
    Weights,
    from_system,
    one_direction,
    other_gru,
    suffixes_of_layer,
    to_system,
)
from jrnn.nn.stacked_gru import StackWeights


def from_keras(
    kind: str,
    weights: Sequence[Any],
    *,
    layer: int = 0,
    bidirectional: bool = False,
    use_bias: bool = True,
) -> Params:
    """Converts one Keras layer to PyTorch's parameters.

    Args:
        kind: "RNN" (SimpleRNN), "LSTM" or "GRU".
        weights: `layer.get_weights()`.
        layer: the index of the layer in the stack.
        bidirectional: whether the weights come from a Bidirectional layer.
        use_bias: whether the layer has biases.

    Raises:
        ConversionError: a list of another length, wrong shapes, or a GRU with `reset_after=False`.

    >>> params = from_keras("GRU", [np.ones((3, 12)), np.ones((4, 12)), np.zeros((2, 12))])
    >>> sorted(params)
    ['bias_hh_l0', 'bias_ih_l0', 'weight_hh_l0', 'weight_ih_l0']
    """
    each = 3 if use_bias else 2
    ways = ("", "_reverse") if bidirectional else ("",)
    arrays = list(map(np.asarray, weights))
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


def to_keras(kind: str, params: Weights, *, layer: int = 0) -> list[np.ndarray]:
    """Returns the list for `layer.set_weights(...)` of one layer of a stack, or the lists of both directions."""
    weights: list[np.ndarray] = []
    for suffix in suffixes_of_layer("keras", kind, params, layer):
        cell = to_system("keras", kind, params, suffix)
        weights += [cell.weight_ih, cell.weight_hh]
        if cell.bias_ih is not None:
            weights.append(
                cell.bias_ih if cell.bias_hh is None else np.stack([cell.bias_ih, cell.bias_hh])
            )
    return weights


def _split_bias(
    kind: str, kernel: np.ndarray, recurrent: np.ndarray, bias: np.ndarray | None = None
) -> CellArrays:
    if kind != "GRU" or bias is None:
        return CellArrays(kernel, recurrent, bias)
    if bias.ndim != 2 or bias.shape[0] != 2:
        given = f"the bias is {list(bias.shape)}, so reset_after is False:"
        raise other_gru("keras", given, "reset_after=True, with a bias [2, 3H],")
    return CellArrays(kernel, recurrent, bias[0], bias[1])


def from_onnx_arrays(
    kind: str, W: Any, R: Any, B: Any = None, *, layer: int = 0, linear_before_reset: bool = False
) -> Params:
    """Converts one ONNX operator's arrays to PyTorch's parameters.

    Args:
        kind: "RNN", "LSTM" or "GRU".
        W, R, B: the operator's second, third and fourth input; B may be None.
        layer: the index of the layer in the stack.
        linear_before_reset: the GRU's attribute; PyTorch's GRU has it set.

    Raises:
        ConversionError: wrong shapes, or a GRU without `linear_before_reset`.
    """
    if kind == "GRU" and not linear_before_reset:
        raise other_gru("onnx", "without linear_before_reset", "linear_before_reset=1")
    W = np.asarray(W)
    R = np.asarray(R)
    B = None if B is None else np.asarray(B)
    if W.ndim != 3 or R.ndim != 3 or W.shape[0] not in (1, 2) or R.shape[0] != W.shape[0]:
        raise ConversionError(
            f"onnx {kind}: W is {list(W.shape)}, R {list(R.shape)}; their first axis must be 1 or 2"
        )
    if B is not None and B.shape != (W.shape[0], 2 * W.shape[1]):
        raise ConversionError(
            f"onnx {kind}: B is {list(B.shape)} but must be {[W.shape[0], 2 * W.shape[1]]}"
        )
    params: Params = {}
    for k, way in enumerate(("", "_reverse")[: W.shape[0]]):
        biases = (None, None) if B is None else np.split(B[k], 2)
        params |= from_system("onnx", kind, CellArrays(W[k], R[k], *biases), f"_l{layer}{way}")
    return params


def to_onnx_arrays(
    kind: str, params: Weights, *, layer: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Returns W, R and B of one layer of a stack. A GRU's operator must have `linear_before_reset=1`."""
    cells = []
    for suffix in suffixes_of_layer("onnx", kind, params, layer):
        cells.append(to_system("onnx", kind, params, suffix))
    weights_ih, weights_hh, biases_ih, biases_hh = zip(*cells, strict=True)
    biases = None
    if biases_ih[0] is not None:
        biases = np.concatenate([np.stack(biases_ih), np.stack(biases_hh)], axis=1)
    return np.stack(weights_ih), np.stack(weights_hh), biases


def from_arraymancer(weights: StackWeights) -> Params:
    """Converts a stacked GRU to PyTorch's parameters.

    >>> shapes = StackWeights((6, 3), (1, 6, 2), (2, 6, 2), (2, 1, 6), (2, 1, 6))
    >>> params = from_arraymancer(StackWeights(*map(np.ones, shapes)))
    >>> params["weight_ih_l0"].shape, params["weight_ih_l1"].shape, params["bias_hh_l1"].shape
    ((6, 3), (6, 2), (6,))
    """
    params: Params = {}
    for layer in range(len(weights.U3s)):
        W3, U3, bW3, bU3 = map(np.asarray, weights.layer(layer))
        params |= from_system(
            "arraymancer", "GRU", CellArrays(W3, U3, bW3[0], bU3[0]), f"_l{layer}"
        )
    return params


def to_arraymancer(params: Weights) -> StackWeights:
    """Converts PyTorch's parameters to a stacked GRU's weights; missing biases become zeros.

    Raises:
        ConversionError: for a reverse direction, which the stacked GRU lacks.
    """
    suffixes = one_direction("arraymancer", "GRU", params)
    cells = []
    for suffix in suffixes:
        cells.append(to_system("arraymancer", "GRU", params, suffix))
    weights_ih, weights_hh, *_ = zip(*cells, strict=True)
    biases_ih, biases_hh = zip(*[cell.biases for cell in cells], strict=True)
    if len(cells) > 1:
        later = np.stack(weights_ih[1:])
    else:
        later = np.zeros_like(weights_hh[0], shape=(0, *weights_hh[0].shape))
    return StackWeights(
        W3s0=weights_ih[0],
        W3sN=later,
        U3s=np.stack(weights_hh),
        bW3s=np.stack(biases_ih)[:, None],
        bU3s=np.stack(biases_hh)[:, None],
    )
