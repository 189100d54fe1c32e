"""Weights of Arraymancer's stacked GRU (`jrnn.nn.stacked_gru`), to and from those of `jrnn.nn.GRU`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jrnn.interop.cells import CellArrays, Params, from_system, one_direction, to_system
from jrnn.nn.stacked_gru import Weights


def from_arraymancer(weights: Weights) -> Params:
    """Converts a stacked GRU to PyTorch's parameters.

    >>> shapes = Weights((6, 3), (1, 6, 2), (2, 6, 2), (2, 1, 6), (2, 1, 6))
    >>> params = from_arraymancer(Weights(*map(np.ones, shapes)))
    >>> params["weight_ih_l0"].shape, params["weight_ih_l1"].shape, params["bias_hh_l1"].shape
    ((6, 3), (6, 2), (6,))
    """
    params: Params = {}
    for layer in range(len(weights.U3s)):
        W3, U3, bW3, bU3 = (np.asarray(array) for array in weights.layer(layer))
        params |= from_system("arraymancer", "GRU", CellArrays(W3, U3, bW3[0], bU3[0]), f"_l{layer}")
    return params


def to_arraymancer(params: Mapping[str, Any]) -> Weights:
    """The stacked GRU's weights from PyTorch's parameters; missing biases become zeros.

    Raises:
        ConversionError: a reverse direction, which the stacked GRU lacks.
    """
    found = one_direction("arraymancer", "GRU", params)
    cells = [to_system("arraymancer", "GRU", params, suffix) for suffix in found]
    biases_ih, biases_hh = zip(*(cell.biases for cell in cells), strict=True)
    rest = [cell.weight_ih for cell in cells[1:]]
    return Weights(
        W3s0=cells[0].weight_ih,
        W3sN=np.stack(rest) if rest else np.zeros_like(cells[0].weight_hh, shape=(0, *cells[0].weight_hh.shape)),
        U3s=np.stack([cell.weight_hh for cell in cells]),
        bW3s=np.stack(biases_ih)[:, None],
        bU3s=np.stack(biases_hh)[:, None],
    )
