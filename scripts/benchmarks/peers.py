"""The loops of scientists: `jrnn.scan` next to `jax.lax.scan`, numba, scipy and C, on one core.

`--sizes float32,float64` chooses the types. Times are processor time. Gradients are those of JAX: the others have
none. Before it is timed, each program's outputs are compared with those of `jax.lax.scan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import geometric_mean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mean_times import averaged, mean_seconds
from science_steps import LOOPS, ScienceLoop

import jrnn
from jrnn.bench.peers import Timed
from jrnn.bench.sizes import MODES
from jrnn.bench.suites import Job, SuiteOptions
from jrnn.errors import DataError

OURS = ("jrnn",)
TAKES = ("cells", "modes", "peers", "sizes")
NEEDS = {"numba": "numba", "scipy": "scipy"}
TYPES = ("float32", "float64")
SCANS: dict[str, Callable[..., Any]] = {"jrnn": jrnn.scan, "lax.scan": jax.lax.scan}
PEERS = (*SCANS, "numba", "scipy", "C")
_MOST_APART = {"float32": 2e-3, "float64": 1e-9}  # of outputs, next to the largest one


def program(
    loop: ScienceLoop, scan: Callable[..., Any], mode: str
) -> Callable[[Any, Any, Any], Any]:
    """Returns a function of parameters, carry and inputs: the outputs, or the gradients of the sum of their squares."""

    def run(parameters: Any, carry: Any, xs: Any) -> Any:
        return scan(loop.step(parameters), carry, xs, reverse=loop.reverse)[1]

    def loss(parameters: Any, carry: Any, xs: Any) -> Any:
        return jnp.sum(run(parameters, carry, xs) ** 2)

    return run if mode == "forward" else jax.grad(loss, (0, 2))


def _typed(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf, dtype), tree)


def timed_by_hand(name: str, peer: str, args: Sequence[Any], dtype: str) -> Timed | None:
    """Returns a loop in numba, scipy or C, compared with `jax.lax.scan`; None where there is none."""
    if peer == "C":
        from science_c import in_c as made
    elif peer == "numba":
        from science_numba import in_numba as made
    else:
        from science_numba import in_scipy as made
    call = made(name, *args, np.dtype(dtype).type)
    if call is None:
        return None
    loop = LOOPS[name](np.random.default_rng(0))
    expected = np.asarray(jax.jit(program(loop, jax.lax.scan, "forward"))(*args))
    apart = np.max(np.abs(call() - expected)) / np.max(np.abs(expected))
    if not apart <= _MOST_APART[dtype]:
        raise DataError(f"bench: {name} in {peer} differs from lax.scan by {apart:.1e} ({dtype})")
    return Timed(mean_seconds(call))


def jobs(options: SuiteOptions) -> Iterator[Job]:
    for dtype in options.sizes or TYPES:
        jax.config.update("jax_enable_x64", dtype == "float64")
        for name in options.chosen("cells", LOOPS):
            loop = LOOPS[name](np.random.default_rng(0))
            args = _typed((loop.parameters, loop.carry, loop.xs), dtype)
            for mode in options.chosen("modes", MODES):
                programs: dict[str, Timed] = {}
                for peer in options.chosen("peers", PEERS):
                    if peer in SCANS:
                        programs[peer] = averaged(program(loop, SCANS[peer], mode), args)
                    elif mode == "forward":
                        by_hand = timed_by_hand(name, peer, args, dtype)
                        if by_hand is not None:
                            programs[peer] = by_hand
                yield Job(name, mode, dtype, programs)


def summary(records: Sequence[Any]) -> str:
    """Returns the geometric means of jrnn's time over those of the others."""
    times = {(r.cell, r.size, r.mode, r.peer): r.least for r in records}
    lines = []
    for key in dict.fromkeys((r.size, r.mode, r.peer) for r in records if r.peer != "jrnn"):
        size, mode, peer = key
        ratios = []
        for cell in dict.fromkeys(r.cell for r in records):
            ours = times.get((cell, size, mode, "jrnn"))
            theirs = times.get((cell, size, mode, peer))
            if ours is not None and theirs is not None:
                ratios.append(ours / theirs)
        if ratios:
            lines.append(
                f"{size}, {mode}: time {geometric_mean(ratios):.2f} of {peer}'s "
                f"({len(ratios)} loops, at most {max(ratios):.2f})"
            )
    return "\n".join(lines)
