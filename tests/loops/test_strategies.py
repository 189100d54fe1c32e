"""A strategy that is not part of jrnn (`toy_strategy.py`) runs loops, forward and reverse, by name and by estimates."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_strategy
from plans_of import scan_plans

import jrnn
from jrnn.errors import ScanError
from jrnn.loops import compile as compiling
from jrnn.loops.costs.target import Target
from jrnn.loops.explanations.explain import plans_in

pytestmark = pytest.mark.usefixtures("rewritten")

XS = np.random.RandomState(0).randn(12, 3).astype(np.float32)
INIT = np.random.RandomState(1).randn(3).astype(np.float32)


by_cumsum = functools.partial(jrnn.scan, executor="cumsum")


@pytest.fixture(autouse=True)
def toy():
    """The toy is one line more in the lists of strategies, the first of all."""
    lists = (compiling.ON_CPU, compiling.ON_ACCELERATORS)
    before = [dict(strategies) for strategies in lists]
    for strategies, others in zip(lists, before):
        strategies.clear()
        strategies["cumsum"] = toy_strategy.try_cumsum
        strategies.update(others)
    yield
    for strategies, others in zip(lists, before):
        strategies.clear()
        strategies.update(others)


def cumulative(carry, x):
    total = carry + x
    return total, total


def lowered(fn, *args):
    return jax.jit(fn).lower(*args).as_text()


def close(actual, wanted):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, wanted
    )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "step",
    [
        cumulative,
        lambda c, x: (x + c, x + c),
        lambda c, x: (c + x, (c + x, x)),
        lambda c, x: (c + x, [c + x, c + x]),
        lambda c, x: (c + x, (c + x).reshape(3)),
    ],
    ids=["named once", "x first", "x passed through", "two outputs", "nothing reshaped"],
)
def test_a_cumulative_sum_is_no_loop(step, reverse):
    def run(scan):
        return lambda init, xs: scan(step, init, xs, reverse=reverse)

    text = lowered(run(by_cumsum), INIT, XS)
    assert "cumsum" in text and "while" not in text
    assert "while" in lowered(run(jax.lax.scan), INIT, XS)
    close(run(by_cumsum)(INIT, XS), run(jax.lax.scan)(INIT, XS))
    explained = scan_plans(step, INIT, XS, reverse=reverse, executor="cumsum")
    assert explained.strategy == "cumsum" and "all steps run as one jnp.cumsum" in str(explained)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_loop_of_its_gradient_is_a_cumulative_sum_too(reverse):
    def gradient(scan):
        def loss(init, xs):
            last, sums = scan(cumulative, init, xs, reverse=reverse)
            return jnp.sum(jnp.sin(sums)) + jnp.sum(last**2)

        return jax.grad(loss, argnums=(0, 1))

    assert "while" not in lowered(gradient(by_cumsum), INIT, XS)
    close(jax.jit(gradient(by_cumsum))(INIT, XS), gradient(jax.lax.scan)(INIT, XS))
    plans = scan_plans(cumulative, INIT, XS, reverse=reverse, executor="cumsum").training
    assert [(plan.strategy, plan.loop.reverse) for plan in plans] == [
        ("cumsum", reverse),
        ("cumsum", not reverse),
    ]


ONE_OF_EACH = "a cumulative sum has one carry, one input, one equation and an output"
LEFT = {
    "last only": (ONE_OF_EACH, lambda c, x: (c + x, None), INIT),
    "no input": (ONE_OF_EACH, lambda c, x: (c + 1, c + 1), INIT),
    "two equations": (ONE_OF_EACH, lambda c, x: (c + 2 * x, c + 2 * x), INIT),
    "two carries": (ONE_OF_EACH, lambda c, x: ((c[0] + x, c[1] * x), c[0] + x), (INIT, INIT)),
    "a product": ("its step is not carry + x", lambda c, x: (c * x, c * x), INIT),
    "a difference": ("its step is not carry + x", lambda c, x: (c - x, c - x), INIT),
    "the sum before": (
        "the sum is not both the new carry and the output",
        lambda c, x: (c + x, c),
        INIT,
    ),
    "one of two outputs": ("the sum is not both", lambda c, x: (c + x, (c + x, c)), INIT),
    "integers": ("its dtype is int32, not a float", cumulative, np.int32([1, 2, 3])),
    "complex numbers": ("its dtype is complex64, not a float", cumulative, np.complex64([1, 2, 3])),
}


@pytest.mark.parametrize("why, step, init", LEFT.values(), ids=LEFT)
def test_another_loop_is_left_with_a_reason(why, step, init):
    dtype = jax.tree.leaves(init)[0].dtype
    xs = XS.astype(dtype) if dtype != np.int32 else np.arange(36, dtype=dtype).reshape(12, 3)
    assert "while" in lowered(lambda *args: by_cumsum(step, *args), init, xs)
    close(by_cumsum(step, init, xs), jax.lax.scan(step, init, xs))
    explained = scan_plans(step, init, xs, executor="cumsum")
    assert explained.strategy == "scan" and f"not cumsum: {why}" in str(explained)


@pytest.mark.usefixtures("without_kernel")
def test_the_chooser_compares_it_with_other_strategies():
    def chosen(step, steps, columns=64):
        (plan,) = scan_plans(step, jnp.ones(columns), jnp.ones((steps, columns))).forward
        return plan

    plan = chosen(cumulative, 2000)
    assert plan.strategy == "cumsum" and plan.baseline.seconds > plan.chosen.estimate.seconds
    assert "not cumsum, 53.3 us, 1.28 MB: more than 1.00 MB" in str(chosen(cumulative, 5000))
    assert (
        chosen(lambda c, x: (jnp.sin(c + x), c), 2000)
        .notes[0]
        .startswith(f"not cumsum: {ONE_OF_EACH}")
    )
    assert chosen(cumulative, 2000, 2).strategy == "lax.scan", (
        "it is left alone before a strategy is asked"
    )


def test_a_loop_of_symbolic_length_is_left_with_a_reason():
    (steps,) = jax.export.symbolic_shape("T")
    xs = jax.ShapeDtypeStruct((steps, 3), np.float32)
    program = jax.export.export(jax.jit(lambda xs: by_cumsum(cumulative, INIT, xs)))(xs)
    close(program.call(XS), jax.lax.scan(cumulative, INIT, XS))
    assert "not cumsum: the number of steps is symbolic" in str(
        scan_plans(cumulative, INIT, xs, executor="cumsum")
    )


def test_strict_reports_the_reason():
    with pytest.raises(ScanError, match="strict=True.*not cumsum: its step is not carry"):
        jax.jit(lambda xs: by_cumsum(lambda c, x: (c * x, c * x), INIT, xs, strict=True))(XS)


def test_batches_of_marked_loops_of_jax():
    batched = jax.vmap(lambda init, xs: jax.lax.scan(cumulative, init, xs), in_axes=(0, 1))
    fn = jax.jit(jrnn.optimize_scans(executor="cumsum")(batched))
    assert "while" not in lowered(fn, INIT, XS)
    assert [plan.strategy for plan in jrnn.explain(fn, INIT, XS).loops] == ["cumsum"]
    close(fn(INIT, XS), batched(INIT, XS))


def test_a_toy_is_short():
    assert len(Path(toy_strategy.__file__).read_text().splitlines()) < 60


def test_any_strategy_can_be_asked_for_by_name():
    """What is asked for is not compared."""

    def solved(h, x):
        return jnp.linalg.solve(jnp.eye(2) * 3 + h, x), None

    def delta(S, x):
        q, k, v = x
        return (S := S + k[:, None] * (v - k @ S)[None, :]), q @ S

    def executors(step, init, xs, executor):
        plans = scan_plans(step, init, xs, executor=executor)
        return [plan.strategy for plan in (*plans.forward, *plans.training)]

    pairs, vectors = jnp.ones((9, 2, 2)), (jnp.ones((9, 4)) / 2,) * 3
    assert executors(solved, jnp.ones((2, 2)), pairs, "arithmetic")[0] == "arithmetic"
    assert executors(solved, jnp.ones((2, 2)), pairs, "scan")[0] == "scan"
    assert executors(delta, jnp.zeros((4, 4)), vectors, "chunks")[1] == "chunks"
    assert "chunks" not in executors(delta, jnp.zeros((4, 4)), vectors, "auto")


def test_a_strategy_of_another_platform_says_so():
    jaxpr = jax.make_jaxpr(lambda xs: jrnn.scan(cumulative, INIT, xs, executor="arithmetic"))(
        XS
    ).jaxpr
    (plan,) = plans_in(jaxpr, Target("cuda"))
    assert plan.strategy == "scan" and plan.notes == ("not arithmetic: it runs on cpu alone",)
