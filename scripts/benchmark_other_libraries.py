"""Times of other libraries' recurrent layers with and without `jrnn.optimize_scans()`, as a table in Markdown.

Needs flax, dm-haiku and equinox. All programs of a size run in turns, so that other work on the machine slows each of them
down alike; the table has medians. On a busy machine processor times say more than the clock.
Example: `python scripts/benchmark_other_libraries.py --seconds 3`.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

import jrnn

SIZES = ((100, 32, 128, 128), (50, 64, 256, 256), (500, 8, 64, 64))  # T, N, D, H
Layer = tuple[
    Callable[[Any, jax.Array], jax.Array], Any
]  # (parameters, xs [T, N, D]) -> hs [T, N, H], and its parameters


def flax_nnx(cell: str, xs: jax.Array, hidden: int) -> Layer:
    kind = {"LSTM": nnx.OptimizedLSTMCell, "GRU": nnx.GRUCell}[cell]
    layer = nnx.RNN(kind(xs.shape[2], hidden, rngs=nnx.Rngs(0)), time_major=True)
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)
    zeros = jnp.zeros((xs.shape[1], hidden))
    start = (zeros, zeros) if cell == "LSTM" else zeros
    return lambda parameters, xs: nnx.merge(graph, parameters, rest)(xs, initial_carry=start), parameters


def flax_linen(cell: str, xs: jax.Array, hidden: int) -> Layer:
    kind = {"LSTM": nn.OptimizedLSTMCell, "GRU": nn.GRUCell}[cell]
    layer = nn.RNN(kind(hidden), time_major=True)
    return layer.apply, layer.init(jax.random.key(0), xs)


def haiku(cell: str, xs: jax.Array, hidden: int) -> Layer:
    def run(xs: jax.Array) -> jax.Array:
        core = {"LSTM": hk.LSTM, "GRU": hk.GRU}[cell](hidden)
        return hk.dynamic_unroll(core, xs, core.initial_state(xs.shape[1]))[0]

    layer = hk.without_apply_rng(hk.transform(run))
    return layer.apply, layer.init(jax.random.key(0), xs)


def equinox(cell: str, xs: jax.Array, hidden: int) -> Layer:
    kind = {"LSTM": eqx.nn.LSTMCell, "GRU": eqx.nn.GRUCell}[cell]
    parameters, static = eqx.partition(kind(xs.shape[2], hidden, key=jax.random.key(0)), eqx.is_array)

    def run(parameters: Any, xs: jax.Array) -> jax.Array:
        layer = eqx.combine(parameters, static)

        def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            state = jax.vmap(layer)(x, state)
            return state, state[0] if cell == "LSTM" else state

        zeros = jnp.zeros((xs.shape[1], hidden))
        return jax.lax.scan(step, (zeros, zeros) if cell == "LSTM" else zeros, xs)[1]

    return run, parameters


LIBRARIES = {"flax.nnx.RNN": flax_nnx, "flax.linen.RNN": flax_linen, "Haiku": haiku, "Equinox": equinox}


def train_step(run: Callable, optimized: bool) -> Callable:
    def loss(parameters: Any, xs: jax.Array) -> jax.Array:
        return jnp.mean(run(parameters, xs) ** 2)

    return jax.jit(jax.value_and_grad(jrnn.optimize_scans()(loss) if optimized else loss))


def measured(programs: dict[Any, tuple[Callable, tuple]], seconds: float) -> dict[Any, tuple[float, float]]:
    """The median wall-clock and processor time of each program in milliseconds; they run in turns for about so long."""
    for fn, args in programs.values():
        jax.block_until_ready(fn(*args))
    times: dict[Any, list[tuple[float, float]]] = {key: [] for key in programs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for key, (fn, args) in programs.items():
            start = time.perf_counter(), time.process_time()
            jax.block_until_ready(fn(*args))
            times[key].append((1000 * (time.perf_counter() - start[0]), 1000 * (time.process_time() - start[1])))
    return {key: tuple(map(statistics.median, zip(*values))) for key, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="time for each cell and size (default: 20)")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    given = parser.parse_args()
    print(
        "| train step, T x N x D x H | library | as it is, ms | `optimize_scans`, ms | ratio | ratio of processor time |"
    )
    print("|---|---|---|---|---|---|")
    for cell in ("LSTM", "GRU"):
        for steps, rows, features, hidden in SIZES:
            xs = jax.random.normal(jax.random.key(1), (steps, rows, features))
            programs = {}
            for name in given.libraries:
                run, parameters = LIBRARIES[name](cell, xs, hidden)
                for optimized in (False, True):
                    programs[name, optimized] = train_step(run, optimized), (parameters, xs)
            times = measured(programs, given.seconds)
            for name in given.libraries:
                (plain, plain_busy), (ours, busy) = times[name, False], times[name, True]
                row = f"{cell} {steps}x{rows}x{features}x{hidden} | {name} | {plain:.1f} | {ours:.1f}"
                print(f"| {row} | {ours / plain:.2f} | {busy / plain_busy:.2f} |", flush=True)


if __name__ == "__main__":
    main()
