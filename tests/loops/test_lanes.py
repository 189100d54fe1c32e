"""Loops over lanes by the kernel for CPUs: values, NaN and infinities are those of `jax.lax.scan`."""

from __future__ import annotations

import platform
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans_of import plans_of

import jrnn
from jrnn.loops.ir import Unsupported, traced_loops
from jrnn.loops.kernels.native import library
from jrnn.loops.kernels.native.lane_call import lane_call
from jrnn.loops.kernels.native.lane_step import lane_step

pytestmark = pytest.mark.skipif(bool(library.loaded().reason), reason="the kernel was not built")


def returns(c, x):
    c = x["reward"] + 0.9 * c
    return c, c


def advantages(carry, x):
    later, next_value = carry
    delta = x["reward"] + 0.99 * next_value * x["alive"] - x["value"]
    later = delta + 0.99 * 0.95 * x["alive"] * later
    return (later, x["value"]), later


def average(mean, x):
    mean = mean + 0.1 * (x["reward"] - mean)
    return mean, mean * x["value"]


def reset(c, x):
    new = jnp.where(x["done"], x["value"], 0.9 * c + x["reward"])
    return new, (c, new)


def masked(c, x):
    return jnp.where(x["done"], c, 0.5 * c + x["reward"]), c


def started(c, x):
    """Resets before it averages, and subtracts."""
    new = jnp.where(x["done"], c + x["value"], 0.0) - x["reward"]
    return new, new


def smoothed(c, x):
    """Adds, resets and multiplies, as the reverse loop of `reset` does."""
    c = 0.9 * jnp.where(x["done"], 0.0, c + x["reward"])
    return c, c


def gate(c, x):
    z = jax.nn.sigmoid(x["reward"])
    return z * c + (1 - z) * x["value"], jnp.tanh(c)


def chained(carry, x):
    first, second, before = carry
    second = jnp.cos(first) * second + jnp.sin(first) * x["reward"]
    return (0.9 * first + x["value"], second, first), (before, second)


def without_outputs(c, x):
    return x["reward"] - 0.9 * c, ()


def counted(carry, x):
    c, count, total = carry
    c = 0.9 * c + x["reward"] * x["scale"]
    return (c, count + 1, total + 2 * jnp.sum(c * x["value"])), c


STEPS = {
    step.__name__: (step, count)
    for step, count in (
        (returns, 1),
        (advantages, 2),
        (average, 1),
        (reset, 1),
        (masked, 1),
        (started, 1),
        (smoothed, 1),
        (gate, 1),
        (chained, 3),
        (without_outputs, 1),
    )
}


def arguments(count, shape, length, dtype):
    rng = np.random.default_rng(0)
    init = [jnp.asarray(rng.normal(size=shape), dtype) for _ in range(count)]
    xs = {
        "reward": jnp.asarray(rng.normal(size=(length, *shape)), dtype),
        "value": jnp.asarray(rng.normal(size=(length, *shape)), dtype),
        "alive": jnp.asarray(rng.random((length, *shape)) > 0.1, dtype),
        "done": jnp.asarray(rng.random((length, *shape)) > 0.9),
        "scale": jnp.asarray(rng.random(length), dtype),
    }
    return (init[0] if count == 1 else tuple(init)), xs


def over_lanes(step, init, xs, reverse=False, level=0):
    """Returns a loop by the kernel, whatever its cost is, as a function."""

    def plain(init, xs):
        return jax.lax.scan(step, init, xs, reverse=reverse)

    (loop,) = traced_loops(plain, init, xs)
    call = replace(lane_call(loop), level=level)
    consts = loop.closed().consts

    def run(init, xs):
        leaves = (jax.tree.leaves(init), jax.tree.leaves(xs))
        return call.run(consts, *leaves, loop.length)

    return jax.jit(run), jax.jit(plain)


def assert_close(ours, theirs, tolerance):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        most = np.max(np.abs(np.asarray(b)), initial=1)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * most)


# Lanes of one vector and less, of several, and of a rest; tiles, several of them, and a rest.
SHAPES = [((2,), 300), ((16,), 37), ((5, 7), 130), ((100,), 23)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_values_are_those_of_the_loop(name, reverse, dtype):
    step, count = STEPS[name]
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    with jax.enable_x64(True):
        for shape, length in SHAPES:
            init, xs = arguments(count, shape, length, dtype)
            ours, theirs = over_lanes(step, init, xs, reverse)
            assert_close(ours(init, xs), theirs(init, xs), tolerance)


@pytest.mark.parametrize("level", range(len(library.loaded().instruction_sets)))
@pytest.mark.parametrize("name", ["advantages", "reset"])
def test_all_instruction_sets_have_the_same_values(name, level):
    step, count = STEPS[name]
    for lanes in (3, 7, 33):
        init, xs = arguments(count, (lanes,), 100, "float32")
        ours, theirs = over_lanes(step, init, xs, level=level)
        assert_close(ours(init, xs), theirs(init, xs), 1e-5)


def test_sums_of_products_and_counters_leave_the_loop():
    init, xs = arguments(1, (16,), 100, "float32")
    init = (init, jnp.int32(3), jnp.float32(0.5))
    ours, theirs = over_lanes(counted, init, xs)
    assert_close(ours(init, xs), theirs(init, xs), 1e-5)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the base set has fused operations")
@pytest.mark.parametrize("reverse", [False, True])
def test_where_nothing_is_fused_the_bits_are_those_of_the_steps(reverse):
    """The last instruction set has no fused multiply-add, and NumPy has none."""
    init, xs = arguments(1, (19,), 200, "float32")
    rows = np.asarray(xs["reward"])
    c = np.asarray(init)
    wanted = np.zeros_like(rows)
    for t in reversed(range(200)) if reverse else range(200):
        c = rows[t] + np.float32(0.9) * c
        wanted[t] = c
    level = len(library.loaded().instruction_sets) - 1
    ours, _ = over_lanes(returns, init, xs, reverse, level)
    last, ys = ours(init, xs)
    np.testing.assert_array_equal(ys[0], wanted)
    np.testing.assert_array_equal(last[0], c)


# NaN and infinities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["returns", "reset", "masked", "average", "gate", "smoothed"])
@pytest.mark.parametrize("reverse", [False, True])
def test_infinities_and_nan_are_where_the_loop_has_them(name, reverse):
    step, count = STEPS[name]
    init, xs = arguments(count, (5,), 150, "float32")
    ours, theirs = over_lanes(step, init, xs, reverse)
    rng = np.random.default_rng(1)
    for number in (np.inf, -np.inf, np.nan, 3e38, 1e25):
        for place in ("reward", "value", "init"):
            planted = {key: np.array(value) for key, value in xs.items()}
            first = np.array(init)
            if place == "init":
                first[rng.integers(5)] = number
            else:
                planted[place][rng.integers(150), rng.integers(5)] = number
            results = (ours(first, planted), theirs(first, planted))
            for a, b in zip(*map(jax.tree.leaves, results), strict=True):
                where = ~np.isfinite(np.asarray(b))
                np.testing.assert_array_equal(np.asarray(a)[where], np.asarray(b)[where])
                assert np.all(np.isfinite(np.asarray(a)[~where]))


# Plans and gradients -------------------------------------------------------------------------------------------------------


def loss(scan, step, scale, init, xs):
    def scaled(carry, x):
        return step(carry, {**x, "reward": scale * x["reward"]})

    carry, ys = scan(scaled, init, xs, reverse=True)
    total = sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(ys))
    return total + sum(jnp.sum(c) for c in jax.tree.leaves(carry))


@pytest.mark.parametrize("name", ["returns", "advantages", "reset", "gate", "chained"])
def test_gradients_are_those_of_the_loop(name):
    step, count = STEPS[name]
    with jax.enable_x64(True):
        init, xs = arguments(count, (8,), 4_000, "float64")
        floats = {key: xs[key] for key in ("reward", "value")}

        def gradients(scan):
            def of(scale, init, floats):
                return loss(scan, step, scale, init, {**xs, **floats})

            return jax.grad(of, (0, 1, 2))

        args = (jnp.asarray(1.1), init, floats)
        ours = jax.jit(gradients(jrnn.scan))(*args)
        theirs = jax.jit(gradients(jax.lax.scan))(*args)
        assert_close(ours, theirs, 1e-10)


@pytest.mark.parametrize("name", ["returns", "advantages"])
def test_a_few_lanes_run_in_one_call_forward_and_reverse(name):
    step, count = STEPS[name]
    init, xs = arguments(count, (16,), 4_000, "float32")

    def of(scale, init):
        return loss(jrnn.scan, step, scale, init, xs)

    plans = plans_of(jax.grad(of, (0, 1)), np.float32(1.1), init)
    assert [plan.loop.reverse for plan in plans] == [True, False]
    assert all("over 16 lanes" in str(plan) for plan in plans)


def test_many_lanes_wait_for_memory_and_stay_as_they_are():
    init, xs = arguments(1, (1_000,), 1_000, "float32")
    (plan,) = plans_of(lambda init, xs: jrnn.scan(returns, init, xs), init, xs)
    assert "one call of the kernel" not in str(plan)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda c, x: (jnp.abs(c) + x, c), "not affine"),
        (lambda c, x: (c[::-1] + x, c), "not affine"),
        (lambda c, x: ((0.9 * c - x) / (2 + x * x), c), "in an order that the kernel has"),
        (lambda c, x: (0.5 * c + jnp.sum(c), c), "not affine"),
        (lambda c, x: (c * c + x, c), "not affine"),
        (lambda c, x: (0.5 * c * c + x, c), "not affine"),
        (lambda c, x: (jnp.where(c > 0, c, x), c), "not affine"),
        (lambda c, x: (x - c - c, c), "not affine"),
    ],
)
def test_what_is_not_affine_lane_by_lane_is_refused(step, why):
    xs = jnp.ones((20, 16))
    (loop,) = traced_loops(lambda xs: jax.lax.scan(step, xs[0], xs), xs)
    with pytest.raises(Unsupported, match=why):
        lane_step(loop)


def test_carries_that_read_each_other_are_refused():
    def step(c, x):
        return (0.5 * c[0] + 0.1 * c[1], c[0] + x), c

    xs = jnp.ones((20, 16))
    (loop,) = traced_loops(lambda xs: jax.lax.scan(step, (xs[0], xs[0]), xs), xs)
    with pytest.raises(Unsupported, match="read each other"):
        lane_step(loop)
