"""The weights of one cell, between PyTorch's layout and any other layout in `jrnn.nn.conventions`.

The two biases of an LSTM or a plain cell are only ever added to each other. A GRU's are not: the reset gate scales the
candidate's hidden bias, so a system with a single bias cannot hold it. Also, not all GRUs are the same function: here, in
PyTorch, cuDNN and Arraymancer the reset gate scales the *product* U h ("linear before reset"); in the other form it scales
h itself, and no weights make the two equal.

Shapes: D input, H hidden, G gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jrnn.errors import ConversionError
from jrnn.nn.conventions import convention, reorder

Params = dict[str, np.ndarray]
Weights = Mapping[str, Any]  # by name


def other_gru(system: str, given: str, wanted: str) -> ConversionError:
    """Returns the error for a GRU whose reset gate acts before the product, with the setting that can be converted."""
    return ConversionError(
        f"{system} GRU: {given} the reset gate scales h before the product, which is another function than PyTorch's GRU; "
        f"only {wanted} converts"
    )


class CellArrays(NamedTuple):
    """A cell's arrays in a system's own order and orientation; biases are None if it has none.

    Attributes:
        weight_ih: [G H, D], or [D, G H] if the system's matrices are transposed.
        weight_hh: [G H, H], or [H, G H].
        bias_ih: [G H]: the input's bias, or the only one.
        bias_hh: [G H]: the hidden product's bias in systems that keep both.
    """

    weight_ih: np.ndarray
    weight_hh: np.ndarray
    bias_ih: np.ndarray | None = None
    bias_hh: np.ndarray | None = None

    @property
    def biases(self) -> tuple[np.ndarray, np.ndarray]:
        """Both biases, or zeros; only for systems whose matrices are not transposed."""
        zeros = np.zeros(self.weight_hh.shape[0], self.weight_hh.dtype)
        of_input = zeros if self.bias_ih is None else self.bias_ih
        of_hidden = zeros if self.bias_hh is None else self.bias_hh
        return of_input, of_hidden


def from_system(system: str, kind: str, cell: CellArrays, suffix: str = "_l0") -> Params:
    """Converts a cell of another system to PyTorch's parameters.

    A single bias becomes `bias_ih`, and `bias_hh` is zero: PyTorch has both or none.

    >>> cell = CellArrays(np.ones((3, 8)), np.ones((2, 8)), np.arange(8.0))
    >>> params = from_system("keras", "LSTM", cell)
    >>> params["weight_ih_l0"].shape, params["bias_ih_l0"].tolist(), params["bias_hh_l0"].any()
    ((8, 3), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], np.False_)
    """
    row = convention(system, kind)
    target = convention("pytorch", kind)
    _check(system, kind, cell, len(row.order), row.transposed)
    params = {}
    for name, array in zip(CellArrays._fields, cell, strict=True):
        if array is not None:
            turned = array.T if row.transposed and array.ndim == 2 else array
            params[name + suffix] = reorder(turned, row.order, target.order)
    if cell.bias_ih is not None and cell.bias_hh is None:
        params[f"bias_hh{suffix}"] = np.zeros_like(params[f"bias_ih{suffix}"])
    return params


def to_system(system: str, kind: str, params: Weights, suffix: str = "_l0") -> CellArrays:
    """Converts PyTorch's parameters to a cell of another system.

    Raises:
        ConversionError: a parameter is missing or has the shape of another kind; there is a projection or layer
            normalization, which other systems lack; or a GRU's hidden bias of the candidate is not zero, and the system has
            no such bias.
    """
    row = convention(system, kind)
    source = convention("pytorch", kind)
    for extra in ("weight_hr", "norm_ih", "norm_hh"):
        if extra + suffix in params:
            raise ConversionError(f"{system} {kind}: its cells have no {extra + suffix!r}")
    for name in ("weight_ih", "weight_hh"):
        if name + suffix not in params:
            raise ConversionError(
                f"{system} {kind}: the parameters lack {name + suffix!r}; they are {sorted(params)}"
            )
    given = {}
    arrays = {}
    for field in CellArrays._fields:
        if field + suffix in params:
            given[field] = np.asarray(params[field + suffix])
    _check(system, kind, CellArrays(**given), len(source.order), source.transposed)
    for field, array in given.items():
        turned = reorder(array, source.order, row.order)
        if row.transposed and turned.ndim == 2:
            turned = np.ascontiguousarray(turned.T)
        arrays[field] = turned
    cell = CellArrays(**arrays)
    if cell.bias_ih is None and cell.bias_hh is None:
        return cell
    if cell.bias_ih is None or cell.bias_hh is None:
        raise ConversionError(
            f"{system} {kind}: there is one bias; bias_ih{suffix} and bias_hh{suffix} go together"
        )
    if row.biases == "both":
        return cell
    if row.biases == "input":
        hidden = cell.bias_hh.shape[0] // len(row.order)
        late = row.order.index("n")
        if cell.bias_hh[late * hidden : (late + 1) * hidden].any():
            raise ConversionError(
                f"{system} {kind}: bias_hh{suffix} of the candidate n is not zero, and {system} has no such bias: the "
                "reset gate scales it, so it cannot be added to bias_ih; set it to zero and train on, or keep jrnn's GRU"
            )
    return cell._replace(bias_ih=cell.bias_ih + cell.bias_hh, bias_hh=None)


def suffixes(params: Weights) -> list[str]:
    """Returns the suffix of every direction of every layer: `_l0`, `_l0_reverse`, `_l1`, ..."""
    endings = []
    for name in params:
        if name.startswith("weight_ih"):
            endings.append(name.removeprefix("weight_ih"))
    if not endings:
        raise ConversionError(
            f"these are not a recurrent stack's parameters: no weight_ih_l0 in {sorted(params)}"
        )
    return sorted(
        endings,
        key=lambda suffix: (int(suffix.removesuffix("_reverse").removeprefix("_l")), suffix),
    )


def suffixes_of_layer(system: str, kind: str, params: Weights, layer: int) -> list[str]:
    """Returns the suffix of each direction of one layer; raises ConversionError if there is no such layer."""
    of_layer = []
    for suffix in suffixes(params):
        if suffix.removesuffix("_reverse") == f"_l{layer}":
            of_layer.append(suffix)
    if not of_layer:
        raise ConversionError(
            f"{system} {kind}: the parameters have no layer {layer}; they are {sorted(params)}"
        )
    return of_layer


def one_direction(system: str, kind: str, params: Weights) -> list[str]:
    """Returns the suffix of every layer; raises ConversionError for a reverse direction, which the system lacks."""
    endings = suffixes(params)
    if any(suffix.endswith("_reverse") for suffix in endings):
        raise ConversionError(
            f"{system} {kind}: its cells have one direction, the parameters two; convert each separately"
        )
    return endings


def _check(system: str, kind: str, cell: CellArrays, gates: int, transposed: bool) -> None:
    shapes = []
    for array in cell[:2]:
        shapes.append(tuple(array.shape[::-1]) if transposed else tuple(array.shape))
    are_matrices = list(map(len, shapes)) == [2, 2]
    if not are_matrices or shapes[0][0] != shapes[1][0] or shapes[1][0] != gates * shapes[1][1]:
        rows = f"{gates} H" if gates > 1 else "H"
        wanted = (
            (f"[D, {rows}]", f"[H, {rows}]") if transposed else (f"[{rows}, D]", f"[{rows}, H]")
        )
        raise ConversionError(
            f"{system} {kind}: the weights are {list(cell.weight_ih.shape)} and {list(cell.weight_hh.shape)}; they must "
            f"be {wanted[0]} and {wanted[1]}"
        )
    for name, bias in zip(CellArrays._fields[2:], cell[2:], strict=True):
        if bias is not None and bias.shape != shapes[0][:1]:
            raise ConversionError(
                f"{system} {kind}: {name} is {list(bias.shape)} but must be {list(shapes[0][:1])}"
            )
