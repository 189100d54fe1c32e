"""A picture of attention: the characters of the input across, those of the output down, the weights as shades."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jrnn.errors import UsageError

SUFFIXES = (".png", ".svg", ".pdf")
CELL = 0.26  # inches
FEWEST = 8  # characters that the picture leaves room for, so that its title and its scale fit


def draw_attention(path: Path, source: str, target: str, weights: np.ndarray) -> None:
    """Draws the weights [T, S] with which the T characters of `target` attend to the S of `source`.

    Raises:
        UsageError: matplotlib is not installed, the file's name ends in no known kind of picture, it cannot be written, or
            there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise UsageError("a picture of attention needs matplotlib: pip install 'jrnn[plot]'") from e
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: a picture's name must end in one of {', '.join(SUFFIXES)}")
    if not target:
        raise UsageError(f"{path}: the answer is empty, and so there is no attention to draw")
    assert weights.shape == (len(target), len(source)), weights.shape
    size = (max(len(source), FEWEST) * CELL + 1.4, max(len(target), FEWEST) * CELL + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal", interpolation="nearest")
    shown = [[c if c != " " else "␣" for c in text] for text in (source, target)]
    axes.set_xticks(range(len(source)), shown[0], family="monospace")
    axes.set_yticks(range(len(target)), shown[1], family="monospace")
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.tick_params(length=0)
    axes.set_xlabel("input")
    axes.set_ylabel("output")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, label="weight")
    bar.outline.set_visible(False)
    try:
        figure.savefig(path, dpi=100)
    except OSError as e:
        raise UsageError(f"{path}: cannot be written: {e.strerror}") from None
