"""`jrnn bench --calibrate`: measures the constants of the cost model (`loops/machines.py`) on this machine.

Small programs are timed, each of which differs from another one in what a constant counts: one more product a step, one more
kernel, one more array that is stacked. The constants follow from their times by differences.

Shapes: T time.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console
from rich.table import Table

from jrnn.bench.measure import conditions
from jrnn.errors import DataError, UsageError
from jrnn.files import write_whole
from jrnn.loops import machines
from jrnn.loops.machines import Machine

T = 1000
_SIDE = 512  # of a large product
_TINY = 16  # a row times a matrix of this side is no call
_ROWS, _WIDE = 8, 64  # so many rows times a matrix of this side are one
_TWICE = 2
_PER_KERNEL = (
    2.5  # operations on an element: of two kernels a maximum, which the model counts as four, and a subtraction
)
_STACKS = 8
_OPERATIONS = 32  # of a chain of elementwise operations, which reads little
_ELEMENTS = 4096
_FUNCTIONS = 4
_LARGE = 32 << 20  # elements of an array that fits no cache
_SIZES = tuple(1 << n for n in range(18, 25))  # elements of arrays that may fit one
_REPEATED = 20
_SECONDS = 0.3  # of one program
_LEAST_PART = 0.02  # of a shipped constant: what noise made smaller or negative counts as this


@dataclass(frozen=True)
class Probe:
    """A program to time."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]


def probes() -> list[Probe]:
    """Returns the programs, whose names `constants` reads."""
    ones = functools.partial(jnp.full, fill_value=0.5, dtype=jnp.float32)

    def steps(step: Callable, carry: Any, *weights: Any) -> tuple[Callable, tuple[Any, ...]]:
        return lambda c, *w: lax.scan(lambda c, _: step(c, *w), c, None, length=T), (carry, *weights)

    def products(c: Any, w: Any, count: int) -> tuple[Any, None]:
        for _ in range(count):
            c = c @ w
        return c, None

    def with_kernels(c: Any, w: Any) -> tuple[Any, None]:
        c = c @ w
        for _ in range(_TWICE):  # a kernel for each sum, and one that reads it
            c = c - jnp.max(c, keepdims=True)
        return c, None

    def elementwise(c: Any, y: Any, count: int) -> tuple[Any, None]:
        for _ in range(count):
            c = c * y + y
        return c, None

    def functions(c: Any, y: Any) -> tuple[Any, None]:
        for _ in range(_FUNCTIONS):
            c = jnp.tanh(c + y)
        return c, None

    def stacking(c: Any, y: Any, count: int) -> tuple[Any, Any]:
        c = c * y + y
        return c, tuple(c + float(i) for i in range(count))

    def passes(c: Any) -> Any:
        return lax.fori_loop(0, _REPEATED, lambda _, c: c * 0.999 + 0.5, c)

    wide, row = (ones((_ROWS, _WIDE)), ones((_WIDE, _WIDE))), (ones((1, _TINY)), ones((_TINY, _TINY)))
    vector, scalar = ones((_ELEMENTS,)), ones(())
    of = functools.partial
    found = {
        "nothing": (lambda x: x + 1, (scalar,)),
        "one product": steps(of(products, count=1), *wide),
        "two products": steps(of(products, count=_TWICE), *wide),
        "one tiny product": steps(of(products, count=1), *row),
        "two tiny products": steps(of(products, count=_TWICE), *row),
        "kernels": steps(with_kernels, *wide),
        "operations": steps(of(elementwise, count=_OPERATIONS), vector, vector),
        "more operations": steps(of(elementwise, count=_TWICE * _OPERATIONS), vector, vector),
        "functions": steps(functions, vector, vector),
        "no stack": steps(of(stacking, count=0), scalar, scalar),
        "stacks": steps(of(stacking, count=_STACKS), scalar, scalar),
        "reading": (jnp.max, (ones((_LARGE,)),)),
        "writing": (lambda x: jnp.broadcast_to(x, (_LARGE,)) + 1, (scalar,)),
    }
    found |= {f"passes over {4 * n} bytes": (passes, (ones((n,)),)) for n in _SIZES}
    return [Probe(name, fn, args) for name, (fn, args) in found.items()]


def processor_seconds(probe: Probe, budget: float = _SECONDS) -> float:
    """Returns the least processor time of a program over many turns, so that other work of the machine counts little."""
    made = jax.jit(probe.fn).lower(*probe.args).compile()
    jax.block_until_ready(made(*probe.args))
    best, spent = float("inf"), 0.0
    while spent < budget:
        start, runs = time.process_time(), 0
        while not runs or time.process_time() - start < budget / 10:  # threads report their time late
            jax.block_until_ready(made(*probe.args))
            runs += 1
        took = time.process_time() - start
        best, spent = min(best, took / runs), spent + took
    return best


def constants(seconds: Mapping[str, float], products: float, shipped: Machine) -> Machine:
    """Returns the constants that explain the times of the programs.

    Args:
        seconds: the time of each program of `probes`.
        products: floating-point operations of large products a second.
        shipped: the constants that bound what noise makes of a difference.
    """

    def step(more: str, less: str, count: float = 1.0) -> float:
        return (seconds[more] - seconds[less]) / (T * count)

    product = step("two products", "one product")
    element = step("more operations", "operations", 2 * _OPERATIONS * _ELEMENTS)
    kernel = step("kernels", "one product", 2 * _TWICE) - _PER_KERNEL * _ROWS * _WIDE * element
    tiny = step("two tiny products", "one tiny product") - kernel
    rates = {4 * n: 8.0 * n * _REPEATED / seconds[f"passes over {4 * n} bytes"] for n in _SIZES}
    cached = max(rates.values())
    read, written = (4.0 * _LARGE / seconds[name] for name in ("reading", "writing"))
    fits = [size for size, rate in rates.items() if rate > cached / 2]
    found = Machine(
        products=products,
        tiny_products=2 * _TINY**2 / max(tiny, 1e-12),
        call=product - kernel - 2 * _ROWS * _WIDE**2 / products,
        kernel=kernel,
        trip=step("one product", "nothing") - product,
        elementwise_trip=step("no stack", "nothing"),
        array=step("stacks", "no stack", _STACKS),
        element=element,
        function=step("functions", "nothing", _FUNCTIONS * _ELEMENTS) - element,
        cached=cached,
        read=read,
        written=written,
        cache=max(fits),
    )
    bounded = {}
    for f in fields(Machine):
        least = _LEAST_PART * getattr(shipped, f.name)
        bounded[f.name] = max(getattr(found, f.name), int(least) if f.name == "cache" else least)
    return replace(found, **bounded)


def default_path() -> Path:
    """Returns `jrnn/costs.json` in the user's folder of configurations."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "jrnn" / "costs.json"


def table(measured: Machine, shipped: Machine) -> Table:
    """Returns a table of the constants next to the shipped ones."""
    found = Table(title="constants of the cost model: seconds, bytes, or operations or bytes a second")
    for name in ("constant", "shipped", "measured", "measured / shipped"):
        found.add_column(name, justify="left" if name == "constant" else "right")
    for f in fields(Machine):
        mine, theirs = getattr(measured, f.name), getattr(shipped, f.name)
        found.add_row(f.name, f"{theirs:.3g}", f"{mine:.3g}", f"{mine / theirs:.2f}")
    return found


def run(
    console: Console,
    path: Path | None,
    timed: Callable[[Probe], float] = processor_seconds,
    gemm: Callable[[], float] | None = None,
) -> Machine:
    """Measures the constants, prints them next to the shipped ones, and writes them.

    Args:
        console: where to print.
        path: the file; by default `default_path()`.
        timed: returns the seconds of a program.
        gemm: returns the rate of large products.

    Raises:
        UsageError: on an accelerator, whose constants are not times of one core. DataError: if the file cannot be written.
    """
    platform = jax.default_backend()
    if platform != "cpu":
        raise UsageError(f"--calibrate measures processor time, not time of a {platform}; set JAX_PLATFORMS=cpu")
    products = (gemm or _products)()
    seconds = {}
    for probe in probes():
        console.print(probe.name, style="dim")
        seconds[probe.name] = timed(probe)
    measured = constants(seconds, products, machines.CPU)
    console.print(table(measured, machines.CPU))
    path = path or default_path()
    write_whole(
        path, machines.written(platform, measured, conditions=conditions(products, 0)).encode(), DataError, True
    )
    console.print(f"{path} is written; loops are planned with it where {machines.VARIABLE}={path} is set")
    return measured


def _products() -> float:
    square = jnp.ones((_SIDE, _SIDE), jnp.float32)
    return 2 * _SIDE**3 / processor_seconds(Probe("large product", jnp.matmul, (square, square)))
