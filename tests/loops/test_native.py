"""The compiled kernel for CPUs agrees with `jax.lax.scan`. Where it was not built, what needs it is skipped.

Sizes are odd on purpose, so that no row of a value ends with a whole vector.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import draw, lstm_step
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from plans_of import scan_plans

from jrnn import nn
from jrnn.errors import ScanError
from jrnn.loops import scan
from jrnn.loops.compile import compile_loop
from jrnn.loops.costs.target import Target
from jrnn.loops.ir import Options, ScanParams, Unsupported, observers, traced_loops
from jrnn.loops.kernels.native import library
from jrnn.loops.kernels.native import program as programs
from jrnn.loops.kernels.native.operations import Array, View, collapsed, dense
from jrnn.loops.kernels.native.runner import Native, contract

pytestmark = pytest.mark.usefixtures("rewritten")

LOADED = library.loaded  # a fixture replaces it
built = pytest.mark.skipif(
    bool(library.loaded().reason), reason=f"no kernel: {library.loaded().reason}"
)
T, N, D, H = 7, 5, 3, 19
WEIGHTS = dict(wx=(D, 4 * H), wh=(H, 4 * H), b=(1, 4 * H), x=(T, N, D), h0=(N, H), c0=(N, H))
SETS = range(len(library.loaded().instruction_sets))


def weights(dtype=jnp.float32, **shapes):
    return {
        name: jnp.asarray(v * 0.4, dtype) for name, v in draw(0, **{**WEIGHTS, **shapes}).items()
    }


def layer_norm_step(p):
    def normed(z):
        centered = z - z.mean(-1, keepdims=True)
        return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-2)

    def step(state, x):
        h, c = state
        i, f, g, o = jnp.split(normed(x @ p["wx"] + h @ p["wh"]) + p["b"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(normed(c)), c), (c, (f > 0).any(-1))

    return step


def heads_step(p):
    """Products with a matrix for each head, a maximum over heads, and parts that are reversed in order."""
    w = p["wh"][:16].reshape(16, 4, 19)[:, :, :8].transpose(1, 0, 2).reshape(4, 16, 8)[:, :4]

    def step(state, x):
        h, top = state
        z = jnp.einsum("nhd,hde->nhe", h.reshape(N, 4, 4), w)
        a, b = z[..., :4], z[..., 4:]
        a = jnp.tanh(a + x.mean(-1)[:, None, None]) * jax.nn.softmax(b, axis=-1) + p["b"][
            :, :4
        ].reshape(1, 1, 4)
        top = jnp.maximum(top, a.max(1))
        h = jnp.swapaxes(a, 1, 2).reshape(N, 16)
        return (h, top), jnp.pad(h, ((0, 0), (1, 2)), constant_values=0.5)

    return step


def functions_step(p):
    def step(state, x):
        h, c = state
        z = x @ p["wx"] + h @ p["wh"]
        a, b, d, e = jnp.split(z, 4, -1)
        h = (
            jnp.where((a > b) & ~(d <= e), jnp.exp(-jnp.abs(a)), jax.nn.softplus(b))
            + jnp.floor(a)
            - jnp.ceil(b)
            + jnp.sign(d)
        )
        h = (
            h / (1 + h**2)
            + jnp.sqrt(d**2 + 0.1)
            - jnp.expm1(-jnp.abs(e))
            + jnp.log(1 + b**2)
            + jnp.round(3 * d)
        )
        h = h + jnp.exp2(-jnp.abs(a)) * jnp.log2(2 + b**2) + 0.1 * jnp.tan(0.3 * jnp.tanh(d))
        if hasattr(jax.lax, "polynomial"):
            h = h + jax.lax.polynomial(jnp.tanh(e), [0.5, -1.0, 0.2])
        c = jnp.clip(
            c + jnp.sin(h) * jnp.cos(a) + jax.lax.erf(e) + h**3,
            -2,
            jnp.where(jnp.isfinite(h), 2.0, 0.0),
        )
        return (c, jnp.minimum(h, c)), c * jax.lax.integer_pow(2 + jnp.abs(a), -2)

    return step


CASES = {
    "lstm": lstm_step,
    "layer norm": layer_norm_step,
    "functions": functions_step,
    "heads": heads_step,
}


def initial(name, p):
    return (p["h0"][:, :16], p["c0"][:, :4]) if name == "heads" else (p["h0"], p["c0"])


def run(make, p, init, executor, **options):
    return scan(make(p), init, p["x"], executor=executor, **options)


def both(make, p, init, dtype=jnp.float32, **options):
    """Returns values and gradients of `native` and of `jax.lax.scan`, and asserts that the kernel computed the former."""

    def value(p, executor):
        out = run(make, p, init(p), executor, **options)
        return sum(jnp.sum(jnp.sin(v.astype(jnp.float32))) for v in jax.tree.leaves(out)), out

    results = []
    for executor in ("native", "scan"):
        with observers.collected() as plans:
            results.append(
                jax.jit(
                    jax.value_and_grad(functools.partial(value, executor=executor), has_aux=True)
                )(p)
            )
        assert {plan.strategy for plan in plans} == {executor} or executor == "scan", [
            plan.notes for plan in plans
        ]
    return results


@pytest.mark.sample("heads-True")
@built
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_agree(name, reverse):
    p = weights()
    ours, theirs = both(CASES[name], p, functools.partial(initial, name), reverse=reverse)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=3e-4), ours, theirs)


@pytest.mark.exhaustive
@built
def test_float64_agrees(x64):
    p = weights(jnp.float64)
    ours, theirs = both(functions_step, p, lambda p: (p["h0"], p["c0"]))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-10), ours, theirs)


@pytest.mark.exhaustive
@built
def test_bfloat16_agrees():
    p = weights(jnp.bfloat16)
    ours, theirs = both(lstm_step, p, lambda p: (p["h0"], p["c0"]))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=0.1, atol=0.1)


@pytest.mark.exhaustive
@built
@pytest.mark.parametrize(
    "options",
    [
        dict(lengths=jnp.array([7, 3, 0, 1, 5])),
        dict(resets=jnp.arange(T * N).reshape(T, N) % 4 == 0),
    ],
)
def test_masks_agree(options):
    ours, theirs = both(lstm_step, weights(), lambda p: (p["h0"], p["c0"]), **options)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), ours, theirs)


@pytest.mark.sample("13")
@built
@pytest.mark.parametrize("rows", [1, 2, 6, 13])
def test_every_instruction_set_and_number_of_threads_computes_the_same_rows(rows):
    p = weights(x=(T, rows, D), h0=(rows, H), c0=(rows, H))
    (loop,) = traced_loops(lambda p: jax.lax.scan(lstm_step(p), (p["h0"], p["c0"]), p["x"]), p)
    runner = Native(programs.program_of(loop))
    args = [[p[k] for k in ("wx", "wh", "b")], [p["h0"], p["c0"]], [p["x"]]]
    args[0] = [next(v for v in args[0] if v.shape == c.aval.shape) for c in loop.consts]
    for level in SETS:
        at = replace(runner, level=level)
        ran = [
            jax.jit(functools.partial(replace(at, threads=n).run, length=T))(*args)
            for n in (1, 2, 3)
        ]
        for other in ran[1:]:
            jax.tree.map(np.testing.assert_array_equal, ran[0], other)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6),
            ran[0],
            loop.run(*args, T),
        )


def ulps(actual, exact):
    spacing = np.spacing(np.abs(exact).astype(actual.dtype)).astype(np.float64)
    return np.abs(actual.astype(np.float64) - exact) / spacing


def every(bits):
    """Returns float32 numbers of every exponent and sign, and the special ones."""
    some = np.arange(0, 2**32, 2**bits, dtype=np.uint64).astype(np.uint32).view(np.float32)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-38, -1e-38, 88.7, -88.7, 104.0]
    return np.concatenate([some, np.array(special, np.float32)])


@pytest.mark.exhaustive
@built
@pytest.mark.parametrize("level", SETS)
def test_functions_are_within_two_units_in_the_last_place(level, request):
    x = every(0 if request.config.getoption("--exhaustive") and level == 0 else 9)

    def step(c, x):
        return c + x, (jnp.tanh(x), jax.nn.sigmoid(x), jnp.exp(x))

    size = min(x.size, 2**22)
    zeros = jnp.zeros((size, 1))
    (loop,) = traced_loops(lambda x: jax.lax.scan(step, zeros, x), jnp.zeros((1, size, 1)))
    runner = replace(Native(programs.program_of(loop)), level=level)
    compiled = jax.jit(lambda x: runner.run([], [zeros], [x], 1)[1])
    with np.errstate(all="ignore"):
        for start in range(0, x.size, size):
            part = np.resize(x[start : start + size], size)
            wide = part.astype(np.float64)
            exact = np.tanh(wide), 1 / (1 + np.exp(-wide)), np.exp(wide)
            actual = [np.asarray(v).ravel() for v in compiled(part[None, :, None])]
            number = ~np.isnan(part)
            assert np.array_equal(np.signbit(actual[0][number]), np.signbit(part[number]))
            for ours, theirs in zip(actual, exact):
                tiny = np.abs(theirs) < np.finfo(np.float32).tiny  # XLA may flush these to 0
                finite = number & ~tiny & (np.abs(theirs) <= np.finfo(np.float32).max)
                assert np.array_equal(np.isnan(ours), ~number)
                assert ulps(ours[finite], theirs[finite]).max() <= 2
                assert np.abs(ours[tiny]).max(initial=0) <= np.finfo(np.float32).tiny
                assert np.all(np.isposinf(ours[theirs > 3.41e38]))


@built
def test_nan_and_infinity_are_those_of_xla():
    values = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0.0, -0.0, 1.0, -2.5, 3e38])
    a, b = (v.reshape(64, 1) for v in jnp.meshgrid(values, values))
    two = (
        jnp.maximum,
        jnp.minimum,
        jnp.divide,
        jnp.multiply,
        jnp.subtract,
        jnp.less,
        jnp.equal,
        jnp.greater_equal,
    )
    one = (
        jnp.sqrt,
        jnp.log,
        jnp.log1p,
        jnp.expm1,
        jnp.sign,
        jnp.floor,
        jnp.isfinite,
        jax.nn.softplus,
    )

    def step(c, x):
        a, b = x
        ys = [*(f(a, b) for f in two), *(f(a) for f in one), jnp.where(a != b, a, b)]
        return c * a, ys

    def run(executor):
        return scan(step, jnp.ones((64, 1)), (a[None], b[None]), executor=executor)

    ours, theirs = (jax.jit(functools.partial(run, name))() for name in ("native", "scan"))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), ours, theirs)


@built
def test_under_vmap_and_in_threads_and_in_shard_map():
    p = weights()
    stacked = jnp.stack([p["x"], p["x"] + 1, p["x"] - 1])

    def forward(x, executor):
        return scan(lstm_step(p), (p["h0"], p["c0"]), x, executor=executor)[1]

    ours, theirs = (
        jax.jit(jax.vmap(functools.partial(forward, executor=e)))(stacked)
        for e in ("native", "scan")
    )
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)
    one = jax.jit(functools.partial(forward, executor="native"))
    with ThreadPoolExecutor(4) as pool:  # programs that run at once
        for result in pool.map(one, [p["x"]] * 8):
            np.testing.assert_array_equal(result, one(p["x"]))
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("d",))
    part = jax.shard_map(
        functools.partial(forward, executor="native"), mesh=mesh, in_specs=P(), out_specs=P()
    )
    np.testing.assert_allclose(jax.jit(part)(p["x"]), one(p["x"]), rtol=2e-5, atol=2e-6)


@built
def test_exported_programs_do_not_need_it():
    p = weights()

    def forward(p):
        return scan(lstm_step(p), (p["h0"], p["c0"]), p["x"], executor="native")[1]

    exported = jax.export.export(jax.jit(forward))(p)
    assert library.TARGET not in exported.mlir_module()
    assert library.TARGET in jax.jit(forward).lower(p).as_text()
    np.testing.assert_allclose(exported.call(p), jax.jit(forward)(p), rtol=2e-5, atol=2e-6)


@built
def test_it_says_why_it_cannot_run_a_step():
    def multiplied(h, x):
        return jnp.tanh(h @ x), None

    with pytest.raises(ScanError, match="'native' cannot run this step .*both change"):
        scan(multiplied, jnp.ones((N, D)), jnp.ones((T, D, D)), executor="native")
    with pytest.raises(ScanError, match="no cumsum"):
        scan(
            lambda h, _: (jnp.cumsum(h, axis=1), None),
            jnp.ones((N, D)),
            length=2,
            executor="native",
        )
    with pytest.raises(ScanError, match="no int32"):
        scan(lambda h, _: (h + 1, None), jnp.ones((N, D), jnp.int32), length=2, executor="native")


@pytest.mark.exhaustive
@built
def test_products_of_inputs_stay_in_the_call_where_that_is_estimated_to_be_faster():
    few = weights(
        wx=(128, 512), wh=(128, 512), b=(1, 512), x=(50, 32, 128), h0=(32, 128), c0=(32, 128)
    )
    one = {**few, "x": few["x"][:, :1], "h0": few["h0"][:1], "c0": few["c0"][:1]}
    for p, count in ((few, 2), (one, 1)):
        (plan,) = scan_plans(lstm_step(p), (p["h0"], p["c0"]), p["x"], executor="native").forward
        assert plan.strategy == "native" and plan.contractions == count, str(plan)


@pytest.fixture
def default(without_kernel, monkeypatch):
    """Returns the executors of the loops of a function and its gradient, as users get them who have the kernel."""
    monkeypatch.setattr(library, "loaded", LOADED)

    def executors(p, **options):
        plans = scan_plans(lstm_step(p), (p["h0"], p["c0"]), p["x"], **options)
        return [plan.strategy for plan in (*plans.forward, *plans.training)]

    return executors


@built
def test_the_default_is_the_kernel_where_it_is_estimated_to_win(default):
    p = weights(wx=(64, 256), wh=(64, 256), b=(1, 256), x=(400, 8, 64), h0=(8, 64), c0=(8, 64))
    assert default(p) == ["native"] * 3
    few = weights(
        wx=(256, 1024), wh=(256, 1024), b=(1, 1024), x=(20, 16, 256), h0=(16, 256), c0=(16, 256)
    )
    assert default(few)[0] == "native", "matrices of 2 MB, packed for 20 steps"
    assert "native" not in default(p, executor="scan")
    assert "native" not in default(weights(x=(2, N, D))), "a call for two steps"
    (loop,) = traced_loops(lambda p: jax.lax.scan(lstm_step(p), (p["h0"], p["c0"]), p["x"]), p)
    for options, executor in (
        ({}, "native"),
        ({"devices": 2}, "lax.scan"),
        ({"exported": True}, "lax.scan"),
    ):
        plan = compile_loop(ScanParams.of_loop(loop), Target("cpu", **options), Options())
        assert plan.strategy == executor


@built
def test_the_default_counts_what_a_call_writes_out(default):
    """The kernel has no sort and no cumsum: a wide output would be computed from a stack, or an input for all steps."""
    p = weights(wx=(64, 256), wh=(64, 256), b=(1, 256), x=(100, 8, 64), h0=(8, 64), c0=(8, 64))
    wide = jnp.ones((64, 4000))

    def sorting(state, x):
        (h, c), y = lstm_step(p)(state, x)
        return (h, c), jnp.sort(y @ wide, -1)[:, :2]

    def spreading(state, x):
        (h, c), y = lstm_step(p)(state, x)
        return (h + 1e-9 * jnp.sum(jnp.cumsum(jnp.tile(x, (1, 100)), -1)[:, :64]), c), y

    for step in (sorting, spreading):
        for memory in (None, 1.0):
            (plan,) = scan_plans(step, (p["h0"], p["c0"]), p["x"], memory=memory).forward
            assert plan.strategy != "native", str(plan)


@built
def test_without_a_kernel_the_default_is_silent(default, monkeypatch):
    monkeypatch.setattr(library, "loaded", lambda: library.Library(reason="there was no compiler"))
    p = weights(wx=(64, 256), wh=(64, 256), b=(1, 256), x=(100, 8, 64), h0=(8, 64), c0=(8, 64))
    plans = scan_plans(lstm_step(p), (p["h0"], p["c0"]), p["x"])
    assert "native" not in str(plans) and "native" not in {
        plan.strategy for plan in (*plans.forward, *plans.training)
    }


@pytest.mark.sample("70-37-float32")
@built
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("width, depth", [(70, 37), (64, 16), (150, 70), (3, 5)])
def test_matrices_are_packed_from_either_layout(width, depth, dtype, x64):
    """Squares of vectors are transposed in registers; what is left of rows and columns is not."""
    w = jnp.asarray(np.random.RandomState(0).randn(width, depth), dtype)
    h, x = (
        jnp.ones((3, depth), dtype),
        jnp.asarray(np.random.RandomState(1).randn(T, 3, depth), dtype),
    )

    def ran(turned, matrix, level):
        step = lambda h, x: (h + x, (h + x) @ (matrix.T if turned else matrix))  # noqa: E731
        (loop,) = traced_loops(lambda h, x: jax.lax.scan(step, h, x), h, x)
        runner = replace(Native(programs.program_of(loop)), level=level)
        return jax.jit(functools.partial(runner.run, length=T))([matrix], [h], [x])

    for level in SETS:
        ours, theirs = ran(True, w, level), ran(False, jnp.array(w.T), level)
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@built
@pytest.mark.parametrize("rows", [1, 20])
def test_transposed_matrices_are_packed_as_they_are(rows, default):
    """XLA copied PyTorch's weights, transposed, and the kernel packed the copies."""
    layer = nn.LSTM(8, 300, rngs=nnx.Rngs(0))
    x = jnp.ones((50, rows, 8))
    graph, state = nnx.split(layer)
    text = jax.jit(lambda s, x: nnx.merge(graph, s)(x)[0]).lower(state, x).compile().as_text()
    assert "jrnn_loop" in text and not re.findall(r"= f32\[300,1200\]", text)


@built
def test_a_transposed_matrix_that_is_no_product_is_transposed_once():
    p = weights(h0=(N, H), x=(T, N, H), m=(H, N))
    (loop,) = traced_loops(
        lambda p: jax.lax.scan(lambda h, x: (jnp.tanh(h * p["m"].T + x), h), p["h0"], p["x"]), p
    )
    parts = Native(programs.program_of(loop)).program.parts
    assert [e.primitive.name for e in parts.constant_eqns] == ["transpose"]
    assert not parts.hoisted_eqns


@built
@pytest.mark.parametrize("width", [5, 40, 300])
def test_one_row_reads_matrices_as_they_are(width):
    """In both layouts, with columns that fill no vector or several."""
    p = dict(
        w=jnp.asarray(np.random.RandomState(0).randn(width, width) * 0.2, jnp.float32),
        x=jnp.ones((3, 1, width)),
    )

    def step(h, x):
        h = jnp.tanh(x + h @ p["w"] + (0.5 * h) @ p["w"].T)
        return h, h

    ours, theirs = (
        jax.value_and_grad(
            lambda x, e=e: jnp.sum(scan(step, jnp.ones((1, width)), x, executor=e)[1] ** 2)
        )(p["x"])
        for e in ("native", "scan")
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@built
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows, m, w", [(700, 37, 130), (256, 64, 64), (513, 20, 67)])
def test_sums_of_outer_products(rows, m, w, dtype, x64):
    rng = np.random.RandomState(0)
    a, b = (jnp.asarray(rng.randn(2, rows, n), dtype) for n in (m, w))
    exact = np.einsum("tri,trj->ij", *(np.asarray(v, np.float64) for v in (a, b)))
    actual = jax.jit(lambda a, b: contract(a, b, ((0, 1), (0, 1)), None, None))
    assert "jrnn_sum" in actual.lower(a, b).as_text()
    np.testing.assert_allclose(actual(a, b), exact, atol=1e-3 if dtype == "float32" else 1e-10)


@built
@pytest.mark.parametrize("w, called", [(67, True), (20, False)])
def test_sums_of_concatenations_read_their_parts(w, called):
    rng = np.random.RandomState(0)
    a, *parts = (jnp.asarray(rng.randn(150, 2, n), jnp.float32) for n in (37, w, w, w))
    exact = np.einsum(
        "tri,trj->ij", *(np.asarray(v, np.float64) for v in (a, np.concatenate(parts, -1)))
    )
    axes = ((0, 1), (0, 1))
    for left, right, result in ((a, parts, exact), (parts, a, exact.T)):
        compiled = jax.jit(lambda left, right: contract(left, right, axes, None, None))
        assert ("concatenate" not in compiled.lower(left, right).as_text()) == called
        np.testing.assert_allclose(compiled(left, right), result, atol=1e-3)


def gru_step(p):
    def step(h, x):
        (r, u, n), (hr, hu, hn) = (
            jnp.split(x @ p["wx"] + p["b"], 3, -1),
            jnp.split(h @ p["wh"], 3, -1),
        )
        r, u = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(u + hu)
        h = (1 - u) * jnp.tanh(n + r * hn) + u * h
        return h, h

    return step


@built
def test_the_reverse_loop_of_a_gru_stacks_common_parts_once(x64):
    """The cotangents of the two products share two of their three parts."""
    p = weights(jnp.float64, wx=(64, 192), wh=(64, 192), b=(1, 192), x=(7, 8, 64), h0=(8, 64))

    def loss(p, executor):
        return jnp.sum(scan(gru_step(p), p["h0"], p["x"], executor=executor)[1] ** 2)

    grads = jax.jit(jax.grad(loss), static_argnums=1)
    text = grads.lower(p, "native").as_text()
    assert [call.count("%") for call in re.findall(r"@jrnn_sum\((.*?)\)", text)] == [4, 4]
    stacks = re.findall(r"@jrnn_loop\(.*-> \((.*?)\)", text)[-1]
    assert (
        stacks.count("tensor<7x8x64xf64>") == 4
    )  # the gradient of x is computed from them after the loop
    for ours, theirs in zip(jax.tree.leaves(grads(p, "native")), jax.tree.leaves(grads(p, "scan"))):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)


def test_other_sums_are_those_of_xla():
    few, other = jnp.ones((9, 3, 4)), jnp.ones((9, 3, 5))
    for axes in (((0, 1), (0, 1)), ((0, 2), (0, 2))):
        other = other if axes[0] == (0, 1) else few
        text = (
            jax.jit(lambda a, b, axes=axes: contract(a, b, axes, None, None))
            .lower(few, other)
            .as_text()
        )
        assert "jrnn_sum" not in text and "dot_general" in text


def test_without_the_object_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(library, "loaded", lambda: library.Library(reason="there was no compiler"))
    p = weights()
    with pytest.raises(ScanError, match="'native' cannot run this step .*there was no compiler"):
        run(lstm_step, p, (p["h0"], p["c0"]), "native")
    assert scan_plans(lstm_step(p), (p["h0"], p["c0"]), p["x"]).strategy != "native"


@pytest.mark.exhaustive
def test_importing_jrnn_does_not_load_it():
    code = "import sys, jrnn; from jrnn.loops.kernels.native import library; sys.exit(library.loaded.cache_info().currsize)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_program_does_not_leave_its_arrays():
    """The sizes of all arrays are checked when the program is written."""
    p = weights()
    (loop,) = traced_loops(lambda p: jax.lax.scan(lstm_step(p), (p["h0"], p["c0"]), p["x"]), p)
    program = programs.program_of(loop)
    assert (
        program.rows == N
        and sum(o.kind == "product" for stage in program.stages for o in stage) == 2
    )
    longer = replace(program.parts.residual, length=T + 1)
    assert programs.program_of(longer).encoded[3] == T + 1
    with pytest.raises(Unsupported, match="rows"):
        View(Array(3), ((N, 0), (3, 1)), row=0).sliced([1, 0], [N, 3], [1, 1])


@pytest.mark.parametrize("shape", [(2, 3, 4), (24,), (6, 4), (1, 2, 12), (4, 6)])
def test_views_are_reshaped_without_copies(shape):
    view = View(Array(24), dense((2, 3, 4)))
    assert view.reshaped(shape).dims == dense(shape) or collapsed(view.reshaped(shape).dims) == [
        (24, 1)
    ]
    turned = view.transposed((2, 0, 1))
    assert turned.reshaped((4, 6)).dims == ((4, 1), (6, 4))
    with pytest.raises(Unsupported, match="moves"):
        turned.reshaped((24,))
