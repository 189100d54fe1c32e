"""What `explain_scan` and `explain` print, and the errors of mistakes in their arguments."""

import jax
import jax.numpy as jnp
import pytest
from cases import lstm_step
from flax import nnx

import jrnn

pytestmark = pytest.mark.usefixtures("judged")

H0, XS = jnp.zeros((2, 4)), jnp.ones((5, 2, 4))


def step(h, x):
    return jnp.tanh(h + x), h


def test_the_text_of_an_lstm_with_lengths_has_at_most_15_lines():
    p = dict(wx=jnp.ones((32, 256)), wh=jnp.ones((64, 256)), b=jnp.ones((1, 256)))
    explained = jrnn.explain_scan(
        lstm_step(p), (jnp.zeros((16, 64)),) * 2, jnp.ones((100, 16, 32)), lengths=jnp.full(16, 50)
    )
    lines = str(explained).splitlines()
    assert len(lines) <= 15
    assert lines[0].startswith("without a gradient: estimated ") and lines[0].endswith("as lax.scan")
    assert sum(line.startswith("  forward loop") for line in lines) == 2
    assert any(line.startswith("with a gradient: estimated ") and ", lax.scan " in line for line in lines)
    assert "    summed after the loop instead of carried: 3 values, 99,328 bytes" in lines
    assert "    contractions in the loop: 1 (lax.scan: 4)" in lines, "of the reverse loop"
    assert lines[-1] == "details: print(explain_scan(...).training[1])"


def test_a_loop_that_is_left_as_it_is_has_one_estimate():
    lines = str(jrnn.explain_scan(step, H0, XS)).splitlines()
    assert lines[0].endswith("on one core, as lax.scan") and not any("(lax.scan" in line for line in lines)
    whole = str(jrnn.explain_scan(lambda h, x: (h + x, h), jnp.zeros(2, int), jnp.ones((3, 2), int)))
    assert "with a gradient: nothing has one" in whole and "(...).forward[0])" in whole


def test_the_loops_inside_of_a_loop_in_chunks_are_not_printed():
    def delta(S, x):
        k, v = x
        return S + jnp.outer(k, v - k @ S), k @ S

    explained = jrnn.explain_scan(delta, jnp.zeros((64, 64)), (jnp.ones((512, 64)),) * 2)
    assert len(explained.training) > 1 and explained.training[0].executor == "chunks"
    text = str(explained)
    assert text.count(" loop of ") == 2 and ".training[1:] are loops inside of that" in text
    assert "(...).training[0])" in text


def test_contractions_in_branches_count():
    w = jnp.ones((4, 4))
    explained = jrnn.explain_scan(lambda h, x: (jnp.tanh(h @ w + x), h), H0, XS, until=lambda h: jnp.any(h > 9))
    assert str(explained).startswith("without a gradient: a while loop") and explained.training[0].contractions == 1


def test_lines_of_libraries_are_relative_to_site_packages():
    @nnx.jit
    @nnx.grad
    @jrnn.optimize_scans()
    def train(model, xs):
        return jnp.sum(model(xs))

    explained = jrnn.explain(train, nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))), jnp.ones((2, 5, 3)))
    assert " at flax/nnx/" in str(explained.loops[0])
    text = str(explained)
    assert text.startswith("loop 1 of 2: forward loop of 5 steps") and text.endswith(
        "details: print(explain(...).loops[1])"
    )
    assert "jrnn.optimize_scans()" in str(jrnn.explain(jnp.sin, 1.0)), "what to do"


@pytest.mark.parametrize(
    "arguments",
    [(step, 0.0, [1.0, 2.0]), (step, H0, 3.0), (step, H0, "abc"), (H0, step, XS), (step, H0, XS, 7)],
    ids=["numbers", "a number", "text", "exchanged", "length"],
)
def test_a_mistake_raises_what_lax_scan_raises(arguments):
    with pytest.raises((TypeError, ValueError)) as theirs:
        jax.lax.scan(*arguments)
    for function in (jrnn.scan, jrnn.explain_scan):
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
        (dict(memory=2), "give 2.0 for a factor"),
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
