"""The constants of the cost model, measured again on this machine and printed next to those in use.

    python scripts/benchmarks constants

Each constant follows from the time of one small program, or from the difference of two: `constants` says how.
A choice of `jrnn.scan` depends on ratios of these constants alone (`jrnn/loops/costs/machines.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from mean_times import averaged

from jrnn.bench.suites import Job, SuiteOptions
from jrnn.loops.costs import machines
from jrnn.loops.costs.constants import TINY_LOOP

OURS = ("program",)
TAKES = ("cells",)

SIDE = 512  # of matrices of large products
STEPS = 2_000
ROWS = 8
WIDTH = 64
IN_CACHE = 1 << 16  # elements of an array that fits the caches of a core
IN_MEMORY = 1 << 26  # elements of an array that fits none
OPERATIONS = 16


def many_products(steps: int) -> Callable[..., Any]:
    """Returns a loop whose step calls two small products, or one: their difference is a call and its operations."""

    def loop(w: Any, h: Any) -> Any:
        def step(h: Any, _: None) -> tuple[Any, None]:
            for _ in range(steps):
                h = jax.lax.optimization_barrier(h @ w)
            return h, None

        return jax.lax.scan(step, h, None, length=STEPS)[0]

    return loop


def barriers(count: int) -> Callable[..., Any]:
    """Returns a loop with this number of elementwise kernels next to one product."""

    def loop(w: Any, h: Any) -> Any:
        def step(h: Any, _: None) -> tuple[Any, None]:
            h = h @ w
            for _ in range(count):
                h = jax.lax.optimization_barrier(h + 1.0)
            return h, None

        return jax.lax.scan(step, h, None, length=STEPS)[0]

    return loop


def additions(count: int) -> Callable[..., Any]:
    """Returns a loop of one kernel whose step adds a number this number of times, each addition after the one before."""

    def loop(c: Any, x: Any) -> Any:
        def step(c: Any, _: None) -> tuple[Any, None]:
            for _ in range(count):
                c = c * x + x
            return c, None

        return jax.lax.scan(step, c, None, length=100 * STEPS)[0]

    return loop


def elementwise(x: Any) -> Any:
    for k in range(OPERATIONS):
        x = x * x + (0.1 + k)
    return x


def copied(x: Any) -> Any:
    """Reads and writes an array many times, so that its memory is not new."""

    def copy(_: Any, x: Any) -> Any:
        return jax.lax.optimization_barrier(x + 1.0)

    return jax.lax.fori_loop(0, STEPS, copy, x)


SQUARE = ((SIDE, SIDE), (SIDE, SIDE))
SMALL = ((WIDTH, WIDTH), (ROWS, WIDTH))
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "large product": (jnp.dot, SQUARE),
    "one call": (many_products(1), SMALL),
    "two calls": (many_products(2), SMALL),
    "one kernel": (barriers(1), SMALL),
    "three kernels": (barriers(3), SMALL),
    "eight additions": (additions(8), ((), ())),
    "sixteen additions": (additions(16), ((), ())),
    "elementwise": (elementwise, ((IN_CACHE,),)),
    "tanh": (jnp.tanh, ((IN_CACHE,),)),
    "copy in the cache": (copied, ((IN_CACHE,),)),
    "read memory": (jnp.sum, ((IN_MEMORY,),)),
    "write memory": (lambda x: jnp.full((IN_MEMORY,), x), ((),)),
}


class Constant(NamedTuple):
    """A constant, its unit, its value in use, and what the measured seconds of programs say of it."""

    name: str
    unit: str
    in_use: float
    measured: Callable[[Mapping[str, float]], float]


def small_product_seconds(seconds: Mapping[str, float]) -> float:
    return 2 * ROWS * WIDTH**2 / (2 * SIDE**3 / seconds["large product"])


def constants() -> tuple[Constant, ...]:
    """Returns the constants that are measured. Clocks differ: what counts is their ratio to `element`."""
    m = machines.this_processor()
    return (
        Constant(
            "product_rate",
            "operations/s",
            m.product_rate,
            lambda s: 2 * SIDE**3 / s["large product"],
        ),
        Constant(
            "call",
            "s",
            m.call,
            lambda s: (s["two calls"] - s["one call"]) / STEPS - small_product_seconds(s),
        ),
        Constant(
            "kernel", "s", m.kernel, lambda s: (s["three kernels"] - s["one kernel"]) / (2 * STEPS)
        ),
        Constant(
            "element",
            "s",
            m.element,
            lambda s: s["elementwise"] / (2 * OPERATIONS * IN_CACHE),
        ),
        Constant("function", "s", m.function, lambda s: s["tanh"] / IN_CACHE),
        Constant(
            "cache_rate",
            "bytes/s",
            m.cache_rate,
            lambda s: 8 * STEPS * IN_CACHE / s["copy in the cache"],
        ),
        Constant("read_rate", "bytes/s", m.read_rate, lambda s: 4 * IN_MEMORY / s["read memory"]),
        Constant(
            "write_rate", "bytes/s", m.write_rate, lambda s: 4 * IN_MEMORY / s["write memory"]
        ),
        Constant(
            "TinyLoopCycles.latency",
            "cycles",
            TINY_LOOP.latency,
            lambda s: (
                (s["sixteen additions"] - s["eight additions"])
                / (8 * 100 * STEPS)
                / TINY_LOOP.seconds
            ),
        ),
    )


def jobs(options: SuiteOptions) -> Iterator[Job]:
    for name in options.chosen("cells", PROGRAMS):
        run, shapes = PROGRAMS[name]
        arguments = tuple(jnp.full(shape, 0.01, jnp.float32) for shape in shapes)
        yield Job(name, "forward", "", {"program": averaged(run, arguments)})


def summary(records: Sequence[Any]) -> str:
    """Returns a table of the constants in use and as measured, for the programs that were run."""
    seconds = {record.cell: record.low for record in records}
    lines = [f"{'constant':24} {'unit':14} {'in use':>10} {'measured':>10} {'ratio':>6}"]
    for constant in constants():
        try:
            new = constant.measured(seconds)
        except KeyError:  # its programs were not chosen
            continue
        ratio = new / constant.in_use
        lines.append(
            f"{constant.name:24} {constant.unit:14} {constant.in_use:10.3g} {new:10.3g} {ratio:6.2f}"
        )
    return "\n".join(lines)
