"""Programs of a few microseconds, timed by the mean of some runs.

On a CPU it is their processor time. On an accelerator, where the processor only waits, it is the time of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrnn.bench.peers import Timed


def averaged(fn: Callable[..., Any], args: Sequence[Any]) -> Timed:
    """Returns a function in JAX as a program that is compiled for these arguments, and timed by the mean of some runs."""
    return Timed.of(fn, *args, timed=mean_seconds)


def outside_of_jit(fn: Callable[..., Any], args: Sequence[Any]) -> Timed:
    """Returns a function in JAX as a program that is called as users call it outside of `jax.jit`."""
    return Timed(mean_seconds(lambda: jax.block_until_ready(fn(*args))))


def mean_seconds(call: Callable[[], Any]) -> Callable[[], float]:
    """Returns a function that runs a call for a while, and returns the mean of the seconds."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter

    def run() -> float:
        start = clock()
        runs = 0
        while not runs or clock() - start < 0.02:  # threads report their time late
            call()
            runs += 1
        return (clock() - start) / runs

    return run
