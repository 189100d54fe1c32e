"""Timing programs side by side, in turns, so that noise of the machine affects all of them alike."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.bench.peers import Program

_SETTLED = 0.01  # seconds that a program runs before it is measured
_TURNS = 3  # that are worth a median


@dataclass(frozen=True)
class Timing:
    """Seconds of one program: median and quartiles over its turns."""

    median: float
    low: float
    high: float
    turns: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Timing:
        """
        >>> Timing.of([3.0, 1.0, 2.0]).median
        2.0
        """
        low, median, high = np.percentile(seconds, (25, 50, 75)).tolist()
        return Timing(median, low, high, len(seconds))


def in_turns(programs: Mapping[str, Program], turns: int, seconds: float = math.inf) -> dict[str, Timing]:
    """Runs all programs in turns, each turn in an order of its own.

    After `seconds` no more turns begin, but for the first three.
    Before it is measured a program runs unmeasured, as in a training loop it would follow itself: whoever ran before leaves
    its data in the caches and its threads (OpenMP's, for some milliseconds) busy waiting on the cores.
    """
    took: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        program.run()
    orders, start = random.Random(0), time.perf_counter()
    for turn in range(turns):
        if turn >= _TURNS and time.perf_counter() - start > seconds:
            break
        for name in orders.sample(list(programs), len(programs)):
            settled = 0.0
            while settled < _SETTLED:
                settled += programs[name].run()
            took[name].append(programs[name].run())
    return {name: Timing.of(values) for name, values in took.items()}


def gemm_flops(seconds: float = 0.3, sides: Sequence[int] = (384, 512, 1024)) -> float:
    """Floating-point operations a second of float32 matrix products here and now, in the best of their turns.

    The best, as what else the machine does only slows a product down; and of several sizes, as a large one takes long
    enough to be disturbed in every turn, while the programs that are compared with it are short.
    """
    best = 0.0
    for side in sides:
        a = jnp.ones((side, side), jnp.float32)
        product = jax.jit(jnp.matmul).lower(a, a).compile()
        jax.block_until_ready(product(a, a))
        begun, turns = time.perf_counter(), 0
        while turns < _TURNS or time.perf_counter() - begun < seconds / len(sides):
            start = time.perf_counter()
            jax.block_until_ready(product(a, a))
            best, turns = max(best, 2 * side**3 / (time.perf_counter() - start)), turns + 1
    return best
