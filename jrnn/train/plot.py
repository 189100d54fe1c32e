"""Pictures by matplotlib: the losses of runs, and what a decoder attended to.

Shapes: S characters of an input, T characters of its answer.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jrnn.errors import UsageError
from jrnn.files.pictures import picture

CELL = 0.13  # inches
FEWEST = 16  # characters of an input that there is room for, so that the scale fits

Curve = tuple[np.ndarray, np.ndarray]  # steps and values


def draw_losses(path: Path, labels: Sequence[str], curves: Sequence[tuple[Curve, Curve]]) -> None:
    """Draws the training loss of each run, smoothed in front of the measured values, and its validation losses.

    Args:
        path: a file whose name ends in .png, .svg or .pdf.
        labels: one for each run, for the legend.
        curves: the training losses and the validation losses of each run.

    Raises:
        UsageError: see `picture`.
    """
    labels = [textwrap.fill(label, 110, subsequent_indent="    ") for label in labels]
    lines = sum(label.count("\n") + 1 for label in labels)
    with picture(path, (9, 5.2 + 0.2 * lines)) as figure:
        axes = figure.subplots()
        for number, (label, ((steps, losses), validations)) in enumerate(zip(labels, curves)):
            color = f"C{number % 10}"
            axes.plot(steps, losses, color=color, alpha=0.2, linewidth=0.6)
            axes.plot(steps, smoothed(losses), color=color, linewidth=1.2, label=label)
            axes.plot(*validations, "o--", color=color, markersize=4, linewidth=0.8)
        axes.set(xlabel="step", ylabel="loss", title="training (line) and validation (dots)")
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower left", fontsize="small")  # below the axes: labels may be long


def smoothed(values: np.ndarray) -> np.ndarray:
    """Returns a running mean whose weights halve within a 50th of the curve, without bias at its beginning.

    >>> smoothed(np.full(3, 2.0)).tolist()
    [2.0, 2.0, 2.0]
    """
    decay = 0.5 ** (1 / max(len(values) / 50, 1))
    smooth, total, weight = np.empty(len(values)), 0.0, 0.0
    for k, value in enumerate(values):
        total, weight = decay * total + value, decay * weight + 1
        smooth[k] = total / weight
    return smooth


def draw_attention(path: Path, source: str, target: str, weights: np.ndarray) -> None:
    """Draws the weights [T, S] with which the T characters of `target` attend to the S of `source`.

    Raises:
        UsageError: there is nothing to draw; or see `picture`.
    """
    if not target:
        raise UsageError(f"{path}: the answer is empty, so there is no attention to draw")
    assert weights.shape == (len(target), len(source)), weights.shape
    size = (max(len(source), FEWEST) * CELL + 0.5, max(len(target), FEWEST // 2) * CELL + 1.1)  # as a phone shows it
    with picture(path, size) as figure:
        axes = figure.add_subplot()
        image = axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal", interpolation="nearest")
        axes.set_xticks(range(len(source)), source.replace(" ", "␣"), family="monospace", fontsize=8)
        axes.set_yticks(range(len(target)), target.replace(" ", "␣"), family="monospace", fontsize=8)
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.tick_params(length=0, pad=2)
        axes.set(xlabel="input", ylabel="output")
        figure.colorbar(image, ax=axes, location="bottom", aspect=40, label="weight").outline.set_visible(False)
