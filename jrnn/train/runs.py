"""Runs compared: the keys in which their configs differ, their steps, losses and speed; tables and curves of them."""

from __future__ import annotations

import fcntl
import math
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict
from rich.table import Table
from rich.text import Text

from jrnn.errors import ConfigError, DataError, printable
from jrnn.files import kind_of, open_file
from jrnn.files.writing import picture
from jrnn.train.checkpoint import steps_in
from jrnn.train.metrics import LIMIT, Patience, best_first, read_metrics, read_validations
from jrnn.train.toml_codec import read_toml

MOST_COLUMNS = 4  # of keys that differ; more keys share one column
LATEST = 20  # measurements of speed whose median is shown

Curve = tuple[np.ndarray, np.ndarray]  # steps and values


@dataclass(frozen=True)
class RunSummary:
    """A summary of one run directory.

    Attributes:
        config: the resolved configuration, its keys joined by dots.
        state: "running" if a process holds its lock; "finished" after all steps, or when its patience ended; "not finite"
            if a loss or gradient ended it; "above limit" if a loss above train.loss_limit did; else "stopped".
        step, steps: done, and asked for.
        best_loss, best_step: the least validation loss and its step; None if there was no validation.
        metrics: what else that validation measured, such as accuracy.
        speed: tokens or examples a second, the median of the latest measurements; None if there are none.
    """

    path: str
    config: Mapping[str, Any]
    state: str
    step: int
    steps: int
    best_loss: float | None
    best_step: int | None
    metrics: Mapping[str, float]
    speed: float | None


def find_runs(folder: str | Path) -> list[Path]:
    """Returns the run directories in a folder and below it, by name; or the folder itself if it is one.

    Raises:
        DataError: if there are none.
    """
    folder = Path(folder)
    configs = folder.rglob("config.toml") if kind_of(folder) == "a folder" else ()
    folders = sorted(p.parent for p in configs if kind_of(p.parent / "run.json"))
    if not folders:
        raise DataError(f"{folder}: holds no run directory; `jrnn train` makes them in runs/")
    return folders


def summarize(run: Path) -> RunSummary:
    """Summarizes a run directory; raises DataError if it is not a run directory."""
    try:
        config = flatten_dict(read_toml(run / "config.toml"), sep=".")
    except ConfigError as e:
        raise DataError(f"{run}: is not a run directory: {e}") from None
    lines = read_metrics(run / "metrics.jsonl")
    best: dict[str, Any] = {}
    speeds = []
    step = 0
    for line in lines:
        step = max(step, line["step"])
        if _is_number(line.get("items_per_second")):
            speeds.append(line["items_per_second"])
        loss = line.get("validation_loss")
        if _is_number(loss) and (not best or loss < best["validation_loss"]):
            best = line
    steps = _integer(config.get("train.steps"))
    is_over = _patience_is_over(run, _integer(config.get("train.patience")))
    refused = str(lines[-1].get("refused", "")) if lines else ""
    if _is_locked(run / "lock"):
        state = "running"
    elif step >= steps or is_over:
        state = "finished"
    elif LIMIT in refused:
        state = "above limit"
    elif refused:
        state = "not finite"
    else:
        state = "stopped"
    return RunSummary(
        path=str(run),
        config=config,
        state=state,
        step=step,
        steps=steps,
        best_loss=best.get("validation_loss"),
        best_step=best.get("step"),
        metrics={
            name: v
            for name, v in best.items()
            if _is_number(v) and name not in ("step", "validation_loss")
        },
        speed=statistics.median(speeds[-LATEST:]) if speeds else None,
    )


def _patience_is_over(run: Path, limit: int) -> bool:
    """Returns whether the patience of a run has ended, of the best validation whose parameters are there."""
    losses = read_validations(run / "metrics.jsonl")
    best = best_first(steps_in(run / "best"), losses)[:1]
    return bool(best) and best[0] in losses and Patience.after(limit, losses, best[0]).is_over


def _is_locked(path: Path) -> bool:
    """Returns whether a process trains in the run directory; see `RunDir`."""
    try:
        with open_file(path, DataError, None) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, DataError):
        pass
    return False


def _integer(value: Any) -> int:
    """Returns the value if it is an integer, else 0."""
    return value if isinstance(value, int) else 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the keys whose values differ between configs, in the order of the configs.

    >>> differing([{"seed": 0, "model.hidden": 8}, {"seed": 0, "model.hidden": 16, "data.path": "a"}])
    ['model.hidden', 'data.path']
    """
    keys: dict[str, None] = {}
    for config in configs:
        keys |= dict.fromkeys(config)
    differ = []
    for key in keys:
        first = configs[0].get(key)
        if any(config.get(key) != first for config in configs):
            differ.append(key)
    return differ


def runs_tables(runs: Sequence[RunSummary]) -> list[Table]:
    """Returns a table for each task and kind of model: a row for each run, the least loss first.

    Its columns are the keys in which the configs of the rows differ, and what validations measure.
    """
    groups: dict[str, list[RunSummary]] = {}
    for r in sorted(runs, key=lambda r: math.inf if r.best_loss is None else r.best_loss):
        names = (str(r.config.get("task", "")), str(r.config.get("model.kind", "")))
        groups.setdefault(", ".join(filter(None, names)), []).append(r)
    return [_table(title, rows) for title, rows in groups.items()]


def _table(title: str, runs: Sequence[RunSummary]) -> Table:
    keys = differing([r.config for r in runs])
    if "train.steps" in keys:  # which has a column of its own
        keys.remove("train.steps")
    in_columns = len(keys) <= MOST_COLUMNS
    table = Table(title=Text(printable(title)), title_justify="left")
    for name in ("run", *(keys if in_columns else ["config"])):
        table.add_column(name, overflow="fold")
    metrics: dict[str, None] = {}
    for r in runs:
        metrics |= dict.fromkeys(r.metrics)
    shown = [name.replace("_", " ") for name in metrics]
    for name in ("steps", "best validation loss", *shown, "best step", "examples/s", "state"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for r in runs:
        table.add_row(*_row(r, keys, in_columns, metrics))
    return table


def _row(
    r: RunSummary, keys: Sequence[str], in_columns: bool, metrics: Iterable[str]
) -> Iterator[str | Text]:
    """Yields the cells of a run; its keys have a column each, or one for all."""
    yield Text(printable(r.path, lines=True))
    if in_columns:
        for key in keys:
            yield Text(printable(str(r.config.get(key, "-")), lines=True))
    else:
        yield Text(printable("\n".join(_assignments(r, keys)), lines=True))
    yield f"{r.step}/{r.steps}"
    yield "-" if r.best_loss is None else f"{r.best_loss:.4f}"
    for name in metrics:
        yield f"{r.metrics[name]:.4g}" if name in r.metrics else "-"
    yield "-" if r.best_loss is None else str(r.best_step)
    yield "-" if r.speed is None else f"{r.speed:,.0f}"
    yield r.state


def _assignments(r: RunSummary, keys: Iterable[str]) -> list[str]:
    return [f"{key} = {r.config[key]}" for key in keys if key in r.config]


def plot_runs(runs: Sequence[Path], out: Path) -> None:
    """Draws the losses of run directories; see `draw_losses`. The legend has the keys in which their configs differ.

    Raises:
        DataError: for a directory that is no run, or has measured nothing. UsageError: see `picture`.
    """
    draw_losses(out, labels(list(map(summarize, runs))), list(map(curves, runs)))


def curves(run: Path) -> tuple[Curve, Curve]:
    """Returns the steps and losses of a run's training, and of its validations.

    Raises:
        DataError: if nothing was measured.
    """
    lines = read_metrics(run / "metrics.jsonl")
    drawn = []
    for name in ("loss", "validation_loss"):
        points = [(m["step"], m[name]) for m in lines if _is_number(m.get(name))]
        steps, losses = np.array(points, float).reshape(-1, 2).T
        drawn.append((steps, losses))
    if not any(len(steps) for steps, _ in drawn):
        raise DataError(f"{run}: has no losses in metrics.jsonl yet")
    return drawn[0], drawn[1]


def labels(runs: Sequence[RunSummary]) -> list[str]:
    """Returns the name of each run with the keys in which the configs differ."""
    keys = differing([r.config for r in runs])
    texts = []
    for r in runs:
        name = Path(r.path).name
        values = ", ".join(_assignments(r, keys))
        texts.append(f"{name}: {values}" if values else name)
    return texts


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
        # Below the axes: labels may be long.
        figure.legend(loc="outside lower left", fontsize="small")


def smoothed(values: np.ndarray) -> np.ndarray:
    """Returns a running mean whose weights halve within a 50th of the curve, without bias at its beginning.

    >>> smoothed(np.full(3, 2.0)).tolist()
    [2.0, 2.0, 2.0]
    """
    decay = 0.5 ** (1 / max(len(values) / 50, 1))
    smooth = np.empty(len(values))
    total = 0.0
    weight = 0.0
    for k, value in enumerate(values):
        total = decay * total + value
        weight = decay * weight + 1
        smooth[k] = total / weight
    return smooth
