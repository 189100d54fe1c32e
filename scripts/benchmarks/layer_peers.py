"""Layers of other libraries of JAX that compute what a layer of `jrnn.nn` does, with as many parameters.

Each function takes sizes and returns `(parameters, x [T, N, D]) -> y [T, N, D]` with the parameters. They are mamba2-jax's
Mamba-2, recurrentgemma's RG-LRU, and memax's LRU, for which equinox is needed. A library that is not installed is left out.

Shapes: T time, N batch, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jrnn.bench.sizes import Size

# A function `(parameters, x [T, N, D]) -> y [T, N, D]`, and its parameters.
Layer = tuple[Callable[[Any, jax.Array], jax.Array], Any]


def mamba2_jax(size: Size, heads: int) -> Layer:
    from mamba2_jax import Mamba2Config, Mamba2Mixer

    config = Mamba2Config(hidden_size=size.hidden, state_size=64, head_dim=2 * size.hidden // heads)
    graph, parameters, rest = nnx.split(Mamba2Mixer(config, 0, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def run(parameters: Any, x: jax.Array) -> jax.Array:
        y, _, _ = nnx.merge(graph, parameters, rest)(jnp.swapaxes(x, 0, 1))
        return jnp.swapaxes(y, 0, 1)

    return run, parameters


def recurrentgemma(size: Size, heads: int) -> Layer:
    from recurrentgemma.common import ScanType
    from recurrentgemma.jax.layers import RGLRU

    layer = RGLRU(size.hidden, heads, scan_type=ScanType.LINEAR_NATIVE)
    positions = jnp.broadcast_to(jnp.arange(size.steps)[None], (size.batch, size.steps))

    def run(parameters: Any, x: jax.Array) -> jax.Array:
        y, _ = layer.apply(parameters, jnp.swapaxes(x, 0, 1), positions)
        return jnp.swapaxes(y, 0, 1)

    x = jnp.zeros((size.batch, size.steps, size.hidden))
    return run, jax.jit(layer.init)(jax.random.key(0), x, positions)


def memax(size: Size, heads: int) -> Layer:
    import equinox as eqx
    from memax.equinox.semigroups.lru import LRU

    layer = LRU(hidden_size=size.hidden, recurrent_size=size.hidden, key=jax.random.key(0))
    parameters, rest = eqx.partition(layer, eqx.is_inexact_array)
    begins = jnp.zeros(size.steps, bool)

    def run(parameters: Any, x: jax.Array) -> jax.Array:
        layer = eqx.combine(parameters, rest)
        one = lambda x: layer(layer.initialize_carry(), (x, begins))[1]  # noqa: E731
        return jax.vmap(one, in_axes=1, out_axes=1)(x)

    return run, parameters


PEERS = {"mamba2": mamba2_jax, "rg_lru": recurrentgemma, "lru": memax}


def of(cell: str, size: Size, heads: int) -> dict[str, Layer]:
    """Returns the layers of installed libraries that compute what this cell does, by the library's name."""
    make = PEERS.get(cell)
    return (
        {}
        if make is None or find_spec(make.__name__) is None
        else {make.__name__: make(size, heads)}
    )
