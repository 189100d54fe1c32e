"""The results of a benchmark as records, tables and a plot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.table import Table

from jrnn.bench.sizes import SETS
from jrnn.errors import DataError
from jrnn.files import write_whole
from jrnn.files.writing import picture

_WORDS = ("cell", "mode", "peer", "executor", "ran")  # columns of words


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
    least: float | None = None

    @property
    def job(self) -> tuple[str, str, str]:
        return self.cell, self.mode, self.size


def ratios(
    records: Iterable[Record], ours: str = "jrnn"
) -> dict[tuple[str, str, str], dict[str, float]]:
    """Returns `{(cell, mode, size): {peer: our time over the peer's}}`."""
    records = list(records)
    mine = {r.job: r.median for r in records if r.peer == ours}
    over_peers: dict[tuple[str, str, str], dict[str, float]] = {}
    for r in records:
        if r.peer != ours and r.job in mine:
            over_peers.setdefault(r.job, {})[r.peer] = mine[r.job] / r.median
    return over_peers


def _head(records: Iterable[Record]) -> str:
    """Returns the heading of the column of sizes."""
    return "T x N x D x H" if all(r.size.count("x") == 3 for r in records) else "size"


def table_of(title: str, columns: Mapping[str, Sequence[str]], jobs: Sequence[Any] = ()) -> Table:
    """Returns a table of columns of text, with a section for each run of equal jobs; words stand left, numbers right."""
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=True)
    for k, row in enumerate(zip(*columns.values())):
        if k and jobs and jobs[k - 1] != jobs[k]:
            table.add_section()
        table.add_row(*row)
    return table


def times_table(records: Sequence[Record], gemm: float) -> Table:
    """Returns a table of milliseconds and quartiles, memory and the share of a GEMM's best speed; no empty columns."""
    columns = {
        "cell": [r.cell for r in records],
        "mode": [r.mode for r in records],
        _head(records): [r.size or "-" for r in records],
        "peer": [r.peer for r in records],
        "ms": [f"{r.median * 1e3:.3g}" for r in records],
        "quartiles": [f"{r.low * 1e3:.3g}-{r.high * 1e3:.3g}" for r in records],
        "of GEMM": [
            f"{r.flops_per_second / gemm:.1%}" if r.flops_per_second else "-" for r in records
        ],
        "compile s": [
            "-" if r.compile_seconds is None else f"{r.compile_seconds:.2f}" for r in records
        ],
        "temporary MB": [
            "-" if r.peak_bytes is None else f"{r.peak_bytes / 1e6:.3g}" for r in records
        ],
    }
    shown = {name: cells for name, cells in columns.items() if set(cells) != {"-"}}
    title = f"milliseconds: median (quartiles); a GEMM makes {gemm / 1e9:.0f} GFLOP/s here at best"
    return table_of(title, shown, [r.job for r in records])


def ratios_table(records: Sequence[Record], ours: str = "jrnn") -> Table:
    """Returns a table of the time of `ours` over each peer's, with geometric means over each set of sizes."""
    of_jobs = ratios(records, ours)
    peers = list(dict.fromkeys(peer for row in of_jobs.values() for peer in row))
    shown: dict[tuple[str, str, str], dict[str, float]] = {}
    for cell, mode in dict.fromkeys(job[:2] for job in of_jobs):
        rows = {size: row for (c, m, size), row in of_jobs.items() if (c, m) == (cell, mode)}
        shown |= {(cell, mode, size): row for size, row in rows.items()}
        for what, sizes in _sets(list(rows)):
            measured = {peer: [rows[s][peer] for s in sizes if peer in rows[s]] for peer in peers}
            shown[cell, mode, what] = {
                peer: geometric_mean(values) for peer, values in measured.items() if values
            }
    columns = {
        name: [job[k] for job in shown] for k, name in enumerate(("cell", "mode", _head(records)))
    }
    columns |= {
        peer: [f"{row[peer]:.2f}" if peer in row else "-" for row in shown.values()]
        for peer in peers
    }
    return table_of(
        f"time of {ours} over the peer's (below 1: {ours} is faster)",
        columns,
        [job[:2] for job in shown],
    )


def _sets(sizes: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns the groups of sizes for means: the sets, as far as they were measured, and the sizes in none of them.

    >>> _sets(["100x1x128x128", "3x2x1x1"])
    [('geometric mean of six (1 of 6)', ['100x1x128x128']), ('geometric mean', ['3x2x1x1'])]
    """
    sets = []
    rest = list(sizes)
    for name, members in SETS.items():
        here = [str(size) for size in members if str(size) in sizes]
        rest = [size for size in rest if size not in here]
        if here:
            part = "" if len(here) == len(members) else f" ({len(here)} of {len(members)})"
            sets.append((f"geometric mean of {name}{part}", here))
    return [*sets, *([("geometric mean", rest)] if rest else [])]


def save(path: str, conditions: dict[str, Any], name: str, records: Sequence[Any]) -> None:
    """Writes dataclasses as JSON under a name, with their conditions; "-" is the standard output."""
    text = json.dumps({"conditions": conditions, name: [asdict(r) for r in records]}, indent=1)
    if path == "-":
        print(text)
    else:
        write_whole(Path(path), f"{text}\n".encode(), DataError, True)


def plot(path: Path, records: Sequence[Record]) -> None:
    """Draws bars of milliseconds on a logarithmic axis, in one panel for each cell and mode; see `picture` for errors."""
    panels = list(dict.fromkeys((r.cell, r.mode) for r in records))
    peers = list(dict.fromkeys(r.peer for r in records))
    most = max(len({r.size for r in records if (r.cell, r.mode) == panel}) for panel in panels)
    path.parent.mkdir(parents=True, exist_ok=True)
    with picture(path, (max(11, 0.8 * most), 3.6 * len(panels))) as figure:
        for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels):
            mine = [r for r in records if (r.cell, r.mode) == panel]
            sizes = list(dict.fromkeys(r.size for r in mine))
            width = 0.8 / len(peers)
            for k, peer in enumerate(peers):
                rows = [r for r in mine if r.peer == peer]
                at = [sizes.index(r.size) + (k - (len(peers) - 1) / 2) * width for r in rows]
                axes.bar(at, [r.median * 1e3 for r in rows], width, label=peer)
            axes.set(
                title=" ".join(panel),
                yscale="log",
                ylabel="ms",
                xticks=range(len(sizes)),
                xticklabels=sizes,
            )
            axes.tick_params(axis="x", labelrotation=30 if most > 8 else 0)
            axes.legend(fontsize="small", ncols=len(peers))
