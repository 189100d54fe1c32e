"""The coefficients of an affine step are read off its equations, and are those of its derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrnn import jaxprs
from jrnn.loops.affine.carries import Between, CarrySchedule
from jrnn.loops.affine.reader import read_diagonal, read_step
from jrnn.loops.ir import ScanParams, Unsupported

N = 3
VECTOR = jax.ShapeDtypeStruct((N,), jnp.float32)


def gated(h, x):
    return (jax.nn.sigmoid(x) * h + (1 - jax.nn.sigmoid(x)) * x,)


def rotated(h, g, x):
    return (jnp.cos(x) * h - jnp.sin(x) * g + x, jnp.sin(x) * h + jnp.cos(x) * g)


def selected(h, x):
    return (jnp.where(x > 0, h / (1 + x * x), -0.5 * (h - x)),)


def without_carry(h, x):
    return (jnp.where(x > 0, 2 * x, x),)


def copied(h, x):
    return (h - h * 0.0 + 0.0,)


def loop_of(step, *types):
    *carry, _ = types

    def flat(*args):
        return (*step(*args), jnp.zeros(()))

    closed = jax.make_jaxpr(flat)(*types)
    scan = ScanParams(closed, 0, len(carry), 8, False)
    return scan.loop(jaxprs.inlined(closed))


def diagonal_step(loop, group):
    eqns, _ = Between(loop).of(group)
    return read_diagonal(loop, group, eqns)


@pytest.mark.parametrize(
    "step", [gated, rotated, selected, without_carry, copied], ids=lambda step: step.__name__
)
def test_coefficients_and_offsets_are_those_of_the_derivative(step):
    count = 2 if step is rotated else 1
    loop = loop_of(step, *[VECTOR] * (count + 1))
    affine = diagonal_step(loop, tuple(range(count)))
    x = np.linspace(-1, 1.5, N, dtype=np.float32)
    zeros = [jnp.zeros(N)] * count
    inputs, _ = jaxprs.needed(loop.eqns, loop.carry_out, set(loop.inputs))
    env = jaxprs.evaluate(inputs, dict(zip(loop.inputs, [*zeros, x])))
    a, b = affine.values(env, zeros[0])

    def new(old):
        return step(*old, x)

    np.testing.assert_allclose(b, new(zeros), rtol=1e-6)
    for k in range(count):
        basis = [jnp.full(N, float(i == k)) for i in range(count)]
        _, column = jax.jvp(new, [zeros], [basis])
        np.testing.assert_allclose([row[k] for row in a], column, rtol=1e-6)


def test_products_with_one_and_sums_with_zero_are_not_written():
    loop = loop_of(gated, VECTOR, VECTOR)
    affine = diagonal_step(loop, (0,))
    assert not affine.eqns
    assert all(isinstance(v, jaxprs.Var) for v in (affine.a[0][0], affine.b[0]))
    loop = loop_of(copied, VECTOR, VECTOR)
    affine = diagonal_step(loop, (0,))
    assert (affine.a[0][0].val, affine.b[0].val) == (1, 0) and not affine.eqns


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64"])
def test_coefficients_that_are_numbers_have_the_type_of_the_carry(dtype):
    vector = jax.ShapeDtypeStruct((N,), dtype)
    loop = loop_of(lambda h, x: (0.5 * h + 1,), vector, vector)
    a, b = diagonal_step(loop, (0,)).values({}, jnp.zeros(N, dtype))
    for values, number in ((a[0][0], 0.5), (b[0], 1)):
        assert values.dtype == dtype
        np.testing.assert_array_equal(values, np.full(N, number, dtype))


def test_an_infinite_factor_leaves_the_offset_alone():
    """The derivative at 0 made of it `inf * 0 + x`."""
    loop = loop_of(lambda h, x: (jnp.exp(x) * h + x,), VECTOR, VECTOR)
    affine = diagonal_step(loop, (0,))
    x = jnp.full(N, 100.0)
    env = jaxprs.evaluate(loop.eqns, dict(zip(loop.inputs, [jnp.zeros(N), x])))
    (a,), b = affine.values(env, x)
    np.testing.assert_array_equal(a, np.full((1, N), np.inf))
    np.testing.assert_array_equal(b, [x])


@pytest.mark.parametrize(
    "step, why",
    [
        (lambda h, x: (h * h + x,), "mul of the carry is not affine"),
        (lambda h, x: (x / h,), "div of the carry is not affine"),
        (lambda h, x: (jnp.where(h > 0, h, x),), "gt of the carry is not affine"),
        (lambda h, x: (jax.lax.stop_gradient(h),), "not affine"),
        (lambda h, x: (h * jnp.sum(h),), "reduce_sum of the carry is not affine"),
    ],
)
def test_other_steps_are_refused_with_the_operation(step, why):
    loop = loop_of(step, VECTOR, VECTOR)
    with pytest.raises(Unsupported, match=why) as error:
        diagonal_step(loop, (0,))
    assert error.value.remedy


def test_the_kind_of_a_step_is_the_simplest():
    matrix = jax.ShapeDtypeStruct((N, N), jnp.float32)

    def kind_of(step):
        loop = loop_of(step, matrix, VECTOR)
        return read_step(loop, (0,), CarrySchedule(loop), {})

    assert kind_of(lambda S, x: (x[:, None] * S,)).kind == "diagonal"
    delta = kind_of(lambda S, k: (S - k[:, None] * (k @ S)[None, :],))
    assert delta.kind == "matrix" and len(delta.a) == 2 and not delta.b
    assert delta.blocks.block == N and delta.blocks.same == (1,)
