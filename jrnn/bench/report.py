"""A benchmark's results as records, a table, a comparison and a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from jrnn.errors import DataError


@dataclass(frozen=True)
class Record:
    """One peer on one cell, size and mode; times in seconds."""

    cell: str
    size: str
    mode: str
    peer: str
    median: float
    low: float
    high: float
    turns: int
    compile_seconds: float | None
    peak_bytes: int | None
    flops_per_second: float

    @property
    def job(self) -> tuple[str, str, str]:
        return self.cell, self.mode, self.size


def ratios(records: Iterable[Record], ours: str = "jrnn") -> dict[tuple[str, str, str], dict[str, float]]:
    """`{(cell, mode, peer): {size: our time over the peer's}}`, with their geometric mean under "mean"."""
    records = list(records)
    mine = {r.job: r.median for r in records if r.peer == ours}
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for r in records:
        if r.peer != ours and r.job in mine:
            found.setdefault((r.cell, r.mode, r.peer), {})[r.size] = mine[r.job] / r.median
    for sizes in found.values():
        sizes["mean"] = math.exp(sum(map(math.log, sizes.values())) / len(sizes))
    return found


def times_table(records: Sequence[Record], gemm: float) -> Table:
    """Milliseconds and their quartiles, memory and the share of a GEMM's speed."""
    table = Table(title=f"milliseconds: median (quartiles); a GEMM makes {gemm / 1e9:.0f} GFLOP/s here")
    for name in ("cell", "mode", "T x N x D x H", "peer", "ms", "quartiles", "of GEMM", "compile s", "temporary MB"):
        table.add_column(name, justify="left" if name in ("cell", "mode", "peer") else "right", no_wrap=True)
    last = None
    for r in records:
        if last not in (None, r.job):
            table.add_section()
        last = r.job
        table.add_row(
            r.cell,
            r.mode,
            r.size,
            r.peer,
            f"{r.median * 1e3:.2f}",
            f"{r.low * 1e3:.2f}-{r.high * 1e3:.2f}",
            f"{r.flops_per_second / gemm:.0%}",
            "" if r.compile_seconds is None else f"{r.compile_seconds:.2f}",
            "" if r.peak_bytes is None else f"{r.peak_bytes / 1e6:.1f}",
        )
    return table


def ratios_table(records: Sequence[Record], ours: str = "jrnn") -> Table:
    """The time of `ours` over each peer's: below 1 is faster."""
    found = ratios(records, ours)
    sizes = list(dict.fromkeys(size for row in found.values() for size in row if size != "mean"))
    table = Table(title=f"time of {ours} over the peer's (below 1: {ours} is faster)")
    for name in ("cell", "mode", "peer", "geometric mean", *sizes):
        table.add_column(name, justify="left" if name in ("cell", "mode", "peer") else "right")
    for (cell, mode, peer), row in found.items():
        cells = [f"{row[size]:.2f}" if size in row else "" for size in sizes]
        table.add_row(cell, mode, peer, f"{row['mean']:.2f}", *cells)
    return table


def save(path: Path, conditions: dict[str, Any], records: Sequence[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"conditions": conditions, "records": [asdict(r) for r in records]}, indent=1) + "\n")


def load(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """The conditions and records that `save` wrote.

    Raises:
        DataError: a file that is not one.
    """
    try:
        data = json.loads(path.read_text())
        return data["conditions"], [Record(**r) for r in data["records"]]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise DataError(f"{path}: not a benchmark's JSON ({e}); `jrnn bench --json` writes one") from e


def comparison_table(old: Sequence[Record], new: Sequence[Record]) -> Table:
    """New times over old ones, for the jobs and peers that both have.

    Two runs differ by the machine's mood as well, so each ratio stands beside that of the peers of the same job.
    """
    before = {(*r.job, r.peer): r.median for r in old}
    table = Table(title="new time over old")
    for name in ("cell", "mode", "T x N x D x H", "peer", "old ms", "new ms", "new / old"):
        table.add_column(name, justify="left" if name in ("cell", "mode", "peer") else "right")
    for r in new:
        if (was := before.get((*r.job, r.peer))) is not None:
            ratio = f"{r.median / was:.2f}"
            table.add_row(r.cell, r.mode, r.size, r.peer, f"{was * 1e3:.2f}", f"{r.median * 1e3:.2f}", ratio)
    return table


def plot(path: Path, records: Sequence[Record]) -> None:
    """Bars of milliseconds, one panel a cell and mode, on a logarithmic axis.

    Raises:
        DataError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise DataError("--plot needs matplotlib: pip install 'jrnn[plot]'") from e
    panels = list(dict.fromkeys((r.cell, r.mode) for r in records))
    peers = list(dict.fromkeys(r.peer for r in records))
    figure = Figure(figsize=(11, 3.2 * len(panels)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels):
        mine = [r for r in records if (r.cell, r.mode) == panel]
        sizes = list(dict.fromkeys(r.size for r in mine))
        width = 0.8 / len(peers)
        for k, peer in enumerate(peers):
            rows = [r for r in mine if r.peer == peer]
            at = [sizes.index(r.size) + (k - (len(peers) - 1) / 2) * width for r in rows]
            axes.bar(at, [r.median * 1e3 for r in rows], width, label=peer)
        axes.set(title=" ".join(panel), yscale="log", ylabel="ms", xticks=range(len(sizes)), xticklabels=sizes)
        axes.legend(fontsize="small", ncols=len(peers))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
