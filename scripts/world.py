"""Programs of other libraries, plain and under `jrnn.optimize_scans()`: time, lowering, compilation, memory, difference.

    python -m venv world
    world/bin/pip install . dynamax numpyro tinygp cuthbert probdiffeq jaxley pyhgf jnkepler spyx blackjax optax flax diffrax
    world/bin/pip install --no-deps keras namex optree dm-haiku jmp tabulate distrax gymnax gymnasium farama-notifications
    taskset -c 0 world/bin/python scripts/world.py [NAME ...]

A line for each program, forward and with the gradient, and the reasons of `jrnn.explain()` for loops that are left as they
are. Times are processor time, interleaved, minimum of some runs; lowering is the minimum of two. A library that is not
installed is left out. It exits with 1 if a program differs by more than 1e-3 of its largest element, or takes more than
1.15 of the plain time. `--json docs/benchmarks/world.json` updates the record that the site's tables are made from.
scripts/world_suites.py runs the tests of such libraries.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from world_programs import DOUBLE, NO_GRADIENT, PROGRAMS

import jrnn

TURNS, SLOWER, APART = 100, 1.15, 1e-3
_TURN = 0.003  # seconds of one measurement, the mean of some calls: a longer one is interrupted more often


def lowered(fn: Callable, args: Any, mark: bool) -> tuple[Any, float]:
    """Returns what is lowered, and the processor time of tracing and lowering it without anything in JAX's caches."""
    jax.clear_caches()
    again = jrnn.optimize_scans(lambda args: fn(args)) if mark else lambda args: fn(args)
    start = time.process_time()
    program = jax.jit(again).lower(args)
    return program, time.process_time() - start


def compiled(program: Any) -> tuple[Any, float]:
    start = time.process_time()
    return program.compile(), time.process_time() - start


def seconds(call: Callable, args: Any, count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        jax.block_until_ready(call(args))
    return (time.process_time() - start) / count


def difference(outs: Any, others: Any) -> float:
    """Returns the largest difference of two results over the largest element; infinity where only one is finite."""
    most = 0.0
    for a, b in zip(jax.tree.leaves(outs), jax.tree.leaves(others), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype.kind not in "fc":
            most = max(most, 0.0 if np.array_equal(a, b) else np.inf)
        elif not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return np.inf
        else:
            apart, size = (np.max(np.abs(x[np.isfinite(a)]), initial=0) for x in (a - b, a))
            most = max(most, float(apart / max(size, 1e-30)))
    return most


def measured(fn: Callable, args: Any) -> dict[str, Any]:
    """Returns the record of a program: seconds plain and marked, and ratios of marked over plain."""
    lowering = [np.inf, np.inf]
    for mark in (0, 1, 1, 0):
        with jrnn.explain() as heard:
            program, spent = lowered(fn, args, bool(mark))
        lowering[mark] = min(lowering[mark], spent)
        if mark:
            marked, loops = program, heard.loops
    (plain, plain_seconds), (marked, marked_seconds) = compiled(program), compiled(marked)
    both = plain, marked
    outs = [call(args) for call in both]
    count = max(1, round(_TURN / max(seconds(plain, args, 2), 1e-6)))
    least = [np.inf, np.inf]
    for turn in range(TURNS):
        for k in (0, 1) if turn % 2 else (1, 0):
            least[k] = min(least[k], seconds(both[k], args, count))
    memory = [max(call.memory_analysis().temp_size_in_bytes, 1) for call in both]
    return {
        "plain": least[0],
        "marked": least[1],
        "lowering": round(lowering[1] / lowering[0], 2),
        "compilation": round(marked_seconds / plain_seconds, 2),
        "memory": round(memory[1] / memory[0], 2),
        "difference": difference(*outs),
        "rewritten": sum(plan.strategy != "lax.scan" for plan in loops),
        "left": [plan.text() for plan in loops if plan.strategy == "lax.scan"],
    }


def lines(record: dict[str, Any]) -> str:
    ratio = record["marked"] / record["plain"]
    within = ratio <= SLOWER and record["difference"] <= APART
    return "\n    ".join(
        [
            f"{record['program']:20} {record['mode']:8} {record['plain'] * 1e3:8.3f} ms, marked "
            f"{record['marked'] * 1e3:8.3f}: {ratio:.2f}; lowering {record['lowering']:.2f}, "
            f"compilation {record['compilation']:.2f}, memory {record['memory']:.2f}, "
            f"difference {record['difference']:.0e}, {record['rewritten']} rewritten"
            f"{'' if within else ' !!'}",
            *record["left"],
        ]
    )


def update(file: Path, records: list[dict[str, Any]]) -> None:
    """Puts records in place of those of the same programs, and the versions of their libraries."""
    kept = (
        json.loads(file.read_text(encoding="utf-8"))
        if file.exists()
        else {"versions": {}, "records": []}
    )
    packages = importlib.metadata.packages_distributions()
    for name in ("jax", *dict.fromkeys(r["program"].partition("_")[0] for r in records)):
        kept["versions"][name] = importlib.metadata.version(packages[name][0])
    measured = {(r["program"], r["mode"]): r for r in (*kept["records"], *records)}
    order = list(PROGRAMS)
    kept["records"] = sorted(
        measured.values(), key=lambda r: (order.index(r["program"]), r["mode"])
    )
    file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main(names: list[str], file: str | None) -> int:
    records = []
    for name in names or PROGRAMS:
        for _ in range(2):  # a library may change the precision when it is first imported
            jax.config.update("jax_enable_x64", name in DOUBLE)
            try:
                fn, args = PROGRAMS[name]()
            except ImportError as error:
                print(f"{name:20} left out: {error}", flush=True)
                break
        else:
            modes = [("forward", fn)] + [("gradient", jax.grad(fn))] * (name not in NO_GRADIENT)
            for mode, whole in modes:
                records.append({"program": name, "mode": mode, **measured(whole, args)})
                print(lines(records[-1]), flush=True)
                if file:
                    update(Path(file), records[-1:])
    return not records or any(
        r["marked"] > SLOWER * r["plain"] or not r["difference"] <= APART for r in records
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)}; all if none is named"
    )
    parser.add_argument("--json", metavar="FILE", help="write the record")
    given = parser.parse_args()
    sys.exit(main(given.names, given.json))
