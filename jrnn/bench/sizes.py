"""The cells, sizes and modes of a benchmark."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product

from jrnn.errors import ConfigError, check_known, near

GATES = {"lstm": 4, "gru": 3, "min_gru": 2, "min_lstm": 3, "lru": 2}
CELLS = tuple(GATES)
AFFINE = ("min_gru", "min_lstm", "lru")  # in the state: their gates read the input alone
MODES = ("forward", "train")


@dataclass(frozen=True)
class Size:
    """T steps, N sequences, D features, H hidden units."""

    steps: int
    batch: int
    features: int
    hidden: int

    def __str__(self) -> str:
        return f"{self.steps}x{self.batch}x{self.features}x{self.hidden}"

    @staticmethod
    def parse(text: str) -> Size:
        """Parses TxNxDxH; raises TypeError or ValueError unless these are four numbers of at least 1.

        >>> Size.parse("100x32x128x128").batch
        32
        """
        size = Size(*map(int, text.split("x")))
        if min(size.steps, size.batch, size.features, size.hidden) < 1:
            raise ValueError(text)
        return size


# From latency (one sequence) to throughput (a wide state).
_SIX = "100x1x128x128 100x32x128x128 50x64x256x256 35x20x650x650 500x8x64x64 100x32x512x512"
SIZES = tuple(map(Size.parse, _SIX.split()))
# The sizes of Caffe2's own lstm_comparison script.
_CAFFE2 = product((64, 128, 256), (20, 100), (40, 100, 400, 800))
CAFFE2_SIZES = tuple(Size(steps, batch, 40, hidden) for batch, steps, hidden in _CAFFE2)
SETS = {"six": SIZES, "caffe2": CAFFE2_SIZES}


def parse_sizes(texts: Sequence[str]) -> tuple[Size, ...]:
    """Parses sizes and names of sets of sizes; raises ConfigError for a text that is neither.

    >>> len(parse_sizes(["six", "20x1x16x16"]))
    7
    """
    sizes: list[Size] = []
    for text in texts:
        if text in SETS:
            sizes += SETS[text]
            continue
        try:
            sizes.append(Size.parse(text))
        except (TypeError, ValueError):
            raise ConfigError(
                f"bench: the size {text!r} must be written TxNxDxH, as in 100x32x128x128, with no 0, or be a set of sizes: "
                f"{', '.join(SETS)}{near(text, SETS)}"
            ) from None
    return tuple(dict.fromkeys(sizes))


def check_names(what: str, names: Sequence[str], known: Collection[str]) -> None:
    """Raises ConfigError for an unknown name."""
    for name in names:
        check_known(
            name,
            known,
            ConfigError,
            f"bench: there is no {what} {name!r}; there are {', '.join(known)}",
        )


def flops(cell: str, size: Size, mode: str) -> int:
    """Returns the floating-point operations of the contractions of a cell.

    A multiply-add is two operations, and training does each contraction of the forward pass three times.

    >>> flops("lstm", Size(1, 1, 2, 3), "forward")
    120
    """
    reads = size.features if cell in AFFINE else size.features + size.hidden
    forward = 2 * size.steps * size.batch * reads * GATES[cell] * size.hidden
    if cell == "lru":  # also from both parts of its state to the output
        forward += 2 * size.steps * size.batch * 2 * size.hidden * size.hidden
    return forward * (3 if mode == "train" else 1)
