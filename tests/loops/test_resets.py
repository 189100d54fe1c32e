"""`resets`: sequences of one batch that start anew at different steps.

Shapes: T time, N batch.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from cases import LSTM, H, N, T, draw, lstm_step

from jrnn import plain_scans
from jrnn.errors import ScanError
from jrnn.loops import scan

pytestmark = pytest.mark.usefixtures("rewritten")

RESETS = np.zeros((T, N), bool)
RESETS[[2, 4], 0] = RESETS[[0, 3], 1] = True
KEYWORDS = [
    {},
    dict(reverse=True),
    dict(lengths=np.array([3, 4])),
    dict(reverse=True, lengths=np.array([4, 3])),
]
XS, ZEROS = jnp.ones((T, N, H)), jnp.zeros((N, H))

close = functools.partial(
    jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-12)
)


def in_segments(p, reverse=False, lengths=(T, T)):
    """Each sequence by itself, one `jax.lax.scan` from reset to reset."""
    carries, outs = [], []
    for n, length in enumerate(lengths):
        start = carry = p["h0"][n : n + 1], p["c0"][n : n + 1]
        steps = range(length)[::-1] if reverse else range(length)
        heads = [i for i, t in enumerate(steps) if i == 0 or RESETS[t, n]]
        ys = []
        for first, last in zip(heads, [*heads[1:], length]):
            at = np.asarray(steps[first:last])
            carry, y = jax.lax.scan(lstm_step(p), start, p["x"][at, n : n + 1])
            ys.append(y)
        ys = jnp.concatenate(ys)
        outs.append(jnp.concatenate([ys[::-1] if reverse else ys, jnp.zeros((T - length, 1, H))]))
        carries.append(carry)
    return jax.tree.map(lambda *v: jnp.concatenate(v), *carries), jnp.concatenate(outs, axis=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("keywords", KEYWORDS, ids=lambda k: "-".join(k) or "plain")
def test_segments_are_as_if_run_by_themselves(keywords, x64):
    p = jax.tree.map(jnp.asarray, draw(5, **LSTM))

    def at_once(p):
        return scan(lstm_step(p), (p["h0"], p["c0"]), p["x"], resets=RESETS, **keywords)

    def both(run):
        return lambda p: (
            run(p),
            jax.grad(lambda p: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(run(p))))(p),
        )

    close(jax.jit(both(at_once))(p), by_numpy(both(functools.partial(in_segments, **keywords)))(p))


@pytest.mark.exhaustive
def test_with_checkpoints_of_the_carry(x64):
    p = jax.tree.map(jnp.asarray, draw(5, **LSTM))

    def gradient(recompute):
        def loss(p):
            return jnp.sum(
                jnp.sin(
                    scan(
                        lstm_step(p), (p["h0"], p["c0"]), p["x"], resets=RESETS, recompute=recompute
                    )[1]
                )
            )

        return jax.grad(loss)

    with plain_scans():
        expected = by_numpy(gradient(None))(p)
    close(jax.jit(gradient("sqrt"))(p), expected)


@pytest.mark.parametrize(
    "step", [lambda h, x: (h * x, h), lambda h, x: (jnp.tanh(h * x), h)], ids=["affine", "tanh"]
)
def test_nan_before_a_reset_does_not_show_after_it(step):
    xs = jnp.full((T, N), 0.5).at[1, 0].set(jnp.nan)
    resets = np.zeros((T, N), bool)
    resets[3] = True

    def run(xs):
        return scan(step, jnp.ones(N), xs, resets=resets)

    last, hs = jax.jit(run)(xs)
    assert np.isnan(hs[2, 0]) and np.isfinite(hs[3:]).all() and np.isfinite(last).all()
    of_xs = jax.jit(jax.grad(lambda xs: jnp.sum(run(xs)[0])))(xs)
    assert np.isfinite(of_xs[3:]).all() and np.all(of_xs[3:] > 0)


def test_one_reset_for_the_whole_carry():
    """Resets [T] suit a carry without a batch; the step is given its carry with the type that it has without resets."""
    xs = jnp.ones(T, jnp.bfloat16)

    def step(count, x):
        return count + x, count

    for init in (0, 0.0, jnp.bfloat16(0)):
        last, counts = scan(step, init, xs, resets=np.arange(T) == 3)
        assert last.dtype == jax.lax.scan(step, init, xs)[0].dtype == jnp.bfloat16
        assert counts.tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    "resets, message",
    [
        (
            RESETS.astype(int),
            r"resets must be booleans, but are int\d+; give resets.astype\(bool\)",
        ),
        (RESETS.T, r"resets must be \[T, ...\] with T = 5, but are \[2, 5\]; put time first"),
        (RESETS[:3], r"with T = 5, but are \[3, 2\]"),
        (np.bool_(True), r"with T = 5, but are \[\]"),
        (
            np.zeros((T, 3), bool),
            r"leaf of the carry must begin with that shape, but one is \[2, 4\].*reshape resets",
        ),
    ],
)
def test_resets_must_fit(resets, message):
    with pytest.raises(ScanError, match=message):
        scan(lambda h, x: (jnp.tanh(h + x), h), ZEROS, XS, resets=resets)


def rollout(init, xs, first, counts):
    """Every step by numpy; after a reset a sequence goes on from `first`."""
    hs, carry = np.zeros(xs.shape), np.array(init)
    for t, (x, reset) in enumerate(zip(xs, RESETS)):
        carry = np.where(reset[:, None], first, carry)
        hs[t] = carry = np.tanh(carry + x + counts * t)
    return hs


@pytest.mark.parametrize("first", [0.0, np.full((N, H), 0.5)], ids=["zeros", "array"])
def test_a_carried_state_goes_back_to_another_and_a_counter_is_left_alone(first, x64):
    rng = np.random.default_rng(0)
    xs, init = rng.normal(size=(T, N, H)), rng.normal(size=(N, H))

    def step(carry, x):
        t, h = carry
        h = jnp.tanh(h + x + t)
        return (t + 1, h), h

    (count, last), hs = scan(step, (0, init), xs, resets=RESETS, reset_state=(None, first))
    wanted = rollout(init, xs, first, 1)
    close((hs, last), (wanted, wanted[-1]))
    assert count == T
    hs = scan(
        lambda h, x: ((h := jnp.tanh(h + x)), h),
        init,
        xs,
        resets=RESETS,
        reset_state=first,
        executor="newton",
    )[1]
    close(hs, rollout(init, xs, first, 0))


def test_keys_are_left_alone_and_the_reset_state_has_a_gradient(x64):
    key, xs = jax.random.key(0), jnp.ones((T, N, H))

    def step(carry, x):
        key, h = carry
        key, now = jax.random.split(key)
        h = jnp.tanh(h + x + 0.1 * jax.random.normal(now, h.shape, h.dtype))
        return (key, h), h

    def total(first, init):
        return jnp.sum(scan(step, (key, init), xs, resets=RESETS, reset_state=(None, first))[1])

    gradient, of_init = jax.grad(total, (0, 1))(jnp.zeros((N, H)), jnp.zeros((N, H)))
    assert (
        (gradient[0] != 0).all() and (of_init[0] != 0).all() and (of_init[1] == 0).all()
    )  # row 1 is reset at once


@pytest.mark.parametrize(
    "reset_state, resets, rule",
    [
        ((0.0,), None, "reset_state is given without resets"),
        ((np.ones((5, 7)),), RESETS, r"reset_state\[0\] cannot be broadcast to the carry's shape"),
        (
            {"h": 0.0},
            RESETS,
            r"reset_state\[0\] cannot be broadcast|reset_state must be a pytree as init",
        ),
        (("ab",), RESETS, r"reset_state\[0\] cannot be broadcast"),
        ((2j,), RESETS, r"reset_state\[0\] is complex\d+, which a carry of float\d+ cannot hold"),
    ],
)
def test_reset_states_that_do_not_fit_are_named(reset_state, resets, rule):
    with pytest.raises(ScanError, match=rule):
        scan(lambda h, x: ((h[0] + x,), None), (ZEROS,), XS, resets=resets, reset_state=reset_state)
