"""The cells of this benchmark through `jrnn.scan` and its peers; see `jrnn.bench.peers`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import jax

from jrnn.bench import peers
from jrnn.bench.sizes import CELLS, GATES, MODES, SETS, flops
from jrnn.bench.suites import Job, SuiteOptions

OURS = ("jrnn",)
TAKES = ("cells", "modes", "sizes", "peers", "devices")


def jobs(options: SuiteOptions) -> Iterator[Job]:
    devices = peers.cores() if options.devices is None else options.devices
    known = peers.available(devices if jax.default_backend() == "cpu" else 1)
    cells = options.chosen("cells", CELLS) if options.cells else list(GATES)
    modes, chosen = options.chosen("modes", MODES), options.chosen("peers", known)
    sizes = options.chosen_sizes(list(SETS))
    for cell, mode, size in product(cells, modes, sizes):
        built = {name: known[name](cell, size, mode) for name in chosen}
        yield Job(cell, mode, str(size), built, flops(cell, size, mode))
