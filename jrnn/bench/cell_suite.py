"""The cells of this benchmark through `jrnn.scan` and its peers; see `jrnn.bench.peers`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jrnn.bench import peers
from jrnn.bench.sizes import CELLS, MODES, SETS, flops
from jrnn.bench.suites import Job, SuiteOptions

OURS = ("jrnn",)
TAKES = ("cells", "modes", "sizes", "peers")


def jobs(options: SuiteOptions) -> Iterator[Job]:
    known = peers.available()
    cells = options.chosen("cells", CELLS)
    modes = options.chosen("modes", MODES)
    chosen = options.chosen("peers", known)
    sizes = options.chosen_sizes(list(SETS))
    for cell, mode, size in product(cells, modes, sizes):
        built = {name: known[name](cell, size, mode) for name in chosen}
        yield Job(cell, mode, str(size), built, flops(cell, size, mode))
