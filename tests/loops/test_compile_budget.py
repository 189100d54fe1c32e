"""How long a plan compiles by estimate, what `explain` says of it, and the bound `optimize_scans(compile_budget=)`."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from plans_of import plans_of

import jrnn
from jrnn.errors import ScanError
from jrnn.loops.costs import compilation
from jrnn.loops.costs.times import Estimate
from jrnn.loops.plan import Candidate

T, N, K = 16_000, 8, 64
XS = jnp.ones(T)
KEYS = jnp.ones((1024, N, K)) / K


def cascade(xs):
    """Four biquads in a row that saturate: unrolled, its program has 300 equations."""

    def step(delays, x):
        new = []
        for a, b in delays:
            y = 0.2 * x + a
            new.append((0.3 * x + 1.6 * y + b, 0.1 * x - 0.8 * y))
            x = y - 0.01 * y * y
        return new, x

    return jax.lax.scan(step, [(jnp.float32(0),) * 2] * 4, xs)


def attention_loss(keys):
    """Linear attention, whose gradient runs in chunks."""

    def step(state, k):
        state = state + k[:, :, None] * k[:, None]
        return state, jnp.einsum("nk,nkv->nv", k, state)

    return jnp.sum(jax.lax.scan(step, jnp.zeros((N, K, K)), keys)[1] ** 2)


def plans(fn, *args, **options):
    with jrnn.optimize_scans(**options):
        return jrnn.explain(fn, *args)


def test_a_plan_says_how_much_longer_it_compiles():
    (plan,) = plans(cascade, XS).loops
    assert plan.strategy == "unrolled" and 0.02 < plan.added_compile_seconds < 1
    explained = plans(jax.grad(attention_loss), KEYS)
    chunks = explained.loops[0]
    assert chunks.strategy == "chunks" and chunks.added_compile_seconds > plan.added_compile_seconds
    assert "  compiles about 0." in str(explained) and " s longer; pays from " in str(explained)
    assert all(p.added_compile_seconds is None for p in explained.loops if p.strategy == "lax.scan")


@pytest.mark.parametrize(
    ("added", "saved", "text"),
    [
        (3.0, 250e-6, "compiles about 3 s longer; pays from 12,000 calls on"),
        (4.0, 40e-6, "compiles about 4 s longer; pays from 100,000 calls on"),
        (0.52, 1.0, "compiles about 0.5 s longer; pays from the first call on"),
        (0.52, 0.0, "compiles about 0.5 s longer"),
        (0.05, 250e-6, ""),
        (-2.0, 250e-6, ""),
    ],
)
def test_explain_says_from_how_many_calls_on_a_plan_pays(added, saved, text):
    (plan,) = plans(cascade, XS).loops
    chosen, reference = (
        Candidate("", Estimate(seconds, 0), None) for seconds in (1e-3, 1e-3 + saved)
    )
    chosen = replace(chosen, strategy="unrolled")
    rejected = ((reference, "slower"),)
    plan = replace(plan, added_compile_seconds=added, chosen=chosen, rejected=rejected)
    assert plan.compilation == text
    assert (f"  {text}\n" in plan.text()) == bool(text)
    if saved and text:
        inside = replace(plan, target=replace(plan.target, repeated=True))
        assert inside.compilation == text.replace("calls", "runs of the loop")


def test_an_estimate_counts_equations_by_kind():
    def seconds(fn, *args):
        return compilation.seconds(jax.make_jaxpr(fn)(*args).jaxpr.eqns)

    wide, tiny, square = jnp.ones(100), jnp.ones(4), jnp.ones((4, 4))
    assert (
        seconds(lambda v: v + 1, tiny)
        < seconds(lambda v: v + 1, wide)
        < seconds(jnp.dot, square, square)
    )
    twice = seconds(lambda v: (v + 1) * 2, wide)
    assert twice == pytest.approx(2 * seconds(lambda v: v + 1, wide))
    assert seconds(jax.jit(lambda v: (v + 1) * 2), wide) == pytest.approx(twice)
    inner = seconds(lambda v: jax.lax.scan(lambda c, _: ((c + 1) * 2, None), v, length=9), wide)
    assert inner == pytest.approx(twice + seconds(jnp.dot, square, square))


def test_a_strategy_that_compiles_longer_than_the_budget_is_refused():
    explained = plans(cascade, XS, compile_budget=0.01)
    (plan,) = explained.loops
    assert plan.strategy == "lax.scan"
    assert "not unrolled: it compiles about 0." in str(
        explained
    ) and "more than compile_budget=0.01" in str(explained)
    assert any(c.strategy == "unrolled" and "compile_budget" in why for c, why in plan.rejected)
    assert plans(cascade, XS, compile_budget=10).loops[0].strategy == "unrolled"
    assert (
        plans(cascade, XS, compile_budget=0.01, executor="unrolled").loops[0].strategy == "lax.scan"
    )
    with pytest.raises(ScanError, match="compile_budget=0.01"):
        plans(cascade, XS, compile_budget=0.01, executor="unrolled", strict=True)


def test_the_gradient_of_a_loop_is_bounded_too():
    loops = plans(jax.grad(attention_loss), KEYS, compile_budget=0.05)
    assert len(loops.loops) == 2 and "chunks" not in {plan.strategy for plan in loops.loops}
    assert "not chunks: it compiles about " in str(loops)
    assert plans(jax.grad(attention_loss), KEYS, compile_budget=100).loops[0].strategy == "chunks"


def test_contexts_with_other_budgets_have_their_own_traces():
    jitted = jax.jit(cascade)
    strategies = []
    for options in ({}, dict(compile_budget=0.01), {}, dict(compile_budget=10)):
        with jrnn.optimize_scans(**options):
            strategies += [plan.strategy for plan in plans_of(jitted, XS)]
    assert strategies == ["unrolled", "lax.scan", "unrolled", "unrolled"]


def test_the_innermost_context_holds():
    with jrnn.optimize_scans(compile_budget=0.01):
        assert plans(cascade, XS).loops[0].strategy == "unrolled"
        assert plans(cascade, XS, compile_budget=10).loops[0].strategy == "unrolled"
        assert jrnn.explain(cascade, XS).loops[0].strategy == "lax.scan"
    with jrnn.optimize_scans(everywhere=True, compile_budget=0.01):
        assert jrnn.explain(cascade, XS).loops[0].strategy == "lax.scan"


@pytest.mark.parametrize("budget", [-1, float("nan"), True, "1", jnp.float32(1)])
def test_a_budget_is_checked(budget):
    with pytest.raises(ScanError, match="compile_budget must be None or seconds"):
        jrnn.optimize_scans(compile_budget=budget)


def test_nothing_is_estimated_where_nobody_asks(monkeypatch):
    def refuse(*args):
        raise AssertionError("an estimate costs a trace")

    monkeypatch.setattr("jrnn.loops.plan.added_seconds", refuse)
    jax.clear_caches()
    jax.jit(jrnn.optimize_scans(cascade)).lower(XS)


def test_a_plan_that_cannot_be_traced_has_no_estimate_and_no_budget_fits(monkeypatch):
    def fail(*args):
        raise NameError("unbound axis name")

    monkeypatch.setattr("jrnn.loops.plan.added_seconds", fail)
    jax.clear_caches()
    (plan,) = plans(cascade, XS).loops
    assert (
        plan.strategy == "unrolled" and plan.added_compile_seconds is None and not plan.compilation
    )
    explained = plans(cascade, XS, compile_budget=10)
    assert explained.loops[0].strategy == "lax.scan" and "how long it compiles is not known" in str(
        explained
    )
