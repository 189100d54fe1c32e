"""What numpy computes in the place of small programs is what XLA computes; other programs are compiled."""

import weakref

import eager_by_numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import pjit

INTS = np.array([-(2**31), -7, -1, 0, 5, 2**31 - 1], np.int32)
FLOATS = np.array([0.5, -0.0, np.nan, 3.0, -np.inf, 0.0, 2.5], np.float32)
KEY = jax.random.key_data(jax.random.key(3))


def key():
    return jax.random.wrap_key_data(KEY)


EXACT = {
    "bits": lambda: [
        jnp.asarray(INTS) & 6,
        jnp.asarray(INTS) | 9,
        jnp.asarray(INTS) ^ 5,
        ~jnp.asarray(INTS),
    ],
    "shifts": lambda: [
        shift(jnp.asarray(INTS), jnp.asarray(by, np.int32))
        for shift in (jnp.left_shift, jnp.right_shift, jax.lax.shift_right_logical)
        for by in (0, 3, 31, 32, 40, -1)
    ],
    "conversions": lambda: (
        [jnp.asarray(FLOATS).astype(kind) for kind in ("int32", "uint8", "float16", "bool")]
        + [jnp.asarray(INTS).astype(kind) for kind in ("int8", "uint32", "bfloat16", "complex64")]
    ),
    "remainders": lambda: [jax.lax.rem(jnp.asarray(INTS), jnp.int32(n)) for n in (3, -3)],
    "sorts": lambda: (
        jnp.sort(jnp.asarray(FLOATS)),
        jnp.argsort(jnp.asarray(FLOATS)),
        jnp.argsort(jnp.asarray(FLOATS, jnp.bfloat16)),
        jnp.sort(jnp.asarray(INTS).reshape(2, 3), axis=0),
    ),
    "weak types": lambda: (jnp.sin(0.0), 2 * jnp.abs(-1.5), jnp.asarray(1) + 1),
    "draws": lambda: (
        jax.random.normal(key(), (40, 3)),
        jax.random.uniform(jax.random.PRNGKey(5), (7,), minval=-1),
        jax.random.key_data(jax.random.split(key(), 3)),
        jax.random.fold_in(jax.random.PRNGKey(2), 11),
        jax.random.bits(key(), (5,)),
        jax.random.bernoulli(key(), 0.3, (9,)),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_values_types_and_draws_are_those_of_compiled_programs(name):
    ours = jax.tree.leaves(EXACT[name]())
    for a, b in zip(ours, jax.tree.leaves(jax.jit(EXACT[name])()), strict=True):
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def compiled(monkeypatch):
    """Names of the programs that are compiled, and not run by numpy."""
    names = []
    inner = eager_by_numpy.compile_and_run

    def compile_and_run(*args, name, **params):
        names.append(name)
        return inner(*args, name=name, **params)

    monkeypatch.setattr(eager_by_numpy, "compile_and_run", compile_and_run)
    monkeypatch.setattr(pjit, "_pjit_call_impl_python", eager_by_numpy.run)
    monkeypatch.setattr(eager_by_numpy, "by_numpy", weakref.WeakKeyDictionary())
    return names


def test_functions_of_tests_loops_and_large_operations_are_compiled(compiled):
    x = jnp.full((3, 77), 0.5)
    assert not compiled

    def twice(x):
        return 2 * x

    np.testing.assert_array_equal(jax.jit(twice)(x), x + x)
    jax.lax.scan(lambda carry, x: (carry + x, None), x[0], x)
    jnp.full((300, 400), 2.0)
    assert compiled == ["twice", "scan", "broadcast_in_dim"]


def test_committed_arrays_keep_their_device(compiled):
    x = jax.device_put(np.full((3, 78), 0.5, np.float32), jax.devices()[0])
    assert (x + x).committed
    assert compiled == ["add"]
    assert not (jnp.full((3, 78), 0.5) * 2).committed


def test_a_result_is_a_copy(compiled):
    x = np.full((3, 80), 0.5, np.float32)
    y = jax.lax.reshape(x, (80, 3))
    x[:] = 0
    assert y.min() == 0.5
    assert not compiled
