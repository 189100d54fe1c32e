"""Several steps of a tiny loop in one iteration: values, NaN and infinities are those of `jax.lax.scan`."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans_of import plans_of
from tiny_steps import AFFINE, STEPS, arguments, linear, random_system, run, unrolled

import jrnn
from jrnn import jaxprs
from jrnn.loops.costs import machines
from jrnn.loops.ir import Unsupported, traced_loops
from jrnn.loops.kernels.native import library
from jrnn.loops.kernels.native.affine_step import affine_step
from jrnn.loops.kernels.unrolled import run_unrolled
from jrnn.loops.strategies.try_unrolled import call_in_blocks

LENGTHS = [8, 21]  # of an iteration and more, and of iterations and a rest


def loop_of(step, init, xs, reverse=False):
    (loop,) = traced_loops(lambda init, xs: jax.lax.scan(step, init, xs, reverse=reverse), init, xs)
    return loop


def same_bits(actual, wanted):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def close(actual, wanted, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance * np.nanmax(np.abs(b), initial=1e-30)
        )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", STEPS)
def test_unrolled_steps_have_the_bits_of_the_loop(name, length, reverse):
    """Operation by operation: compiled, XLA chooses which products and sums it rounds once."""
    c, init, xs = arguments(name, length)
    loop = loop_of(functools.partial(STEPS[name][1], c), init, xs, reverse)
    with jax.disable_jit():
        wanted = run(jax.lax.scan, name, c, init, xs, reverse=reverse)
        carry, ys = run_unrolled(
            loop, 4, [], list(map(jnp.asarray, init)), [jnp.asarray(xs)], length
        )
    same_bits([carry, ys], [list(wanted[0]), jax.tree.leaves(wanted[1])])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [21, 3_001])
@pytest.mark.parametrize("name", STEPS)
def test_values_and_gradients_are_those_of_the_loop(name, length, reverse):
    args = arguments(name, length)

    def loss(scan, c, init, xs):
        carry, ys = run(scan, name, c, init, xs, reverse=reverse)
        weights = [jnp.cos(jnp.arange(y.size, dtype=jnp.float32)) for y in jax.tree.leaves(ys)]
        return sum(jnp.sum(v) for v in carry) + sum(
            jnp.sum(w * y) for w, y in zip(weights, jax.tree.leaves(ys))
        )

    def both(scan):
        of = functools.partial(loss, scan)
        return jax.jit(
            lambda *args: (run(scan, name, *args, reverse=reverse), jax.grad(of, (0, 1, 2))(*args))
        )

    close(both(unrolled)(*args), both(jax.lax.scan)(*args), 1e-4)


@pytest.mark.parametrize("name", ["filter", "resets"])
def test_the_loops_of_a_gradient_run_in_blocks_without_being_asked(name):
    def loss(c, init, xs):
        return jnp.sum(run(jrnn.scan, name, c, init, xs)[1] ** 2)

    plans = plans_of(jax.grad(loss), *arguments(name, 16_000))
    assert [plan.loop.reverse for plan in plans] == [False, True]
    assert all("in blocks of 16 steps" in str(plan) for plan in plans)


@pytest.mark.parametrize("name", sorted(set(STEPS) - {*AFFINE, "resets"}))
def test_other_steps_say_why_they_wait(name):
    (plan,) = plans_of(lambda *args: run(jrnn.scan, name, *args), *arguments(name, 16_000))
    assert plan.strategy == "unrolled"
    assert "a carry is not affine" in str(plan)


def test_the_users_unroll_changes_no_iteration():
    for unroll in (4, 12):
        chaos = functools.partial(run, jrnn.scan, "chaos", unroll=unroll)
        (plan,) = plans_of(chaos, *arguments("chaos", 16_000))
        assert "8 steps in one iteration" in str(plan)


def printing(c, s, u):
    jax.debug.callback(lambda h: None, s[0])
    return STEPS["filter"][1](c, s, u)


def branching(c, s, u):
    return jax.lax.cond(u > 0, lambda: STEPS["filter"][1](c, s, u), lambda: (s, u))


def drawing(c, s, u):
    return (
        s[0] + jax.random.normal(jax.random.fold_in(jax.random.key(0), u.astype(int))),
        s[1],
    ), s[0]


def choosing(c, s, u):
    rate = jnp.where(u > s[0], 0.6, 0.9)
    return (rate * s[0] + (1 - rate) * u, s[1]), s[0]


def wide(c, s, u):
    return (s[0] * jnp.full(1_000, 0.5) + u, s[1]), s[0]


@pytest.mark.parametrize(
    "step", [printing, branching, drawing, choosing, wide], ids=lambda step: step.__name__
)
def test_loops_that_are_not_tiny_stay_as_they_are(step):
    c, init, xs = arguments("filter", 16_000)
    init = (jnp.zeros(1_000), init[1]) if step is wide else init
    (plan,) = plans_of(lambda init, xs: jrnn.scan(functools.partial(step, c), init, xs), init, xs)
    assert plan.strategy != "unrolled"


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (
            lambda s, u: ((s[0] + u * s[1], s[0]), u),
            "carries are not affine with coefficients of all steps",
        ),
        (lambda s, u: (s + u.astype(bool).astype(int), s), "not one number in float32 or float64"),
        (lambda s, u: (jnp.abs(s), s), "a carry is not affine"),
    ],
)
def test_what_is_not_affine_is_refused_with_the_reason(step, why):
    init = (
        jnp.int32(0)
        if "one number" in why
        else (jnp.float32(0),) * 2
        if "carries" in why
        else jnp.float32(0.5)
    )
    with pytest.raises(Unsupported, match=why):
        affine_step(loop_of(lambda s, u: step(s, u), init, jnp.ones(8)))


# Numbers that are not finite, and rounding ---------------------------------------------------------------------------------


@functools.cache
def compiled(n, length, reverse):
    """Returns compiled functions of a random system: by the kernel, and by `jax.lax.scan`."""
    step = linear(n)

    def plain(c, init, xs):
        return jax.lax.scan(functools.partial(step, c), init, xs, reverse=reverse)

    a, b = np.zeros((n, n), np.float32), np.zeros(n, np.float32)
    (loop,) = traced_loops(plain, (a, b), (np.float32(0),) * n, np.zeros(length, np.float32))

    def in_kernel(c, init, xs):
        carry, ys = call_in_blocks(scalars(loop)).run(numbers(c), init, [xs], length)
        return tuple(carry), tuple(ys)

    return jax.jit(in_kernel), jax.jit(plain)


def numbers(c):
    return [*c[0].reshape(-1), *c[1]]


def scalars(loop):
    """Returns the loop of a system with its coefficients as numbers, as the canonical form of a loop has them."""
    n = len(loop.carry)
    step = linear(n)

    def of_numbers(*args):
        b, s = args[n * n : n * n + n], args[n * n + n : -1]
        rows = [[args[i * n + j] for j in range(n)] for i in range(n)]
        carry, ys = step((Rows(rows), b), s, args[-1])
        return [*carry, *ys]

    number = jax.ShapeDtypeStruct((), jnp.float32)
    count = n * n + n
    program = jaxprs.trace(of_numbers, [number] * (count + n + 1))
    consts, carry, xs = program.invars[:count], program.invars[count:-1], program.invars[-1:]
    outs = program.outvars
    return replace(
        loop, eqns=program.eqns, consts=consts, carry=carry, xs=xs, carry_out=outs[:n], ys=outs[n:]
    )


class Rows:
    """A matrix of numbers."""

    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, at):
        return self.rows[at[0]][at[1]]


def finite_arrays(ours, theirs):
    """Returns how many arrays are finite. Infinities and NaN must be at the same places, and the other numbers close."""
    count = 0
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, float), np.asarray(b, float)
        np.testing.assert_array_equal(
            np.where(np.isfinite(b), 0, b), np.where(np.isfinite(a), 0, a)
        )
        where = np.isfinite(b)
        assert np.all(np.abs(a[where] - b[where]) <= 1e-4 * np.max(np.abs(b[where]), initial=0))
        count += where.all()
    return count


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("reverse", [False, True])
def test_infinities_and_nan_are_where_the_loop_has_them(pytestconfig, n, reverse):
    rng = np.random.default_rng(n + 10 * reverse)
    in_kernel, plain = compiled(n, 43, reverse)
    finite = 0
    for _ in range(340 if pytestconfig.getoption("--exhaustive") else 40):
        system = random_system(rng, n, 43)
        finite += finite_arrays(in_kernel(*system), plain(*system))
    assert finite > 10


@pytest.mark.parametrize("radius", [0.0, 0.5, 0.99, 0.9999, 1.0])
def test_rounding_is_that_of_the_loop(pytestconfig, radius):
    """The largest error against float64 is at most four times that of `jax.lax.scan`, with poles of any size."""
    length = 65_536 if pytestconfig.getoption("--exhaustive") else 8_192
    in_kernel, plain = compiled(2, length, False)
    rng = np.random.default_rng(0)
    for angle in (0.0, 0.1, 1.0, 3.0):
        turn = radius * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        system = (
            (turn.astype("f"), np.float32([1, 0.5])),
            (np.float32(0.3),) * 2,
            rng.normal(size=length).astype("f"),
        )
        with jax.enable_x64(True):
            exact = plain(*jax.tree.map(lambda v: np.asarray(v, np.float64), system))
        for ours, theirs, e in zip(in_kernel(*system)[1], plain(*system)[1], exact[1], strict=True):
            off, most = (
                np.max(np.abs(np.asarray(v, float) - np.asarray(e))) for v in (ours, theirs)
            )
            assert off <= 4 * most


# Where XLA makes one kernel of small iterations alone ----------------------------------------------------------------------


@pytest.fixture
def limited(monkeypatch):
    older = machines.CPU._replace(one_kernel_bytes=machines.SMALL_LOOP)
    monkeypatch.setattr(machines, "this_processor", lambda: older)


def controlled(c, s, u):
    """A mass with drag and its controller, whose four carries are read by one another."""
    at, speed, total, before = s
    error = u - at
    total = total + 0.01 * error
    force = c[0] * error + c[1] * total + c[2] * (error - before)
    speed = speed + 0.01 * (force - 0.5 * speed * speed - at)
    return (at + 0.01 * speed, speed, total, error), at


@pytest.mark.parametrize(("dtype", "is_unrolled"), [(np.float32, True), (np.float64, False)])
def test_an_iteration_that_may_be_too_large_for_one_kernel_is_not_unrolled(
    limited, dtype, is_unrolled
):
    """XLA counts more of such an iteration than is estimated: compiled for the limit, it ran kernel by kernel in float64."""
    with jax.enable_x64(True):
        c, init, xs = (np.ones(shape, dtype) for shape in (3, 4, 16_000))

        def loss(c, init, xs):
            return jnp.sum(jrnn.scan(functools.partial(controlled, c), tuple(init), xs)[1] ** 2)

        forward, _ = plans_of(jax.grad(loss, (0, 1, 2)), c, init, xs)
    assert (forward.strategy == "unrolled") == is_unrolled


def test_a_loop_of_small_kernels_is_not_cut_into_chunks(limited):
    """What its kernels take is known too roughly: sums after each chunk took up to 2.4 times as long."""

    def loss(c, init, xs):
        variance = jrnn.scan(lambda v, u: (c[0] + c[1] * u + c[2] * v, v), init, xs)[1]
        return jnp.sum(variance * xs)

    *_, plan = plans_of(
        jax.grad(loss, (0, 1, 2)),
        tuple(np.ones(3, "f")),
        np.ones(16, "f"),
        np.ones((16_000, 16), "f"),
    )
    assert plan.loop.reverse
    assert "at a time" not in str(plan)


@pytest.mark.parametrize("lanes", [(), (16,)])
def test_a_mask_is_stored_where_a_step_that_reads_less_may_be_one_kernel(limited, lanes):
    """Computed again from the inputs, the mask of 16 values took 1.8 times as long as stored; that of one did not."""

    def loss(c, mean, xs):
        def step(mean, x):
            mean = jnp.where(x[1] > 0, mean, c * mean + (1 - c) * x[0])
            return mean, mean

        return jnp.sum(jrnn.scan(step, mean, xs)[1])

    xs = (np.ones((16_000, *lanes), "f"),) * 2
    *_, plan = plans_of(jax.grad(loss, (0, 1, 2)), np.float32(0.9), np.ones(lanes, "f"), xs)
    assert plan.loop.reverse
    assert ("gt" in [e.primitive.name for e in plan.loop.eqns]) == (not lanes)


def cascade(c, s, u):
    """Four filters of order 2, one after the other, and the largest size of the last one's state."""
    new = []
    for k in range(0, 8, 2):
        (first, second), u = STEPS["filter"][1](c[5 * k // 2 :], s[k : k + 2], u)
        new += [first, second]
    return tuple(new), (u, jnp.abs(new[-1]))


@pytest.mark.parametrize("reverse", [False, True])
def test_an_affine_loop_that_is_no_single_kernel_runs_in_blocks(limited, reverse):
    c, (first, _), xs = arguments("filter", 1_001)
    c, init = tuple(c) * 4, (first,) * 8

    def loss(scan, c, init, xs):
        (y, size), step = (
            scan(functools.partial(cascade, c), init, xs, reverse=reverse)[1],
            jnp.arange(len(xs)),
        )
        return jnp.sum(jnp.cos(step) * y**2) + jnp.sum(size)

    ours, theirs = (
        jax.grad(functools.partial(loss, scan), (0, 1, 2)) for scan in (jrnn.scan, jax.lax.scan)
    )
    plans = plans_of(ours, c, init, xs)
    assert "in blocks" in str(plans[-1])
    close(jax.jit(ours)(c, init, xs), jax.jit(theirs)(c, init, xs), 1e-4)


def test_coefficients_may_be_read_from_an_array_in_the_step():
    sections = jnp.tile(jnp.array([0.2, 0.3, 0.1, -1.6, 0.8]), (4, 1))

    def cascade(sections, xs, scan):
        def step(carry, x):
            new = []
            for k in range(4):
                b0, b1, b2, a1, a2 = (sections[k, i] for i in range(5))
                y = b0 * x + carry[k][0]
                new.append((b1 * x - a1 * y + carry[k][1], b2 * x - a2 * y))
                x = y
            return new, x

        return scan(step, [(0.0, 0.0)] * 4, xs)[1]

    xs = jnp.sin(jnp.arange(3_000.0))
    (plan,) = jrnn.explain(lambda s, x: cascade(s, x, jrnn.scan), sections, xs).loops
    assert "in blocks of" in str(plan)
    wanted = cascade(sections, xs, jax.lax.scan)
    close(jax.jit(lambda s, x: cascade(s, x, jrnn.scan))(sections, xs), wanted)


# The kernel in blocks ------------------------------------------------------------------------------------------------------


def in_blocks(step, init, xs, reverse=False, level=0):
    """Runs a loop by the kernel, whatever its cost is."""
    loop = loop_of(step, init, xs, reverse)
    call = replace(call_in_blocks(loop), level=level)
    leaves = jax.tree.leaves
    carry, ys = jax.jit(lambda init, xs: call.run(loop.closed().consts, init, xs, loop.length))(
        leaves(init), leaves(xs)
    )
    return carry, ys


BLOCK_STEPS = {
    "gate": (1, lambda s, u: ((h := (1 - (z := jax.nn.sigmoid(u))) * s[0] + z * 0.3,), h)),
    "mask": (1, lambda s, u: ((jnp.where((u > 0) & (u < 1), s[0], 0.9 * s[0] + u),), s[0])),
    "division": (1, lambda s, u: (((u - s[0]) / (2 + u * u),), jnp.exp(-s[0] * s[0]) * u)),
    "missing numbers": (1, lambda s, u: ((0.5 * s[0] + u,), jnp.where(u > 2, jnp.nan, -s[0]))),
    "decay of a constant": (
        1,
        lambda s, u: ((jnp.exp(jnp.float32(-0.5)).astype(u.dtype) * s[0] + u,), s[0]),
    ),
    "no outputs": (1, lambda s, u: ((0.9 * s[0] + u,), ())),
    "a number next": (2, lambda s, u: ((jnp.ones((), u.dtype), s[0] + 0.5 * s[1] + u), s[1])),
    "the same next": (2, lambda s, u: ((h := 0.5 * s[0] - 0.2 * s[1] + u, h), h)),
    "counter": (2, lambda s, u: ((0.9 * s[0] + u, s[1] + jnp.float32(1)), s[0])),
    "oscillator": (2, lambda s, u: ((s[0] - 0.1 * s[1], s[1] + 0.1 * s[0] + u), s[0] * s[1])),
    "three": (3, lambda s, u: ((s[1], s[2], u - 0.2 * s[0] - 0.5 * s[2]), (s[0] + s[1], s[2] * u))),
    "eight": (8, lambda s, u: ((u + 0.3 * s[7] - 0.2 * s[0], *(0.7 * v for v in s[:7])), s[3])),
    "two inputs": (
        2,
        lambda s, u: ((0.5 * s[0] + jnp.sin(u), 0.8 * s[1] - 0.1 * s[0] + u), s[0] + s[1]),
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [37, 300])  # blocks and a rest, and two tiles
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", BLOCK_STEPS)
def test_blocks_have_the_values_of_the_loop(name, reverse, length, dtype):
    count, step = BLOCK_STEPS[name]
    with jax.enable_x64(True):
        init, xs = (
            (jnp.asarray(0.3, dtype),) * count,
            jnp.asarray(np.random.default_rng(0).normal(size=length), dtype),
        )
        carry, ys = in_blocks(step, init, xs, reverse)
        wanted = jax.lax.scan(step, init, xs, reverse=reverse)
    close(
        [carry, ys],
        [list(wanted[0]), jax.tree.leaves(wanted[1])],
        1e-5 if dtype == "float32" else 1e-13,
    )


@pytest.mark.parametrize(
    "step",
    [
        lambda s, u: ((s * (0 * u + 1e30)) * 1e-30 + u, s),
        lambda s, u: (((s + u) * u) * 1e-30, s),
        lambda s, u: ((s * u + u * 1e15) - u * 1e15, s),
    ],
)
@pytest.mark.parametrize("size", [1.0, 1e10, 1e15, 1e25])
def test_what_overflows_within_a_step_is_infinite_as_in_the_loop(step, size):
    xs = np.random.default_rng(0).normal(size=300).astype("f")
    xs[40:60] *= size
    carry, ys = in_blocks(step, jnp.float32(0.5), xs)
    wanted = jax.lax.scan(step, jnp.float32(0.5), xs)
    for ours, theirs in zip([*carry, *ys], jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))


@pytest.mark.parametrize("level", range(len(library.loaded().instruction_sets)))
@pytest.mark.parametrize("name", ["gate", "oscillator", "three", "eight"])
@pytest.mark.parametrize("reverse", [False, True])
def test_blocks_have_the_same_values_with_all_instruction_sets(name, reverse, level):
    count, step = BLOCK_STEPS[name]
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-13)):
        with jax.enable_x64(True):
            init, xs = (
                (jnp.asarray(0.3, dtype),) * count,
                jnp.asarray(np.random.default_rng(0).normal(size=777), dtype),
            )
            close(
                in_blocks(step, init, xs, reverse, level),
                in_blocks(step, init, xs, reverse),
                tolerance,
            )


def random_gate(rng, length):
    """Returns coefficients and inputs of a step with one carry: resets, decays of 1e-30, growth, and planted numbers."""
    a = rng.choice(
        [0.0, 1e-30, 0.5, 0.99, 1.0, -1.0, 3.0],
        size=length,
        p=[0.1, 0.05, 0.2, 0.25, 0.2, 0.1, 0.1],
    )
    xs = rng.normal(size=length) * 10.0 ** rng.choice([0, 0, 0, 18, 36])
    for of in (a, xs):
        for _ in range(rng.choice([0, 0, 1, 2])):
            of[rng.integers(length)] = rng.choice([np.inf, -np.inf, np.nan, 3e38])
    first = rng.choice([0.3, 0.3, 1e36, np.inf, np.nan])
    return jnp.float32(first), (a.astype("f"), xs.astype("f"))


@pytest.mark.parametrize("reverse", [False, True])
def test_infinities_and_nan_of_gates_are_where_the_loop_has_them(pytestconfig, reverse):
    rng = np.random.default_rng(int(reverse))

    def step(s, x):
        a, u = x
        return a * s + u, (s, u - s)

    first, xs = random_gate(rng, 300)
    loop = loop_of(step, first, xs, reverse)
    call = call_in_blocks(loop)
    ours = jax.jit(lambda init, xs: call.run([], [init], xs, 300))
    theirs = jax.jit(lambda init, xs: jax.lax.scan(step, init, xs, reverse=reverse))
    finite = 0
    for _ in range(1_000 if pytestconfig.getoption("--exhaustive") else 100):
        first, xs = random_gate(rng, 300)
        finite += finite_arrays(ours(first, xs), theirs(first, xs))
    assert finite > 20


def turning(radius, angle):
    """Returns the coefficients of a filter of order 2 with poles at a radius and an angle, all in float32."""
    return np.float32([0.2, 0.3, 0.1, -2 * radius * np.cos(angle), radius**2])


@pytest.mark.parametrize("step", ["one carry", "mask", "one output", "its gradient"])
@pytest.mark.parametrize("radius", [0.5, 0.99, 0.9999, 1.0])
def test_rounding_in_blocks_is_that_of_the_loop(pytestconfig, step, radius):
    """The largest error against float64 is at most four times that of `jax.lax.scan`."""
    length = 65_536 if pytestconfig.getoption("--exhaustive") else 8_192
    xs = np.random.default_rng(0).normal(size=length).astype("f")

    def outputs(scan, c, xs):
        init = (xs[0] * 0 + 0.3,) * (1 if step in ("one carry", "mask") else 2)
        if step == "one carry":
            return scan(lambda s, u: ((h := c[4] * s[0] - u,), h), init, xs)[1]
        if step == "mask":
            return scan(
                lambda s, u: ((h := jnp.where(u > 3, s[0], c[4] * s[0] + (1 - c[4]) * u),), h),
                init,
                xs,
            )[1]
        return scan(functools.partial(STEPS["filter"][1], c), init, xs)[1]

    def values(scan, c, xs):
        weights = jnp.sin(jnp.arange(length)).astype(xs.dtype)
        of = functools.partial(outputs, scan)
        return (
            jax.grad(lambda xs: jnp.vdot(weights, of(c, xs)))(xs)
            if step == "its gradient"
            else of(c, xs)
        )

    assert all(
        "in blocks" in str(plan)
        for plan in plans_of(functools.partial(values, jrnn.scan), turning(radius, 0.1), xs)
    )
    for angle in (0.0, 0.1, 1.0, 3.0):
        c = turning(radius, angle)
        with jax.enable_x64(True):
            exact = jax.jit(functools.partial(values, jax.lax.scan))(
                *(np.asarray(v, np.float64) for v in (c, xs))
            )
        ours, theirs = (
            jax.jit(functools.partial(values, scan))(c, xs) for scan in (jrnn.scan, jax.lax.scan)
        )
        off, most = (
            np.max(np.abs(np.asarray(v, float) - np.asarray(exact))) for v in (ours, theirs)
        )
        assert off <= 4 * most
