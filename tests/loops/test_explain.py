"""What `explain` prints, and the errors of mistakes in its arguments."""

import functools
import os

import jax
import jax.numpy as jnp
import pytest
from cases import lstm_step
from flax import nnx

import jrnn

pytestmark = pytest.mark.usefixtures("without_kernel")

H0, XS = jnp.zeros((2, 4)), jnp.ones((5, 2, 4))


def step(h, x):
    return jnp.tanh(h + x), h


def test_the_text_of_an_lstm_with_lengths_has_at_most_15_lines():
    p = dict(wx=jnp.ones((32, 256)), wh=jnp.ones((64, 256)), b=jnp.ones((1, 256)))

    def loss(p, xs):
        return jnp.sum(
            jrnn.scan(lstm_step(p), (jnp.zeros((16, 64)),) * 2, xs, lengths=jnp.full(16, 50))[1]
        )

    lines = str(jrnn.explain(jax.grad(loss, (0, 1)), p, jnp.ones((100, 16, 32)))).splitlines()
    assert len(lines) <= 15
    assert lines[0] == "2 loops: 1 rewritten, 1 left to lax.scan"
    assert (
        lines[1].startswith(os.path.join("tests", "loops", "test_explain.py:"))
        and ".loss)" in lines[1]
    )
    assert "  forward loop of 100 steps on cpu: lax.scan" in lines and any(
        "; nothing to gain" in line for line in lines
    )
    assert "    summed after the loop instead of carried: 3 values, 99,328 bytes" in lines
    assert "    contractions in the loop: 1 (lax.scan: 4)" in lines, "of the reverse loop"
    assert lines[-1] == "details: print .loops[1] of this explanation"


def test_the_arguments_of_a_scan_are_explained_as_they_are():
    lines = str(
        jrnn.explain(jrnn.scan, step, H0, XS, None, True, executor="scan", unroll=1)
    ).splitlines()
    assert lines[0] == "1 loop: 0 rewritten, 1 left to lax.scan"
    assert "test_explain.py:" in lines[1] and "(test_the_arguments_of_a_scan" in lines[1]
    assert lines[2] == "  reverse loop of 5 steps on cpu: lax.scan" and not any(
        "(lax.scan" in line for line in lines
    )
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (H0, XS)]
    assert len(jrnn.explain(jrnn.scan, step, *shapes).loops) == 1


def test_a_plan_prints_what_its_summary_leaves_out():
    w = jnp.ones((80, 80))
    (plan,) = jrnn.explain(
        jrnn.scan,
        lambda h, x: (jnp.tanh(h @ w + x @ w), h @ w),
        jnp.ones((2, 80)),
        jnp.ones((20, 2, 80)),
        executor="scan",
    ).loops
    details = str(plan).splitlines()
    assert [
        line for line in plan.text().splitlines() if line in details
    ] == plan.text().splitlines()
    assert any("dot_general float32[2,80], 12,800 bytes at " in line for line in details)
    assert any("written by the loop at each step" in line for line in details)
    assert any("    not lax.scan, " in line for line in details)


def test_an_effect_under_a_mask_is_explained():
    """A step that is called at masked steps sees placeholder inputs: whoever asks how the loop runs is told."""

    def printing(c, x):
        jax.debug.print("{}", x)
        return c + x, c

    masks = {"lengths": jnp.array([5, 3]), "mask": jnp.ones((5, 2), bool)}
    for name, mask in masks.items():
        explained = jrnn.explain(
            lambda xs, n=name, m=mask: jrnn.scan(printing, jnp.zeros(2), xs, **{n: m}), XS[:, :, 0]
        )
        assert "get placeholder inputs" in str(explained) and "get placeholder inputs" in str(
            explained.loops[0]
        )


def test_newton_makes_no_loop_to_explain():
    text = str(jrnn.explain(jrnn.scan, step, H0, XS, executor="newton"))
    assert text.startswith("0 loops") and "scan_statistics reports what it does" in text


def test_contractions_in_branches_count():
    w = jnp.ones((4, 4))

    def last(xs):
        return jrnn.scan(
            lambda h, x: (jnp.tanh(h @ w + x), h), H0, xs, until=lambda h: jnp.any(h > 9)
        )[0]

    assert jrnn.explain(last, XS).loops == ()
    assert jrnn.explain(jax.grad(lambda xs: jnp.sum(last(xs))), XS).loops[0].contractions == 1


def test_lines_of_libraries_are_relative_to_site_packages():
    @nnx.jit
    @nnx.grad
    @jrnn.optimize_scans()
    def train(model, xs):
        return jnp.sum(model(xs))

    explained = jrnn.explain(
        train, nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))), jnp.ones((2, 5, 3))
    )
    assert " at flax/nnx/" in str(explained.loops[0])
    text = str(explained)
    assert (
        text.startswith("2 loops: ")
        and "  forward loop of 5 steps" in text
        and "\ndetails: print .loops[" in text
    )
    assert "jrnn.optimize_scans()" in str(jrnn.explain(jnp.sin, 1.0)), "what to do"


@pytest.mark.parametrize(
    "arguments",
    [
        (step, 0.0, [1.0, 2.0]),
        (step, H0, 3.0),
        (step, H0, "abc"),
        (H0, step, XS),
        (step, H0, XS, 7),
    ],
    ids=["numbers", "a number", "text", "exchanged", "length"],
)
def test_a_mistake_raises_what_lax_scan_raises(arguments):
    with pytest.raises((TypeError, ValueError)) as theirs:
        jax.lax.scan(*arguments)
    for function in (jrnn.scan, functools.partial(jrnn.explain, jrnn.scan)):
        with pytest.raises(theirs.type) as ours:
            function(*arguments)
        assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(lengths=jnp.array([3, 9])), "lengths must lie between 0 and T = 5, but one is 9"),
        (dict(lengths=[-1, 3]), "but one is -1"),
        (dict(lengths=jnp.ones((5, 2), bool)), "give booleans .T, N. as mask="),
        (dict(until=True), "until must be a function of the carry"),
        (dict(memory=-2), "memory must be None or a positive factor"),
    ],
    ids=["too long", "negative", "mask", "until", "memory"],
)
def test_a_mistake_in_an_option_says_what_to_give(options, message):
    with pytest.raises(jrnn.errors.ScanError, match=message):
        jrnn.scan(step, H0, XS, **options)


@pytest.mark.parametrize("form", [jnp.asarray, list], ids=["array", "list"])
def test_lengths_that_are_not_known_are_cut(form):
    run = jax.jit(lambda lengths: jrnn.scan(step, H0, XS, lengths=form(lengths)))
    actual, expected = run(jnp.array([9, -2])), run(jnp.array([5, 0]))
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)))


def test_the_rounds_of_random_numbers_are_no_loops_of_the_program():
    """JAX lowers a draw to a loop of 5 steps, within the context that tags the loops of the program."""

    @jrnn.optimize_scans(strict=True)
    def noisy(xs, key):
        xs = xs + jax.random.normal(key, xs.shape)
        return jax.lax.scan(step, H0, xs)

    explained = jrnn.explain(noisy, XS[:4], jax.random.key(0))
    assert [plan.loop.length for plan in explained.loops] == [4]


def test_what_is_written_as_arithmetic_is_named():
    def dropout(h, key):
        return jnp.tanh(h * jax.random.bernoulli(key, 0.5, h.shape)), None

    def sorting(h, x):
        return jnp.sort(h + x), None

    def product(h, x):
        return jnp.sort(h @ (jnp.ones((4, 4)) + x)), None

    keys = jax.random.split(jax.random.key(0), 5)
    for fn, xs, said in (
        (dropout, keys, "draws of random numbers are written"),
        (sorting, XS, "small sorts are written"),
        (product, XS[:, :1, :], "written as arithmetic"),
    ):
        text = str(jrnn.explain(jrnn.scan, fn, H0, xs, executor="arithmetic").loops[0])
        assert said in text, text
        assert "linear algebra" not in text or fn is product
