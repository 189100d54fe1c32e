"""Where a replacement of `jax.lax.scan` may differ from it: types, random numbers, infinities, side effects, mistakes."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans_of import scan_plans

import jrnn
from jrnn.errors import ScanError
from jrnn.loops import scan

T, N, H = 5, 2, 3
XS, H0 = jnp.linspace(-1, 1, T * N * H).reshape(T, N, H), jnp.ones((N, H))
W = jnp.linspace(-0.5, 0.5, H * H).reshape(H, H)


def same(step, carry, xs, **keywords):
    """Runs both, and compares values, types and weak types."""
    ours, theirs = (run(step, carry, xs, **keywords) for run in (scan, jax.lax.scan))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert jax.typeof(a) == jax.typeof(b) and a.weak_type == b.weak_type
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_weak_types_stay_weak():
    """Or what follows would be of another type: weak float32 * bfloat16 is bfloat16."""
    same(lambda c, x: (c + 1, c), 0, XS)
    same(lambda c, x: ((c[0] + 1.0, c[1] * 2.0), (1.5, c[0], x)), (0.0, 1.0), XS)


@pytest.mark.parametrize("recompute", [None, "sqrt"])
def test_weak_types_stay_weak_between_checkpoints(recompute):
    for reverse in (False, True):
        ours = scan(lambda c, x: (c * 0.5, c), 1.0, XS, reverse=reverse, recompute=recompute)
        theirs = jax.lax.scan(lambda c, x: (c * 0.5, c), 1.0, XS, reverse=reverse)
        assert [jax.typeof(a) for a in ours] == [jax.typeof(a) for a in theirs]
        np.testing.assert_allclose(ours[1], theirs[1])


def test_weak_types_stay_weak_after_resets():
    resets = np.arange(T) % 2 == 1
    last, ys = scan(lambda c, x: (c * 0.5, c), 1.0, XS, resets=resets)
    assert last.weak_type and ys.weak_type
    np.testing.assert_allclose(ys, [1, 1, 0.5, 1, 0.5])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_small_integers_wrap_around(dtype):
    same(lambda c, x: (c + dtype(3), None), dtype(1), None, length=300)


@pytest.mark.usefixtures("rewritten")
def test_a_constant_added_often_does_not_overflow_with_the_number_of_times():
    total, _ = scan(lambda c, _: (c + jnp.float16(1e-4), None), jnp.float16(0), None, length=70_000)
    np.testing.assert_allclose(total, 7.0, rtol=1e-2)


@pytest.mark.parametrize("size", [1e8, 3e38])
def test_sums_of_differences_are_not_differences_of_sums(size):
    """Which cancel, or overflow."""
    xs = jnp.float32(size) * (1 - jnp.float32(2e-7) * jnp.arange(5))
    run = jax.jit(
        lambda xs, b: scan(
            lambda c, x: ((c[0] + (x - b), c[1] + (x + -b)), None), (jnp.float32(0),) * 2, xs
        )[0]
    )
    np.testing.assert_allclose(
        run(xs, xs[2]), [np.sum(np.asarray(xs) - np.float32(xs[2]))] * 2, rtol=1e-5
    )


def test_sums_of_widened_values_are_wide():
    xs = jnp.asarray(np.random.RandomState(0).rand(200, 1, 4), jnp.bfloat16)

    def step(carry, x):
        total, products, last = carry
        product = (jnp.swapaxes(last, 0, 1) @ x).astype(jnp.float32)
        return (total + x.astype(jnp.float32), products + product, x), None

    zeros = jnp.zeros((1, 4)), jnp.zeros((4, 4)), xs[0] * 0
    total, products, _ = scan(step, zeros, xs)[0]
    exact = np.asarray(xs, np.float64)
    np.testing.assert_allclose(total, exact.sum(0), rtol=1e-5)
    np.testing.assert_allclose(products, np.einsum("tni,tnj->ij", exact[:-1], exact[1:]), rtol=1e-5)


def test_gradients_of_narrow_constants_are_summed_in_float32():
    """One by one, 600 bfloat16 numbers of about the same size stop to add up after 256."""
    w = jnp.ones((130, 260))  # too large to be summed after the loop

    def loss(w):
        def step(h, x):
            h = h * jnp.bfloat16(0.5) + x
            return h, jnp.sum((h * w.astype(jnp.bfloat16)).astype(jnp.float32))

        zero, ones = jnp.zeros((1, 1), jnp.bfloat16), jnp.ones((600, 1, 1), jnp.bfloat16)
        return jnp.sum(scan(step, zero, ones, executor="scan")[1])

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(w)[0, :3], 1198, rtol=0.01)


@pytest.mark.sample("unsafe_rbg")
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_numbers_are_those_of_each_step(impl):
    """Keys but threefry's give other numbers under vmap, so what is made of them stays in the loop."""
    keys = jax.random.split(jax.random.key(1, impl=impl), T)

    def step(h, given):
        key, x = given
        kept = jax.random.bernoulli(jax.random.fold_in(key, 7), 0.5, h.shape)
        return h + jnp.where(kept, x, 0) @ W, jax.random.normal(key, h.shape) @ W

    same(step, H0, (keys, XS))
    if impl != "threefry2x32":
        with pytest.raises(ScanError, match="only threefry keys draw the same numbers"):
            scan(
                lambda h, key: (h + jax.random.normal(key, h.shape), h),
                H0,
                keys,
                executor="associative",
            )


def test_literal_carries(x64):
    def loss(run, w):
        (a, b), (ys, z) = run(
            lambda c, x: ((c[0] * w + c[1], np.float32(0.0)), (c[0], c[1] * x)),
            (W[:2], jnp.float32(3)),
            XS,
        )
        return jnp.sum(ys**2) + jnp.sum(z) + b

    np.testing.assert_allclose(
        *(jax.grad(functools.partial(loss, run))(W[:2]) for run in (scan, jax.lax.scan)), rtol=1e-5
    )


def test_a_reset_forgets_infinity():
    factors, starts = jnp.array([1e30, 1e30, 1e30, 1.0, 2.0]), jnp.array([0, 0, 0, 1, 0], bool)
    same(lambda h, x: (jnp.where(x[1], 1.0, h * x[0]), h), jnp.ones(()), (factors, starts))


def test_python_in_the_step_where_nothing_is_compiled():
    with jax.disable_jit():
        same(lambda h, x: (h + x if x.sum() > 0 else h - x, h), H0, XS)


def test_a_search_for_nan_finds_those_of_the_results():
    """Not those of a value that the step does not use; nor those of steps cut out of xs."""
    xs = np.where(np.arange(T)[:, None, None] == 1, np.nan, np.asarray(XS))

    def step(h, x):
        z = x @ W
        return jnp.tanh(h + jnp.where(jnp.isnan(z), 0, z)), h

    with jax.debug_nans(True):
        same(step, H0, xs.astype(np.float32))


def test_derivative_rules_with_side_effects():
    seen = []

    @jax.custom_vjp
    def told(v):
        return jnp.sin(v)

    def back(v, ct):
        jax.debug.callback(lambda total: seen.append(round(float(total), 4)), jnp.sum(v))
        return (ct * jnp.cos(v),)

    told.defvjp(lambda v: (jnp.sin(v), v), back)

    def step_of(w):
        return lambda h, x: (told(h @ w + x), h)

    def gradient(run):
        seen.clear()
        grad = jax.grad(lambda w: jnp.sum(run(step_of(w), H0, XS)[1]))(W)
        jax.effects_barrier()
        return grad, list(seen)

    (ours, calls), (theirs, expected) = gradient(scan), gradient(jax.lax.scan)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert calls == expected and len(calls) == T
    assert "side effects" in str(scan_plans(step_of(W), H0, XS))


@pytest.mark.parametrize("recompute", ["contractions", "sqrt"])
def test_what_a_step_adds_to_a_ref_is_added_once(recompute):
    def loss(run, w):
        ref = jax.new_ref(jnp.ones(()))

        def step(h, x):
            ref[...] += jnp.sum(h * w)
            return jnp.tanh(h + x), h * ref[...]

        return jnp.sum(run(step, H0, XS)[1]) + ref[...]

    ours, theirs = functools.partial(scan, recompute=recompute), jax.lax.scan
    np.testing.assert_allclose(
        *(jax.value_and_grad(functools.partial(loss, run))(0.5) for run in (ours, theirs)),
        rtol=1e-5,
    )


@pytest.mark.parametrize("recompute", [None, "contractions"])
def test_the_reverse_loop_makes_no_comparison_again(recompute):
    """Of operands that are done again and rounded otherwise: what was equal, as a maximum and its operand, is not then."""

    def step(h, x):
        h = jnp.maximum(h * 0.9 + x * x, jnp.sin(h) * x)
        return h, (jnp.floor(h * x) * h, jnp.max(h * x, axis=-1))

    forward, reverse = scan_plans(step, H0, XS, recompute=recompute).training
    primitives = {eqn.primitive.name for eqn in reverse.loop.eqns}
    assert primitives and not primitives & {"eq", "gt", "floor"}


@pytest.mark.exhaustive
def test_no_steps():
    """The sum of no products, and the carries before no steps."""

    def step(carry, x):
        h, product, _ = carry
        return (jnp.tanh(h @ W + x), product + h.T @ x, h * 0.5 + x), h

    same(step, (H0, W, H0), XS[:0])

    def loss(run, w, xs):
        last, hs = run(lambda h, x: (jnp.tanh(h @ w + x), h), H0, xs)
        return jnp.sum(last) + jnp.sum(hs)

    for of in (jax.grad, jax.hessian):
        assert not np.any(of(functools.partial(loss, scan))(W, XS[:0]))


def test_unroll_is_refused_as_lax_scan_refuses_it():
    with pytest.raises(ValueError, match="`unroll` must be"):
        scan(lambda h, x: (h, x), H0, XS, unroll=-1)


@pytest.mark.parametrize(
    "step, xs, error, message",
    [
        (lambda h, x: (h[:, :1], x), XS, TypeError, "must have equal types"),
        (lambda h, x: (h.astype(jnp.bfloat16), x), XS, TypeError, "must have equal types"),
        (lambda h, x: ((h, h), x), XS, TypeError, "same pytree structure"),
        (lambda h, x: h, XS, TypeError, "must be a pair"),
        (lambda h, x: (h, x), None, ValueError, "`length` not provided"),
        (lambda h, x: (h, x), (XS, XS[1:]), ValueError, "leading axis sizes"),
    ],
)
def test_with_lengths_mistakes_are_reported_as_without(step, xs, error, message):
    with pytest.raises(error, match=message):
        scan(step, H0, xs, lengths=jnp.array([3, 1]))


@pytest.mark.exhaustive
def test_padding_is_nothing_to_divide_by(x64):
    """The step is evaluated past the ends too, but on nothing that the sequence does not hold."""
    xs = np.arange(1.0, T * N + 1).reshape(T, N)
    lengths = np.array([3, 0])

    def loss(w, xs):
        last, ys = scan(
            lambda h, x: (h * 0.5 + w * jnp.log(x), w / x), jnp.zeros(N), xs, lengths=lengths
        )
        return jnp.sum(last) + jnp.sum(ys)

    for padding in (0.0, np.nan):
        padded = np.where(np.arange(T)[:, None] < lengths, xs, padding)
        of_w, of_x = jax.grad(loss, (0, 1))(2.0, jnp.asarray(padded))
        a, b, c = xs[:3, 0]
        np.testing.assert_allclose(of_w, np.log([a, b, c]) @ [0.25, 0.5, 1] + 1 / a + 1 / b + 1 / c)
        np.testing.assert_allclose(
            of_x[:3, 0], 2 * np.array([0.25 / a, 0.5 / b, 1 / c]) - 2 / xs[:3, 0] ** 2
        )
        assert not np.any(of_x[3:]) and not np.any(of_x[:, 1])


@pytest.mark.parametrize(
    "keywords, message",
    [
        (dict(executor=None), "there is no executor None"),
        (dict(executor="associative", recompute="sqrt"), "keeps all states"),
        (dict(recompute=["sums"]), "none has a name"),
    ],
)
def test_impossible_requests_say_what_is_wrong(keywords, message):
    with pytest.raises(ScanError, match=message):
        scan(lambda h, x: (h * x, h), H0, XS, **keywords)


@pytest.mark.parametrize("value", [1, 0.0, "yes", None, np.int32(1)])
def test_reverse_is_a_boolean(value):
    with pytest.raises(ScanError, match="reverse must be True or False, but is"):
        scan(lambda h, x: (h * x, h), H0, XS, reverse=value)
    last, _ = scan(lambda h, x: (h - x, h), jnp.float32(0), jnp.arange(3.0), reverse=np.bool_(True))
    assert last == -3


@pytest.mark.parametrize("plain", [False, True])
def test_the_parameter_for_transposition_is_passed_on(plain, monkeypatch):
    given, original = [], jax.lax.scan

    def run(*args, **options):
        given.append(args)
        return original(*args, **options)

    monkeypatch.setattr(jax.lax, "scan", run)
    with jrnn.plain_scans() if plain else contextlib.nullcontext():
        scan(lambda h, x: (h * x, h), jnp.float32(1), jnp.arange(3.0), _split_transpose=True)
    assert given[0][6] is True


@pytest.mark.parametrize("name", ["length", "reverse", "unroll"])
def test_traced_options_are_refused_as_lax_scan_refuses_them(name):
    def refusal(run):
        with pytest.raises(TypeError) as caught:  # of which ConcretizationTypeError is one
            jax.jit(
                lambda v: run(
                    lambda h, x: (h, x), H0, None if name == "length" else XS, **{name: v}
                )
            )(1)
        return type(caught.value), str(caught.value)

    assert refusal(scan) == refusal(jax.lax.scan)


def test_gradients_inside_shard_map_vary_as_their_values_do(x64):
    """The sums of the reverse loop vary over the same axes of the mesh as the constants whose gradients they are."""
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    large = jnp.linspace(-1, 1, 130 * 140).reshape(
        130, 140
    )  # too large to be summed after the loop

    def loss(run, large, xs):
        def shard(large, xs):
            def step(h, x):
                h = jnp.tanh(h + x)
                return h, jnp.sum(jnp.sin(large * h[0, 0]))

            return jax.lax.psum(jnp.sum(run(step, xs[0], xs)[1]), "data")

        return jax.shard_map(
            shard, mesh=mesh, in_specs=(spec(), spec(None, "data")), out_specs=spec()
        )(large, xs)

    xs = jnp.tile(XS, (1, len(jax.devices()), 1))
    ours, theirs = (
        jax.jit(jax.grad(functools.partial(loss, run)))(large, xs) for run in (scan, jax.lax.scan)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-11)
