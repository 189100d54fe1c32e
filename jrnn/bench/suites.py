"""A suite is a module whose `jobs(options)` yields the programs to compare; this one is that of `jrnn bench`.

A suite's `OURS` are the programs whose times are divided by those of the others. It may have `summary(records)`, a text
below the tables. scripts/benchmarks of the repository has more suites.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from jrnn.bench import peers
from jrnn.bench.peers import Timed
from jrnn.bench.sizes import CELLS, MODES, SETS, Size, check_names, flops, parse_sizes

OURS = ("jrnn",)


@dataclass(frozen=True)
class SuiteOptions:
    """What to run.

    Attributes:
        cells, modes, sizes, peers: names to measure; None for all that the suite has and can run here.
        turns: measured runs of each program, at most.
        seconds: after these, no more turns of a job begin, except for the first three.
        json, plot: files to write; json "-" is the standard output.
    """

    cells: Sequence[str] | None = None
    modes: Sequence[str] | None = None
    sizes: Sequence[str] | None = None
    peers: Sequence[str] | None = None
    turns: int = 15
    seconds: float = 20.0
    json: str | None = None
    plot: Path | None = None
    console: Console = field(default_factory=Console)

    def chosen(self, what: str, known: Mapping[str, Any] | Sequence[str]) -> list[str]:
        """Returns the names given for an option, such as `cells`, by default all; raises ConfigError for unknown ones."""
        given = getattr(self, what)
        check_names(what.removesuffix("s"), given or (), known)
        return list(known if given is None else given)

    def chosen_sizes(self, default: Sequence[str]) -> tuple[Size, ...]:
        return parse_sizes(default if self.sizes is None else self.sizes)


@dataclass(frozen=True)
class Job:
    """Programs that do the same work, to be run interleaved; `flops`: its floating-point operations, or 0."""

    cell: str
    mode: str
    size: str
    programs: Mapping[str, Timed | None]
    flops: float = 0.0


def jobs(options: SuiteOptions) -> Iterator[Job]:
    """Yields the cells of this benchmark through `jrnn.scan` and its peers; see `jrnn.bench.peers`."""
    known = peers.available()
    cells, modes = options.chosen("cells", CELLS), options.chosen("modes", MODES)
    chosen, sizes = options.chosen("peers", known), options.chosen_sizes(list(SETS))
    for cell, mode, size in product(cells, modes, sizes):
        built = {name: known[name](cell, size, mode) for name in chosen}
        yield Job(cell, mode, str(size), built, flops(cell, size, mode))
