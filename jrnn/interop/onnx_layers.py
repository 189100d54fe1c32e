"""Weights of ONNX's RNN, LSTM and GRU operators: the tensors W, R and B.

Shapes: D input, H hidden, G gates, K directions. W is [K, G H, D], R [K, G H, H], B [K, 2 G H]: the input's bias, then the
hidden one's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jrnn.errors import ConversionError
from jrnn.interop.cells import CellArrays, Params, from_system, suffixes_of_layer, to_system
from jrnn.interop.gates import other_gru


def from_onnx_arrays(
    kind: str, W: Any, R: Any, B: Any = None, *, layer: int = 0, linear_before_reset: bool = False
) -> Params:
    """Converts one ONNX operator's arrays to PyTorch's parameters.

    Args:
        kind: "RNN", "LSTM" or "GRU".
        W, R, B: the operator's second, third and fourth input; B may be None.
        layer: which layer of the stack they become.
        linear_before_reset: the GRU's attribute; PyTorch's GRU has it set.

    Raises:
        ConversionError: wrong shapes, or a GRU without `linear_before_reset`.
    """
    if kind == "GRU" and not linear_before_reset:
        raise other_gru("onnx", "without linear_before_reset", "linear_before_reset=1")
    W, R, B = np.asarray(W), np.asarray(R), None if B is None else np.asarray(B)
    if W.ndim != 3 or R.ndim != 3 or W.shape[0] not in (1, 2) or R.shape[0] != W.shape[0]:
        raise ConversionError(
            f"onnx {kind}: W is {list(W.shape)} and R {list(R.shape)}; their first axis is directions"
        )
    if B is not None and B.shape != (W.shape[0], 2 * W.shape[1]):
        raise ConversionError(f"onnx {kind}: B is {list(B.shape)} but must be {[W.shape[0], 2 * W.shape[1]]}")
    params: Params = {}
    for k, way in enumerate(("", "_reverse")[: W.shape[0]]):
        biases = (None, None) if B is None else np.split(B[k], 2)
        params |= from_system("onnx", kind, CellArrays(W[k], R[k], *biases), f"_l{layer}{way}")
    return params


def to_onnx_arrays(
    kind: str, params: Mapping[str, Any], *, layer: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """W, R and B of one layer of a stack. A GRU's operator must have `linear_before_reset=1`."""
    cells = [to_system("onnx", kind, params, suffix) for suffix in suffixes_of_layer("onnx", kind, params, layer)]
    biases = None
    if cells[0].bias_ih is not None:
        biases = np.stack([np.concatenate([cell.bias_ih, cell.bias_hh]) for cell in cells])
    return np.stack([cell.weight_ih for cell in cells]), np.stack([cell.weight_hh for cell in cells]), biases
