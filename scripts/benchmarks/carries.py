"""Loops whose step touches a few elements of a large carry: `jrnn.scan` next to `jax.lax.scan`, for several sizes.

Delay lines, histories, replay buffers and arrays that are filled by index. The time must not grow with the size of the
carry; where XLA copies the carry at each step, it does. A loop has 2,000 steps. `--sizes 1024,65536` says how many elements
the carry has. Times are processor time.

Shapes: T time, N elements of the carry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import geometric_mean
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from mean_times import averaged
from pairs import pairs_of

import jrnn
from jrnn.bench.sizes import MODES
from jrnn.bench.suites import Job, SuiteOptions

OURS = ("jrnn",)
TAKES = ("cells", "modes", "peers", "sizes")
STEPS = 2000
SIZES = ("1024", "65536")

Step = Callable[[Any, Any], tuple[Any, Any]]


def delay(n: int) -> tuple[Step, Any]:
    """An echo: one element of the buffer is read, and another one is written."""

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        buffer, i = carry
        y = x + 0.5 * buffer[(i - 7) % n]
        return (buffer.at[i % n].set(y), i + 1), y

    return step, (jnp.zeros(n), jnp.int32(0))


def interpolated(n: int) -> tuple[Step, Any]:
    """Two elements are read, for a delay between two samples, through a nonlinear function."""

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        buffer, i = carry
        y = jnp.tanh(x + 0.3 * buffer[(i - 7) % n] + 0.2 * buffer[(i - 8) % n])
        return (buffer.at[i % n].set(y), i + 1), y

    return step, (jnp.zeros(n), jnp.int32(0))


def moving_delay(n: int) -> tuple[Step, Any]:
    """A chorus: the delay changes with the input."""

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        buffer, i = carry
        steps = (10 + 5 * jnp.sin(x)).astype(jnp.int32)
        y = x + 0.5 * buffer[(i - steps) % n]
        return (buffer.at[i % n].set(y), i + 1), y

    return step, (jnp.zeros(n), jnp.int32(0))


def crossed_delays(n: int) -> tuple[Step, Any]:
    """Two lines that feed each other."""

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        left, right, i = carry
        new_left = x + 0.5 * right[(i - 11) % n]
        new_right = x - 0.4 * left[(i - 7) % n]
        carry = (left.at[i % n].set(new_left), right.at[i % n].set(new_right), i + 1)
        return carry, new_left + new_right

    return step, (jnp.zeros(n), jnp.zeros(n), jnp.int32(0))


def voices(n: int) -> tuple[Step, Any]:
    """Two lines of different delays under `vmap`."""

    def voice(buffer: Any, steps: Any, i: Any, x: Any) -> tuple[Any, Any]:
        y = x + 0.5 * buffer[(i - steps) % n]
        return buffer.at[i % n].set(y), y

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        buffers, i = carry
        buffers, y = jax.vmap(voice, (0, 0, None, None))(buffers, jnp.array([7, 9]), i, x)
        return (buffers, i + 1), y

    return step, (jnp.zeros((2, n)), jnp.int32(0))


def history(n: int) -> tuple[Step, Any]:
    """A delayed differential equation, whose whole past is in the carry."""

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        past, i = carry
        y = past[i] + 0.01 * (x - past[jnp.maximum(i - 5, 0)])
        return (past.at[i + 1].set(y), i + 1), y

    return step, (jnp.zeros(n + STEPS), jnp.int32(0))


def rows(n: int) -> tuple[Step, Any]:
    """A buffer of vectors of 8 numbers."""
    length = n // 8

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        buffer, i = carry
        y = jnp.tanh(x + buffer[(i - 7) % length])
        return (buffer.at[i % length].set(y), i + 1), jnp.sum(y)

    return step, (jnp.zeros((length, 8)), jnp.int32(0))


def replay(n: int) -> tuple[Step, Any]:
    """A replay buffer: one element is written, and four random ones are read."""

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        buffer, i, key = carry
        key, now = jax.random.split(key)
        buffer = buffer.at[i % n].set(x)
        return (buffer, i + 1, key), jnp.sum(buffer[jax.random.randint(now, (4,), 0, n)])

    return step, (jnp.zeros(n), jnp.int32(0), jax.random.key(0))


def filled(n: int) -> tuple[Step, Any]:
    """An array that is filled by index, as in NumPy."""

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        results, i = carry
        y = jnp.sin(x)
        return (results.at[i].set(y), i + 1), y

    return step, (jnp.zeros(n + STEPS), jnp.int32(0))


CARRIES: dict[str, Callable[[int], tuple[Step, Any]]] = {
    "delay": delay,
    "interpolated": interpolated,
    "moving_delay": moving_delay,
    "crossed_delays": crossed_delays,
    "voices": voices,
    "history": history,
    "rows": rows,
    "replay": replay,
    "filled": filled,
}
PEERS: dict[str, Callable[..., Any]] = {"jrnn": jrnn.scan, "lax.scan": lax.scan}


def program(name: str, mode: str, peer: str, size: int) -> tuple[Callable[..., Any], tuple[Any]]:
    """Returns the function of a loop, or the gradient of its outputs' squares, and its inputs [T]."""
    step, init = CARRIES[name](size)
    xs = jnp.linspace(0.0, 1.0, STEPS)

    def run(xs: Any) -> Any:
        (last, *_), ys = PEERS[peer](step, init, xs)
        return last if name == "filled" else ys

    def loss(xs: Any) -> Any:
        return jnp.sum(run(xs) ** 2)

    return run if mode == "forward" else jax.grad(loss), (xs,)


def jobs(options: SuiteOptions) -> Iterator[Job]:
    peers = options.chosen("peers", PEERS)
    for name in options.chosen("cells", CARRIES):
        for mode in options.chosen("modes", MODES):
            for size in options.sizes or SIZES:
                programs = {p: averaged(*program(name, mode, p, int(size))) for p in peers}
                yield Job(name, mode, size, programs)


def summary(records: Sequence[Any]) -> str:
    """Returns the geometric means of the times over those of `lax.scan`, by the size of the carry."""
    lines = []
    for mode in dict.fromkeys(r.mode for r in records):
        by_size: dict[str, list[float]] = {}
        for ours, reference in pairs_of(records, mode):
            by_size.setdefault(ours.size, []).append(ours.least / reference.least)
        for size, ratios in by_size.items():
            mean = geometric_mean(ratios)
            worst = max(ratios)
            lines.append(
                f"{mode}, carries of {size}: time {mean:.3f} of lax.scan's (at most {worst:.2f})"
            )
    return "\n".join(lines)
