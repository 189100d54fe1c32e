"""Rules for random numbers by Threefry, JAX's own generator: its rounds one after another.

On a CPU JAX runs these rounds as a loop, which is a kernel of its own, or stores its state after every four.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jrnn.jaxprs import Eqn
from jrnn.jaxprs.jax_internals import THREEFRY
from jrnn.loops.passes.arithmetic.operands import Values

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = 0x1BD11BDA


def threefry2x32(
    eqn: Eqn,
    first: Array,
    second: Array,
    x: Array,
    y: Array,
) -> Values:
    """Threefry of two words with 20 rounds.

    J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    parity = lax.bitwise_xor(lax.bitwise_xor(first, second), np.uint32(_PARITY))
    keys = (first, second, parity)
    x = lax.add(x, first)
    y = lax.add(y, second)
    for i in range(5):
        for bits in _ROTATIONS[i % 2]:
            x = lax.add(x, y)
            left = lax.shift_left(y, np.uint32(bits))
            right = lax.shift_right_logical(y, np.uint32(32 - bits))
            y = lax.bitwise_xor(x, lax.bitwise_or(left, right))
        x = lax.add(x, keys[(i + 1) % 3])
        y = lax.add(lax.add(y, keys[(i + 2) % 3]), np.uint32(i + 1))
    return [x, y]


def iota_2x32_shape(eqn: Eqn) -> Values:
    shape = eqn.params["shape"]
    high = jnp.zeros(shape, jnp.uint32)
    return [high, lax.reshape(lax.iota(jnp.uint32, math.prod(shape)), shape)]


def random_bits(eqn: Eqn, keys: Array) -> Values:
    def bits(key: Array) -> Array:
        return THREEFRY.random_bits(key, eqn.params["bit_width"], eqn.params["shape"])

    return _of_each(keys, bits)


def random_split(eqn: Eqn, keys: Array) -> Values:
    def split(key: Array) -> Array:
        return THREEFRY.split(key, eqn.params["shape"])

    return _as_keys(_of_each(keys, split))


def random_fold_in(eqn: Eqn, keys: Array, data: Array) -> Values:
    shape = eqn.outvars[0].aval.shape  # a key and many data, many keys and one, or as many
    keys = jnp.broadcast_to(keys, shape)
    return _as_keys(_of_each(keys, THREEFRY.fold_in, jnp.broadcast_to(data, shape)))


def _as_keys(words: Values) -> Values:
    """Returns the words of keys as keys."""
    return words and [jax.random.wrap_key_data(words[0], impl=THREEFRY.name)]


def _of_each(keys: Array, fn: Callable[..., Array], *args: Array) -> Values:
    """Returns what a function gives of the words of each key, or None if they are keys of another generator.

    XLA:CPU writes the result before it computes anything from it. It does not vectorize rounds that it fuses with a
    logarithm, a lookup or a reduction, and repeats them for each reader.
    """
    if str(keys.dtype) != f"key<{THREEFRY.tag}>":
        return None
    for _ in range(keys.ndim):
        fn = jax.vmap(fn)
    return [lax.optimization_barrier(fn(jax.random.key_data(keys), *args))]


# The rules that the other rules use.
ROUNDS = {"iota_2x32_shape": iota_2x32_shape, "threefry2x32": threefry2x32}
RULES = {
    "random_bits": random_bits,
    "random_fold_in": random_fold_in,
    "random_split": random_split,
    **ROUNDS,
}
