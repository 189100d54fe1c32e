"""Executors agree with the loop, and refuse what they cannot do."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from cases import D, H, N, T, draw
from plans_of import scan_plans

from jrnn import plain_scans
from jrnn.errors import ScanError
from jrnn.loops import install, scan
from jrnn.loops.affine import associative
from jrnn.loops.compile import compile_loop
from jrnn.loops.costs.target import Target
from jrnn.loops.explanations.explain import plans_in
from jrnn.loops.ir import ScanParams, tag, traced_loops
from jrnn.loops.passes import split

pytestmark = pytest.mark.usefixtures("rewritten")

MINGRU = dict(wz=(D, H), wn=(D, H), h0=(N, H), x=(T, N, D))


def mingru_step(p):
    def step(h, x):
        z = jax.nn.sigmoid(x @ p["wz"])
        h = (1 - z) * h + z * (x @ p["wn"])
        return h, jnp.tanh(h)

    return step


@pytest.fixture(params=["cpu", "tpu"])
def solver(request, monkeypatch):
    """Plans for each target: on a CPU a loop of multiplications and additions stays, elsewhere there are rounds."""
    monkeypatch.setattr(
        install,
        "compile_loop",
        lambda scan, _, *tag: compile_loop(scan, Target(request.param), *tag),
    )


@pytest.mark.exhaustive("cpu-False")
@pytest.mark.grid(every=3)
@pytest.mark.parametrize("reverse", [False, True])
def test_associative_agrees_with_the_loop(reverse, solver, x64):
    p = jax.tree.map(jnp.asarray, draw(0, **MINGRU))

    def loss(p, executor):
        last, ys = scan(mingru_step(p), p["h0"], p["x"], reverse=reverse, executor=executor)
        return jnp.sum(jnp.sin(ys)) + jnp.sum(last**3)

    def squared(p, executor):
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss)(p, executor)))

    def both(executor):
        return lambda p: (jax.value_and_grad(loss)(p, executor), jax.grad(squared)(p, executor))

    check = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-12)
    with plain_scans():
        expected = by_numpy(both("scan"))(p)
    jax.tree.map(check, jax.jit(both("associative"))(p), expected)


def test_associative_with_lengths(x64):
    p = jax.tree.map(jnp.asarray, draw(0, **MINGRU))
    runs = [
        scan(mingru_step(p), p["h0"], p["x"], lengths=jnp.array([3, 0]), executor=executor)
        for executor in ("associative", "scan")
    ]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), *runs)


def test_associative_keeps_independent_states_apart(x64):
    p = jax.tree.map(jnp.asarray, draw(1, **MINGRU))

    def step(carry, x):
        slow, spin = carry
        kept = -(slow - x @ p["wn"]) / 3.0 + 0.25
        turned = jnp.where(x[:, :1] > 0, spin * jnp.exp(0.3j), spin - 1j)
        return (kept, turned), (slow * 2.0, jnp.abs(spin))

    carry = (p["h0"], p["h0"] + 0.5j)
    runs = [scan(step, carry, p["x"], executor=executor) for executor in ("associative", "scan")]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), *runs)


@pytest.mark.parametrize(
    "step, why",
    [
        (lambda h, x: (jnp.tanh(h) + x, h), "tanh of the carry is not affine"),
        (lambda h, x: (h * h + x, h), "mul of the carry is not affine"),
        (lambda h, x: (h @ jnp.ones((H, H)) + x, h), "dot_general"),
        (lambda h, x: (jnp.where(h > 0, h, x), h), "not affine"),
        (lambda h, x: (1 / h + x, h), "div of the carry"),
        (lambda h, x: (h[:, ::-1] + x, h), "rev of the carry"),
    ],
)
def test_associative_refuses(step, why):
    with pytest.raises(ScanError, match=why):
        scan(step, jnp.ones((N, H)), jnp.ones((T, N, H)), executor="associative")


def lru_step(p):
    def step(h, x):
        re, im = h
        re, im = (
            p["cos"] * re - p["sin"] * im + x @ p["wz"],
            p["sin"] * re + p["cos"] * im + x @ p["wn"],
        )
        return (re, im), jnp.tanh(re) * im

    return step


@pytest.mark.exhaustive
def test_associative_solves_carries_that_read_each_other(solver, x64):
    """A complex recurrence as two real carries, in float64 and in float32, forward and its gradient."""
    p = draw(2, **MINGRU, i0=(N, H), cos=(1, H), sin=(1, H))

    def loss(p, executor):
        last, ys = scan(lru_step(p), (p["h0"], p["i0"]), p["x"], executor=executor)
        return jnp.sum(jnp.sin(ys)) + jnp.sum(last[0] * last[1])

    value = jax.value_and_grad(loss)
    for dtype, tolerance in ((jnp.float64, 1e-11), (jnp.float32, 1e-5)):
        given = jax.tree.map(lambda v, dtype=dtype: np.asarray(v, dtype), p)
        check = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
        with plain_scans():
            expected = by_numpy(functools.partial(value, executor="scan"))(given)
        jax.tree.map(
            check, jax.jit(functools.partial(value, executor="associative"))(given), expected
        )


def test_associative_solves_one_layer_after_the_other(x64):
    p = jax.tree.map(jnp.asarray, draw(3, **MINGRU, deep=(H, H)))

    def step(carry, x):
        upper, lower = carry
        lower, y = mingru_step(p)(lower, x)
        gate = jax.nn.sigmoid(y @ p["deep"])
        upper = upper * gate + lower
        return (upper, lower), upper

    actual = scan(step, (p["h0"], p["h0"] * 2), p["x"], executor="associative")
    expected = by_numpy(lambda h: jax.lax.scan(step, (h, h * 2), p["x"]))(p["h0"])
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), actual, expected
    )


def test_associative_refuses_carries_that_multiply_or_count_or_are_too_many():
    ones = jnp.ones((N, H))
    xs = jnp.ones((T, N, H))
    with pytest.raises(ScanError, match="mul of the carry is not affine"):
        scan(lambda c, x: ((c[0] * c[1], c[1] + c[0]), x), (ones, ones), xs, executor="associative")
    with pytest.raises(ScanError, match="a carry is int32"):
        scan(
            lambda c, x: ((c[0] * 2, c[1] * x), x), (jnp.int32(1), ones), xs, executor="associative"
        )
    with pytest.raises(ScanError, match="more than 4 carries read each other"):
        scan(lambda c, x: ((*c[1:], c[0] * x), x), (ones,) * 5, xs, executor="associative")


@pytest.mark.usefixtures("without_kernel")
@pytest.mark.parametrize("platform", ["cuda", "tpu", "metal"])
def test_accelerators_keep_the_order_of_sums_that_the_user_wrote(platform):
    """A gradient of the same loop may be solved in rounds, and its sums may leave the loop."""
    big = jnp.ones((90, 4))

    def total(w, xs):
        return scan(
            lambda c, x: ((0.5 * c[0] + x, c[1] + jnp.sum(x * w)), c[0]), (jnp.zeros(4), 0.0), xs
        )

    def plans(fn):
        return plans_in(jax.make_jaxpr(fn)(jnp.float32(1), big).jaxpr, Target(platform))

    (forward,) = plans(total)
    assert forward.strategy != "associative" and not forward.accumulated
    assert any("order of its sums" in note for note in forward.notes)
    *_, gradient = plans(jax.grad(lambda w, xs: jnp.sum(jnp.sin(total(w, xs)[0][1]))))
    assert gradient.loop.reverse
    assert gradient.strategy == "associative" or gradient.accumulated
    (counted,) = plans(
        lambda w, xs: scan(lambda c, x: (c + jnp.sum(x), None), jnp.int32(0), jnp.int32(xs))
    )
    assert counted.accumulated, "integers have no order"


def test_accelerators_solve_gradients_of_affine_steps_that_need_no_more_memory_at_once():
    """Loops that the user wrote only if he asks, and on a CPU no loop else."""
    h, xs = jnp.ones((N, H)), jnp.ones((100, N, H))

    def chosen(step, platform="cuda", **keywords):
        run = functools.partial(scan, step, **keywords)
        closed = jax.make_jaxpr(jax.grad(lambda h, xs: jnp.sum(run(h, jnp.tanh(xs))[0])))(h, xs)
        forward, *_, reverse = [plan.strategy for plan in plans_in(closed.jaxpr, Target(platform))]
        return forward, reverse

    assert chosen(lambda h, x: (jnp.tanh(x) * h + x, h)) == ("scan", "associative")
    assert chosen(lambda h, x: (jnp.tanh(x) * h + x, h), executor="scan") == ("scan", "scan")
    assert chosen(lambda h, x: (h * x + x, h), "cpu") == ("scan", "scan")
    for platform in ("cpu", "cuda"):
        asked = chosen(lambda h, x: (h * x + x, h), platform, executor="associative")
        assert asked == ("associative", "associative")
    wide = jnp.ones((1, H, 50))
    sums = jax.jit(lambda h, x: jnp.sum(jnp.sin(x)[:, :, None] * wide * h[:, :, None], axis=2))
    assert chosen(lambda h, x: (h * jnp.tanh(x) + 0 * sums(h, x), None))[1] == "scan"
    assert chosen(lambda h, x: (jnp.tanh(h * x), h)) == ("scan", "scan")


@pytest.mark.parametrize(
    "step, bounded",
    [
        (lambda h, x: (jax.nn.sigmoid(x) * h + x, h), True),
        (lambda h, x: ((1 - jax.nn.sigmoid(x)) * h + x, h), True),
        (lambda h, x: (jnp.tanh(x) * jnp.clip(x, -1, 0.5) * h, h), True),
        (lambda h, x: (jnp.exp(-jax.nn.relu(x)) * h, h), True),
        (lambda h, x: (0.5 * h + x * 1e30, h), True),
        (lambda h, x: (x * h, h), False),
        (lambda h, x: (1.001 * h, h), False),
        (lambda h, x: (jnp.exp(x) * h, h), False),
        (
            lambda h, x: (jnp.where(x > 0, h, 1.0), h),
            False,
        ),  # a factor of zero does not forget an infinite carry
    ],
)
def test_accelerators_solve_by_rounds_where_no_product_of_factors_can_overflow(step, bounded):
    xs = jnp.ones((100, N, H))
    (loop,) = traced_loops(lambda xs: scan(step, xs[0], xs), xs)
    assert associative.is_bounded(split(loop).residual) == bounded
    of_a_gradient = tag.Provenance(written_reverse=not loop.reverse)
    params, tpu = ScanParams.of_loop(loop), Target("tpu")
    assert compile_loop(params, tpu, tag.Options()).strategy == "scan"
    assert compile_loop(params, tpu, tag.Options(), of_a_gradient).strategy == (
        "associative" if bounded else "scan"
    )


def test_unknown_executor_and_the_choice():
    with pytest.raises(ScanError, match="did you mean 'associative'"):
        scan(lambda c, x: (c, x), 0.0, jnp.ones(3), executor="asociative")
    told = scan_plans(lambda c, x: (c * x, c), jnp.float32(1), jnp.ones(3), executor="associative")
    assert told.strategy == "associative"


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(strict="x"), ScanError, "strict must be True or False"),
        (dict(axis_name="no such axis"), ScanError, "runs on one device|is no axis here"),
        (dict(unroll=-3), ValueError, "unroll"),
        (dict(length=99), ValueError, "length"),
        (dict(memory=-1), ScanError, "memory must be"),
    ],
)
@pytest.mark.parametrize("executor", ["auto", "newton"])
def test_options_are_checked_whatever_the_executor(executor, options, error, message):
    if executor == "newton" and "unroll" in options:
        pytest.skip("it ignores unroll")
    with pytest.raises(error, match=message):
        scan(
            lambda h, x: (jnp.tanh(h + x), h),
            jnp.ones(3),
            jnp.ones((T, 3)),
            executor=executor,
            **options,
        )


@pytest.mark.parametrize("lowered", ["cuda", "rocm", "cpu"])
def test_loops_are_planned_for_the_platform_that_they_are_lowered_for(monkeypatch, lowered):
    """JAX calls the GPUs of all makers "gpu"."""

    class Device:
        class client:
            platform = "cpu" if lowered == "cpu" else "gpu"
            _raw_platform = lowered

    monkeypatch.setattr(jax, "devices", lambda: [Device])
    assert Target.here().platform == lowered
