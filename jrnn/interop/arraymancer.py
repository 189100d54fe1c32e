"""Weights of Arraymancer's stacked GRU (`jrnn.nn.stacked_gru`), to and from those of `jrnn.nn.GRU`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jrnn.errors import ConversionError
from jrnn.interop.cells import Cell, Params, from_system, suffixes, to_system
from jrnn.nn.stacked_gru import Weights


def from_arraymancer(weights: Weights) -> Params:
    """PyTorch's parameters of a stacked GRU.

    >>> shapes = Weights((6, 3), (1, 6, 2), (2, 6, 2), (2, 1, 6), (2, 1, 6))
    >>> params = from_arraymancer(Weights(*map(np.ones, shapes)))
    >>> params["weight_ih_l0"].shape, params["weight_ih_l1"].shape, params["bias_hh_l1"].shape
    ((6, 3), (6, 2), (6,))
    """
    params: Params = {}
    for layer in range(len(weights.U3s)):
        W3, U3, bW3, bU3 = (np.asarray(array) for array in weights.layer(layer))
        params |= from_system("arraymancer", "GRU", Cell(W3, U3, bW3[0], bU3[0]), f"_l{layer}")
    return params


def to_arraymancer(params: Mapping[str, Any]) -> Weights:
    """The stacked GRU's weights from PyTorch's parameters; missing biases become zeros.

    Raises:
        ConversionError: a reverse direction, which the stacked GRU lacks.
    """
    found = suffixes(params)
    if any(suffix.endswith("_reverse") for suffix in found):
        raise ConversionError("arraymancer GRU: it has one direction, but these parameters have two")
    cells = [to_system("arraymancer", "GRU", params, suffix) for suffix in found]
    zeros = np.zeros(cells[0].weight_hh.shape[0], cells[0].weight_hh.dtype)
    rest = [cell.weight_ih for cell in cells[1:]]
    return Weights(
        W3s0=cells[0].weight_ih,
        W3sN=np.stack(rest) if rest else np.zeros((0, *cells[0].weight_hh.shape), zeros.dtype),
        U3s=np.stack([cell.weight_hh for cell in cells]),
        bW3s=np.stack([zeros if cell.bias_ih is None else cell.bias_ih for cell in cells])[:, None],
        bU3s=np.stack([zeros if cell.bias_hh is None else cell.bias_hh for cell in cells])[:, None],
    )
