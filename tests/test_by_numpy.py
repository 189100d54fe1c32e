"""What numpy makes of a traced function is what XLA makes of it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import COMPILED, by_numpy, jit, suffices

from jrnn.jaxprs import all_equations
from jrnn.jaxprs.by_numpy import LOOPS, evaluate_by_numpy
from jrnn.jaxprs.primitives import where
from jrnn.loops.affine.rounds import all_finite

X = np.random.RandomState(0).standard_normal((3, 4))


def arithmetic(x, y):
    z = x + 1j * y
    parts = [
        x - y,
        x / (y * y + 1),
        -x,
        abs(x),
        jnp.square(x),
        jnp.sqrt(x * x),
        jax.lax.rsqrt(x * x + 1),
        x**3,
    ]
    parts += [
        jnp.maximum(x, y),
        jnp.minimum(x, y),
        jax.lax.clamp(-0.5, x, 0.5),
        jnp.floor(x),
        jnp.ceil(x),
        jnp.sign(x),
        jax.lax.rem(x, y),
        jnp.arctan2(x, y),
        (z * z).real,
        z.imag,
    ]
    parts += [f(x) for f in (jnp.sin, jnp.cos, jnp.tanh, jnp.exp, jax.nn.sigmoid, jnp.expm1)]
    parts += [f(x * x + 0.1) for f in (jnp.log, jnp.log1p, jax.lax.lgamma, jax.lax.digamma)]
    parts += [
        f(x) for f in (jnp.cbrt, jax.lax.erf, jax.lax.erfc, jnp.tan, jnp.sinh, jnp.cosh, jnp.exp2)
    ]
    parts += [(x * x + 1) ** y, jnp.conj(z).real]
    asked = (
        (x > 0) & ~(y > 0)
        | jnp.isfinite(x / 0)
        | (x == y)
        | (x != y)
        | (x < y)
        | (x <= y)
        | (x >= y)
    )
    return [
        *parts,
        asked,
        jnp.where(x > y, x, y),
        x.astype(jnp.float32),
        (x * 3).astype(jnp.int32),
        asked + 1,
    ]


def movements(x, y):
    grown = jax.lax.pad(x, 2.0, ((1, 0, 1), (0, 2, 0)))
    placed = jax.lax.dynamic_update_slice(x, y[:2, :2], (jnp.int32(1), jnp.int32(3)))
    taken = jax.lax.dynamic_slice(x, (jnp.int32(-5), jnp.int32(2)), (2, 2))
    products = [
        jnp.einsum("ij,kj->ki", x, y),
        jnp.einsum("bi,bij->bj", x, x[:, :, None] * y[:, None]),
        x @ y.T,
    ]
    narrow = (x.astype(jnp.bfloat16) @ y.astype(jnp.bfloat16).T).astype(jnp.float32)
    joined = [
        jnp.concatenate([x, y], 1),
        *jnp.split(x, 2, axis=1),
        x[::2, 1:],
        x.T,
        x[:, ::-1],
        x[:, 1],
        x.reshape(2, 6),
    ]
    sums = [
        x.sum(0),
        x.max(1),
        (x > 0).any(0),
        (x > 0).all(1),
        x.sum(),
        jnp.arange(12).reshape(3, 4) * x,
        x[:1] + y,
    ]
    sums += [
        x.min(1),
        x.prod(0),
        x.argmax(1),
        x.argmin(0),
        *(f(x, 1) for f in (jax.lax.cumsum, jax.lax.cumprod)),
    ]
    sums += [jax.lax.cumsum(x, 0, reverse=True)]
    return [grown, placed, taken, *products, narrow, *joined, *sums]


def matrices(x, y):
    square = x[:, :3] + 3 * jnp.eye(3)
    batch = jnp.stack([square @ square.T, square.T @ square])
    results = [
        jnp.linalg.cholesky(batch),
        *jnp.linalg.qr(x.T),
        *jnp.linalg.qr(jax.lax.stop_gradient(x.T), "complete"),
    ]
    for options in itertools.product((0, 1), (0, 1, 2), (False, True)):
        lower, trans, unit = options
        results.append(jax.scipy.linalg.solve_triangular(square, y[:, :3], trans, lower, unit))
    solve = functools.partial(
        jax.lax.linalg.triangular_solve, jnp.stack([square, y[:, 1:]]) * (1 + 0.5j)
    )
    results += [
        solve(batch * 1j, left_side=left, lower=left, conjugate_a=True).real
        for left in (False, True)
    ]
    u, values, v = jnp.linalg.svd(x, full_matrices=False)
    return [*results, values, jnp.linalg.svd(x, compute_uv=False), u @ jnp.diag(values) @ v]


def indices(x, y):
    at, where = jnp.array([2, 0, 2]), jnp.argsort(y, 1)
    taken = [
        x[at],
        x[:, at],
        x[at, at],
        x[at[:, None], at],
        x[1, at],
        jnp.take_along_axis(x, where, 1),
        x[where[0, 0] % 3],
    ]
    taken += [
        jax.vmap(lambda a, i: a[i])(x, at),
        jax.vmap(lambda a, i: a[:, i], (None, 0))(x, where),
    ]
    put = [
        x.at[at].add(y),
        x.at[:, at].add(y[:, :3]),
        x.at[at[:2]].set(y[:2]),
        x.at[at[:2], at[:2]].multiply(y[:2, 0], unique_indices=True),
    ]
    put += [
        x.at[at].min(y),
        x.at[1, at].max(y[0, :3]),
        x.at[at + 5].add(y),
        x.at[at + 1, 2].set(1.0),
    ]
    put += [jax.vmap(lambda a, i, b: a.at[i].add(b))(x, where, y)]
    return [
        *taken,
        *put,
        jnp.asarray(x, jnp.float32).at[at].add(1),
        (10 * x).astype(int).at[at].add(3),
    ]


def control(x, y):
    def step(h, x):
        h = jnp.tanh(h + jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x))
        return h, (h, x * 2)

    scanned = jax.lax.scan(step, y[0], x), jax.lax.scan(step, y[0], x, reverse=True, unroll=2)
    fixed, start = jax.lax.stop_gradient(y), (jnp.int32(0), jax.lax.stop_gradient(x))
    counted = jax.lax.while_loop(
        lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] * 0.5 + fixed), start
    )
    barred = jax.lax.optimization_barrier((x, y)), all_finite([fixed])
    halved = jax.lax.custom_linear_solve(lambda v: 2 * v, y, lambda _, b: b / 2, lambda _, b: b / 2)
    return (
        scanned,
        counted,
        barred,
        halved,
        jax.checkpoint(jnp.sin)(x),
        jax.jit(jnp.cos)(x),
        jax.nn.relu(x),
    )


@pytest.mark.sample("arithmetic")
@pytest.mark.parametrize("fn", [arithmetic, movements, matrices, indices, control])
def test_values_and_gradients_are_xlas(fn, x64):
    def both(x, y):
        def smooth(x, y):
            return sum(
                jnp.sum(jnp.sin(v)) for v in jax.tree.leaves(fn(x, y)) if v.dtype == jnp.float64
            )

        return fn(x, y), jax.grad(smooth, (0, 1))(x, y)

    args = X, np.cos(X)
    actual, expected = (
        jax.tree.leaves(by_numpy(both)(*args)),
        jax.tree.leaves(COMPILED(both)(*args)),
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        rough = 1e-2 if ours.dtype == np.float32 else 1e-8  # XLA keeps some narrow numbers wide
        np.testing.assert_allclose(ours, theirs, rtol=rough, atol=1e-12)


def test_this_file_has_every_primitive_of_the_tables(x64):
    primitives = set()
    for fn in (arithmetic, movements, matrices, indices, control):
        value = lambda x, y, fn=fn: jax.tree.leaves(fn(x, y))[0].sum()  # noqa: E731
        for traced in (fn, jax.grad(value, (0, 1))):
            primitives |= {
                eqn.primitive.name for eqn in all_equations(jax.make_jaxpr(traced)(X, X + 1).jaxpr)
            }
    other_versions = {"pjit", "closed_call", "core_call", "checkpoint", "remat2", "eval_jaxpr"}
    other_versions |= {"stack", "unstack"}
    elsewhere = {
        "add_any",
        "complex",
        "custom_vjp_call",
        "name",
        "stop_gradient",
        "copy",
        "one_minus_square",
        "pvary",
        "reduce_and",
        "checked_linear_map",
        "rounded_product",  # tests/loops/test_product_types.py
        "hidden_program",  # in the gradient of a loop in chunks: tests/loops/test_derived.py
    }
    by_rows = where(lambda row: row.numpy is not None)
    assert {*by_rows, *LOOPS} - primitives <= other_versions | elsewhere


def test_a_matrix_that_is_not_positive_definite_has_a_factor_of_nan(x64):
    for two in (np.stack([np.eye(2), -np.eye(2)]), np.stack([np.eye(2), -np.eye(2)]) * (1 + 0j)):
        factors = lambda x: (f := jnp.linalg.cholesky(x), jnp.nan_to_num(f, nan=0.5))  # noqa: E731
        for ours, theirs in zip(by_numpy(factors)(two), COMPILED(factors)(two)):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("planted", [0.0, np.nan])
def test_zeros_and_nan_spread_through_triangular_solves_as_in_lapack(planted, x64):
    a = np.tril(np.ones((3, 3))) * (1 + 0.5j)
    a[1, 1] = planted
    for matrix in (a, a.real):
        solve = lambda a: jax.scipy.linalg.solve_triangular(a, np.ones((3, 2)), lower=True)  # noqa: E731
        np.testing.assert_array_equal(by_numpy(solve)(matrix), COMPILED(solve)(matrix))


def test_updates_are_computed_in_wide_numbers():
    """The sum in the parameters of a scatter has the types of the jaxpr."""

    def placed(x, y):
        at = jnp.array([2, 0, 2])
        added = (
            x.at[at].add(y),
            x.at[at].set(y[:1]),
            x.at[0, at].multiply(y[0, :3]),
            x.at[at].min(y),
            x.at[at].max(y),
        )
        return [*added, jax.grad(lambda x: jnp.sum(x[at] * y))(x)]

    args = X.astype(np.float32), np.cos(X, dtype=np.float32)
    closed = jax.make_jaxpr(placed)(*args)
    actual = evaluate_by_numpy(closed.jaxpr, closed.consts, args, wide=True)
    for ours, theirs in zip(actual, COMPILED(placed)(*args), strict=True):
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_products_are_computed_in_wide_numbers(dtype):
    """Their parameters have the types of the jaxpr, such as those of 16 bits."""
    args = X, np.cos(X)
    for product in (
        lambda x, y: x @ y.T,
        lambda x, y: jnp.matmul(x, y.T, preferred_element_type=jnp.float32),
    ):
        closed = jax.make_jaxpr(product)(*(x.astype(dtype) for x in args))
        (ours,) = evaluate_by_numpy(closed.jaxpr, closed.consts, args, wide=True)
        np.testing.assert_allclose(ours, args[0] @ args[1].T, rtol=1e-14)


def test_a_call_of_jit_is_evaluated_unless_something_else_happens_in_it():
    assert jit(lambda x, *, y: {"sum": x + y})(1.0, y=jnp.ones(2))["sum"].tolist() == [2, 2]
    assert jax.grad(jit(jnp.sin))(0.0) == 1
    assert type(jit(lambda n: n, static_argnums=0)) is type(COMPILED(jnp.sin))
    told = []

    @jit
    def tells(x):
        jax.debug.callback(lambda x: told.append(float(x)), x)
        return x + 1

    assert tells(2.0) == 3
    jax.effects_barrier()
    assert told == [2.0]


def test_a_primitive_that_is_not_in_the_table_is_run_by_jax():
    closed = jax.make_jaxpr(jnp.sort)(np.array([3.0, 1.0, 2.0]))
    (result,) = evaluate_by_numpy(closed.jaxpr, closed.consts, [np.array([3.0, 1.0, 2.0])])
    assert result.tolist() == [1, 2, 3]


def test_programs_are_compiled_in_exhaustive_runs_and_for_accelerators(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert suffices(False) and not suffices(True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not suffices(False)
