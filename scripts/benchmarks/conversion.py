"""Functions under jit next to their round trip through nets: `from_jax`, then `to_jax`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jrnn.bench.peers import Timed, clocked
from jrnn.bench.suites import Job, SuiteOptions
from jrnn.convert import from_jax

OURS = ("round trip",)
TAKES = ("cells",)


def _normal(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


# From random generators, a function of one array, or a module; and that array.
MODELS: dict[str, Callable[[nnx.Rngs], tuple[Any, Any]]] = {
    "lstm": lambda rngs: (nnx.RNN(nnx.LSTMCell(64, 128, rngs=rngs)), _normal(64, 100, 64)),
    "gru": lambda rngs: (nnx.RNN(nnx.GRUCell(64, 128, rngs=rngs)), _normal(64, 100, 64)),
    "mlp": lambda rngs: (
        nnx.Sequential(
            nnx.Linear(256, 512, rngs=rngs), nnx.relu, nnx.Linear(512, 64, rngs=rngs), nnx.softmax
        ),
        _normal(512, 256),
    ),
    "convolutions": lambda rngs: (
        nnx.Sequential(
            nnx.Conv(3, 16, (3, 3), rngs=rngs), nnx.relu, nnx.Conv(16, 16, (3, 3), rngs=rngs)
        ),
        _normal(16, 32, 32, 3),
    ),
    "attention": lambda rngs: (
        nnx.MultiHeadAttention(4, 128, rngs=rngs, decode=False),
        _normal(8, 128, 128),
    ),
    "loop": lambda rngs: (
        lambda x: jax.lax.fori_loop(0, 50, lambda i, c: jnp.tanh(c @ c) * 0.1 + c, x * 0.01),
        _normal(256, 256),
    ),
}


def jobs(options: SuiteOptions) -> Iterator[Job]:
    for name in options.chosen("cells", MODELS):
        fn, x = MODELS[name](nnx.Rngs(0))
        package = from_jax(fn, x)
        run, (blob,) = package.to_jax(), package.input_names
        leaves, structure = jax.tree.flatten(
            fn
        )  # a module's weights are constants, as the net's are
        direct = jax.jit(
            lambda x, leaves=leaves, tree=structure: jax.tree.unflatten(tree, leaves)(x)
        )
        around = jax.jit(lambda x, run=run, blob=blob: run({blob: x}))
        pairs = {"round trip": around, "function": direct}
        yield Job(
            name,
            "forward",
            "x".join(map(str, x.shape)),
            {
                n: Timed(clocked(lambda f=f, x=x: jax.block_until_ready(f(x))))
                for n, f in pairs.items()
            },
        )
