"""Training steps of other libraries' recurrent layers, with and without `jrnn.optimize_scans()`.

Needs dm-haiku and equinox, besides flax.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp

from jrnn.bench.peers import Timed, clocked, flax_rnn
from jrnn.bench.sizes import Size
from jrnn.bench.suites import Job, SuiteOptions
from jrnn.loops import optimize_scans

OURS = ("optimize_scans",)
TAKES = ("cells", "sizes", "peers")
NEEDS = {"equinox": "equinox", "haiku": "dm-haiku"}
SIZES = ("100x32x128x128", "50x64x256x256", "500x8x64x64")
# A function `(parameters, xs [T, N, D]) -> hs [T, N, H]`, and its parameters.
Layer = tuple[Callable[[Any, jax.Array], jax.Array], Any]


def jobs(options: SuiteOptions) -> Iterator[Job]:
    for cell in options.chosen("cells", ("lstm", "gru")):
        for size in options.chosen_sizes(SIZES):
            xs = jax.random.normal(jax.random.key(1), (size.steps, size.batch, size.features))
            for name in options.chosen("peers", LIBRARIES):
                run, parameters = LIBRARIES[name](cell, xs, size.hidden)
                programs = {
                    "optimize_scans": _step(run, parameters, xs, True),
                    "as it is": _step(run, parameters, xs, False),
                }
                yield Job(f"{cell}, {name}", "train", str(size), programs)


def _step(run: Callable, parameters: Any, xs: jax.Array, optimized: bool) -> Timed:
    def loss(parameters: Any, xs: jax.Array) -> jax.Array:
        return jnp.mean(run(parameters, xs) ** 2)

    fn = jax.jit(jax.value_and_grad(optimize_scans()(loss) if optimized else loss))
    return Timed(clocked(lambda: jax.block_until_ready(fn(parameters, xs))))


def flax_nnx(cell: str, xs: jax.Array, hidden: int) -> Layer:
    layer = flax_rnn(cell, Size(*xs.shape, hidden))
    assert layer is not None
    return layer.forward, layer.weights


def flax_linen(cell: str, xs: jax.Array, hidden: int) -> Layer:
    kind = {"lstm": linen.OptimizedLSTMCell, "gru": linen.GRUCell}[cell]
    layer = linen.RNN(kind(hidden), time_major=True)
    return layer.apply, layer.init(jax.random.key(0), xs)


def haiku(cell: str, xs: jax.Array, hidden: int) -> Layer:
    import haiku as hk

    def run(xs: jax.Array) -> jax.Array:
        core = {"lstm": hk.LSTM, "gru": hk.GRU}[cell](hidden)
        return hk.dynamic_unroll(core, xs, core.initial_state(xs.shape[1]))[0]

    layer = hk.without_apply_rng(hk.transform(run))
    return layer.apply, layer.init(jax.random.key(0), xs)


def equinox(cell: str, xs: jax.Array, hidden: int) -> Layer:
    import equinox as eqx

    kind = {"lstm": eqx.nn.LSTMCell, "gru": eqx.nn.GRUCell}[cell]
    parameters, static = eqx.partition(
        kind(xs.shape[2], hidden, key=jax.random.key(0)), eqx.is_array
    )

    def run(parameters: Any, xs: jax.Array) -> jax.Array:
        layer = eqx.combine(parameters, static)

        def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            state = jax.vmap(layer)(x, state)
            return state, state[0] if cell == "lstm" else state

        zeros = jnp.zeros((xs.shape[1], hidden))
        return jax.lax.scan(step, (zeros, zeros) if cell == "lstm" else zeros, xs)[1]

    return run, parameters


LIBRARIES = {
    "flax.nnx.RNN": flax_nnx,
    "flax.linen.RNN": flax_linen,
    "haiku": haiku,
    "equinox": equinox,
}
