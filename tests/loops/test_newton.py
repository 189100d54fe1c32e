"""The executor "newton": the values and derivatives of the loop, whatever the iteration did.

Shapes: T time, N batch, H hidden.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_newton
from by_numpy import COMPILED, by_numpy
from newton_cells import CELLS, H, N, example
from program_depth import DeepModule

import jrnn
from jrnn import Newton, jaxprs
from jrnn.errors import ScanError
from jrnn.loops import scan, scan_statistics
from jrnn.loops.affine import rounds
from jrnn.loops.affine.blocks import blocks_of

pytestmark = pytest.mark.usefixtures("little_optimization")

T = 24
close = functools.partial(
    jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
)


def loss(run, make, p, carry, xs):
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(run(make(p), carry, xs)))


def everything(run, make):
    """Values, and the gradient with respect to everything."""
    return lambda *args: (
        run(make(args[0]), *args[1:]),
        jax.grad(functools.partial(loss, run, make), argnums=(0, 1, 2))(*args),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CELLS)
def test_values_and_gradients_are_those_of_the_loop(name, x64):
    make, *args = example(name, T)
    newton = functools.partial(scan, executor="newton")
    close(jax.jit(everything(newton, make))(*args), by_numpy(everything(jax.lax.scan, make))(*args))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gru", "elman_dense"])
def test_in_float32(name):
    make, *args = jax.tree.map(
        lambda v: jnp.asarray(v, jnp.float32) if hasattr(v, "shape") else v, example(name, T)
    )
    (got, stats) = jax.jit(lambda p, c, xs: scan_statistics(make(p), c, xs))(*args)
    expected = by_numpy(lambda p, c, xs: jax.lax.scan(make(p), c, xs))(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, expected)
    assert stats.sequential_steps == 0 and stats.iterations < 12


@pytest.mark.parametrize("name, block", [(name, row[4]) for name, row in CELLS.items()])
def test_the_structure_of_the_jacobian_is_found(name, block):
    make, p, carry, xs = example(name, 2)
    closed = jax.make_jaxpr(lambda c, x: make(p)(c, x))(carry, xs[0])
    groups = blocks_of(jaxprs.inlined(closed, jaxprs.LOWERED_CALLS), len(jax.tree.leaves(carry)))
    if name == "slstm":  # m reads h, and h reads m: all four are one group
        assert len(groups) == 1
    assert max(group.block for group in groups) == block


@pytest.mark.exhaustive
def test_the_last_update_is_made(x64):
    """In float32 the values are as near as those of the loop, not only as near as the certificate asks."""
    make, *given = example("ctrnn", 64)
    expected = by_numpy(lambda p, carry, xs: jax.lax.scan(make(p), carry, xs)[1])(*given)
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), given)
    actual = jax.jit(lambda p, carry, xs: scan(make(p), carry, xs, executor="newton")[1])(*single)
    assert abs(actual - expected).max() < 3e-7 * abs(expected).max()


@pytest.mark.exhaustive
def test_layers_are_solved_one_after_the_other(x64):
    make, p, carry, xs = example("gru", T)

    def step(carry, x):
        upper, lower = carry
        lower, y = make(p)(lower, x)
        upper = jnp.tanh(upper * 0.5 + y @ jnp.eye(H)[::-1])
        return (upper, lower), (upper, y)

    closed = jax.make_jaxpr(step)((carry, carry), xs[0])
    groups = blocks_of(jaxprs.inlined(closed, jaxprs.LOWERED_CALLS), 2)
    assert [(group.carries, group.block) for group in groups] == [((1,), 1), ((0,), 1)]
    ours, theirs = (
        lambda c, xs, run=run: run(step, (c, c), xs)
        for run in (functools.partial(scan, executor="newton"), jax.lax.scan)
    )
    close(jax.jit(ours)(carry, xs), by_numpy(theirs)(carry, xs))


@pytest.mark.exhaustive
def test_one_iteration_is_enough_for_an_affine_step(x64):
    make, p, carry, xs = example("mingru", T)
    assert scan_statistics(make(p), carry, xs)[1].iterations == 1


@pytest.mark.exhaustive
def test_derivatives_of_higher_order_and_transformations(x64):
    make, p, carry, xs = example("gru", 8)

    def second(run):
        value = functools.partial(loss, run, make)
        return jax.jvp(
            jax.grad(value, argnums=(0, 1, 2)),
            (p, carry, xs),
            jax.tree.map(jnp.cos, (p, carry, xs)),
        )

    newton = functools.partial(scan, executor="newton")
    close(COMPILED(lambda: second(newton))(), by_numpy(lambda: second(jax.lax.scan))())
    many = jnp.stack([carry, carry * 2])
    mapped = COMPILED(
        jax.vmap(jax.grad(functools.partial(loss, newton, make), argnums=1), (None, 0, None))
    )(p, many, xs)
    close(
        mapped[1],
        by_numpy(jax.grad(functools.partial(loss, jax.lax.scan, make), argnums=1))(p, many[1], xs),
    )
    ours, theirs = (functools.partial(run, make(p), reverse=True) for run in (newton, jax.lax.scan))
    close(COMPILED(ours)(carry, xs), by_numpy(theirs)(carry, xs))


# Another implementation -----------------------------------------------------------------------------------------------

GOLDEN = Path(__file__).parents[1] / "golden" / "pararnn.npz"


def pararnn_gru(p):
    def step(h, x):
        z, r, n = jnp.split(x @ p["W_x.weight"].T + p["W_x.bias"], 3, axis=-1)
        z, r = jax.nn.sigmoid(z + p["a_z"] * h), jax.nn.sigmoid(r + p["a_r"] * h)
        h = (1 - z) * h + z * jnp.tanh(n + p["a_n"] * (h * r))
        return h, h

    return step


def pararnn_lstm(p):
    def step(carry, x):
        c, h = carry[:, 0], carry[:, 1]
        f, z, o = jnp.split(x @ p["W_x.weight"].T + p["W_x.bias"], 3, axis=-1)
        f = jax.nn.sigmoid(f + p["a_f"] * h + p["c_f"] * c)
        c = f * c + (1 - f) * jnp.tanh(z + p["a_z"] * h)
        h = jax.nn.sigmoid(o + p["a_o"] * h + p["c_o"] * c) * jnp.tanh(c)
        carry = jnp.stack([c, h], axis=1)
        return carry, carry

    return step


def pararnn_cfc(p):
    def step(h, x):
        f, n = jnp.split(x[:, :-1] @ p["W_x.weight"].T + p["W_x.bias"], 2, axis=-1)
        kept = jax.nn.sigmoid(-jax.nn.softplus(f) * x[:, -1:])
        h = kept * h + (1 - kept) * jnp.tanh(n + p["u"] * h)
        return h, h

    return step


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "make", [pararnn_gru, pararnn_lstm, pararnn_cfc], ids=lambda make: make.__name__
)
def test_states_and_gradients_are_those_of_pararnn_torch(make, x64):
    """Recorded by scripts/record/pararnn_cells.py: the same method in another framework, with Jacobians by hand."""
    with np.load(GOLDEN) as file:
        name = make.__name__.removeprefix("pararnn_")
        golden = {key.split("|")[1]: file[key] for key in file.files if key.startswith(f"{name}|")}
    arguments = "x", "first", "w", "states", "iterations"
    names = [key for key in golden if key not in arguments and not key.startswith("grad_")]
    p = {key: jnp.atleast_2d(golden[key]) for key in names}

    def value(p, x, first):
        (_, ys), stats = scan_statistics(make(p), first, x.swapaxes(0, 1))
        return jnp.sum(ys.swapaxes(0, 1) * golden["w"]), (ys, stats)

    run = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True))
    (_, (ys, stats)), gradients = run(p, jnp.asarray(golden["x"]), jnp.asarray(golden["first"]))
    close(ys.swapaxes(0, 1), golden["states"])
    near = functools.partial(
        np.testing.assert_allclose, rtol=1e-6, atol=1e-6
    )  # the package sums gradients in float32
    jax.tree.map(
        near,
        gradients,
        (
            {key: np.atleast_2d(golden[f"grad_{key}"]) for key in p},
            golden["grad_x"],
            golden["grad_first"],
        ),
    )
    assert stats.sequential_steps == 0 and stats.iterations <= golden["iterations"] + 1


# The certificate ------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_chaotic_loop_ends_in_the_loop(x64):
    """Its residuals can be small where the trajectory is another one."""
    make, p, carry, xs = example("lorenz", 1500)
    (last, ys), stats = jax.jit(
        lambda c: scan_statistics(make(p), c, xs, executor=Newton(iterations=8))
    )(carry)
    assert stats.sequential_steps == 1500 and stats.iterations == 8
    np.testing.assert_array_equal(ys, jax.jit(lambda c: jax.lax.scan(make(p), c, xs)[1])(carry))
    random = np.random.RandomState(0)
    w, xs = (
        jnp.asarray(random.randn(10, 10) * 3 / np.sqrt(10)),
        jnp.asarray(random.randn(400, 1, 10) * 0.01),
    )
    step = lambda h, x: ((h := jnp.tanh(h @ w + x)), h)  # noqa: E731
    (_, ys), stats = jax.jit(lambda h: scan_statistics(step, h, xs, executor=Newton(iterations=8)))(
        jnp.zeros((1, 10))
    )
    assert stats.sequential_steps > 0
    close(ys, jax.jit(lambda h: jax.lax.scan(step, h, xs)[1])(jnp.zeros((1, 10))))


UNLIKE = {  # steps with elements of unlike sizes, and steps that jump, with their first carries
    "one large element": (lambda h, x: ((h := jnp.tanh(h) / 2 + x), h), [1e6, 0.0]),
    "a counter": (
        lambda h, x: ((h := jnp.stack([h[0] + 1, jnp.tanh(3 * h[1] + x[1])])), h),
        [1e7, 0.0],
    ),
    "one growing": (
        lambda h, x: ((h := jnp.array([1.3, 0.5]) * jnp.tanh(h) + x * jnp.array([1e5, 1e-3])), h),
        [1.0, 0.0],
    ),
    "clipped": (lambda h, x: ((h := jnp.clip(1.2 * h + x, -1, 1)), h), [0.0, 0.0]),
    "signs": (lambda h, x: ((h := 0.5 * jnp.sign(h) + 0.3 * x), h), [0.0, 0.0]),
    "hysteresis": (
        lambda h, x: ((h := jnp.where(h > 0, 0.5 + 0.4 * h, 0.3 * h - 0.5) + x), h),
        [0.0, 0.0],
    ),
}


@pytest.mark.sample("one large element", "hysteresis")
@pytest.mark.parametrize("name", UNLIKE)
def test_each_element_is_judged_in_its_own_scale(name, x64):
    step, first = UNLIKE[name]
    xs = jnp.asarray(np.random.RandomState(2).randn(64, 2))
    for options in (Newton(), Newton(iterations=2), Newton(guess=jnp.zeros((64, 2)), iterations=1)):
        ours = jax.jit(lambda h, options=options: scan(step, h, xs, executor=options))(
            jnp.array(first)
        )
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12),
            ours,
            jax.lax.scan(step, jnp.array(first), xs),
        )


def test_a_step_that_is_not_enclosed_runs_as_the_loop_or_is_exact(x64):
    """A condition has no enclosure, so only residuals of 0 are a certificate."""

    def step(h, x):
        h = jax.lax.cond(h > 0, lambda h: 0.3 * h + x, lambda h: x - h, h)
        return h, h

    xs = jnp.asarray(np.random.RandomState(0).randn(30))
    (_, ys), stats = jax.jit(lambda h: scan_statistics(step, h, xs, executor=Newton(iterations=2)))(
        jnp.float64(0.5)
    )
    assert stats.sequential_steps > 0
    close(ys, jax.lax.scan(step, jnp.float64(0.5), xs)[1])


def test_the_bound_of_a_later_group_has_the_errors_of_earlier_ones(x64):
    """The second carry is affine in the first, so that its own residuals are 0: all of its error comes from the first."""
    limit = 0.65
    for _ in range(200):  # where the first carry ends, so that the difference below cancels
        limit = np.tanh(0.9 * limit + 0.3)

    def step(carry, x):
        h, total = carry
        h = jnp.tanh(0.9 * h + x)
        total = 0.5 * total + 1e3 * (h - limit)
        return (h, total), total

    first, xs = (jnp.asarray([limit + 1e-3]), jnp.zeros(1)), jnp.full((64, 1), 0.3)
    wanted = jax.lax.scan(step, first, xs)[1]
    for tolerance, runs_the_loop in ((1e-6, False), (1e-4, False), (1e-2, True)):
        (_, ys), stats = scan_statistics(step, first, xs, executor=Newton(tolerance=tolerance))
        off = np.max(np.abs(ys - wanted)) / np.max(np.abs(wanted))
        assert off <= float(stats.error) <= 1e-2, tolerance
        assert (stats.sequential_steps == 64) == runs_the_loop, tolerance


def test_outputs_are_certified_or_those_of_the_loop(x64):
    """An output that divides by a small norm is as far off as its bound says; of others there is no bound."""
    xs = jnp.asarray(np.random.RandomState(0).randn(64))
    outputs = {
        "steep": lambda h: h / (1e-3 + jnp.abs(h)),
        "too steep": lambda h: jnp.sin(1e8 * h),
        "jumps": lambda h: jnp.sign(jnp.sin(1e14 * h)),
        "an integer": lambda h: (1e14 * h).astype(int),
        "not enclosed": lambda h: jax.lax.cond(h > 0, jnp.sin, jnp.cos, h),
    }
    for name, of in outputs.items():

        def step(h, x, of=of):
            h = 0.9 * jnp.tanh(h) + 1e-3 * x
            return h, of(h)

        def run(which, step=step):
            return jax.jit(lambda h: which(step, h, xs))(jnp.float64(0.5))

        # The residuals of the states are 1e-13 after four updates.
        (_, ys), stats = run(
            functools.partial(scan_statistics, executor=Newton(iterations=4, tolerance=1e-7))
        )
        wanted = run(jax.lax.scan)[1]
        assert np.all(np.abs(ys - wanted) <= float(stats.error) * (1 + np.abs(wanted))), name
        assert stats.sequential_steps == (0 if name == "steep" else 64), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_damping_has_the_type_of_the_carry(dtype, x64):
    step = lambda h, x: ((h := jnp.tanh(h) / 2 + x), h)  # noqa: E731
    h, xs = jnp.zeros(2, dtype), jnp.ones((9, 2), dtype)
    ys = scan(step, h, xs, executor=Newton(damping=0.2))[1]
    assert ys.dtype == dtype
    np.testing.assert_allclose(
        *(np.asarray(v, float) for v in (ys, jax.lax.scan(step, h, xs)[1])), rtol=2e-2
    )


@pytest.mark.exhaustive
def test_overflow_in_an_iteration_does_not_reach_the_caller(x64):
    """From zero, exp(h * h) overflows in the first update; the loop itself stays small."""
    xs = jnp.full((30, 2), 3.0)

    def step(h, x):
        h = jnp.exp(h * h * x - 4.0 * x * jnp.abs(h)) * 0.5 + 0.3 * jnp.log(h + 1e-3)
        return h, h

    def run(which, h):
        return which(step, h, xs)

    newton = functools.partial(scan, executor="newton")
    close(run(newton, jnp.ones(2)), run(jax.lax.scan, jnp.ones(2)))
    exploding = lambda h, x: (h * h * x, h)  # noqa: E731
    ours, theirs = (which(exploding, jnp.ones(2), xs)[1] for which in (newton, jax.lax.scan))
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)  # infinite, as in the loop


@pytest.mark.exhaustive("float64")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_huge_state_is_not_taken_for_the_scale(dtype, x64):
    """XLA rounds the reciprocal of the largest numbers to 0, and so would be all residuals relative to them."""
    xs, h = jnp.asarray(np.random.RandomState(0).randn(9, 2), dtype), jnp.full(2, 0.3, dtype)

    def step(h, x):
        h = jnp.tanh(1.5 * h + x)
        return h, h

    huge = jnp.zeros((9, 2), dtype).at[4, 0].set(0.98 * np.finfo(dtype).max)
    (_, ys), stats = COMPILED(lambda h: scan_statistics(step, h, xs, executor=Newton(guess=huge)))(
        h
    )
    np.testing.assert_allclose(ys, by_numpy(lambda h: jax.lax.scan(step, h, xs)[1])(h), rtol=1e-5)
    assert stats.iterations > 1 and stats.residual < 1e-4


@pytest.mark.exhaustive
def test_guesses_quasi_newton_and_damping(x64):
    make, p, carry, xs = example("elman_dense", T)
    expected = by_numpy(lambda c: jax.lax.scan(make(p), c, xs))(carry)
    plain = jax.jit(lambda c: scan_statistics(make(p), c, xs)[1])(carry)
    for options in (
        Newton(guess="sweep"),
        Newton(guess=plain.states),
        Newton(jacobian="diagonal", iterations=100),
        Newton(damping=0.3),
    ):
        got, stats = jax.jit(
            lambda c, options=options: scan_statistics(make(p), c, xs, executor=options)
        )(carry)
        close(got, expected)
        assert stats.sequential_steps == 0, options
        if not isinstance(options.guess, str):
            assert stats.iterations == 0 and plain.iterations > 2
    quasi = functools.partial(scan, executor=Newton(jacobian="diagonal", iterations=100))
    close(
        jax.jit(everything(quasi, make))(p, carry, xs),
        by_numpy(everything(jax.lax.scan, make))(p, carry, xs),
    )


# Rounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_the_depth_of_an_iteration_grows_with_the_logarithm():
    """Launches on the longest path of the compiled program: two a round, where the loop has some for every step."""

    def compiled(run, steps):
        make, p, carry, xs = example("gru", steps)
        return DeepModule(
            jax.jit(lambda c, xs: run(make(p), c, xs)).lower(carry, xs).compile().as_text()
        )

    one, two = (
        compiled(functools.partial(scan, executor="newton"), steps).loop_depths()[0]
        for steps in (512, 4096)
    )
    assert 0 < two - one <= 2 * 3 and two < 50
    assert compiled(jax.lax.scan, 512).depth() > 512


@pytest.mark.sample("6")
@pytest.mark.parametrize("size", [1, 3, 6])
def test_linear_recurrences_and_their_adjoints(size, x64):
    random = np.random.RandomState(size)
    j, b = jnp.asarray(random.randn(7, 2, size, size) * 0.5), jnp.asarray(random.randn(7, 2, size))

    def by_loop(j, b):
        step = lambda d, given: ((d := jnp.einsum("nij,nj->ni", given[0], d) + given[1]), d)  # noqa: E731
        return jax.lax.scan(step, jnp.zeros((2, size)), (j, b))[1]

    def derivatives(solve):
        value = lambda j, b: jnp.sum(jnp.sin(solve(j, b)))  # noqa: E731
        gradient = jax.grad(value, argnums=(0, 1))
        return solve(j, b), gradient(j, b), jax.jvp(gradient, (j, b), (j, b))[1]

    close(jax.jit(lambda: derivatives(rounds.solve))(), by_numpy(lambda: derivatives(by_loop))())
    huge = jnp.full((9, 1, 1, 1), 1e200)  # products overflow, the solution is 0
    assert np.isfinite(jax.jit(rounds.solve)(huge, jnp.zeros((9, 1, 1)))).all()


# What it refuses ------------------------------------------------------------------------------------------------------


@jax.custom_vjp
def with_vjp(x):
    return x


with_vjp.defvjp(lambda x: (x, None), lambda _, g: (g,))


@pytest.mark.parametrize(
    "step, carry, message",
    [
        (lambda c, x: ((c[0] + 1, c[1] * x), x), (jnp.int32(0), jnp.ones(2)), "a carry is int32"),
        (lambda c, x: (c * x, x), jnp.ones(2, complex), "a carry is complex64"),
        (lambda c, x: (with_vjp(c) * x, x), jnp.ones(2), "define it with jax.custom_jvp"),
        (lambda c, x: ((), x), (), "nothing is carried"),
        (
            lambda c, x: (c @ jnp.ones((300, 300)), None),
            jnp.ones((9, 300)),
            "300 x 300 for each of 1000 steps, need 3,24",
        ),
    ],
)
def test_what_it_refuses(step, carry, message):
    xs = jnp.ones((1000, 2))
    with pytest.raises(ScanError, match=message):
        scan(step, carry, xs, executor="newton")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(jacobian="diag"), "did you mean 'diagonal'"),
        (dict(guess="zero"), "did you mean 'zeros'"),
        (dict(iterations=0), "at least 1"),
        (dict(tolerance=0.0), "must be positive"),
        (dict(damping=2.0), "from 0 to 1"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ScanError, match=message):
        Newton(**options)


def test_options_that_it_excludes():
    step, h, xs = (lambda h, x: (jnp.tanh(h + x), h)), jnp.zeros(N), jnp.ones((3, N))
    with pytest.raises(ScanError, match="'newton' keeps all states"):
        scan(step, h, xs, executor="newton", recompute="sqrt")
    with pytest.raises(ScanError, match="until stops between them"):
        scan(step, h, xs, executor=Newton(), until=lambda h: h[0] > 1)
    with pytest.raises(ScanError, match="for jrnn.scan alone"):
        jrnn.optimize_scans(executor="newton")
    with pytest.raises(ScanError, match="guess must be the carries after every step"):
        scan(step, h, xs, executor=Newton(guess=jnp.zeros((2, N))))
    with pytest.raises(ScanError, match="must be 'newton' or an object of Newton"):
        scan_statistics(step, h, xs, executor="scan")
    with jrnn.plain_scans():
        np.testing.assert_array_equal(
            scan(step, h, xs, executor="newton")[1], jax.lax.scan(step, h, xs)[1]
        )
    assert scan(step, h, xs[:0], executor="newton")[1].shape == (0, N)


@pytest.mark.sample("0")
@pytest.mark.parametrize("start", range(0, 2000, 50))
def test_random_problems(start, x64):
    """No result is wrong, certified or not; the quick run has two that are solved and two that are not."""
    if start:
        assert not [what for k in range(50) if (what := random_newton.fault(start + k)[0])]
        return
    results = [random_newton.fault(seed, jit=by_numpy) for seed in (0, 3, 4, 5)]
    assert not [what for what, _ in results if what]
    assert sum(steps == 0 for _, steps in results) == 2
