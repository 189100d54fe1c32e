"""Loops with matrix states in chunks that are prepared at once, as on accelerators: the properties of those that are not."""

import functools

import chunk_layers as layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_matrix_states import (  # noqa: F401
    assert_close,
    loss,
    problem,
    test_a_product_that_the_recurrence_does_not_have_may_overflow,
    test_a_step_trains_in_chunks_as_step_by_step,
    test_bfloat16_inputs_with_a_float32_state,
    test_few_steps,
    test_float32_with_strong_and_weak_decay,
    test_jvp_and_second_derivatives,
    test_products_of_cotangents_that_the_recurrence_does_not_have_may_overflow,
    test_reverse_lengths_and_resets,
    test_vmap_of_the_gradient,
    test_what_is_not_finite_stays_where_the_recurrence_has_it,
)

import jrnn
from jrnn import jaxprs
from jrnn.loops.affine.chunkwise import batched
from jrnn.loops.affine.chunkwise.labeled import Labeled
from jrnn.loops.affine.chunkwise.vector_decay import VectorDecay
from jrnn.loops.costs.target import Target
from jrnn.loops.explanations.explain import plans_in
from jrnn.loops.strategies import try_chunks

pytestmark = pytest.mark.usefixtures("rewritten", "batched_chunks")


@pytest.fixture
def batched_chunks(in_chunks_always, monkeypatch):
    """Chunks are prepared at once on this platform, too. Returns the chunks that were."""
    seen, run = [], batched.AllChunks.run
    monkeypatch.setattr(try_chunks, "prefers_batched", lambda target: True)
    monkeypatch.setattr(
        batched.AllChunks, "run", lambda self, *args: seen.append(self) or run(self, *args)
    )
    return seen


def test_accelerators_prepare_chunks_at_once(monkeypatch):
    monkeypatch.undo()
    platforms = ("cpu", "cuda", "rocm", "tpu")
    assert [try_chunks.prefers_batched(Target(platform)) for platform in platforms] == [
        False,
        True,
        True,
        True,
    ]


def program_of(step):
    """The jaxpr of a training step of 8 chunks."""
    init, xs = problem(step, 512, jnp.float32)
    given = {n: xs[n] for n in ("q", "k", "v")}
    return jax.make_jaxpr(jax.grad(lambda given: loss(jrnn.scan, step, init, {**xs, **given})[0]))(
        given
    ).jaxpr


def over_chunks(jaxpr):
    """The bodies of the loops over chunks, with all their equations."""
    loops = [e for e in jaxpr.eqns if e.primitive.name == "scan" and e.params["length"] == 8]
    return [list(jaxprs.all_equations(loop.params["jaxpr"].jaxpr)) for loop in loops]


@pytest.mark.parametrize(
    "step, products", [(layers.gla, [0]), (layers.gated_delta, [3])], ids=["gla", "gated_delta"]
)
def test_only_products_that_lead_to_the_next_state_stay_in_the_loop(step, products, batched_chunks):
    loops = over_chunks(program_of(step))
    assert [sum(e.primitive.name == "dot_general" for e in body) for body in loops] == products
    assert batched_chunks


def test_one_condition_decides_for_all_chunks(batched_chunks):
    jaxpr = program_of(layers.gated_delta)
    assert sum(e.primitive.name == "cond" for e in jaxpr.eqns) == 1
    assert not [e for body in over_chunks(jaxpr) for e in body if e.primitive.name == "cond"]
    assert batched_chunks


@pytest.mark.parametrize("growth, by_steps", [(0.0, False), (0.2, True)])
@pytest.mark.parametrize("step, decay", [(layers.gated_delta, "g"), (layers.gla, "gk")])
def test_growing_decays_run_step_by_step(step, decay, growth, by_steps, batched_chunks):
    init, xs = problem(step, 128, jnp.float32)
    xs[decay] = np.full_like(xs[decay], growth)
    ours, theirs = (
        jax.jit(functools.partial(scan, step))(init, xs) for scan in (chunked, jax.lax.scan)
    )
    equal = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs))]
    assert all(equal) == by_steps
    assert batched_chunks


def chunked(step, init, xs):
    """The values of a loop that is being differentiated."""
    return jax.jvp(lambda q: jrnn.scan(step, init, {**xs, "q": q}), (xs["q"],), (xs["q"],))[0]


def test_the_largest_product_of_vector_decays():
    decays = np.random.default_rng(0).uniform(-1.6, 1.6, (8, 2, 3)).astype(np.float32)
    products = [1.0]
    for length in (2, 4, 8):
        for start in range(0, 8, length):
            block = np.abs(decays[start : start + length])
            for cut in range(1, length):
                products += [block[:cut].prod(0).max(), block[cut:].prod(0).max()]
    decay = VectorDecay(8, 1, None, Labeled(jnp.asarray(decays), ("T", 0, 1)), True)
    np.testing.assert_allclose(decay.largest(), max(products), rtol=1e-6)


def plans_on_a_gpu(step, init, xs, **options):
    closed = jax.make_jaxpr(functools.partial(jrnn.scan, step, **options))(init, xs)
    return plans_in(closed.jaxpr, Target("cuda"))


def test_loops_without_a_gradient_run_in_chunks_too(in_chunks_always):
    init, xs = problem(layers.gated_delta, 256, jnp.float32)
    (plan,) = plans_on_a_gpu(layers.gated_delta, init, xs)
    assert plan.strategy == "chunks"
    run = jax.jit(
        lambda init, xs: plan.node.run([], jax.tree.leaves(init), jax.tree.leaves(xs), 256)
    )
    expected = jax.lax.scan(layers.gated_delta, init, xs)
    assert_close((run(init, xs), expected), 1e-5)


@pytest.mark.parametrize(
    "options", [{"memory": 2.0}, {"executor": "scan"}], ids=["memory", "executor"]
)
def test_a_bound_of_memory_or_an_executor_keeps_loops_without_a_gradient_step_by_step(
    options, in_chunks_always
):
    (plan,) = plans_on_a_gpu(
        layers.gated_delta, *problem(layers.gated_delta, 256, jnp.float32), **options
    )
    assert plan.strategy == "scan"


@pytest.mark.parametrize("width, reads_after", [(4, True), (64, False)])
def test_a_loop_does_not_stack_states_to_read_them_after_it(width, reads_after):
    def step(S, x):
        S = jnp.tanh(S + jnp.outer(x, x))
        return S, S @ x

    (plan,) = plans_on_a_gpu(step, jnp.ones((width, width)), jnp.ones((32, width)), executor="scan")
    assert bool(plan.sunk) == reads_after
