"""Loops of a million steps: their time must grow with the number of steps, on every JAX that is tested.

No clock is read. Where XLA copied the stacked outputs at each step, as that of jaxlib 0.11.1 does, this test would take six
minutes (docs/notes/xla_faults.md).
"""

import jax
import jax.numpy as jnp
import numpy as np

import jrnn

T = 1_000_000


def _step(carry, x):
    carry = 0.5 * jnp.sin(carry) + x
    return carry, carry


def test_outputs_of_a_million_steps_are_stacked():
    xs = jnp.linspace(-1, 1, T)
    last, ys = jax.jit(lambda xs: jrnn.scan(_step, jnp.float32(0), xs))(xs)
    before = np.asarray(ys)[:-1].astype(np.float64)
    np.testing.assert_allclose(ys[1:], 0.5 * np.sin(before) + np.asarray(xs)[1:], atol=1e-6)
    assert last == ys[-1]


def test_an_array_of_a_million_elements_is_filled_by_index():
    @jrnn.optimize_scans
    def filled(x):
        def write(t, array):
            return array.at[t + 1].set(0.5 * jnp.sin(array[t]) + x)

        return jax.lax.fori_loop(0, T - 1, write, jnp.zeros(T))

    array = np.asarray(jax.jit(filled)(1.0)).astype(np.float64)
    np.testing.assert_allclose(array[1:], 0.5 * np.sin(array[:-1]) + 1, atol=1e-6)
