"""The layouts of the weights of one cell in PyTorch and in other systems: one table.

Gates have PyTorch's letters: i, f, g (the candidate), o of an LSTM; r (reset), z (update: the share of the old state that
stays), n (the candidate) of a GRU. Other systems' names for the same gates are in comments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jrnn.errors import ConversionError, near

Biases = Literal["both", "sum", "input"]


@dataclass(frozen=True)
class Convention:
    """The layout of one kind of cell in a system.

    Attributes:
        order: the gates in the order of the blocks of its weights, in PyTorch's letters.
        biases: "both": one for the input's and one for the hidden product; "sum": one for the sum of both; "input": one for
            the input's product, and none for the hidden one.
        transposed: whether its matrices are [in, gates * hidden] instead of [gates * hidden, in].
    """

    order: tuple[str, ...]
    biases: Biases
    transposed: bool = False


CONVENTIONS: dict[tuple[str, str], Convention] = {
    ("pytorch", "RNN"): Convention(("h",), "both"),
    ("pytorch", "LSTM"): Convention(("i", "f", "g", "o"), "both"),
    ("pytorch", "GRU"): Convention(("r", "z", "n"), "both"),
    ("caffe2", "RNN"): Convention(("h",), "both"),
    ("caffe2", "LSTM"): Convention(("i", "f", "o", "g"), "both"),
    ("caffe2", "GRU"): Convention(("r", "z", "n"), "both"),  # reset, update, output
    ("flax", "RNN"): Convention(("h",), "sum", transposed=True),
    ("flax", "LSTM"): Convention(("i", "f", "g", "o"), "sum", transposed=True),
    ("flax", "GRU"): Convention(("r", "z", "n"), "input", transposed=True),
    ("keras", "RNN"): Convention(("h",), "sum", transposed=True),
    ("keras", "LSTM"): Convention(("i", "f", "g", "o"), "sum", transposed=True),  # i, f, c, o
    # z, r, h with reset_after
    ("keras", "GRU"): Convention(("z", "r", "n"), "both", transposed=True),
    ("onnx", "RNN"): Convention(("h",), "both"),
    ("onnx", "LSTM"): Convention(("i", "o", "f", "g"), "both"),  # i, o, f, c
    ("onnx", "GRU"): Convention(("z", "r", "n"), "both"),  # z, r, h with linear_before_reset
    ("arraymancer", "GRU"): Convention(("r", "z", "n"), "both"),
}


def convention(system: str, kind: str) -> Convention:
    """Returns the convention of a system for a kind of cell ("RNN", "LSTM" or "GRU").

    >>> convention("onnx", "LSTM").order
    ('i', 'o', 'f', 'g')
    >>> convention("onnx", "LTSM")
    Traceback (most recent call last):
    jrnn.errors.ConversionError: onnx has no cell called 'LTSM'; did you mean 'LSTM'?; known are ['RNN', 'LSTM', 'GRU']
    """
    if (system, kind) in CONVENTIONS:
        return CONVENTIONS[system, kind]
    systems = sorted({known for known, _ in CONVENTIONS})
    if system not in systems:
        raise ConversionError(
            f"no system is called {system!r}{near(system, systems)}; known are {systems}"
        )
    kinds = []
    for s, k in CONVENTIONS:
        if s == system:
            kinds.append(k)
    raise ConversionError(
        f"{system} has no cell called {kind!r}{near(kind, kinds)}; known are {kinds}"
    )


def reorder(
    array: np.ndarray, old: tuple[str, ...], new: tuple[str, ...], axis: int = 0
) -> np.ndarray:
    """Reorders the blocks of an array along `axis`, one for each gate.

    >>> reorder(np.array([1, 2, 3, 4]), ("i", "f", "g", "o"), ("i", "f", "o", "g"))
    array([1, 2, 4, 3])
    """
    assert sorted(old) == sorted(new), (old, new)
    if array.shape[axis] % len(old):
        raise ConversionError(
            f"an array {list(array.shape)} has no {len(old)} equal blocks along axis {axis}, one for each of the gates "
            f"{', '.join(old)}"
        )
    blocks = dict(zip(old, np.split(array, len(old), axis=axis), strict=True))
    return np.concatenate([blocks[gate] for gate in new], axis=axis)
