"""Marked loops meet JAX: differentiation, lowering for each platform, the way back to JAX's own rule, long steps."""

from __future__ import annotations

import functools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from cases import D, H, N, T, draw, lstm_step
from jax.experimental.xla_metadata import set_xla_metadata
from plans_of import plans_of, scan_plans

import jrnn
from jrnn.errors import ScanError
from jrnn.jaxprs.jax_internals import scan_p
from jrnn.loops import scan
from jrnn.loops.compile import ON_CPU
from jrnn.loops.ir import observers, strict_passes, traced_loops

pytestmark = pytest.mark.usefixtures("rewritten")

XS, H0 = jnp.linspace(-1, 1, T * N * H).reshape(T, N, H), jnp.ones((N, H))
W = jnp.linspace(-0.5, 0.5, H * H).reshape(H, H)


def rnn(h, x):
    h = jnp.tanh(h @ W + x @ W)
    return h, h


def train(which, w, step=None):
    def f(h, x):
        h = jnp.tanh(h @ w + x @ w)
        return h, h

    return jnp.sum(which(step or f, H0, XS)[1] ** 2)


def test_the_rules_are_in_place():
    """The private names of JAX that `install` uses exist on this version, and hold its rules."""
    from jax._src.interpreters import ad, mlir
    from jax._src.xla_metadata_lib import current_xla_metadata

    for table in (ad.primitive_jvps, ad.primitive_linearizations):
        assert table[scan_p].__wrapped__ is not None
    assert scan_p in mlir._platform_specific_lowerings["cpu"]
    assert current_xla_metadata() is None


def test_the_forward_and_the_reverse_loop_are_planned():
    plans = plans_of(jax.grad(functools.partial(train, scan)), W)
    assert [plan.loop.reverse for plan in plans] == [False, True]
    assert all(plan.strategy == "scan" and plan.contractions == 1 for plan in plans)
    assert plans_of(jax.grad(functools.partial(train, jax.lax.scan)), W) == [], (
        "scans without a mark are JAX's own"
    )


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_target_is_the_platform_that_is_lowered_for(platform):
    """Whatever the platform that this process runs on."""
    with observers.collected() as plans:
        jax.jit(lambda xs: scan(rnn, H0, xs)).trace(XS).lower(lowering_platforms=(platform,))
    assert [plan.target.platform for plan in plans] == [platform]


def test_one_export_for_several_platforms():
    """Each platform gets the loop of its own target; the CPU's runs here."""
    with observers.collected() as plans:
        exported = jax.export.export(
            jax.jit(lambda xs: scan(rnn, H0, xs)), platforms=("cpu", "cuda", "tpu")
        )(XS)
    assert {plan.target.platform for plan in plans} == {"cpu", "cuda", "tpu"}
    if jax.default_backend() == "cpu":
        ours, theirs = exported.call(XS), jax.lax.scan(rnn, H0, XS)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), ours, theirs
        )


def test_an_error_in_a_pass_leaves_the_loop_to_jax(monkeypatch, caplog):
    """It is one warning, however many loops it is of."""
    monkeypatch.setattr(observers, "_logged", set())

    def broken(context):
        raise KeyError("a mistake of ours")

    monkeypatch.setitem(ON_CPU, "scan", broken)
    with strict_passes(False):
        plan = scan_plans(rnn, H0, XS[:3]).forward[0]
        assert plan.strategy == "lax.scan" and "a mistake of ours" in str(plan)
        np.testing.assert_allclose(
            scan(rnn, H0, XS[:2])[1], jax.lax.scan(rnn, H0, XS[:2])[1], rtol=1e-6
        )
        with pytest.raises(ScanError, match="left as jax.lax.scan lowers it.*a mistake of ours"):
            scan(rnn, H0, XS[:1], strict=True)
    with pytest.raises(KeyError):
        scan(rnn, H0, XS[:4])
    (warning,) = caplog.messages
    assert (
        "a mistake of ours" in warning and "plans_of.py" in warning and jax.__version__ in warning
    )


def test_a_refusal_that_is_foreseen_is_no_warning(caplog):
    """Of a step with a Ref, one whose operations jrnn does not know, and a loop with nothing to gain."""

    def counted(xs):
        ref = jax.new_ref(jnp.zeros(()))

        def step(h, x):
            ref[...] += 1.0
            return h + x, None

        return scan(step, H0, xs)

    steps = [rnn, lambda h, x: (jnp.fft.fft(h).real + x, h), lambda h, x: (h, None)]
    for run in [counted, *(functools.partial(scan, step, H0) for step in steps)]:
        jax.jit(run)(XS)
    assert not caplog.messages


def test_strict_raises_where_nothing_can_be_done():
    def with_ref(ref):
        def step(h, x):
            ref[...] += 1.0
            return h + x, h

        return step

    jax.jit(lambda xs: scan(rnn, H0, xs, strict=True))(XS)
    with pytest.raises(ScanError, match="no steps"):
        scan(rnn, H0, XS[:0], strict=True)


def test_the_tag_stays_out_of_the_program():
    """XLA may treat instructions with attributes apart. A program whose loops are left to JAX is the one without jrnn."""
    programs = [
        jax.jit(lambda xs: scan(rnn, H0, xs)),
        jax.jit(jrnn.optimize_scans(lambda xs: jax.lax.scan(rnn, H0, xs))),
    ]
    texts = [program.lower(XS).as_text() for program in programs]
    assert all("stablehlo.tanh" in text and "jrnn_scan" not in text for text in texts)

    def run(xs):
        return jax.lax.scan(lambda h, x: (jnp.tanh(h * x), None), H0, 2.0 * xs)[0]

    marked, plain = jrnn.optimize_scans(run), run
    marked, plain = (
        jax.jit(lambda xs, fn=fn: fn(xs)).lower(XS).as_text() for fn in (marked, plain)
    )
    assert marked == plain


def test_other_metadata_than_the_tag_is_in_the_program():
    @jrnn.optimize_scans
    def run(xs):
        with set_xla_metadata(owner="me"):
            return 2.0 * xs

    text = jax.jit(run).lower(XS).as_text()
    assert 'owner = "me"' in text and "jrnn_scan" not in text


def test_a_second_eager_call_does_not_trace_the_step_again():
    calls = []

    def step(h, x):
        calls.append(1)
        return jnp.tanh(h + x), h

    for _ in range(3):
        scan(step, H0, XS)
    assert len(calls) == 1


def test_frames_of_users_are_shown_as_the_source():
    closed = jax.make_jaxpr(lambda xs: scan(rnn, H0, xs))(XS)
    assert "test_marked_loops.py" in str(scan_plans(rnn, H0, XS).forward[0])
    assert [e.primitive.name for e in closed.jaxpr.eqns][-1] == "scan", "to JAX it is a scan"


def test_examples_mapped_outside_share_one_gradient_of_each_weight():
    """Equinox's idiom: `vmap` over examples, then the mean. No weight's gradient is kept for each example."""
    w, xs = jnp.ones((64, 64)), jnp.ones((32, 10, 64))

    def loss(which, w):
        def one(x):
            return jnp.sum(
                which(lambda h, x: ((y := jnp.tanh(h @ w + x)), y), jnp.zeros(64), x)[1] ** 2
            )

        return jnp.mean(jax.vmap(one)(xs))

    ours, theirs = (
        jax.jit(jax.grad(functools.partial(loss, which)))
        .lower(w)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for which in (scan, jax.lax.scan)
    )
    assert ours <= 1.5 * theirs


def test_weights_that_are_used_several_times_are_summed_after_the_loop():
    def loss(w):
        def step(h, x):
            def slope(h):
                return jnp.tanh(h @ w + x)

            a = slope(h)
            b = slope(h + 0.5 * a)
            return h + 0.1 * (a + 2 * b), h

        return jnp.sum(scan(step, H0, XS)[1])

    _, reverse = plans_of(jax.grad(loss), W)
    assert len(reverse.accumulated) == 1 and reverse.contractions == 2, "products of h alone stay"


def test_a_weight_behind_a_relu_is_hoisted():
    plan = scan_plans(
        lambda h, x: ((y := jnp.tanh(jax.nn.relu(x @ W) @ W + h @ W)), y), H0, XS
    ).forward[0]
    assert plan.contractions == 1


def test_plans_under_named_axes():
    """A collective stays in the loop, and what surrounds it does not."""
    explained = []

    def one(xs):
        explained.append(
            scan_plans(lambda h, x: ((y := jnp.tanh(h @ W + jax.lax.pmean(x @ W, "i"))), y), H0, xs)
        )
        return xs

    jax.vmap(one, axis_name="i")(XS[None])
    plan = explained[0].forward[0]
    assert plan.strategy == "scan" and plan.contractions == 1 and "psum" in str(plan)


def test_steps_in_a_checkpoint_are_planned():
    _, reverse = plans_of(jax.grad(lambda w: train(scan, w, jax.checkpoint(rnn_of(w)))), W)
    assert len(reverse.accumulated) == 1 and reverse.strategy == "scan"


def test_all_loops_of_a_checkpoint_are_planned():
    """The forward loop, the same again in the reverse pass, and the reverse loop."""
    plans = plans_of(jax.value_and_grad(jax.checkpoint(lambda w: train(scan, w, rnn_of(w)))), W)
    assert [plan.loop.reverse for plan in plans] == [False, False, True]


def rnn_of(w):
    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h

    return step


def chain(length, doubled):
    def step(total, x):
        v = jnp.tanh(x)
        for _ in range(length):
            v = v + v if doubled else v + x
        return total + v, None

    return step


@pytest.mark.exhaustive("step-4_0")
@pytest.mark.parametrize("step, steps", [(chain(700, False), 4), (chain(40, True), 4)])
def test_long_steps_take_time_in_proportion(step, steps):
    """Neither recursion nor time that grows exponentially."""
    xs = jnp.full((steps, 3), 1e-6)
    ours, theirs = (
        jax.jit(jax.grad(lambda xs, which=which: jnp.sum(which(step, jnp.zeros(3), xs)[0])))(xs)
        for which in (scan, jax.lax.scan)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_verify_finds_what_is_not_a_loop():
    p = jax.tree.map(
        jnp.asarray, draw(0, wx=(D, 4 * H), wh=(H, 4 * H), b=(1, 4 * H), h0=(N, H), x=(T, N, D))
    )
    (loop,) = traced_loops(lambda x: scan(lstm_step(p), (p["h0"], p["h0"]), x), p["x"])
    assert loop.verify() is loop

    def changed(**fields):
        return type(loop)(
            **{**{name: getattr(loop, name) for name in loop.__dataclass_fields__}, **fields}
        )

    for broken, message in (
        (changed(eqns=loop.eqns[1:]), "which nothing defines"),
        (changed(eqns=(*loop.eqns, loop.eqns[-1])), "a second time"),
        (changed(xs=loop.carry), "named twice"),
        (changed(carry_out=loop.carry_out[:1] + loop.consts[:1]), "a carry changes"),
        (changed(ys=(jex.Var(loop.ys[0].aval),)), "not defined"),
    ):
        with pytest.raises(AssertionError, match=message):
            broken.verify()
