"""Small linear algebra as arithmetic: each rule next to what XLA and LAPACK compute, random loops, and what is chosen.

Rules are traced and evaluated by numpy, which calls LAPACK through JAX for the original. More random loops:
`python tests/loops/random_small_loops.py`.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_loops import loops_of
from jax.lax import linalg
from plans_of import scan_plans
from random_small_loops import OPERATIONS, fault

import jrnn
from jrnn.jaxprs import by_numpy, jax_internals, primitives
from jrnn.loops.costs import machines
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.machines import ONE_KERNEL_FLAG
from jrnn.loops.ir import traced_loops
from jrnn.loops.passes.arithmetic.rewrite import RULES, equations, rewritten
from jrnn.loops.strategies import try_arithmetic as choice
from jrnn.loops.strategies import try_split

pytestmark = pytest.mark.usefixtures("rewritten")

RNG = np.random.default_rng(0)


def normal(*shape, kind=float):
    drawn = RNG.normal(size=shape)
    return jnp.asarray(drawn + 1j * RNG.normal(size=shape) if kind is complex else drawn)


def compare(fn, *args, tolerance=1e-10):
    """Asserts that a function gives the same, NaN included, if all in it that has a rule is rewritten."""
    closed = jax.make_jaxpr(lambda *args: jax.tree.leaves(fn(*args)))(*args)
    changed = rewritten(closed, lambda eqn: True)
    left = [e for e in equations(changed.eqns) if e.primitive.name in RULES]
    assert all("scatter" in e.primitive.name and e.invars[1].aval.size <= 2 for e in left), left
    actual, wanted = (
        by_numpy.evaluate_by_numpy(c.jaxpr, c.consts, args) for c in (changed, closed)
    )
    for a, b in zip(actual, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (v.astype(float) if v.dtype == jnp.bfloat16 else v for v in (a, b))
        scale = np.max(np.abs(b[np.isfinite(b)]), initial=1e-30)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("kind", [float, complex])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_factorizations_are_those_of_lapack(kind, batch):
    for n in (1, 4):
        a, eye = normal(*batch, n, n, kind=kind), jnp.broadcast_to(jnp.eye(n), (*batch, n, n))
        spd = a @ jnp.conj(jnp.swapaxes(a, -1, -2)) + 0.1 * eye
        compare(jnp.linalg.cholesky, spd)
        compare(jnp.linalg.cholesky, spd - 2 * eye)  # NaN
        compare(jnp.linalg.solve, a, normal(*batch, n, 2, kind=kind))
        compare(jnp.linalg.slogdet, a)
        for m in (2, 5):
            x = normal(*batch, n, m, kind=kind)
            compare(linalg.lu, x)
            for full in (False, True):
                compare(lambda x, full=full: linalg.qr(x, full_matrices=full), x)


@pytest.mark.parametrize("kind", [float, complex])
def test_triangular_solves_of_every_form(kind):
    for batch, flags in itertools.product(((), (2,)), itertools.product((False, True), repeat=5)):
        if batch and flags[0] == flags[1]:
            continue
        n, m = 4 - flags[3], 1 + 2 * flags[4]
        named = dict(
            zip(("left_side", "lower", "transpose_a", "conjugate_a", "unit_diagonal"), flags)
        )
        b = normal(*batch, *((n, m) if flags[0] else (m, n)), kind=kind)
        a = normal(*batch, n, n, kind=kind) + 3 * jnp.broadcast_to(jnp.eye(n), (*batch, n, n))
        compare(lambda a, b, named=named: linalg.triangular_solve(a, b, **named), a, b)


def test_matrices_that_have_no_factor():
    singular = jnp.asarray([[1.0, 2, 3], [2, 4, 6], [1, 1, 1]])
    for a in (jnp.zeros((3, 3)), singular, singular.at[1, 1].set(jnp.nan)):
        compare(lambda a: linalg.lu(a)[0], a)
        compare(linalg.qr, a)
        compare(jnp.linalg.cholesky, a)
        compare(jnp.linalg.solve, a, jnp.ones((3, 1)))


@pytest.mark.parametrize("kind", [float, complex])
@pytest.mark.parametrize("n", [2, 4])
def test_nan_and_zeros_spread_as_in_lapack(kind, n):
    a = normal(n, n, kind=kind)
    middle = (n // 2,) * 2
    if (
        kind is float or n == 2
    ):  # with more complex rows, LAPACK's choice of a pivot depends on where NaN is in memory
        compare(lambda a: linalg.lu(a)[0], a.at[middle].set(jnp.nan))
    for where in ((0, n - 1), (n - 1, n - 1)):
        compare(linalg.qr, a.at[where].set(jnp.nan))
    compare(linalg.qr, a.at[0, 0].set(jnp.nan).at[1:, 0].set(0))
    no_factor = a.at[middle].set(0)
    compare(
        lambda a, b: linalg.triangular_solve(a, b, left_side=True, lower=True),
        no_factor,
        normal(n, 2, kind=kind),
    )


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_the_diagonal_of_a_complex_factor_is_real(value):
    a = normal(3, 3, kind=complex)
    spd = (a @ jnp.conj(a).T + jnp.eye(3)).at[1, 1].set(value)
    compare(lambda a: jnp.stack([(f := linalg.cholesky(a)).real, f.imag]), spd)


def test_eigenvalues_stay_a_call():
    for a in (normal(2, 2), normal(3, 3)):
        changed = rewritten(jax.make_jaxpr(jnp.linalg.eigh)(a), choice.fits_arithmetic)
        assert "eigh" in [e.primitive.name for e in equations(changed.eqns)]


def test_random_numbers_are_those_of_jax():
    def drawn(keys, x):
        first = jax.random.split(keys[0])[1]
        return jax.vmap(lambda key: jax.random.bits(key, (3,), "uint8"))(keys), jax.random.bits(
            jax.random.fold_in(first, x), (2, 2)
        )

    keys = jax.random.split(jax.random.key(3), 4)
    assert_drawn_alike(drawn, keys, 5)
    with jax.numpy_rank_promotion("allow"):
        assert_drawn_alike(jax.vmap(jax.random.fold_in, (None, 0)), keys[0], jnp.arange(5))
        assert_drawn_alike(jax.vmap(jax.random.fold_in, (0, None)), keys, 5)
    assert_drawn_alike(lambda keys: jax.vmap(jax.random.bits)(keys[:0]), keys)


def assert_drawn_alike(fn, *args):
    """Asserts that the rounds of all draws are arithmetic, whose results are materialized, and give the same words."""
    closed = jax.make_jaxpr(lambda *args: jax.tree.leaves(fn(*args)))(*args)
    changed = rewritten(closed, choice.fits_arithmetic)
    names = [e.primitive.name for e in equations(changed.eqns)]
    assert not RULES.keys() & names
    count = sum(primitives.is_kind(e, "draw") and e.outvars[0].aval.size > 0 for e in closed.eqns)
    assert names.count("optimization_barrier") >= count
    results = jax.jit(jex.jaxpr_as_fun(changed))(*args)
    for a, b in zip(results, jax.tree.leaves(fn(*args)), strict=True):
        a, b = (
            jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v
            for v in (a, b)
        )
        np.testing.assert_array_equal(a, b)


VALUES = [3.0, jnp.nan, -0.0, 0.0, 1, jnp.inf, -jnp.inf, 1, -jnp.nan]


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.bfloat16])
def test_sorts_keep_the_order_of_equal_values_and_of_nan(dtype):
    v = jnp.asarray(VALUES, dtype)
    compare(jnp.sort, v)
    compare(jnp.argsort, v)
    compare(lambda v: jnp.argsort(v, descending=True), v)
    compare(lambda v: jax.lax.top_k(v, 5), v)


def test_sorts_of_other_types_and_axes():
    compare(lambda a: jnp.sort(a, axis=0), normal(5, 4))
    compare(jnp.sort, normal(6, kind=complex))
    compare(jnp.sort, jnp.asarray(RNG.integers(0, 255, 9).astype(np.uint8)))
    compare(lambda a, b: jnp.lexsort((a, b)), *jnp.asarray(RNG.integers(0, 3, (2, 8))))
    compare(lambda a: jax.lax.top_k(a, 2), jnp.asarray(RNG.integers(0, 3, (4, 6))))


@pytest.mark.parametrize("how", ["add", "set", "multiply", "max"])
def test_scatters_of_several_places(how):
    at, to, updates = jnp.asarray([0, 2, 2, -1, 7]), normal(4, 3), normal(5, 3)
    compare(lambda t, u: getattr(t.at[at], how)(u), to, updates)
    compare(lambda t, u: getattr(t.at[at], how)(u, mode="clip"), to, updates)
    compare(lambda t, u: getattr(t.at[at[:3], jnp.asarray([0, 1, 1])], how)(u), to, updates[:3, 0])
    places = jnp.asarray([[0, 1], [2, 2], [4, 9]])
    compare(jax.vmap(lambda t, i, u: getattr(t.at[i], how)(u)), normal(3, 5), places, normal(3, 2))


@pytest.mark.parametrize(("count", "stay"), [(3, False), (11, True)])
def test_scatters_of_many_places_stay(count, stay):
    """XLA joins some of the single ones again, so that the loop is no single kernel."""
    places = jnp.asarray([1, 3, 5, 7, 9, 11, 0, 2, 4, 6, 8, 10])

    def step(c, x):
        for k in range(count):
            c = (c + x @ x).at[(places + k) % 13].add(jnp.tanh(c[:12]))
        return c, None

    (loop,) = traced_loops(
        lambda c, xs: jax.lax.scan(step, c, xs), jnp.zeros(13), jnp.ones((40, 2, 2))[:, :1, 0]
    )
    changed = choice.arithmetic(loop, Estimator(loop, machines.CPU))
    scatters = [
        e
        for e in equations((loop if changed is None else changed.loop).eqns)
        if "scatter" in e.primitive.name
    ]
    assert any(e.invars[1].aval.shape[0] > 1 for e in scatters) == stay


PRODUCTS = {
    "ij,jk->ik": ((3, 9), (9, 5)),
    "bij,bjk->bik": ((2, 3, 4), (2, 4, 5)),
    "aibj,bja->i": ((2, 3, 4, 5), (4, 5, 2)),
    "ij,kj->ik": ((16, 20), (16, 20)),
    "i,i->": ((4,), (4,)),
    "ij,jk->ki": ((3, 0), (0, 2)),
}


@pytest.mark.parametrize("form", PRODUCTS)
def test_products_of_every_form_and_type(form):
    shapes = PRODUCTS[form]
    for dtype, wanted, tolerance in (
        (complex, None, 1e-12),
        (jnp.float32, jnp.float64, 1e-12),
        (jnp.bfloat16, None, 1e-2),
        (jnp.bfloat16, jnp.float32, 1e-6),
        (jnp.int8, jnp.int32, 0),
    ):
        args = [jnp.asarray(9 * normal(*s)).astype(dtype) for s in shapes]
        compare(
            lambda a, b, wanted=wanted: jnp.einsum(form, a, b, preferred_element_type=wanted),
            *args,
            tolerance=tolerance,
        )


@pytest.mark.parametrize("factorize", [jnp.linalg.cholesky, jnp.linalg.qr, linalg.lu])
def test_loops_over_rows_compute_no_index_but_their_counter(factorize):
    closed = jax.make_jaxpr(lambda a: factorize(a))(normal(5, 5))
    loops = [
        e for e in equations(rewritten(closed, lambda eqn: True).eqns) if e.primitive.name == "scan"
    ]
    assert loops
    for loop in loops:
        scalars = [e for e in loop.params["jaxpr"].eqns if not e.outvars[0].aval.shape]
        assert {e.primitive.name for e in scalars} <= {
            "add",
            "sub",
        }  # the counter, and rows from the last one


def test_branches_loops_and_calls_are_rewritten_inside():
    a = normal(4, 3, 3)
    compare(lambda p, a: jax.lax.cond(p > 0, lambda: jnp.linalg.inv(a), lambda: a @ a), 1.0, a[0])
    compare(
        lambda a: jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ a)), (0, a)
        ),
        a[0],
    )
    compare(
        lambda a: jax.lax.scan(lambda c, x: (c @ x, jax.jit(jnp.linalg.solve)(x, c)), a[0], a), a
    )


@pytest.mark.sample("0")
@pytest.mark.parametrize("start", range(0, 400, 10))
def test_random_loops(start):
    with jax.enable_x64(False):
        assert [told for seed in range(start, start + 10) if (told := fault(seed))] == []


# The choice -------------------------------------------------------------------------------------------------------------


def kalman(belief, y):
    f, h = jnp.eye(4) + 0.01, jnp.eye(2, 4)
    mean, cov = f @ belief[0], f @ belief[1] @ f.T + 0.1 * jnp.eye(4)
    gain = jnp.linalg.solve(h @ cov @ h.T + jnp.eye(2), h @ cov).T
    return (mean + gain @ (y - h @ mean), cov - gain @ h @ cov), mean


def plan(step, *args):
    return scan_plans(step, *args).forward[0]


def test_a_filter_is_one_kernel(without_kernel, monkeypatch):
    explained = plan(kalman, (jnp.zeros(4), jnp.eye(4)), jnp.ones((1000, 2)))
    assert explained.chosen.label == "as arithmetic"
    assert "small linear algebra is written as arithmetic: one kernel" in str(explained)
    others = [candidate.label for candidate, _ in explained.rejected]
    assert others == ["lax.scan"]  # no split is searched where none can be as fast
    monkeypatch.setattr(try_split, "_beats", lambda *args: False)
    again = plan(lambda *args: kalman(*args), (jnp.zeros(4), jnp.eye(4)), jnp.ones((1000, 2)))
    assert again.chosen == explained.chosen and len(again.rejected) > 1


def test_an_operation_of_a_random_program_draws_nothing_while_it_is_traced():
    """Programs are traced several times to be compared, and would differ."""
    rng = np.random.default_rng(0)
    for _ in range(8):
        step = OPERATIONS["sort"](rng)
        one, other = (
            str(jax.make_jaxpr(lambda a, step=step: step(a, a))(jnp.ones((3, 3)))) for _ in range(2)
        )
        assert one == other


def test_what_is_in_the_way_and_what_a_flag_would_change_are_named(without_kernel, monkeypatch):
    def step(svd, h, x):
        return jnp.tanh(h @ x @ h @ x) * (jnp.linalg.svd(h)[1][0] if svd else 1), None

    h, xs = jnp.eye(4), jnp.ones((99, 4, 4))
    assert "no single kernel, because of svd" in str(plan(partial(step, True), h, xs))
    monkeypatch.setattr(
        machines, "this_processor", lambda: machines.CPU._replace(one_kernel_bytes=64)
    )
    explained = plan(partial(step, False), h, xs)
    assert f"one kernel if the process starts with XLA_FLAGS={ONE_KERNEL_FLAG}" in str(explained)


def test_xla_makes_one_kernel_of_a_loop_without_calls(without_kernel):
    """On the JAX that runs; the plans count on it."""

    def loops(slow):
        def step(h, x):
            return (jnp.linalg.svd(h)[0] if slow else jnp.tanh(h)) * x, None

        def run(h):
            return jrnn.scan(step, h, jnp.ones(99, h.dtype))[0]

        text = jax.jit(run).lower(jnp.eye(2, dtype=jnp.float32)).compile().as_text()
        return loops_of(text)

    (quick,) = loops(False)
    assert (quick.steps, quick.kernels) == (99, 0)
    (slow,) = loops(True)
    assert slow.kernels > 1 and any("gesdd" in name for name in slow.kernel_blockers), slow


def noisy(draws, h, key):
    return h + sum(
        jax.random.normal(k, h.shape, h.dtype) for k in jax.random.split(key, draws)
    ), None


@pytest.mark.parametrize("draws, size", [(1, 0), (1, 64), (1, 256), (12, 8), (1, 1 << 15)])
def test_draws_of_all_sizes_are_arithmetic(without_kernel, draws, size):
    h = jnp.zeros((size,) if size else (), jnp.float32)
    explained = plan(partial(noisy, draws), h, jax.random.split(jax.random.key(0), 500))
    assert "as arithmetic" in explained.chosen.label, explained


def test_a_product_leaves_the_loop_of_a_draw(without_kernel):
    """The draw that its operand needs leaves with it, and the other one stays."""

    def step(w, h, x):
        keys = jax.random.split(x[1])
        x = jnp.where(jax.random.bernoulli(keys[0], 0.5, x[0].shape), x[0], 0)
        return jnp.tanh(h + x @ w) + jax.random.uniform(keys[1], h.shape, h.dtype), None

    w, h, x = (
        jnp.ones((64, 64), jnp.float32),
        jnp.zeros((16, 64), jnp.float32),
        jnp.ones((100, 16, 64), jnp.float32),
    )
    explained = plan(partial(step, w), h, (x, jax.random.split(jax.random.key(0), 100)))
    candidates = {candidate.label: candidate for candidate, _ in explained.rejected}
    split_loop = candidates["as arithmetic, everything else moved"].node.split_loop
    drawn = [
        [e.primitive.name for e in part].count("random_bits")
        for part in (split_loop.hoisted_eqns, split_loop.residual.eqns)
    ]
    assert drawn == [1, 1]


def test_a_large_product_stays_a_call(without_kernel):
    explained = plan(
        lambda h, x: (jnp.tanh(h @ x), None), jnp.ones((64, 64)), jnp.ones((100, 64, 64))
    )
    assert "as arithmetic" not in explained.chosen.label and explained.contractions == 1


def test_fewer_rows_are_factorized_in_a_loop_of_several_kernels(without_kernel):
    """With more rows, loops took up to 4 times the time of `lax.scan`, and compiled for 6 s more."""

    def step(kind, large, carry, x):
        h, other = carry
        factor = kind(h @ h.T + jnp.eye(len(h)))
        return (0.1 * factor, jnp.tanh(other @ other) if large else other), x

    def stays(rows, large, kind=jnp.linalg.cholesky, machine=machines.CPU):
        loop = plan(partial(step, kind, large), (jnp.eye(rows), jnp.eye(64)), jnp.ones(99)).loop
        changed = choice.arithmetic(loop, Estimator(loop, machine))
        names = {e.primitive.name for e in equations((changed.loop if changed else loop).eqns)}
        return not names.isdisjoint(("cholesky", "lu"))

    assert [stays(rows, False) for rows in (12, 13)] == [False, True]
    assert [stays(rows, True) for rows in (8, 9)] == [False, True]
    assert [stays(rows, False, lambda a: linalg.lu(a)[0]) for rows in (10, 11)] == [False, True]
    assert stays(9, False, lambda a: jnp.linalg.cholesky(a) * jnp.linalg.svd(a[:3, :3])[1][0])
    limited = machines.CPU._replace(one_kernel_bytes=1024)
    assert [stays(rows, False, machine=limited) for rows in (8, 9)] == [False, True]


def test_a_loop_above_the_limit_is_counted_kernel_by_kernel(without_kernel):
    """Small products took 1.4 times `jax.lax.scan`'s time with jax 0.10.2, because their kernels were not counted."""
    loop = plan(kalman, (jnp.zeros(4), jnp.eye(4)), jnp.ones((1000, 2))).loop
    estimators = [
        Estimator(loop, machines.CPU._replace(one_kernel_bytes=limit)) for limit in (math.inf, 16)
    ]
    calls = [
        dict(choice.arithmetic(loop, estimator).cost.terms)["calls"] for estimator in estimators
    ]
    assert calls[1] - calls[0] > 1000 * 5 * machines.CPU.kernel, calls


def test_a_loop_of_elementwise_steps_above_the_limit_is_counted_so_too(without_kernel):
    """Estimates were a tenth of the time of five bodies that attract each other with jax 0.10.2."""
    loop = plan(
        lambda h, x: (jnp.sin(h) * jnp.sum(h) + x, None), jnp.ones(4), jnp.ones((1000, 4))
    ).loop
    seconds = [
        Estimator(loop, machines.CPU._replace(one_kernel_bytes=limit)).whole().seconds
        for limit in (math.inf, 16)
    ]
    assert seconds[1] - seconds[0] > 1000 * 2 * machines.CPU.kernel, seconds


def test_of_a_linear_solve_its_solver_counts(without_kernel):
    """The three other functions, which are for its gradient, were counted too."""

    def by_parts(a, b):
        lu, _, order = linalg.lu(a)
        y = linalg.triangular_solve(
            lu, b[order][:, None], left_side=True, lower=True, unit_diagonal=True
        )
        return linalg.triangular_solve(lu, y, left_side=True)[:, 0]

    def seconds(solve):
        step = lambda h, x: (solve(jnp.diag(h) + jnp.eye(4), x), None)  # noqa: E731
        return (
            Estimator(plan(step, jnp.ones(4), jnp.ones((99, 4))).loop, machines.CPU).whole().seconds
        )

    whole, parts = seconds(jnp.linalg.solve), seconds(by_parts)
    assert 0.5 < whole / parts < 1.5, whole / parts


def test_the_limit_is_that_of_the_flag():
    assert machines.one_kernel_bytes(ONE_KERNEL_FLAG) == 1e8
    assert machines.one_kernel_bytes() == (math.inf if jax_internals.XLA_MAKES_ONE_KERNEL else 1024)


def test_stacks_stay_in_place_inside_of_one_kernel(without_kernel):
    """No computation inside of the loop copies a stack: each step writes its own slice."""
    with jax.enable_x64(False):
        args = (jnp.zeros(4), jnp.eye(4)), jnp.ones((977, 2))
        step = lambda c, x: (new := kalman(c, x)[0], new[1])  # noqa: E731
        assert plan(step, *args).chosen.label == "as arithmetic"
        text = jax.jit(lambda c, xs: jrnn.scan(step, c, xs)).lower(*args).compile().as_text()
    lines = [line.split(", metadata")[0] for line in text.split("\nENTRY")[0].splitlines()]
    whole = [line for line in lines if "= f32[977,4,4]" in line]
    written = [line for line in whole if " dynamic-update-slice(" in line]
    passed_on = (
        "parameter",
        "get-tuple-element",
        "fusion",
        "broadcast",
    )  # zeros are broadcast before the loop
    others = [line for line in whole if not any(f" {op}(" in line for op in passed_on)]
    assert written and others == written, others
