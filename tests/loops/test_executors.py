"""Executors agree with the loop, and refuse what they cannot do."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from cases import D, H, N, T, draw
from jax.experimental import rnn

from jrnn import plain_scans
from jrnn.errors import ScanError
from jrnn.loops import LstmStep, backends, explain_scan, scan
from jrnn.loops.affine import associative
from jrnn.loops.backends.backend import Backend
from jrnn.loops.loop import mark
from jrnn.loops.passes import split
from jrnn.loops.plans import Target
from jrnn.loops.rules import lowering
from jrnn.loops.scan import cudnn

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
    own = backends.BY_PLATFORM[request.param]
    planning = Backend(lambda loop, _, options: own.planned(loop, Target(request.param), options))
    monkeypatch.setitem(backends.BY_PLATFORM, "cpu", planning)


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
        re, im = p["cos"] * re - p["sin"] * im + x @ p["wz"], p["sin"] * re + p["cos"] * im + x @ p["wn"]
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
        jax.tree.map(check, jax.jit(functools.partial(value, executor="associative"))(given), expected)


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
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), actual, expected)


def test_associative_refuses_carries_that_multiply_or_count_or_are_too_many():
    ones = jnp.ones((N, H))
    xs = jnp.ones((T, N, H))
    with pytest.raises(ScanError, match="mul of the carry is not affine"):
        scan(lambda c, x: ((c[0] * c[1], c[1] + c[0]), x), (ones, ones), xs, executor="associative")
    with pytest.raises(ScanError, match="a carry is int32"):
        scan(lambda c, x: ((c[0] * 2, c[1] * x), x), (jnp.int32(1), ones), xs, executor="associative")
    with pytest.raises(ScanError, match="more than 4 carries read each other"):
        scan(lambda c, x: ((*c[1:], c[0] * x), x), (ones,) * 5, xs, executor="associative")


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize("platform", ["cuda", "tpu", "metal"])
def test_accelerators_keep_the_order_of_sums_that_the_user_wrote(platform):
    """A gradient of the same loop may be solved in rounds, and its sums may leave the loop."""
    big = jnp.ones((90, 4))

    def total(w, xs):
        return scan(lambda c, x: ((0.5 * c[0] + x, c[1] + jnp.sum(x * w)), c[0]), (jnp.zeros(4), 0.0), xs)

    def plans(fn):
        return lowering.plans_in(jax.make_jaxpr(fn)(jnp.float32(1), big).jaxpr, Target(platform))

    (forward,) = plans(total)
    assert forward.executor != "associative" and not forward.summed
    assert any("order of its sums" in note for note in forward.notes)
    *_, gradient = plans(jax.grad(lambda w, xs: jnp.sum(jnp.sin(total(w, xs)[0][1]))))
    assert gradient.loop.reverse
    assert gradient.executor == "associative" or gradient.summed
    (counted,) = plans(lambda w, xs: scan(lambda c, x: (c + jnp.sum(x), None), jnp.int32(0), jnp.int32(xs)))
    assert counted.summed, "integers have no order"


def test_accelerators_solve_gradients_of_affine_steps_that_need_no_more_memory_at_once():
    """Loops that the user wrote only if he asks, and on a CPU no loop else."""
    h, xs = jnp.ones((N, H)), jnp.ones((100, N, H))

    def chosen(step, platform="cuda", **keywords):
        run = functools.partial(scan, step, **keywords)
        closed = jax.make_jaxpr(jax.grad(lambda h, xs: jnp.sum(run(h, jnp.tanh(xs))[0])))(h, xs)
        forward, *_, reverse = [plan.executor for plan in lowering.plans_in(closed.jaxpr, Target(platform))]
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
        (lambda h, x: (jnp.where(x > 0, h, 1.0), h), False),  # a factor of zero does not forget an infinite carry
    ],
)
def test_accelerators_solve_by_rounds_where_no_product_of_factors_can_overflow(step, bounded):
    xs = jnp.ones((100, N, H))
    (loop,) = lowering.steps_of(lambda xs: scan(step, xs[0], xs), xs)
    assert associative.is_bounded(split(loop).core) == bounded
    of_a_gradient = mark.Options(written=not loop.reverse)
    assert backends.plan(loop, Target("tpu"), mark.Options()).executor == "scan"
    assert backends.plan(loop, Target("tpu"), of_a_gradient).executor == ("associative" if bounded else "scan")


def test_unknown_executor_and_the_choice():
    with pytest.raises(ScanError, match="did you mean 'associative'"):
        scan(lambda c, x: (c, x), 0.0, jnp.ones(3), executor="asociative")
    told = explain_scan(lambda c, x: (c * x, c), jnp.float32(1), jnp.ones(3), executor="associative")
    assert told.executor == "associative"


# cuDNN ----------------------------------------------------------------------------------------------------------------


def lstm_step(seed=0):
    p = draw(seed, w_x=(4 * H, D), w_h=(4 * H, H), b=(4 * H,), h0=(N, H), c0=(N, H), x=(T, N, D))
    p = {name: jnp.asarray(v, jnp.float32) for name, v in p.items()}
    return LstmStep(p["w_x"], p["w_h"], p["b"]), (p["h0"], p["c0"]), p["x"]


def test_cudnn_takes_what_it_can():
    step, carry, xs = lstm_step()
    assert cudnn.refusal(step, carry, xs, False, None, "cuda") is None
    assert "no CUDA device" in cudnn.refusal(step, carry, xs, False, None, "cpu")
    assert "backwards" in cudnn.refusal(step, carry, xs, True, None, "cuda")
    assert "float32 only" in cudnn.refusal(step, carry, xs.astype(jnp.bfloat16), False, None, "cuda")
    assert "not an LstmStep" in cudnn.refusal(lambda c, x: (c, x), carry, xs, False, None, "cuda")
    assert "resets" in cudnn.refusal(step, carry, xs, False, jnp.zeros((T, N), bool), "cuda")
    assert "[T, N, D]" in cudnn.refusal(step, carry, xs[:, :, :, None], False, None, "cuda")


def test_cudnn_is_refused_by_name_where_it_cannot_run():
    if jax.default_backend() == "cpu":
        with pytest.raises(ScanError, match="cudnn.*no CUDA device"):
            scan(*lstm_step(), executor="cudnn")


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(strict="x"), ScanError, "strict must be True or False"),
        (dict(verify=1), ScanError, "verify must be True or False"),
        (dict(axis_name="no such axis"), ScanError, "runs on one device|is no axis here"),
        (dict(unroll=-3), ValueError, "unroll"),
        (dict(length=99), ValueError, "length"),
        (dict(memory=-1), ScanError, "memory must be"),
    ],
)
@pytest.mark.parametrize("executor", ["auto", "cudnn", "newton"])
def test_options_are_checked_whatever_the_executor(executor, options, error, message):
    if executor == "newton" and "unroll" in options:
        pytest.skip("it ignores unroll")
    with pytest.raises(error, match=message):
        scan(*lstm_step(), executor=executor, **options)


def test_plain_scans_stop_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, "scan", None)
    step, carry, xs = lstm_step()
    with plain_scans():
        jaxpr = jax.make_jaxpr(lambda xs: scan(step, carry, xs, executor="cudnn"))(xs)
    assert [eqn.primitive.name for eqn in jaxpr.eqns].count("scan") == 1


@pytest.mark.parametrize(
    "precision, why", [("bfloat16", "float32 and TF32"), ("highest", None), ("tensorfloat32", None)]
)
def test_cudnn_takes_the_precisions_that_it_has(precision, why):
    with jax.default_matmul_precision(precision):
        refusal = cudnn.refusal(*lstm_step(), False, None, "cuda")
    assert refusal is None if why is None else why in refusal


@pytest.mark.parametrize("lowered", ["cuda", "rocm", "cpu"])
def test_loops_are_planned_for_the_platform_that_they_are_lowered_for(monkeypatch, lowered):
    """JAX calls the GPUs of all makers "gpu"."""

    class Device:
        class client:
            platform = "cpu" if lowered == "cpu" else "gpu"
            _raw_platform = lowered

    monkeypatch.setattr(jax, "devices", lambda: [Device])
    assert Target.here().platform == lowered
    why = cudnn.refusal(*lstm_step(), False, None, Target.here().platform)
    assert why is None if lowered == "cuda" else {"rocm": "AMD", "cpu": "no CUDA"}[lowered] in why


@pytest.fixture
def reference(monkeypatch):
    """JAX's own unpacking and reference LSTM in the place of the kernels; it knows no lengths. The lengths are recorded."""
    given = []

    def forward(x, h, c, weights, lengths, features, hidden, layers, dropout, both, precision):
        parts = rnn.unpack_lstm_weights(weights, features, hidden, layers, both)
        return rnn.lstm_ref(x, h, c, *parts, lengths, features, hidden, layers, dropout, both)

    def lstm_fwd(x, h, c, weights, lengths, *sizes):
        given.append(lengths)
        out = forward(x, h, c, weights, lengths, *sizes)
        return out, (x, h, c, weights, lengths, out[0], jnp.zeros(3))

    def lstm_bwd(*asked):
        *sizes, (x, h, c, weights, lengths, y, reserve), cotangents = asked
        return *jax.vjp(lambda *v: forward(*v, lengths, *sizes), x, h, c, weights)[1](tuple(cotangents)), None

    monkeypatch.setattr(rnn, "lstm_fwd", lstm_fwd)
    monkeypatch.setattr(rnn, "lstm_bwd", lstm_bwd)
    return given


def lstm_layers(layers, both):
    count = 2 if both else 1
    steps, size = [], D
    for layer in range(layers):
        for k in range(count):
            p = draw(10 * layer + k, w_x=(4 * H, size), w_h=(4 * H, H), b=(4 * H,))
            steps.append(LstmStep(*(jnp.asarray(v, jnp.float32) for v in p.values())))
        size = count * H
    p = draw(5, h=(layers * count, N, H), c=(layers * count, N, H), x=(T, N, D))
    h, c, xs = (jnp.asarray(v, jnp.float32) for v in p.values())
    return tuple(steps), (h, c), xs


@pytest.mark.grid(every=2)
@pytest.mark.parametrize("layers, both", [(2, True), (1, False)])
def test_what_cudnn_is_given_means_the_same_network(layers, both, reference):
    """In one call for all layers and directions; with its gradient, and the gradient of that by the loop."""
    steps, states, xs = lstm_layers(layers, both)

    def loss(which, given):
        ys, last = which(given)
        return jnp.sum(jnp.sin(ys)) + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(last))

    def by_kernel(given):
        return cudnn.run(given[0], given[1:3], given[3], bidirectional=both)

    def by_loop(given):
        ys, *last = cudnn._loop(given, jnp.full(N, T), both)
        return ys, tuple(last)

    def squared(which, given):
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(functools.partial(loss, which))(given)))

    check = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
    given = (steps, *states, xs)
    for of in (loss, squared) if layers == 1 else (loss,):
        ours, theirs = (jax.value_and_grad(functools.partial(of, which)) for which in (by_kernel, by_loop))
        with plain_scans():
            expected = by_numpy(theirs)(given)
        jax.tree.map(check, by_numpy(ours)(given), expected)
    assert reference, "the kernel was called"


@pytest.mark.exhaustive
def test_cudnn_is_given_lengths_as_it_wants_them(reference):
    steps, states, xs = lstm_layers(1, False)
    cudnn.run(steps, states, xs, lengths=np.array([T + 3, -1]))
    cudnn.run(steps, states, xs)  # all of them
    assert [v.tolist() for v in reference] == [[T, 0], [T, T]] and all(v.dtype == jnp.int32 for v in reference)
    step, carry = steps[0], tuple(v[0] for v in states)
    wanted = scan(step, carry, xs, lengths=jnp.array([2, T]))
    ys, h, c = cudnn._loop((steps, *states, xs), jnp.array([2, T]), False)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), ((h[0], c[0]), ys), wanted)


def test_vmap_calls_a_kernel_without_a_rule_for_each(reference, monkeypatch):
    """Tried with a sort, as the kernels are known on CUDA only; theirs are given this rule at their first call."""
    steps, states, xs = lstm_layers(1, False)
    rules = {}
    monkeypatch.setattr(cudnn, "batching", SimpleNamespace(primitive_batchers=rules))
    cudnn.run(steps, states, xs)
    assert rules[rnn.rnn_fwd_p].args == (rnn.rnn_fwd_p,) and rules[rnn.rnn_bwd_p].args == (rnn.rnn_bwd_p,)
    keys, values = jnp.array([[3, 1, 2], [1, 2, 3]]), jnp.arange(3)
    params = dict(dimension=0, is_stable=True, num_keys=1)
    outs, axes = cudnn._one_by_one(jax.lax.sort_p, [keys.T, values], [1, None], **params)
    assert axes == [0, 0] and [v.tolist() for v in outs] == [[[1, 2, 3], [1, 2, 3]], [[1, 2, 0], [0, 1, 2]]]
