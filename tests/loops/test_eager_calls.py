"""Calls outside of `jax.jit`: compiled once for each step, options and shapes, with gradients, and freed with the step."""

from __future__ import annotations

import functools
import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import hijax

import jrnn
from jrnn.errors import ScanError
from jrnn.loops import Newton, scan
from jrnn.loops.wrappers import compiled_calls

T, N, H = 6, 3, 4
XS = jnp.sin(jnp.arange(T * N * H, dtype=jnp.float32)).reshape(T, N, H)
H0 = jnp.full((N, H), 0.1)
W = jnp.linspace(-0.5, 0.5, H * H).reshape(H, H)
LENGTHS, RESETS = np.array([4, 6, 1]), np.arange(T * N).reshape(T, N) % 5 == 0


def rnn(w, h, x):
    h = jnp.tanh(h @ w + x)
    return h, h


step = functools.partial(rnn, W)


def is_far(h):
    return jnp.all(h > 10)


def is_near(s):
    return jnp.all(s < 100)


def double(s):
    return 2 * s


OPTIONS = {
    "plain": {},
    "lengths": dict(lengths=LENGTHS),
    "a list of lengths": dict(lengths=LENGTHS.tolist()),
    "resets": dict(resets=RESETS),
    "mask": dict(mask=~RESETS),
    "until": dict(until=is_far),
    "sqrt": dict(recompute="sqrt"),
    "a number": dict(recompute=3),
    "all": dict(lengths=LENGTHS, resets=RESETS, mask=~RESETS, reverse=True),
    "newton": dict(executor="newton"),
    "an object of Newton": dict(executor=Newton(iterations=7)),
}
CALLS = {name: functools.partial(scan, step, **options) for name, options in OPTIONS.items()}
CALLS["while_loop"] = lambda h, xs: jrnn.while_loop(is_near, double, h + xs[0], max_steps=20)
CALLS["scan_statistics"] = lambda h, xs: jrnn.loops.scan_statistics(step, h, xs, lengths=LENGTHS)[0]


def loss(run, h, xs):
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(run(h, xs)))


TRANSFORMATIONS = {
    "value": lambda run: run,
    "gradient": lambda run: jax.grad(functools.partial(loss, run), argnums=(0, 1)),
    "vmap": lambda run: lambda h, xs: jax.vmap(lambda h: run(h, xs))(jnp.stack([h, h])),
}
FEW = {
    ("value", "lengths"),
    ("gradient", "until"),
    ("value", "while_loop"),
    ("gradient", "lengths"),
}


@pytest.mark.sample(*(f"{how}-{name}" for how, name in FEW))
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("how", TRANSFORMATIONS)
def test_one_compilation_for_a_shape(how, name):
    def run():
        return TRANSFORMATIONS[how](CALLS[name])(H0, XS)

    first, expected = run(), jax.jit(run)()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, first, expected)
    with compilations() as compiled:
        again = run()
    assert not compiled
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_a_new_shape_compiles_one_program_and_other_lengths_none():
    lengths, fewer = jnp.asarray(LENGTHS), jnp.asarray(LENGTHS - 1)
    scan(step, H0, XS, lengths=lengths)
    shorter = XS[:2] + 0
    ends = jnp.minimum(lengths, 2)
    with compilations() as compiled:
        _, ys = scan(step, H0, XS, lengths=fewer)
    assert not compiled and (ys[3, 0] == 0).all() and (ys[2, 0] != 0).all()
    with compilations() as compiled:
        scan(step, H0, shorter, lengths=ends)
    assert len(compiled) == 1


def test_a_call_is_traced_once_for_its_types(monkeypatch):
    def add(total, x):
        return total + x, total

    traces = []
    make_jaxpr = jax.make_jaxpr
    monkeypatch.setattr(
        jax, "make_jaxpr", lambda *args, **kw: traces.append(args) or make_jaxpr(*args, **kw)
    )
    calls = [
        (0.0, XS[:, 0, 0]),
        (jnp.float32(0), XS[:, 0, 0]),
        (0.0, XS[:2, 0, 0]),
        (0, XS[:, 0, 0].astype(int)),
    ]
    results = [scan(add, *call) for call in calls]
    assert len(traces) == len(calls)  # a weak type, a shape and a dtype are others
    again = [scan(add, *call) for call in calls]
    assert len(traces) == len(calls)
    jax.tree.map(np.testing.assert_array_equal, again, results)
    assert [total.weak_type for total, _ in again] == [total.weak_type for total, _ in results]
    with jax.enable_x64(True):
        assert scan(add, 0.0, np.ones(3))[0].dtype == np.float64
    assert len(traces) == len(calls) + 1


def test_lengths_are_checked_in_every_call():
    for _ in range(2):
        with pytest.raises(ScanError, match="must lie between 0 and T = 6, but one is 7"):
            scan(step, H0, XS, lengths=[7, 1, 1])
    scan(step, H0, XS, lengths=[6, 1, 1])
    with pytest.raises(ScanError, match="but one is 7"):
        scan(step, H0, XS, lengths=[7, 1, 1])


def test_a_guess_is_an_argument():
    (_, ys), statistics = jrnn.loops.scan_statistics(step, H0, XS)
    guesses = [Newton(guess=guess) for guess in (statistics.states, statistics.states * 0)]
    with compilations() as compiled:
        results = [jrnn.loops.scan_statistics(step, H0, XS, executor=guess) for guess in guesses]
    assert len(compiled) == 1
    assert results[0][1].iterations < results[1][1].iterations
    for (_, outputs), _ in results:
        np.testing.assert_allclose(outputs, ys, atol=1e-6)


def test_contexts_are_part_of_the_key():
    lengths = jnp.asarray(LENGTHS)

    def count():
        with compilations() as compiled:
            scan(step, H0, XS, lengths=lengths)
        return len(compiled)

    count()
    with jrnn.plain_scans():
        assert count() == 1
    with jax.default_matmul_precision("highest"):
        assert count() == 1
    assert count() == 0


def test_equal_options_of_other_types_are_others():
    lengths = jnp.asarray(LENGTHS)
    scan(step, H0, XS, lengths=lengths, unroll=1)
    with compilations() as compiled:
        scan(step, H0, XS, lengths=lengths, unroll=True)  # unrolls all steps
    assert len(compiled) == 1


def test_what_a_step_closes_over_is_no_constant_of_the_program():
    large = jnp.ones((500, 1000)) + H0[0, 0]

    def reads(h, x):
        return jnp.tanh(h + x) * large[0, 0], None

    def differentiated(large):
        return scan(lambda h, x: (jnp.tanh(h + x) * large[0, 0], None), H0, XS, lengths=LENGTHS)[
            0
        ].sum()

    scan(reads, H0, XS, lengths=LENGTHS)
    held = [v for v in jax.live_arrays() if v.shape == large.shape]
    assert len(held) == 1
    gradient = jax.grad(differentiated)(large)
    np.testing.assert_allclose(gradient, jax.jit(jax.grad(differentiated))(large), rtol=1e-5)


@pytest.mark.parametrize("transform", ["value", "gradient"])
def test_a_program_is_freed_with_its_step_and_with_the_condition(transform):
    def run(until=None):
        weights = W + 0

        def own(h, x):
            return rnn(weights, h, x)

        def stops(h):
            return jnp.all(h > weights.sum() + 9)

        TRANSFORMATIONS[transform](functools.partial(scan, own, lengths=LENGTHS))(H0, XS)
        TRANSFORMATIONS[transform](functools.partial(scan, own, until=stops))(H0, XS)
        TRANSFORMATIONS[transform](functools.partial(scan, step, until=stops))(H0, XS)
        return weakref.ref(own), weakref.ref(stops), weakref.ref(weights)

    references = run()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_clear_caches_frees_the_programs():
    scan(step, H0, XS, lengths=LENGTHS)
    assert len(compiled_calls._compiled)
    jax.clear_caches()
    gc.collect()
    assert not len(compiled_calls._compiled)


def test_steps_that_cannot_be_keys_run():
    class Step:
        __hash__ = None

        def __call__(self, h, x):
            return rnn(W, h, x)

    ours, expected = (scan(each, H0, XS, lengths=LENGTHS) for each in (Step(), step))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), ours, expected)


def test_refs_that_are_given_twice_are_named_as_by_lax_scan():
    ref = jax.new_ref(0.0)
    cases = {
        "c[0] and c[1]": (lambda c, _: (None, None), (ref, ref)),
        "argument y": (lambda y, _: (ref[...], None), ref),
    }
    for place, (step, init) in cases.items():
        for which in (jrnn.scan, jax.lax.scan):
            with pytest.raises(ValueError, match=re.escape(place)):
                which(step, init, None, length=1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(lengths=LENGTHS),
        dict(resets=RESETS),
        dict(mask=~RESETS),
        dict(executor="associative"),
        dict(recompute=["state"]),
    ],
    ids=["plain", "lengths", "resets", "mask", "an executor by name", "names"],
)
@pytest.mark.parametrize("how", ["value", "gradient"])
def test_a_step_is_traced_once(how, options):
    traces = []

    def affine(h, x):
        traces.append(x)
        h = checkpoint_name(0.5 * h + x, "state")
        return h, h

    run = functools.partial(scan, affine, **options)
    ours = TRANSFORMATIONS[how](run)(H0, XS)
    assert len(traces) == 1
    traces.clear()
    jax.jit(TRANSFORMATIONS[how](run)).trace(H0, XS)
    assert len(traces) == 1
    expected = TRANSFORMATIONS[how](
        functools.partial(scan, lambda *args: affine(*args), **options)
    )(H0, XS)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), ours, expected
    )


# Values of types that are not arrays ----------------------------------------------------------------------------------


class Pair:
    def __init__(self, a, b):
        self.a = a
        self.b = b


class PairType(hijax.HiType):
    """A type that says nothing of how its values are passed to a compiled program."""

    def __hash__(self):
        return hash(PairType)

    def __eq__(self, other):
        return isinstance(other, PairType)

    def to_tangent_aval(self):
        return PairType()


hijax.register_hitype(Pair, lambda pair: PairType())


class Product(getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive):  # the name since jax 0.11
    def __init__(self):
        self.in_avals = (PairType(),)
        self.out_aval = jax.typeof(jnp.zeros(3))
        self.params = {}
        super().__init__()

    def expand(self, pair):
        return pair.a * pair.b

    def jvp(self, primals, tangents):
        return self(*primals), jnp.zeros(3)

    if hasattr(hijax, "linearize_from_jvp"):
        lin, linearized = hijax.linearize_from_jvp
        vjp_fwd, vjp_bwd_retval = hijax.vjp_from_jvp


@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.linearize(f, jnp.ones(3))[1]])
def test_a_step_closes_over_a_value_of_a_high_level_type(transform):
    pair = Pair(jnp.arange(3.0), 2.0)

    def step(h, x):
        h = jnp.sin(h) + Product()(pair) * x
        return h, h

    def loss(loop, h):
        h, ys = loop(step, h, jnp.arange(4.0))
        return jnp.sum(h) + jnp.sum(ys)

    ours, theirs = (
        transform(functools.partial(loss, loop))(jnp.ones(3)) for loop in (scan, jax.lax.scan)
    )
    np.testing.assert_array_equal(ours, theirs)
