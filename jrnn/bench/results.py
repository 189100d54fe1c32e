"""The results of a benchmark as records, tables and a plot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.table import Table

from jrnn.bench.sizes import SETS
from jrnn.errors import DataError
from jrnn.files import write_whole
from jrnn.files.writing import picture

Ratios = dict[str, float]  # by peer
JobName = tuple[str, str, str]  # cell, mode, size

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
    def job(self) -> JobName:
        return self.cell, self.mode, self.size


def ratios(records: Iterable[Record], ours: str = "jrnn") -> dict[JobName, Ratios]:
    """Returns `{(cell, mode, size): {peer: our time over the peer's}}`."""
    records = list(records)
    mine = {r.job: r.median for r in records if r.peer == ours}
    over_peers: dict[JobName, Ratios] = {}
    for r in records:
        if r.peer != ours and r.job in mine:
            over_peers.setdefault(r.job, {})[r.peer] = mine[r.job] / r.median
    return over_peers


def _head(records: Iterable[Record]) -> str:
    """Returns the heading of the column of sizes."""
    return "T x N x D x H" if all(r.size.count("x") == 3 for r in records) else "size"


def columns_of(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> dict[str, list[str]]:
    """Returns the cells of rows by their columns, which stay if there are no rows."""
    columns: dict[str, list[str]] = {head: [] for head in heads}
    for row in rows:
        for column, cell in zip(columns.values(), row):
            column.append(cell)
    return columns


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
    heads = ["cell", "mode", _head(records), "peer", "ms", "quartiles", "of GEMM", "compile s"]
    rows = []
    jobs = []
    for r in records:
        quartiles = f"{r.low * 1e3:.3g}-{r.high * 1e3:.3g}"
        share = f"{r.flops_per_second / gemm:.1%}" if r.flops_per_second else "-"
        seconds = "-" if r.compile_seconds is None else f"{r.compile_seconds:.2f}"
        size = megabytes(r.peak_bytes)
        ms = f"{r.median * 1e3:.3g}"
        rows.append((r.cell, r.mode, r.size or "-", r.peer, ms, quartiles, share, seconds, size))
        jobs.append(r.job)
    columns = columns_of([*heads, "temporary MB"], rows)
    shown = {head: cells for head, cells in columns.items() if set(cells) != {"-"}}
    title = f"milliseconds: median (quartiles); a GEMM makes {gemm / 1e9:.0f} GFLOP/s here at best"
    return table_of(title, shown, jobs)


def megabytes(size: int | None) -> str:
    """Returns bytes as a cell of a table."""
    return "-" if size is None else f"{size / 1e6:.3g}"


def ratios_table(records: Sequence[Record], ours: str = "jrnn") -> Table:
    """Returns a table of the time of `ours` over each peer's, with geometric means over each set of sizes."""
    panels: dict[tuple[str, str], dict[str, Ratios]] = {}
    peers: dict[str, None] = {}
    for (cell, mode, size), of_peers in ratios(records, ours).items():
        panels.setdefault((cell, mode), {})[size] = of_peers
        peers |= dict.fromkeys(of_peers)

    rows = []
    sections = []
    for panel, of_sizes in panels.items():
        means: dict[str, Ratios] = {}
        for what, sizes in _sets(list(of_sizes)):
            means[what] = _means(peers, [of_sizes[size] for size in sizes])
        for name, of_peers in (of_sizes | means).items():
            rows.append([*panel, name, *_ratio_cells(peers, of_peers)])
            sections.append(panel)
    title = f"time of {ours} over the peer's (below 1: {ours} is faster)"
    return table_of(title, columns_of(["cell", "mode", _head(records), *peers], rows), sections)


def _means(peers: Iterable[str], rows: Sequence[Mapping[str, float]]) -> Ratios:
    """Returns the geometric mean of the ratios of each peer that was measured."""
    means = {}
    for peer in peers:
        values = [of_peers[peer] for of_peers in rows if peer in of_peers]
        if values:
            means[peer] = geometric_mean(values)
    return means


def _ratio_cells(peers: Iterable[str], of_peers: Mapping[str, float]) -> Iterator[str]:
    for peer in peers:
        yield f"{of_peers[peer]:.2f}" if peer in of_peers else "-"


def _sets(sizes: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns the groups of sizes for means: the sets, as far as they were measured, and the sizes in none of them.

    >>> _sets(["100x1x128x128", "3x2x1x1"])
    [('geometric mean of six (1 of 6)', ['100x1x128x128']), ('geometric mean', ['3x2x1x1'])]
    """
    sets = []
    rest = list(sizes)
    for name, members in SETS.items():
        here = [text for text in map(str, members) if text in sizes]
        rest = [text for text in rest if text not in here]
        if here:
            part = "" if len(here) == len(members) else f" ({len(here)} of {len(members)})"
            sets.append((f"geometric mean of {name}{part}", here))
    if rest:
        sets.append(("geometric mean", rest))
    return sets


def save(path: str, conditions: dict[str, Any], name: str, records: Sequence[Any]) -> None:
    """Writes dataclasses as JSON under a name, with their conditions; "-" is the standard output."""
    text = json.dumps({"conditions": conditions, name: list(map(asdict, records))}, indent=1)
    if path == "-":
        print(text)
    else:
        write_whole(Path(path), f"{text}\n".encode(), DataError, True)


def plot(path: Path, records: Sequence[Record]) -> None:
    """Draws bars of milliseconds on a logarithmic axis, in one panel for each cell and mode; see `picture` for errors."""
    panels: dict[tuple[str, str], dict[str, list[Record]]] = {}  # the records of each size
    peers: dict[str, None] = {}
    for r in records:
        panels.setdefault((r.cell, r.mode), {}).setdefault(r.size, []).append(r)
        peers[r.peer] = None
    most = max(map(len, panels.values()))
    width = 0.8 / len(peers)
    path.parent.mkdir(parents=True, exist_ok=True)
    with picture(path, (max(11, 0.8 * most), 3.6 * len(panels))) as figure:
        of_panels = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, (panel, sizes) in zip(of_panels, panels.items()):
            for k, peer in enumerate(peers):
                shift = (k - (len(peers) - 1) / 2) * width
                places = []
                heights = []
                for place, of_size in enumerate(sizes.values()):
                    for r in of_size:
                        if r.peer == peer:
                            places.append(place + shift)
                            heights.append(r.median * 1e3)
                axes.bar(places, heights, width, label=peer)
            axes.set(
                title=" ".join(panel),
                yscale="log",
                ylabel="ms",
                xticks=range(len(sizes)),
                xticklabels=list(sizes),
            )
            axes.tick_params(axis="x", labelrotation=30 if most > 8 else 0)
            axes.legend(fontsize="small", ncols=len(peers))
