"""Counts how the executor "newton" solves the steps of tests/loops/newton_cells.py, for docs/benchmarks/newton.json.

    python scripts/record/newton_iterations.py            # prints the table
    python scripts/record/newton_iterations.py --write    # and writes the file

Weights are random, or trained by Adam to follow the running mean of the inputs. Nothing is timed: iterations, errors and the
depth of the compiled program do not depend on the machine.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/loops", "scripts/benchmarks", "docs")]

import tables  # noqa: E402
from newton_cells import CELLS, example  # noqa: E402
from program_depth import DeepModule  # noqa: E402

import jrnn  # noqa: E402

STEPS = {"lorenz": 1500}
UNTRAINED = ("kalman", "lorenz")  # their steps have no weights
HEADS = [
    "cell", "block", "T", "float64", "float64, trained", "float32", "float32, trained", "error, float64",
    "error, float32", "steps one by one", "launches, an iteration", "launches, `lax.scan`",
]  # fmt: skip


def trained(name: str, steps: int = 150) -> Any:
    """The weights after some steps of Adam on sequences of 64 steps."""
    make, p, carry, xs = example(name, 64)
    wanted = jnp.cumsum(xs.sum(-1, keepdims=True), axis=0) / jnp.arange(1, 65)[:, None, None]
    readout = jnp.full((*CELLS[name][3][-1:], 1), 0.5)

    def loss(both):
        p, readout = both
        ys = jrnn.scan(make(p), carry, xs)[1]
        return jnp.mean((ys @ readout - wanted) ** 2)

    optimizer = optax.adam(1e-2)

    def one(state, _):
        both, moments = state
        value, gradient = jax.value_and_grad(loss)(both)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(both, updates), moments), value

    start = p, readout
    ((p, _), _), losses = jax.jit(partial(jax.lax.scan, one, length=steps))(
        (start, optimizer.init(start)), None
    )
    print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}", file=sys.stderr)
    return p


def newton(step, carry, xs):
    return jrnn.loops.scan_statistics(step, carry, xs)


def plain(step, carry, xs):
    return jax.lax.scan(step, carry, xs), None


def program(run: Any, make: Any) -> Any:
    """Values, statistics and gradients."""

    def loss(p, carry, xs):
        results, statistics = run(make(p), carry, xs)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(results)), (
            results,
            statistics,
        )

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def error(ours: Any, theirs: Any) -> float:
    """The largest difference of any leaf, relative to that leaf's largest element."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(
        float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)) for a, b in pairs if np.size(a)
    )


def row(name: str) -> list[str]:
    steps = STEPS.get(name, 8192)
    make, p, carry, xs = example(name, steps)
    sets = [p] if name in UNTRAINED else [p, trained(name)]
    iterations, errors, by_loop, depths = [], [], 0, []
    for dtype in (jnp.float64, jnp.float32):
        programs, worst = [program(run, make) for run in (newton, plain)], 0.0
        for weights in sets:
            given = jax.tree.map(lambda v: jnp.asarray(v, dtype), (weights, carry, xs))  # noqa: B023
            ((_, (ours, statistics)), slope), ((_, (theirs, _)), expected) = (
                run(*given) for run in programs
            )
            iterations.append(str(int(statistics.iterations)))
            by_loop = max(by_loop, int(statistics.sequential_steps))
            worst = max(worst, error((ours, slope), (theirs, expected)))
        iterations += ["-"] * (2 - len(sets))
        errors.append(f"{worst:.0e}")
    for run in (newton, plain):
        lowered = jax.jit(lambda p, h, xs, run=run: run(make(p), h, xs)[0]).lower(p, carry, xs)
        module = DeepModule(lowered.compile().as_text())
        depths.append(f"{module.loop_depths()[0] if run is newton else module.depth():,}")
    return [name, str(CELLS[name][4]), f"{steps:,}", *iterations, *errors, f"{by_loop:,}", *depths]


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    names = [a for a in sys.argv[1:] if not a.startswith("-")] or list(CELLS)
    rows = []
    for name in names:
        rows.append(row(name))
        print(*rows[-1], sep=" | ", flush=True)
    if "--write" in sys.argv:
        tables.write("newton", {"head": HEADS, "rows": rows})


if __name__ == "__main__":
    main()
