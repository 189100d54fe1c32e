"""Runs side by side: the keys in which their configs differ, their steps, losses and speed."""

from __future__ import annotations

import fcntl
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from jrnn.errors import ConfigError, DataError
from jrnn.train.metrics import Patience, read_metrics
from jrnn.train.toml_codec import read_toml

MOST_COLUMNS = 4  # of keys that differ; more stand below each other
LATEST = 20  # measurements of speed, of which the median counts


@dataclass(frozen=True)
class RunSummary:
    """One run directory in a few figures.

    config: the resolved configuration, its keys joined by dots. step, steps: done, and asked for. best_loss: of all
    validations, at step best_step. speed: tokens or examples a second, the median of the latest. The last three are None
    where nothing was measured.
    state: "running", where a process holds its lock; "finished", after all steps or where its
        patience ended; "not finite", where a loss or gradient ended it; "stopped".
    """

    path: str
    config: Mapping[str, Any]
    state: str
    step: int
    steps: int
    best_loss: float | None
    best_step: int | None
    speed: float | None


def find_runs(folder: str | Path) -> list[Path]:
    """The run directories in a folder and below it, by name; the folder itself where it is one.

    Raises:
        DataError: where there is none.
    """
    folder = Path(folder)
    found = sorted(p.parent for p in folder.rglob("config.toml") if (p.parent / "run.json").exists())
    if not found:
        raise DataError(f"{folder}: holds no run directory; `jrnn train` makes them in runs/")
    return found


def summarize(run: Path) -> RunSummary:
    """A run directory in a few figures.

    Raises:
        DataError: where it is none.
    """
    try:
        config = flatten(read_toml(run / "config.toml"))
    except ConfigError as e:
        raise DataError(f"{run}: is not a run directory: {e}") from None
    lines = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    validations = [(m["validation_loss"], m["step"]) for m in lines if _is_number(m.get("validation_loss"))]
    speeds = [m["items_per_second"] for m in lines if _is_number(m.get("items_per_second"))]
    best_loss, best_step = min(validations, default=(None, None))
    step = max((m["step"] for m in lines), default=0)
    steps, patience = (v if isinstance(v := config.get(k), int) else 0 for k in ("train.steps", "train.patience"))
    is_over = Patience.after(patience, (loss for loss, _ in validations)).is_over
    return RunSummary(
        path=str(run),
        config=config,
        state=_state(run, lines, step >= steps or is_over),
        step=step,
        steps=steps,
        best_loss=best_loss,
        best_step=best_step,
        speed=statistics.median(speeds[-LATEST:]) if speeds else None,
    )


def _state(run: Path, lines: Sequence[Mapping[str, Any]], is_whole: bool) -> str:
    if _is_locked(run / "lock"):
        return "running"
    if is_whole:
        return "finished"
    return "not finite" if lines and "refused" in lines[-1] else "stopped"


def _is_locked(path: Path) -> bool:
    """Whether a process trains in the run directory: see `RunDir`."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with their keys joined by dots.

    >>> flatten({"seed": 0, "model": {"hidden": 8}})
    {'seed': 0, 'model.hidden': 8}
    """
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys that are not the same in all configs, in the order in which they come.

    >>> differing([{"seed": 0, "model.hidden": 8}, {"seed": 0, "model.hidden": 16, "data.path": "a"}])
    ['model.hidden', 'data.path']
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    return [k for k in keys if any(config.get(k) != configs[0].get(k) for config in configs)]


def runs_tables(runs: Sequence[RunSummary]) -> list[Table]:
    """A table for each task and kind of model, with a line a run; of the configs, what differs within the table."""
    groups: dict[tuple[str, str], list[RunSummary]] = {}
    for r in runs:
        groups.setdefault((str(r.config.get("task", "")), str(r.config.get("model.kind", ""))), []).append(r)
    return [_table(", ".join(filter(None, names)), found) for names, found in groups.items()]


def _table(title: str, runs: Sequence[RunSummary]) -> Table:
    keys = [k for k in differing([r.config for r in runs]) if k != "train.steps"]  # which has a column of its own
    in_columns = len(keys) <= MOST_COLUMNS
    table = Table(title=title, title_justify="left")
    for name in ("run", *(keys if in_columns else ["config"])):
        table.add_column(name, overflow="fold")
    for name in ("steps", "best loss", "at step", "a second", "state"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for r in runs:
        if in_columns:
            values = [str(r.config.get(k, "-")) for k in keys]
        else:
            values = ["\n".join(f"{k} = {r.config[k]}" for k in keys if k in r.config)]
        best = ("-", "-") if r.best_loss is None else (f"{r.best_loss:.4f}", str(r.best_step))
        speed = "-" if r.speed is None else f"{r.speed:,.0f}"
        table.add_row(*(escape(v) for v in (r.path, *values)), f"{r.step}/{r.steps}", *best, speed, r.state)
    return table


def as_json(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """The same as plain JSON, with whole configs."""
    return [asdict(r) for r in runs]
