"""Weights of flax.nnx's recurrent cells: LSTMCell, OptimizedLSTMCell, GRUCell and SimpleCell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx

from jrnn.errors import ConversionError
from jrnn.interop.cell_weights import CellArrays, Params, Weights, from_system, to_system
from jrnn.nn.conventions import convention

_KINDS: dict[type, str] = {
    nnx.LSTMCell: "LSTM",
    nnx.OptimizedLSTMCell: "LSTM",
    nnx.GRUCell: "GRU",
    nnx.SimpleCell: "RNN",
}


def from_flax(cell: Any, suffix: str = "_l0") -> Params:
    """Converts a flax.nnx cell to PyTorch's parameters.

    Args:
        cell: an `nnx.LSTMCell`, `OptimizedLSTMCell`, `GRUCell` or `SimpleCell` with its default activations; a SimpleCell
            may have relu, for `jrnn.nn.RNN(..., nonlinearity="relu")`.
        suffix: the layer and direction in a stack, such as "_l1_reverse", or "" for `jrnn.nn.LSTMCell` and its like.

    Raises:
        ConversionError: for any other cell, or one that computes another function.

    >>> cell = nnx.OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0))
    >>> {name: value.shape for name, value in from_flax(cell).items()}
    {'weight_ih_l0': (16, 3), 'weight_hh_l0': (16, 4), 'bias_ih_l0': (16,), 'bias_hh_l0': (16,)}
    """
    kind = _kind(cell)
    if isinstance(cell, nnx.LSTMCell):
        of_input = _dense(cell, "i")
        of_hidden = _dense(cell, "h")
        kernels_ih = [np.asarray(dense.kernel[...]) for dense in of_input]
        kernels_hh = []
        biases = []
        for dense in of_hidden:
            kernels_hh.append(np.asarray(dense.kernel[...]))
            biases.append(np.asarray(dense.bias[...]))
        arrays = CellArrays(
            weight_ih=np.concatenate(kernels_ih, axis=1),
            weight_hh=np.concatenate(kernels_hh, axis=1),
            bias_ih=np.concatenate(biases),
        )
    else:
        biased = _biased(cell)
        arrays = CellArrays(
            weight_ih=np.asarray(cell.dense_i.kernel[...]),
            weight_hh=np.asarray(cell.dense_h.kernel[...]),
            bias_ih=np.asarray(biased.bias[...]),
        )
    return from_system("flax", kind, arrays, suffix)


def to_flax(params: Weights, cell: Any, suffix: str = "_l0") -> Any:
    """Puts PyTorch's parameters of one direction of one layer into a flax.nnx cell, and returns it.

    Raises:
        ConversionError: for sizes that differ from the cell's, or a GRU whose candidate has a hidden bias.
    """
    kind = _kind(cell)
    arrays = to_system("flax", kind, params, suffix)
    if arrays.bias_ih is None:
        bias = np.zeros(arrays.weight_hh.shape[1], arrays.weight_hh.dtype)
    else:
        bias = arrays.bias_ih
    if isinstance(cell, nnx.LSTMCell):
        for side, kernel in (("i", arrays.weight_ih), ("h", arrays.weight_hh)):
            for dense, block in zip(_dense(cell, side), np.split(kernel, 4, axis=1), strict=True):
                _put(dense.kernel, block, kind)
        for dense, block in zip(_dense(cell, "h"), np.split(bias, 4), strict=True):
            _put(dense.bias, block, kind)
    else:
        _put(cell.dense_i.kernel, arrays.weight_ih, kind)
        _put(cell.dense_h.kernel, arrays.weight_hh, kind)
        _put(_biased(cell).bias, bias, kind)
    return cell


def _kind(cell: Any) -> str:
    name = type(cell).__name__
    if type(cell) not in _KINDS:
        known = ", ".join(sorted(known.__name__ for known in _KINDS))
        raise ConversionError(
            f"flax: {name} is not a cell that can be converted; those are {known}"
        )
    kind = _KINDS[type(cell)]
    probe = np.linspace(-3, 3, 7, dtype=np.float32)
    for role, usual in (
        ("gate_fn", ("sigmoid",)),
        ("activation_fn", ("tanh", "relu") if kind == "RNN" else ("tanh",)),
    ):
        given = getattr(cell, role, None)
        if given is not None and not _is_one_of(usual, given, probe):
            theirs = getattr(given, "__name__", given)
            raise ConversionError(
                f"flax {name}: its {role} is {theirs}, but jrnn.nn has {' or '.join(usual)} there"
            )
    if getattr(cell, "residual", False):
        raise ConversionError(
            f"flax {name}: it adds its state to the new one (residual=True), which jrnn.nn does not"
        )
    return kind


def _is_one_of(names: Iterable[str], function: Callable[..., Any], probe: np.ndarray) -> bool:
    """Whether a function has the values of one of these functions of jax.nn."""
    for name in names:
        if np.allclose(function(probe), getattr(jax.nn, name)(probe)):
            return True
    return False


def _biased(cell: Any) -> Any:
    """Returns the one of the two products that has the bias."""
    return cell.dense_h if isinstance(cell, nnx.OptimizedLSTMCell) else cell.dense_i


def _dense(cell: nnx.LSTMCell, side: str) -> list[Any]:
    """Returns the four products of one side, in flax's order of gates."""
    layers = []
    for gate in convention("flax", "LSTM").order:
        name = side + gate
        layers.append(getattr(cell, "if_" if name == "if" else name))
    return layers


def _put(variable: nnx.Variable[Any], value: np.ndarray, kind: str) -> None:
    if variable.shape != value.shape:
        raise ConversionError(
            f"flax {kind}: the cell's array is {list(variable.shape)}, the weight {list(value.shape)}"
        )
    variable.set_value(value.astype(variable.dtype))
