"""Measures a function under jit beside its round trip through nets, in turns, and prints the ratios of the medians.

python scripts/benchmark_conversion.py [TURNS [PART OF A MODEL'S NAME ...]]
"""

from __future__ import annotations

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import jrnn


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def models():
    yield "nnx.RNN(LSTMCell) 64x100x64", nnx.RNN(nnx.LSTMCell(64, 128, rngs=nnx.Rngs(0))), normal(64, 100, 64)
    yield "nnx.RNN(GRUCell) 64x100x64", nnx.RNN(nnx.GRUCell(64, 128, rngs=nnx.Rngs(0))), normal(64, 100, 64)
    mlp = nnx.Sequential(
        nnx.Linear(256, 512, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(512, 64, rngs=nnx.Rngs(1)), nnx.softmax
    )
    yield "MLP 512x256", mlp, normal(512, 256)
    conv = nnx.Sequential(
        nnx.Conv(3, 16, (3, 3), rngs=nnx.Rngs(0)), nnx.relu, nnx.Conv(16, 16, (3, 3), rngs=nnx.Rngs(1))
    )
    yield "convolutions 16x32x32x3", conv, normal(16, 32, 32, 3)
    attention = nnx.MultiHeadAttention(4, 128, rngs=nnx.Rngs(0), decode=False)
    yield "attention 8x128x128", attention, normal(8, 128, 128)
    yield (
        "while 256x256",
        lambda x: lax.fori_loop(0, 50, lambda i, c: jnp.tanh(c @ c) * 0.1 + c, x * 0.01),
        normal(256, 256),
    )


def as_function(module):
    """A module as a jitted function of its input, its weights closed over as the nets' are."""
    leaves, structure = jax.tree.flatten(module)
    return jax.jit(lambda x: jax.tree.unflatten(structure, leaves)(x))


def measure(run, x) -> tuple[float, float]:
    """Seconds on the clock, and of all processors: the latter are steadier where others use the machine too."""
    start, busy = time.perf_counter(), time.process_time()
    jax.block_until_ready(run(x))
    return time.perf_counter() - start, time.process_time() - busy


def main(turns: int, wanted: list[str]) -> None:
    print(f"{'model':32} {'function':>10} {'round trip':>10} {'ratio':>6} {'processor':>10}")
    for name, fn, x in models():
        if wanted and not any(w in name for w in wanted):
            continue
        package = jrnn.from_jax(fn, x)
        run, (blob,) = package.to_jax(), package.input_names
        direct = jax.jit(fn) if callable(fn) and not isinstance(fn, nnx.Module) else as_function(fn)
        around = jax.jit(lambda x, run=run, blob=blob: run({blob: x}))
        times: list[list[tuple[float, float]]] = [[], []]
        for turn in range(turns + 2):
            for k, program in enumerate((direct, around)):
                taken = measure(program, x)
                if turn >= 2:
                    times[k].append(taken)
        (one, busy_one), (two, busy_two) = ([statistics.median(t) for t in zip(*found)] for found in times)
        print(
            f"{name:32} {one * 1e3:8.2f}ms {two * 1e3:8.2f}ms {two / one:6.2f} {busy_two / busy_one:10.2f}", flush=True
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15, sys.argv[2:])
