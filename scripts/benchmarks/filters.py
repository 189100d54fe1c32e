"""Scientific loops over small states: `jrnn.scan` next to `jax.lax.scan`, forward and with the gradient.

Times are processor time. A loop has 1,000 steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import geometric_mean
from typing import Any

import jax
import jax.numpy as jnp
from mean_times import averaged
from pairs import pairs_of
from small_states import LOOPS

from jrnn.bench.sizes import MODES
from jrnn.bench.suites import Job, SuiteOptions
from jrnn.loops import scan

OURS = ("jrnn",)
TAKES = ("cells", "modes", "peers")
PEERS: dict[str, Callable] = {"jrnn": scan, "lax.scan": jax.lax.scan}
STEPS = 1_000
SLOW = 1e-6  # seconds a step; loops that take `jax.lax.scan` more have something to gain


def program(name: str, mode: str, peer: str) -> tuple[Callable[[Any, Any], Any], tuple[Any, Any]]:
    """Returns the function of a loop, or its gradient with respect to the carry and the inputs, and the arguments."""
    step, carry, xs = LOOPS[name](STEPS)

    def loss(carry: Any, xs: Any) -> Any:
        return sum(jnp.sum(v) for v in jax.tree.leaves(PEERS[peer](step, carry, xs)))

    return loss if mode == "forward" else jax.grad(loss, (0, 1), allow_int=True), (carry, xs)


def jobs(options: SuiteOptions) -> Iterator[Job]:
    peers = options.chosen("peers", PEERS)
    for name in options.chosen("cells", LOOPS):
        for mode in options.chosen("modes", MODES):
            yield Job(
                name,
                mode,
                str(STEPS),
                {peer: averaged(*program(name, mode, peer)) for peer in peers},
            )


def summary(records: Sequence[Any]) -> str:
    """Returns the geometric means of the times over those of `lax.scan`."""
    lines = []
    for mode in dict.fromkeys(r.mode for r in records):
        pairs = pairs_of(records, mode)
        for text, slow in (("more than 1 us", True), ("less", False)):
            ratios = [a.median / b.median for a, b in pairs if (b.median / STEPS > SLOW) == slow]
            if ratios:
                lines.append(
                    f"{mode}, {len(ratios)} loops that take lax.scan {text} a step: time {geometric_mean(ratios):.3f} of "
                    f"lax.scan's (at most {max(ratios):.2f})"
                )
    return "\n".join(lines)
