"""`jrnn.loops.scan` gives what `jax.lax.scan` gives, and its derivatives of every kind."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from cases import CASES, GRU, LSTM, D, H, N, T, draw, gru_step, lstm_step

from jrnn.errors import ScanError
from jrnn.loops import scan

pytestmark = pytest.mark.usefixtures("rewritten")


def close(ours, theirs, tolerance=1e-11):
    ours, theirs = jax.tree.leaves_with_path(ours), jax.tree.leaves_with_path(theirs)
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, a), (_, b) in zip(ours, theirs):
        assert (jnp.shape(a), jnp.result_type(a)) == (jnp.shape(b), jnp.result_type(b)), path
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=str(path))


def runs(name):
    """`fn(scan, params) -> (carry, ys)` of a case, and its parameters."""
    make, params = CASES[name]

    def fn(which, p):
        step, carry, xs, keywords = make(p)
        return which(step, carry, xs, **keywords)

    return fn, params


def loss(which, fn, p):
    """A number that depends on every smooth result with weights of its own."""
    total = 0.0
    for i, leaf in enumerate(jax.tree.leaves(fn(which, p))):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            weights = jnp.cos(jnp.arange(leaf.size, dtype=jnp.float64) + i).reshape(leaf.shape)
            total += jnp.sum(weights * jnp.sin(jnp.real(leaf)))
    return total


@pytest.mark.sample("straight_through")
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_lax_scan(name, x64):
    fn, params = runs(name)
    params = jax.tree.map(jnp.asarray, params)

    def both(which):
        return lambda p: (fn(which, p), jax.grad(functools.partial(loss, which, fn))(p))

    close(jax.jit(both(scan))(params), by_numpy(both(jax.lax.scan))(params))


@pytest.mark.exhaustive("lstm")
@pytest.mark.grid(every=3)
@pytest.mark.parametrize("name", ["lstm", "accumulators", "branches", "straight_through"])
def test_second_derivatives(name, x64):
    fn, params = runs(name)
    params = jax.tree.map(jnp.asarray, params)

    def squared(which, p):
        grads = jax.grad(functools.partial(loss, which, fn))(p)
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))

    ours, theirs = (jax.grad(functools.partial(squared, which)) for which in (scan, jax.lax.scan))
    close(jax.jit(ours)(params), by_numpy(theirs)(params), 1e-9)


@pytest.mark.sample("scan_in_the_step")
@pytest.mark.parametrize("name", ["lstm", "gru", "choice_fed_back", "scan_in_the_step"])
def test_forward_mode(name, x64):
    fn, params = runs(name)
    params = jax.tree.map(jnp.asarray, params)
    tangents = jax.tree.map(jnp.cos, params)

    def moved(which):
        return lambda p, t: jax.jvp(functools.partial(loss, which, fn), (p,), (t,))

    close(jax.jit(moved(scan))(params, tangents), by_numpy(moved(jax.lax.scan))(params, tangents))


@pytest.mark.exhaustive
def test_forward_over_reverse_and_reverse_over_forward(x64):
    fn, params = runs("gru")
    h0 = jnp.asarray(params["h0"])

    def of_state(which, h0):
        return loss(which, fn, {**params, "h0": h0})

    expected = by_numpy(jax.hessian(functools.partial(of_state, jax.lax.scan)))(h0)
    ours = functools.partial(of_state, scan)
    close(jax.jit(jax.jacfwd(jax.grad(ours)))(h0), expected, 1e-10)
    close(jax.jit(jax.jacrev(jax.jacfwd(ours)))(h0), expected, 1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("batched", ["h0", "wh", "x"])
def test_gradient_of_vmap_and_vmap_of_gradient(batched, x64):
    fn, params = runs("gru")
    params = jax.tree.map(jnp.asarray, params)
    many = jnp.stack([params[batched], params[batched] * 0.5, params[batched] + 1])

    def one(which, p, v):
        return loss(which, fn, {**p, batched: v})

    def inside(which, p):
        return jnp.sum(jax.vmap(lambda v: one(which, p, v))(many))

    def outside(which, p):
        return jax.vmap(jax.grad(lambda p, v: one(which, p, v)), (None, 0))(p, many)

    def both(which):
        return lambda p: (jax.grad(functools.partial(inside, which))(p), outside(which, p))

    close(jax.jit(both(scan))(params), by_numpy(both(jax.lax.scan))(params))


@pytest.mark.exhaustive
def test_linearize_checkpoint_and_jit_inside_grad(x64):
    fn, params = runs("lstm")
    params = jax.tree.map(jnp.asarray, params)
    ours, theirs = (functools.partial(loss, which, fn) for which in (scan, jax.lax.scan))
    expected = by_numpy(jax.grad(theirs))(params)
    close(jax.jit(jax.grad(jax.checkpoint(ours)))(params), expected)
    close(jax.grad(jax.jit(ours))(params), expected)
    tangents = jax.tree.map(jnp.sin, params)
    wanted = by_numpy(lambda p, t: jax.jvp(theirs, (p,), (t,))[1])(params, tangents)
    close(jax.jit(lambda p, t: jax.linearize(ours, p)[1](t))(params, tangents), wanted)


@pytest.mark.exhaustive
def test_scan_inside_scan(x64):
    p = jax.tree.map(jnp.asarray, draw(0, **GRU))

    def nested(which, p):
        def step(h, x):
            h, ys = which(gru_step(p), h, x[None] * jnp.arange(1.0, 4.0)[:, None, None])
            return h, ys.sum(0)

        return jnp.sum(which(step, p["h0"], p["x"])[1] ** 2)

    ours, theirs = (jax.grad(functools.partial(nested, which)) for which in (scan, jax.lax.scan))
    close(jax.jit(ours)(p), by_numpy(theirs)(p))


@pytest.mark.sample("h0")
@pytest.mark.parametrize("wanted", ["wh", "h0", "x"])
def test_gradient_of_one_input_alone(wanted, x64):
    fn, params = runs("lstm")

    def of_one(which, v):
        return loss(which, fn, {**params, wanted: v})

    v = jnp.asarray(params[wanted])
    ours, theirs = (jax.grad(functools.partial(of_one, which)) for which in (scan, jax.lax.scan))
    close(jax.jit(ours)(v), by_numpy(theirs)(v))


def test_no_steps_at_all():
    p = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), draw(0, **GRU))
    carry, ys = scan(gru_step(p), p["h0"], p["x"][:0])
    np.testing.assert_array_equal(carry, p["h0"])
    assert ys.shape == (0, N, H)


@pytest.mark.exhaustive("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_small_types(dtype):
    p = jax.tree.map(lambda v: jnp.asarray(v, dtype), draw(1, **LSTM))

    def run(which, p):
        carry, ys = which(lstm_step(p), (p["h0"], p["c0"]), p["x"])
        return jnp.sum(ys.astype(jnp.float32) ** 2), (carry, ys)

    ours, theirs = (
        jax.grad(functools.partial(run, which), has_aux=True) for which in (scan, jax.lax.scan)
    )
    ours, theirs = jax.jit(ours)(p), by_numpy(theirs)(p)
    tolerance = (
        1e-5 if dtype == jnp.float32 else 0.08
    )  # a bfloat16 sum over time is rounded once instead of T times
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert a.dtype == b.dtype == dtype
        np.testing.assert_allclose(
            a.astype(jnp.float32), b.astype(jnp.float32), rtol=tolerance, atol=tolerance
        )


def test_mistakes_are_reported_as_lax_scan_reports_them():
    with pytest.raises(TypeError, match="carry"):
        scan(lambda c, x: (jnp.zeros((2, 2)), x), jnp.zeros(3), jnp.zeros((4, 3)))
    with pytest.raises(TypeError, match="pair"):
        scan(lambda c, x: c, jnp.zeros(3), jnp.zeros((4, 3)))
    with pytest.raises(ValueError, match="disagree|length"):
        scan(lambda c, x: (c, x), jnp.zeros(3), jnp.zeros((4, 3)), length=5)


def test_side_effects_happen():
    seen = []

    def step(c, x):
        jax.debug.callback(lambda v: seen.append(float(v)), x, ordered=True)
        return c + x, c

    scan(step, jnp.float32(0), jnp.arange(3.0))
    jax.effects_barrier()
    assert seen == [0.0, 1.0, 2.0]


# Lengths --------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("reverse", [False, True])
def test_lengths_hold_the_carry_and_zero_the_outputs(reverse, x64):
    p = jax.tree.map(jnp.asarray, draw(2, **LSTM))
    lengths = np.array([3, 0])

    def ours(p):
        return scan(lstm_step(p), (p["h0"], p["c0"]), p["x"], lengths=lengths, reverse=reverse)

    def one_by_one(p):
        carries, outs = [], []
        for n, length in enumerate(lengths):
            start = (p["h0"][n : n + 1], p["c0"][n : n + 1])
            carry, ys = jax.lax.scan(
                lstm_step(p), start, p["x"][:length, n : n + 1], reverse=reverse
            )
            carries.append(carry)
            outs.append(jnp.concatenate([ys, jnp.zeros((T - length, 1, H))]))
        return jax.tree.map(lambda *v: jnp.concatenate(v), *carries), jnp.concatenate(outs, axis=1)

    def total(fn, p):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fn(p)))

    def both(fn):
        return lambda p: (fn(p), jax.grad(functools.partial(total, fn))(p))

    close(jax.jit(both(ours))(p), by_numpy(both(one_by_one))(p))


def test_lengths_must_fit():
    with pytest.raises(ScanError, match="must begin with that shape"):
        scan(lambda c, x: (c + x, x), jnp.zeros(3), jnp.zeros((4, 3)), lengths=np.array([1, 2]))
    with pytest.raises(ScanError, match="integers"):
        scan(
            lambda c, x: (c + x, x),
            jnp.zeros(3),
            jnp.zeros((4, 3)),
            lengths=np.array([1.0, 2.0, 3.0]),
        )


@pytest.mark.exhaustive
def test_sharded_over_the_batch():
    """On a mesh the results are those of one device (the mesh has as many devices as there are)."""
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = len(jax.devices()) * N
    p = jax.tree.map(
        lambda v: jnp.asarray(v, jnp.float32),
        draw(3, **{**GRU, "h0": (rows, H), "x": (T, rows, D)}),
    )
    spec = jax.sharding.PartitionSpec

    def run(which, p):
        return jnp.sum(which(gru_step(p), p["h0"], p["x"])[1] ** 2)

    placed = dict(p)
    placed["h0"] = jax.device_put(p["h0"], jax.NamedSharding(mesh, spec("data")))
    placed["x"] = jax.device_put(p["x"], jax.NamedSharding(mesh, spec(None, "data")))
    expected = by_numpy(jax.grad(functools.partial(run, jax.lax.scan)))(p)
    close(jax.jit(jax.grad(functools.partial(run, scan)))(placed), expected, 1e-5)

    weights = ("wx", "wh", "b")

    def mean_over_shards(p):
        where = {
            k: spec() if k in weights else spec("data") if k == "h0" else spec(None, "data")
            for k in p
        }
        total = jax.shard_map(
            lambda p: jax.lax.psum(run(scan, p), "data"),
            mesh=mesh,
            in_specs=(where,),
            out_specs=spec(),
        )
        return total(p)

    close(jax.jit(jax.grad(mean_over_shards))(p), expected, 1e-5)


@pytest.mark.exhaustive
def test_sharded_by_type():
    """With explicit axes, a contraction over the sharded batch needs the sharding of its result, as in `lax.scan`."""
    p = jax.tree.map(
        lambda v: jnp.asarray(v, jnp.float32),
        draw(3, **{**GRU, "x": (T, len(jax.devices()) * N, D)}),
    )

    def run(which, p):
        h0 = jnp.zeros_like(p["x"][0, :, :1]) * p["wh"][:1, :H]
        return jnp.sum(which(gru_step(p), h0, p["x"])[1] ** 2)

    expected = by_numpy(jax.grad(functools.partial(run, jax.lax.scan)))(p)
    with jax.set_mesh(
        jax.make_mesh(
            (len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Explicit,)
        )
    ):
        placed = {**p, "x": jax.device_put(p["x"], jax.sharding.PartitionSpec(None, "data"))}
        ours = jax.jit(jax.grad(functools.partial(run, scan)))(placed)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), ours, expected
    )
