"""The layers of `jrnn.nn` that are written as a step, next to the same layer with the loops of JAX.

"jrnn" is a layer as it is, and "lax.scan" the same layer in `jrnn.plain_scans()`, forward and train (gradients of the sum of
squares of the output with respect to the parameters and the input). Another library's layer joins them where there is one
and it is installed, see `layer_peers`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product

import jax.numpy as jnp
import layer_peers
import numpy as np
from flax import nnx

from jrnn.bench.peers import Timed, compiled
from jrnn.bench.sizes import MODES, Size
from jrnn.bench.suites import Job, SuiteOptions
from jrnn.loops import plain_scans
from jrnn.nn.families import CELLS

OURS = ("jrnn",)
TAKES = ("cells", "modes", "sizes")
SIZES = ("256x8x128x128", "1024x2x256x256")
HEADS = 4
LOOPS = {"jrnn": nullcontext, "lax.scan": plain_scans}


def jobs(options: SuiteOptions) -> Iterator[Job]:
    cells, modes = options.chosen("cells", CELLS), options.chosen("modes", MODES)
    for cell, mode, size in product(cells, modes, options.chosen_sizes(SIZES)):
        yield Job(cell, mode, str(size), programs(cell, size, mode))


def programs(cell: str, size: Size, mode: str) -> dict[str, Timed]:
    heads = {"num_heads": HEADS} if "num_heads" in inspect.signature(CELLS[cell]).parameters else {}
    layer = CELLS[cell](size.hidden, rngs=nnx.Rngs(0), **heads)
    shape = (size.steps, size.batch, size.hidden)
    x = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)
    by_name = {}
    for name, loops in LOOPS.items():
        with loops():
            by_name[name] = compiled(
                lambda params, x: layer.apply(params, x)[0], layer.params(), x, mode
            )
    for name, (run, parameters) in layer_peers.of(cell, size, HEADS).items():
        by_name[name] = compiled(run, parameters, x, mode)
    return by_name
