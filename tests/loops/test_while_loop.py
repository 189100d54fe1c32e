"""`jrnn.while_loop` and `jrnn.scan(..., until=...)`: early exit, with derivatives like those of unrolled loops."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy

import jrnn
from jrnn.errors import ScanError

close = functools.partial(
    jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-12)
)
W = np.random.RandomState(0).randn(3, 3) * 0.4


def mix(w, s):
    return {"i": s["i"] + 1, "h": jnp.cos(s["h"] @ w) + 0.1 * s["h"]}


def by_loop(w, h, n, **options):
    start = {"i": jnp.int32(0), "h": h}
    return jrnn.while_loop(lambda s: s["i"] < n, functools.partial(mix, w), start, **options)["h"]


def unrolled(w, h, n):
    for _ in range(n):
        h = mix(w, {"i": 0, "h": h})["h"]
    return h


@pytest.mark.sample("0-options0")
@pytest.mark.parametrize(
    "n, options",
    [
        (0, dict(max_steps=9)),
        (1, dict(max_steps=1)),
        (20, dict(max_steps=300)),  # three levels of 16
        (5, dict(max_steps=20)),
        (7, dict(max_steps=20, checkpoints=4)),
        (7, dict(max_steps=8, checkpoints=100)),
    ],
)
def test_derivatives_are_those_of_the_unrolled_loop(n, options, x64):
    w, h = jnp.asarray(W), jnp.asarray([0.3, -0.2, 1.0])

    def loss(run, w, h):
        return jnp.sum(jnp.sin(run(w, h)))

    ours, theirs = (lambda w, h: by_loop(w, h, n, **options)), (lambda w, h: unrolled(w, h, n))

    def everything(run):
        value = functools.partial(loss, run)
        gradient = jax.grad(value, argnums=(0, 1))
        return (
            run(w, h),
            gradient(w, h),
            jax.jvp(value, (w, h), (w * 0.1, h + 1)),
            jax.jvp(gradient, (w, h), (w * 0.1, h + 1))[1],
        )

    close(jax.jit(lambda: everything(ours))(), by_numpy(lambda: everything(theirs))())


def test_what_reaches_the_bound_has_the_state_that_it_has():
    double = lambda x: jrnn.while_loop(lambda s: s < 100.0, lambda s: 2 * s, x, max_steps=3)  # noqa: E731
    assert float(double(3.0)) == 24.0 and float(jax.grad(double)(3.0)) == 8.0


@pytest.mark.exhaustive
def test_examples_stop_each_at_its_step(x64):
    """The derivative of the body at what has stopped is infinite: it must not reach the gradient of a shared weight."""
    x = jnp.asarray([4.0, 900.0, 30.0])

    def root(w, x):
        """Halves and shrinks until 1, where sqrt(s - 1) has an infinite slope."""
        return jrnn.while_loop(
            lambda s: s > 1.0, lambda s: jnp.maximum(1.0, w * jnp.sqrt(s - 1.0)), x, max_steps=40
        )

    def apart(w):
        return sum(root(w, v) for v in x)

    def at_once(w):
        return jnp.sum(jax.vmap(root, (None, 0))(w, x))

    value, gradient = jax.jit(jax.value_and_grad(at_once))(1.3)
    assert np.isfinite(gradient)
    close((value, gradient), by_numpy(jax.value_and_grad(apart))(1.3))
    mapped = jax.jit(jax.vmap(jax.grad(root), (None, 0)))(1.3, x)
    close(mapped, by_numpy(lambda w: jnp.stack([jax.grad(root)(w, v) for v in x]))(1.3))


def test_work_stops(x64):
    """Counted by a callback: no step after the stop, neither forward nor backward; under vmap until all have stopped."""
    calls = []

    @jax.custom_jvp
    def noted(s):
        jax.debug.callback(lambda: calls.append("forward"))
        return s

    @noted.defjvp
    def _(primals, tangents):
        jax.debug.callback(lambda: calls.append("derivative"))
        return primals[0], tangents[0]

    def run(x):
        return jrnn.while_loop(lambda s: s < 10.0, lambda s: noted(s) * 2.0, x, max_steps=400)

    assert run(1.0) == 16.0
    jax.effects_barrier()
    assert len(calls) == 4
    assert jax.vmap(run)(jnp.asarray([1.0, 6.0])).tolist() == [16.0, 12.0]
    jax.effects_barrier()
    assert len(calls) == 8, "4 steps, each of both examples"
    del calls[:]
    assert jax.grad(run)(1.0) == 16.0
    jax.effects_barrier()
    assert 4 <= calls.count("derivative") <= 12, (
        "two levels of segments compute each of 4 steps up to three times"
    )


@pytest.mark.exhaustive
def test_the_memory_of_a_gradient_grows_with_the_logarithm():
    def temporary(steps, **options):
        def loss(w, h):
            return jnp.sum(by_loop(w, h, steps, max_steps=steps, **options))

        args = jnp.asarray(W, jnp.float32), jnp.ones((2000, 3))
        return jax.jit(jax.grad(loss)).lower(*args).compile().memory_analysis().temp_size_in_bytes

    few, many = temporary(16), temporary(4096)
    assert many < 6 * few, "256 times the steps"
    assert temporary(256, checkpoints=256) > 2 * temporary(256)


@pytest.mark.parametrize("stop", ["while_loop", "until"])
def test_a_loop_that_stops_inside_of_a_step(stop, x64):
    """A rule for derivatives makes results and tangents in one loop there, which nothing separates."""

    def loss(scan, w):
        def step(h, x):
            if stop == "until":
                h, _ = jrnn.scan(
                    lambda h, x: (h * w + x, None),
                    h,
                    jnp.ones((5, 3)),
                    until=lambda h: jnp.sum(h) > 8,
                )
            else:
                h = jrnn.while_loop(
                    lambda h: jnp.sum(h) < 5, lambda h: 1.5 * w * h + 0.1, h, max_steps=8
                )
            return 0.3 * h + x, h

        last, ys = scan(step, jnp.ones(3), jnp.ones((4, 3)))
        return jnp.sum(last) + jnp.sum(ys**2)

    of_order = [
        jax.value_and_grad(functools.partial(loss, scan)) for scan in (jrnn.scan, jax.lax.scan)
    ]
    ours, theirs = (
        jax.jit(lambda w, f=f: (f(w), jax.jvp(f, (w,), (1.0,))[1]))(1.1) for f in of_order
    )
    close(ours, theirs)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_steps=0), "max_steps must be a positive integer"),
        (dict(max_steps=2.5), "max_steps must be"),
        (dict(max_steps=True), "max_steps must be"),
        (dict(max_steps=3, checkpoints=-1), "checkpoints must be"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(ScanError, match=message):
        jrnn.while_loop(lambda s: s < 3, lambda s: s + 1, 0, **options)


def test_errors_and_types_are_those_of_jax():
    with pytest.raises(TypeError, match="must have equal types|must have identical types"):
        jrnn.while_loop(
            lambda s: s[0] < 3,
            lambda s: (s[0] + 1, s[1].astype(jnp.int32)),
            (0, jnp.ones(2)),
            max_steps=3,
        )
    for start in (0, 0.0, jnp.bfloat16(0)):
        ours = jrnn.while_loop(lambda s: s < 3, lambda s: s + jnp.bfloat16(1), start, max_steps=9)
        theirs = jax.lax.while_loop(lambda s: s < 3, lambda s: s + jnp.bfloat16(1), start)
        assert jax.typeof(ours) == jax.typeof(theirs) and ours == theirs


# Examples -------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_an_ode_with_adaptive_steps(x64):
    """Heun's method with Euler's as the estimate of the error, y' = -k y: the gradient is that of the steps taken."""
    tolerance = 1e-4

    def solve(k, y0):
        def body(state):
            t, dt, y = state
            dt = jnp.minimum(dt, 1.0 - t)
            a = -k * y
            b = -k * (y + dt * a)
            error = jnp.abs(dt * (b - a) / 2)
            scale = jax.lax.stop_gradient(
                jnp.clip(0.9 * jnp.sqrt(tolerance / (error + 1e-12)), 0.3, 3.0)
            )
            accept = error <= tolerance
            return (
                jnp.where(accept, t + dt, t),
                dt * scale,
                jnp.where(accept, y + dt * (a + b) / 2, y),
            )

        t, _, y = jrnn.while_loop(lambda s: s[0] < 1.0, body, (0.0, 0.1, y0), max_steps=500)
        return y, t

    (y, t), gradient = jax.jit(jax.value_and_grad(lambda k: solve(k, 1.5), has_aux=True))(2.0)
    assert t == 1.0
    np.testing.assert_allclose(y, 1.5 * np.exp(-2.0), rtol=2e-3)
    np.testing.assert_allclose(gradient, -1.5 * np.exp(-2.0), rtol=5e-3)


# Devices --------------------------------------------------------------------------------------------------------------


def test_devices_that_stop_at_different_steps():
    """Inside of `jax.shard_map` with checked types: no device waits for a collective of one that has stopped."""
    program = Path(__file__).parent / "stops_over_devices.py"
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    path = str(Path(jrnn.__file__).parents[1])
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 6 and max(errors.values()) < 1e-12, errors


# until ----------------------------------------------------------------------------------------------------------------

XS = np.random.RandomState(2).randn(6, 2, 3)


def rnn(w):
    def step(h, x):
        h = jnp.tanh(h @ w + x) + 0.5 * h
        return h, {"h": h, "positive": h > 0}

    return step


def trips(h, xs):
    """The steps of `rnn(W)` until an element of the state is above 1.3."""
    for n, x in enumerate(xs):
        if np.abs(h).max() > 1.3:
            return n
        h = np.tanh(h @ W + x) + 0.5 * h
    return len(xs)


def by_hand(step, steps, h, xs, reverse=False):
    """One example, so many steps in Python."""
    order = range(len(xs))[::-1] if reverse else range(len(xs))
    outs = [None] * len(xs)
    for t in order[:steps]:
        h, outs[t] = step(h, xs[t])
    empty = jax.tree.map(jnp.zeros_like, step(h, xs[0])[1])
    return h, jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *[empty if y is None else y for y in outs]
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_until_is_a_loop_that_breaks(reverse, mapped, x64):
    stops = lambda h: jnp.max(jnp.abs(h)) > 1.3  # noqa: E731
    ends = [trips(np.zeros(3), XS[::-1, n] if reverse else XS[:, n]) for n in (0, 1)]
    assert ends[0] != ends[1] and min(ends) > 0 and min(ends) < 6, (
        "the examples stop at different steps"
    )

    def ours(w, h, xs):
        return jrnn.scan(rnn(w), h, xs, reverse=reverse, until=stops)

    def theirs(steps):
        return lambda w, h, xs: by_hand(rnn(w), steps, h, xs, reverse)

    def loss(run, w, h, xs):
        last, ys = run(w, h, xs)
        return jnp.sum(jnp.sin(ys["h"])) + jnp.sum(last**3)

    def everything(run):
        gradient = jax.grad(functools.partial(loss, run), argnums=(0, 1, 2))
        return lambda *a: (run(*a), gradient(*a), jax.jvp(gradient, a, a)[1])

    expected = [by_numpy(everything(theirs(ends[n])))(W, np.zeros(3), XS[:, n]) for n in (0, 1)]
    if mapped:
        got = jax.jit(jax.vmap(everything(ours), (None, 0, 1)))(W, np.zeros((2, 3)), XS)
    else:
        run = jax.jit(everything(ours))
        got = jax.tree.map(lambda *v: np.stack(v), *(run(W, np.zeros(3), XS[:, n]) for n in (0, 1)))
    close(got, jax.tree.map(lambda *v: np.stack(v), *expected))


@pytest.mark.sample("contractions")
@pytest.mark.parametrize("recompute", [None, "contractions", "sqrt"])
def test_sequences_of_a_batch_stop_each_at_its_step(recompute, x64):
    """With lengths and a mask. NaN after the stop reaches neither values nor gradients."""
    w, h0 = jnp.asarray(W), jnp.zeros((2, 3))
    stops = lambda h: jnp.max(jnp.abs(h), axis=-1) > 1.3  # noqa: E731
    masks = dict(lengths=jnp.array([6, 4]), mask=jnp.ones((6, 2), bool).at[1, 0].set(False))

    def run(w, xs):
        return jrnn.scan(rnn(w), h0, xs, until=stops, recompute=recompute, **masks)

    last, ys = jax.jit(run)(w, XS)
    lives = np.asarray(ys["h"].any(axis=-1))
    assert not lives[1, 0] and not lives[4:, 1].any() and not lives[-1].any() and lives[0].all()
    spoiled = np.where(lives[:, :, None], XS, np.nan)
    value = jax.jit(jax.value_and_grad(lambda w, xs: jnp.sum(run(w, xs)[0] ** 3), argnums=(0, 1)))
    close(value(w, spoiled), value(w, XS))

    def by_hands(w):
        total = 0.0
        for n, steps in enumerate(([0, 2, 3, 4, 5], [0, 1, 2, 3])):
            xs = XS[np.array(steps), n]
            total += jnp.sum(by_hand(rnn(w), trips(np.zeros(3), xs), h0[n], xs)[0] ** 3)
        return total

    close(value(w, spoiled)[1][0], by_numpy(jax.grad(by_hands))(w))


@pytest.mark.exhaustive
def test_adaptive_computation_time(x64):
    """Graves 2016: a step ponders until its halting probabilities add up to 0.99, or five times."""
    w = {"h": jnp.asarray(W), "halt": jnp.asarray([0.5, -0.3, 0.8])}

    def act(w, x):
        def ponder(carry, _):
            h, mean, halted = carry
            h = jnp.tanh(h @ w["h"] + x)
            p = jax.nn.sigmoid(h @ w["halt"])
            p = jnp.where(halted + p >= 0.99, 1.0 - halted, p)  # the last one gets what is left
            return (h, mean + p * h, halted + p), None

        start = jnp.zeros(3), jnp.zeros(3), jnp.zeros(())
        return jrnn.scan(ponder, start, length=5, until=lambda carry: carry[2] >= 0.99)[0][1]

    def unrolled(w, x):
        h, mean, halted, trips = jnp.zeros(3), jnp.zeros(3), 0.0, 0
        while halted < 0.99 and trips < 5:
            h = jnp.tanh(h @ w["h"] + x)
            p = jax.nn.sigmoid(h @ w["halt"])
            p = 1.0 - halted if halted + p >= 0.99 else p
            mean, halted, trips = mean + p * h, halted + p, trips + 1
        return mean, trips

    xs = jnp.asarray([[2.0, -1.0, 3.0], [-1.0, 0.5, -2.0], [0.1, 0.2, -0.3]])
    assert len({unrolled(w, x)[1] for x in xs}) > 1
    ours = jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(jax.vmap(act, (None, 0))(w, xs)))))(w)
    close(ours, jax.grad(lambda w: sum(jnp.sum(jnp.sin(unrolled(w, x)[0])) for x in xs))(w))


@pytest.mark.parametrize(
    "until, options, message",
    [
        (lambda h: h[0, 0], {}, "until must return booleans, but returns float"),
        (lambda h: None, {}, "until must return booleans, but returns"),
        (lambda h: h[0] > 1, {}, r"shape \[3\].*but one is \[2, 3\]"),
        (lambda h: h[0, 0] > 1, dict(executor="associative"), "computes all steps at once"),
    ],
)
def test_until_must_fit(until, options, message):
    with pytest.raises(ScanError, match=message):
        jrnn.scan(
            lambda h, x: (h * 0.5 + x, h),
            jnp.zeros((2, 3)),
            jnp.asarray(XS, jnp.float32),
            until=until,
            **options,
        )


@pytest.mark.parametrize("rows, stop", [(1, 9), (3, 4)])
def test_sums_of_a_gradient_leave_a_loop_that_stops_early(rows, stop, x64):
    """A branch made each product as a new array, and the loop added it: 5.7 times the time of `jax.lax.scan`."""
    rng = np.random.default_rng(0)
    w, xs, h0 = (
        jnp.asarray(rng.normal(size=shape)) for shape in ((64, 64), (9, rows, 64), (rows, 64))
    )
    xs = 0.1 * xs

    def loss(w, xs, h0, run):
        return jnp.sum(run(lambda h, x: jnp.tanh(h @ w / 8 + x), h0, xs) ** 2)

    def until(step, h, xs):
        counted = lambda c, x: ((step(c[0], x), c[1] + 1), None)  # noqa: E731
        return jrnn.scan(counted, (h, 0), xs, until=lambda c: c[1] >= stop)[0][0]

    def unrolled(step, h, xs):
        return jax.lax.scan(lambda h, x: (step(h, x), None), h, xs[:stop])[0]

    def both(derivative):
        return [
            jax.jit(derivative(functools.partial(loss, run=run)))(w, xs, h0)
            for run in (until, unrolled)
        ]

    close(*both(lambda f: jax.grad(f, (0, 1, 2))))
    along = lambda f: lambda *args: jax.jvp(jax.grad(f, (0, 1, 2)), args, args)[1]  # noqa: E731
    close(*both(along))
    plan = jrnn.explain(jax.grad(functools.partial(loss, run=until)), w, xs, h0).loops[-1]
    assert plan.loop.reverse and plan.accumulated and plan.contractions == 1, str(plan)
