"""One computation in all spellings (`spellings.py`): `jrnn.scan`, `jax.lax.scan`, and the plain spelling.

A row is a spelling of a cell. "plain" is `jrnn.scan` in the plain spelling, so that its column says what a spelling costs.
"a net" is the net of a cell by `to_jax`, next to the same step by hand with the products of the inputs before the loop, as
the net has them. "eager" is the plain spelling outside of `jax.jit`, next to its program within.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import jax
from mean_times import averaged, outside_of_jit
from spelled_cells import CELLS, problem
from spelled_libraries import AS_A_NET
from spellings import programs

from jrnn.bench.peers import in_mode
from jrnn.bench.sizes import MODES
from jrnn.bench.suites import Job, SuiteOptions
from jrnn.loops import scan

OURS = ("jrnn",)
TAKES = ("cells", "modes", "sizes")
SIZES = ("64x32x64x256", "100x8x64x128")
OF_A_NET = "inputs multiplied first"  # the spelling that a net has


def jobs(options: SuiteOptions) -> Iterator[Job]:
    cells = options.chosen("cells", CELLS)
    modes = options.chosen("modes", MODES)
    for cell, mode, size in product(cells, modes, options.chosen_sizes(SIZES)):
        given = problem(cell, size)

        def timed(run: Callable[..., Any], mode: str = mode, given: Any = given) -> Any:
            return averaged(in_mode(run, mode), given)

        ours, theirs = (programs(cell, size, which, mode) for which in (scan, jax.lax.scan))
        eager = {"jrnn": ours["plain"], "lax.scan": theirs["plain"]}
        called = {peer: outside_of_jit(in_mode(run, mode), given) for peer, run in eager.items()}
        yield Job(f"{cell}, eager", mode, str(size), {**called, "plain": timed(ours["plain"])})
        for name, run in ours.items():
            as_a_net = name == AS_A_NET
            peers = {"jrnn": run, "lax.scan": theirs[OF_A_NET if as_a_net else name]}
            peers["plain"] = ours[OF_A_NET if as_a_net else "plain"]
            yield Job(
                f"{cell}, {name}", mode, str(size), {peer: timed(of) for peer, of in peers.items()}
            )
