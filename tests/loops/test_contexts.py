"""Contexts, threads and whole programs: `optimize_scans` with options, `plain_scans`, `explain`, equal steps, weak types."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.extend.core.primitives import scan_p
from jax.interpreters import mlir

import jrnn
from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.loops import scan
from jrnn.loops.compile import ON_CPU
from jrnn.loops.costs.times import Estimate
from jrnn.loops.plan import Candidate
from jrnn.loops.wrappers import tracing

XS, H0 = jnp.linspace(-1, 1, 24).reshape(4, 2, 3), jnp.ones((2, 3))


def affine(h, x):
    return h * jax.nn.sigmoid(x) + x, h


def bent(h, x):
    h = jnp.tanh(h + x)
    return h, h


def executors_of(fn, *args):
    return [plan.strategy for plan in jrnn.explain(fn, *args).loops]


def lax(step):
    return lambda xs: jax.lax.scan(step, H0, xs)


@pytest.mark.usefixtures("rewritten")
def test_a_context_takes_the_options_of_a_scan():
    for name in ("scan", "associative"):
        with jrnn.optimize_scans(executor=name):
            assert executors_of(lax(affine), XS) == [name]
    with jrnn.optimize_scans(executor="associative"):
        assert executors_of(lax(bent), XS) == ["scan"], "a loop that cannot be solved stays a loop"
    with (
        jrnn.optimize_scans(executor="associative", strict=True),
        pytest.raises(ScanError, match="'associative' cannot"),
    ):
        jax.jit(lax(bent)).lower(XS)
    with jrnn.optimize_scans(strict=True), pytest.raises(ScanError, match="no steps"):
        jax.jit(lax(bent)).lower(XS[:0])
    with jrnn.optimize_scans(memory=2.5):
        closed = jax.make_jaxpr(lax(bent))(XS)
    (eqn,) = [e for e in jaxprs.all_equations(closed.jaxpr) if e.primitive is scan_p]
    assert jrnn.loops.ir.tag.tag_in(eqn.ctx.xla_metadata).options.memory == 2.5


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(executor="asociative"), "did you mean 'associative'"),
        (dict(executor="newton"), "for jrnn.scan alone"),
        (dict(memory=0), "memory must be None or a positive"),
        (dict(memory="1GB"), "memory must be None or a positive"),
    ],
)
def test_a_context_checks_its_options(options, message):
    with pytest.raises(ScanError, match=message):
        jrnn.optimize_scans(**options)


@pytest.mark.usefixtures("rewritten")
def test_decorators_with_and_without_arguments():
    @jrnn.optimize_scans
    def bare(xs):
        """What it does."""
        return lax(bent)(xs)

    assert bare.__name__ == "bare" and bare.__doc__ == "What it does."
    for _ in range(2):  # a decorated function may be called again
        assert executors_of(bare, XS) == ["scan"]
    assert executors_of(jrnn.optimize_scans(executor="scan")(lax(affine)), XS) == ["scan"]
    assert executors_of(jrnn.plain_scans(bare), XS) == ["scan"], "the innermost context holds"
    with pytest.raises(TypeError, match="give options by name"):
        jrnn.optimize_scans("scan")
    with pytest.raises(TypeError, match="must be the function"):
        jrnn.plain_scans(True)


def test_one_loop_opts_out():
    def both(xs):
        with jrnn.plain_scans():
            first = jax.lax.scan(bent, H0, xs)[0] + scan(bent, H0, xs)[0]
        return first, jax.lax.scan(affine, H0, xs)

    with jrnn.optimize_scans(executor="scan"):
        (plan,) = jrnn.explain(both, XS).loops
    assert [eqn.primitive.name for eqn in plan.loop.eqns].count("tanh") == 0, (
        "the affine loop is the one that is marked"
    )
    expected = jax.lax.scan(bent, H0, XS)[0] * 2
    np.testing.assert_allclose(both(XS)[0], expected, rtol=1e-6)
    with jrnn.plain_scans(), pytest.raises(ScanError, match="not affine"):
        scan(bent, H0, XS, executor="associative")


def test_explain_shows_every_loop_of_a_train_step():
    @jax.jit
    def train_step(w, xs, rate):
        def loss(w):
            with jrnn.optimize_scans():
                h = jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), H0, xs)[0]
            return jnp.sum(scan(bent, h, xs)[1])

        return w - rate * jax.grad(loss)(w)

    explained = jrnn.explain(train_step, jnp.eye(3), XS, rate=0.1)
    assert [plan.loop.reverse for plan in explained.loops] == [False, False, True, True]
    text = str(explained)
    assert text.startswith("4 loops: ") and text.count("  reverse loop of 4 steps") == 2
    assert "no loop" in str(jrnn.explain(jnp.sin, 1.0))
    with pytest.raises(TypeError, match="must be a function"):
        jrnn.explain(XS)


# Equal steps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decay:
    rate: float

    def __call__(self, carry, x):
        return carry * self.rate + x, carry


def test_equal_steps_of_which_the_first_is_gone():
    first = Decay(0.5)
    untagged = tracing.untagged_step(first)
    second = Decay(0.5)
    assert tracing.untagged_step(second) == untagged and hash(
        tracing.untagged_step(second)
    ) == hash(untagged)
    assert tracing.untagged_step(Decay(0.25)) != untagged
    untagged_second = tracing.untagged_step(second)
    del first
    assert untagged_second.__wrapped__ is second and untagged_second(1.0, 2.0) == (2.5, 1.0)
    assert untagged_second != untagged, "the step of the other is gone"
    entries = len(tracing._untagged_steps)
    del second
    assert len(tracing._untagged_steps) == entries - 1


def test_an_equal_step_is_not_traced_again():
    traces = []

    class Counting(Decay):
        def __call__(self, carry, x):
            traces.append(1)
            return super().__call__(carry, x)

    steps = [Counting(0.5), Counting(0.5)]
    for step in steps:
        scan(step, jnp.zeros(2), jnp.ones((3, 2)))
    assert len(traces) == 1, "as with jax.lax.scan"


@pytest.mark.exhaustive
def test_threads_with_equal_steps():
    failures = []
    xs = jnp.ones((3, 2))
    barrier = threading.Barrier(4)

    def work():
        try:
            barrier.wait()
            for k in range(30):
                scan(Decay(0.5 + k), jnp.zeros(2), xs)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# Weak types -----------------------------------------------------------------------------------------------------------


def test_a_python_number_as_carry_is_solved():
    last, ys = scan(lambda c, x: (c * 0.5 + x, c), 0.0, jnp.ones(4), executor="associative")
    expected = jax.lax.scan(lambda c, x: (c * 0.5 + x, c), 0.0, jnp.ones(4))
    np.testing.assert_allclose(ys, expected[1], rtol=1e-6)
    assert (last.weak_type, ys.weak_type) == tuple(v.weak_type for v in expected)


@pytest.mark.parametrize(
    "step",
    [
        lambda c, x: ((c[0] * 0.5, c[1] * x), c),
        lambda c, x: ((c[0] * 0.5, jnp.sin(c[0]) * c[1]), None),
        lambda c, x: ((jnp.tanh(c[0]) * x, c[1] + c[0]), c[0]),
    ],
)
def test_gradients_have_the_weak_types_of_lax_scan(step):
    def gradient(which):
        def loss(c, xs):
            carry, ys = which(step, c, xs)
            return sum(jnp.sum(leaf) for leaf in jax.tree.leaves((carry, ys)))

        return jax.grad(loss, argnums=(0, 1))((1.0, 2.0), jnp.arange(3.0))

    ours, theirs = map(jax.tree.leaves, map(gradient, (scan, jax.lax.scan)))
    assert [v.weak_type for v in ours] == [v.weak_type for v in theirs]
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# Plans that cannot be lowered -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("rewritten")
def test_a_plan_that_cannot_be_lowered_leaves_the_loop_with_the_reason(monkeypatch):
    class Broken:
        def run(self, *args):
            raise NotImplementedError("no such operation")

    broken = Candidate("everything", Estimate(0.0, 0), Broken(), strategy="scan")
    monkeypatch.setitem(ON_CPU, "scan", lambda context: [broken])
    fn = jax.jit(lambda xs: scan(bent, H0, xs)[0])
    with jrnn.loops.ir.strict_passes(False):
        (explained,) = jrnn.explain(fn, XS).loops
        np.testing.assert_array_equal(fn(XS), jax.lax.scan(bent, H0, XS)[0])
    assert explained.strategy == "lax.scan"
    assert explained.notes == (
        "NotImplementedError in a pass (please report it): no such operation",
    )
    with pytest.raises(NotImplementedError, match="no such operation"):
        jax.jit(lambda xs: scan(bent, H0, xs)[0] * 1).lower(XS)


unlowered_p = Primitive("unlowered")
unlowered_p.def_abstract_eval(lambda x: x)


@functools.partial(mlir.register_lowering, unlowered_p)
def _(ctx, x):
    raise NotImplementedError("half of a program")


HALVES = {
    "a loop": lambda h: jax.lax.fori_loop(0, 3, lambda i, h: unlowered_p.bind(jnp.sin(h)), h),
    "a function": jax.jit(lambda h: jnp.cos(jax.jit(unlowered_p.bind)(jnp.sin(h)))),
}


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
def test_a_plan_that_is_lowered_in_part_leaves_nothing_behind(monkeypatch, half):
    class Broken:
        def run(self, consts, init, xs, length):
            return [half(jax.jit(jnp.cosh)(init[0]))], [xs[0]]

    broken = Candidate("everything", Estimate(0.0, 0), Broken(), strategy="scan")
    monkeypatch.setitem(ON_CPU, "scan", lambda context: [broken])

    def twice(loop, xs):
        def outer(c, _):
            h, ys = loop(bent, jax.jit(jnp.cosh)(c), xs)
            return jnp.sin(h), jax.jit(jnp.cosh)(jnp.sum(ys, axis=0))

        return jax.lax.scan(outer, H0, None, length=2)

    fn = jax.jit(lambda xs: twice(scan, xs))
    (explained,) = jrnn.explain(fn, XS).loops
    assert explained.notes == (
        "NotImplementedError in a pass (please report it): half of a program",
    )
    actual = fn(XS)
    expected = jax.jit(lambda xs: twice(jax.lax.scan, xs))(XS)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(
    "calls", [jaxprs.CALLS, jaxprs.CALLS_AND_CHECKPOINTS, jaxprs.LOWERED_CALLS]
)
def test_calls_are_opened_by_renaming(calls):
    weights = jnp.arange(3.0)
    inner = jax.jit(lambda x: jnp.sin(x) * weights)

    @jax.custom_jvp
    def ruled(x):
        return inner(x) + 1

    ruled.defjvp(lambda primals, tangents: (ruled(*primals), 2 * tangents[0]))

    @jax.named_scope("outside")
    def fn(x):
        return [inner(inner(jax.checkpoint(jnp.exp)(x))), ruled(x), x]

    program = jaxprs.trace(fn, [jax.typeof(weights)], calls)
    names = [eqn.primitive.name for eqn in program.eqns]
    assert not {*names} & {*calls}
    assert names.count("sin") == 2 + (calls is jaxprs.LOWERED_CALLS), (
        "a function that is called twice is there twice"
    )
    results = [v for eqn in program.eqns for v in eqn.outvars]
    assert len({*results}) == len(results), "each time with other variables"
    assert all(
        "outside" in str(eqn.source_info.name_stack)
        for eqn in program.eqns
        if eqn.primitive.name == "sin"
    )
    for values in (program.run(weights), jax.extend.core.jaxpr_as_fun(program.closed())(weights)):
        for a, b in zip(values, fn(weights), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
