"""The times of two files that `jrnn bench --json` wrote.

    python scripts/benchmarks/compare.py OLD.json NEW.json

The load of the machine also differs between two runs, so compare each ratio with those of the same job's peers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jrnn.bench.results import table_of

JOB = ("cell", "mode", "size", "peer")


def comparison_table(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> Table:
    """Returns a table of new times over old ones, for the jobs and peers that both have."""
    before = {tuple(r[name] for name in JOB): r["median"] for r in old}
    shared = [(r, before[key]) for r in new if (key := tuple(r[name] for name in JOB)) in before]
    columns = {name: [r[name] for r, _ in shared] for name in JOB}
    columns |= {
        "old ms": [f"{was * 1e3:.2f}" for _, was in shared],
        "new ms": [f"{r['median'] * 1e3:.2f}" for r, _ in shared],
        "new / old": [f"{r['median'] / was:.2f}" for r, was in shared],
    }
    return table_of("new time over old", columns)


if __name__ == "__main__":
    Console().print(
        comparison_table(*(json.loads(Path(path).read_text())["records"] for path in sys.argv[1:]))
    )
