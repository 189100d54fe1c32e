"""Layers with matrix states: `jrnn.scan` next to `jax.lax.scan`, and next to two chunkwise forms that are written by hand.

Times are processor time, as in the suite "never-worse". A size TxNxDxH is T steps and N heads with states of D x H.
`--sizes 256x2x64x64,1024x2x64x64,4096x2x64x64,16384x2x64x64` shows how time and memory grow with T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import geometric_mean
from typing import Any

import chunkwise
import jax
import jax.numpy as jnp
from linear_layers import LAYERS, problem
from mean_times import averaged
from pairs import pairs_of

from jrnn.bench.sizes import MODES, Size
from jrnn.bench.suites import Job, SuiteOptions
from jrnn.loops import scan

OURS = ("jrnn",)
TAKES = ("cells", "modes", "sizes", "peers")
BY_HAND = {"gla": chunkwise.gla, "gated_delta_rule": chunkwise.gated_delta_rule}


def programs(name: str) -> dict[str, Callable[[Any, Any], Any]]:
    """Returns the functions `(carry, xs) -> (carry, outputs)` of a layer."""
    step = LAYERS[name].step
    by_name = {
        "jrnn": lambda carry, xs: scan(step, carry, xs),
        "lax.scan": lambda carry, xs: jax.lax.scan(step, carry, xs),
    }
    return by_name | ({"by hand": BY_HAND[name]} if name in BY_HAND else {})


def train(forward: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns the gradient of the sum of squares of all outputs with respect to the carry and the inputs."""

    def loss(carry: Any, xs: Any) -> Any:
        return sum(jnp.sum(v**2) for v in jax.tree.leaves(forward(carry, xs)))

    return jax.value_and_grad(loss, (0, 1))


def jobs(options: SuiteOptions) -> Iterator[Job]:
    peers = options.chosen("peers", ("jrnn", "lax.scan", "by hand"))
    for name in options.chosen("cells", LAYERS):
        for mode in options.chosen("modes", MODES):
            for size in options.chosen_sizes(["1024x8x64x64"]):
                yield Job(name, mode, str(size), of(name, mode, size, peers))


def of(name: str, mode: str, size: Size, peers: Sequence[str]) -> dict[str, Any]:
    given = problem(name, size)
    return {
        peer: averaged(forward if mode == "forward" else train(forward), given)
        for peer, forward in programs(name).items()
        if peer in peers and (peer != "by hand" or size.steps % chunkwise.C == 0)
    }


def summary(records: Sequence[Any]) -> str:
    """Returns geometric means over `lax.scan`: of times and temporary memory."""
    lines = []
    for mode in dict.fromkeys(r.mode for r in records):
        if pairs := pairs_of(records, mode):
            times = [a.median / b.median for a, b in pairs]
            memory = [max(a.peak_bytes, 1) / max(b.peak_bytes, 1) for a, b in pairs]
            lines.append(
                f"{mode}: time {geometric_mean(times):.2f} of lax.scan's (at most {max(times):.2f}), "
                f"temporary memory {geometric_mean(memory):.3f}"
            )
    return "\n".join(lines)
