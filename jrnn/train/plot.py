"""Loss curves of runs, drawn to a file."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrnn.errors import DataError
from jrnn.train.metrics import read_metrics
from jrnn.train.runs import RunSummary, differing, summarize

SUFFIXES = (".png", ".svg", ".pdf")


def plot_runs(runs: Sequence[Path], out: Path) -> None:
    """Draws the losses of runs: the training loss smoothed, with what was measured faintly behind it, and validations.

    Args:
        runs: run directories; the legend names them, and what their configs differ in.
        out: a file whose name ends in .png, .svg or .pdf.

    Raises:
        DataError: for a directory that is no run or has measured nothing, another kind of file, or without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DataError("plots need matplotlib: pip install 'jrnn[plot]'") from None
    if out.suffix not in SUFFIXES:
        raise DataError(f"{out}: the name of a plot must end in {', '.join(SUFFIXES)}")
    told = [textwrap.fill(label, 110, subsequent_indent="    ") for label in labels([summarize(run) for run in runs])]
    lines = sum(label.count("\n") + 1 for label in told)
    figure = Figure(figsize=(9, 5.2 + 0.2 * lines), layout="constrained")
    axes = figure.subplots()
    for number, (run, label) in enumerate(zip(runs, told)):
        color = f"C{number % 10}"
        (steps, losses), (validation_steps, validations) = curves(run)
        axes.plot(steps, losses, color=color, alpha=0.2, linewidth=0.6)
        axes.plot(steps, smoothed(losses), color=color, linewidth=1.2, label=label)
        axes.plot(validation_steps, validations, "o--", color=color, markersize=4, linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss", title="training (line) and validation (dots)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", fontsize="small")  # below, as runs may differ in many keys
    try:
        figure.savefig(out, dpi=150)
    except OSError as e:
        raise DataError(f"{out}: cannot be written: {e.strerror}") from None


Curve = tuple[np.ndarray, np.ndarray]


def curves(run: Path) -> tuple[Curve, Curve]:
    """Steps and losses of a run's training, and of its validations.

    Raises:
        DataError: where nothing was measured.
    """
    lines = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    found = tuple(_curve(lines, name) for name in ("loss", "validation_loss"))
    if not any(len(steps) for steps, _ in found):
        raise DataError(f"{run}: has no losses in metrics.jsonl yet")
    return found[0], found[1]


def _curve(lines: Sequence[Mapping[str, Any]], name: str) -> Curve:
    points = [(m["step"], m[name]) for m in lines if name in m]
    steps, values = zip(*points) if points else ((), ())
    return np.asarray(steps, float), np.asarray(values, float)


def smoothed(values: np.ndarray) -> np.ndarray:
    """A running mean whose weights fall by half in a 50th of the curve; its beginning is not drawn towards 0.

    >>> smoothed(np.full(3, 2.0)).tolist()
    [2.0, 2.0, 2.0]
    """
    decay = 0.5 ** (1 / max(len(values) / 50, 1))
    found, total, weight = np.empty(len(values)), 0.0, 0.0
    for k, value in enumerate(values):
        total, weight = decay * total + value, decay * weight + 1
        found[k] = total / weight
    return found


def labels(runs: Sequence[RunSummary]) -> list[str]:
    """The name of each run, and the values of what the configs differ in."""
    keys = differing([r.config for r in runs])
    told = [", ".join(f"{k} = {r.config[k]}" for k in keys if k in r.config) for r in runs]
    return [f"{Path(r.path).name}: {text}" if text else Path(r.path).name for r, text in zip(runs, told)]
