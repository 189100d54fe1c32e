"""What a suite of measurements is: a module whose `jobs(options)` yields the programs to compare.

In: `SuiteOptions`. Out: `Job`s, each with the programs to compare. `jrnn bench` runs `cell_suite.py`.

A suite's `OURS` are the programs whose times are divided by the others' times. It may have `summary(records)`, a text
below the tables. scripts/benchmarks of the repository has more suites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from jrnn.bench.peers import Timed
from jrnn.bench.sizes import Size, check_names, parse_sizes
from jrnn.errors import UsageError


@dataclass(frozen=True)
class SuiteOptions:
    """What to run.

    Attributes:
        suite: the name of the suite.
        cells, modes, sizes, peers: names to measure; None for all that the suite has and can run here.
        turns: measured runs of each program, at most.
        seconds: after these, no more turns of a job begin, except for the first three.
        json, plot: files to write; json "-" is the standard output.
    """

    suite: str = "scan"
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


def check_options(options: SuiteOptions, suite: ModuleType) -> None:
    """Raises UsageError for an option that means nothing for the suite."""
    for name in ("cells", "modes", "sizes", "peers"):
        if getattr(options, name) is not None and name not in suite.TAKES:
            raise UsageError(f"--{name} means nothing for the suite {options.suite!r}")
