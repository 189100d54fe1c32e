"""A marked scan among the parts of JAX around it: tracebacks, names of scopes, caches of traces, `jax_remat3`."""

import functools
import gc
import traceback
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jrnn import jaxprs
from jrnn.loops import compile as compiling
from jrnn.loops import scan
from jrnn.loops.ir import Tag, tag


def step_that_raises(carry, x):
    raise AssertionError("from the step")


@pytest.mark.parametrize(
    "keywords", [{}, {"recompute": 2}, {"lengths": jnp.array([2, 3])}], ids=str
)
@pytest.mark.parametrize("mode", ["quiet_remove_frames", "remove_frames"])
def test_a_traceback_shows_the_frames_of_users_only(mode, keywords):
    filtering = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", mode)
    try:
        scan(step_that_raises, jnp.zeros(2), jnp.zeros((3, 2)), **keywords)
    except AssertionError as error:
        frames = traceback.extract_tb(error.__traceback__)
    finally:
        jax.config.update("jax_traceback_filtering", filtering)
    named = [frame.name for frame in frames]
    ours = ["test_a_traceback_shows_the_frames_of_users_only", "step_that_raises"]
    assert [name for name in named if name != "reraise_with_filtered_traceback"] == ours


def name_stacks(scan, transform):
    def step(carry, x):
        with jax.named_scope("cell"):
            carry = jnp.tanh(carry * x)
        with jax.named_scope("readout"):
            return carry, jnp.sin(carry)

    def loss(init):
        return scan(step, init, jnp.arange(3.0))[1].sum()

    jaxpr = jax.make_jaxpr(transform(loss))(1.0).jaxpr
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    return [
        {str(eqn.source_info.name_stack) for eqn in loop.params["jaxpr"].eqns} for loop in loops
    ]


@pytest.mark.parametrize(
    "transform", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))], ids=["grad", "jvp"]
)
def test_scopes_in_a_differentiated_step_have_the_names_of_lax_scan(transform):
    forward, expected = (name_stacks(s, transform)[0] for s in (scan, jax.lax.scan))
    assert {"cell", "readout"} <= forward <= expected | {""}


@pytest.mark.exhaustive("scan")
@pytest.mark.parametrize("wrapped", [False, True], ids=["scan", "scan in a checkpoint"])
def test_gradients_with_the_second_implementation_of_checkpoint(wrapped):
    def loss(scan, w):
        def run(w):
            return scan(
                lambda c, x: (jnp.tanh(c @ w + x), c.sum()), jnp.ones((2, 3)), jnp.ones((4, 2, 3))
            )

        carry, ys = (jax.checkpoint(run) if wrapped else run)(w)
        return carry.sum() + ys.sum()

    jax.config.update("jax_remat3", True)
    try:
        actual, expected = (
            jax.grad(functools.partial(loss, s))(jnp.eye(3)) for s in (scan, jax.lax.scan)
        )
    finally:
        jax.config.update("jax_remat3", False)
    assert jnp.allclose(actual, expected, rtol=1e-6)


def test_a_policy_around_the_loop_offloads_what_it_names_and_nothing_else():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["z", "h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def moves(scan):
        def step(h, x):
            z = checkpoint_name(jnp.sin(h) * x, "z")
            h = checkpoint_name(jnp.sin(z), "h")
            return h, jnp.sum(h * z)

        def loss(h):
            return scan(step, h, jnp.arange(3.0))[1].sum()

        text = str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(jnp.arange(4.0)))
        return [text.count(f"MemorySpace.{space}") for space in ("Host", "Device")]

    assert moves(scan) == moves(jax.lax.scan) == [2, 2]


def test_a_jitted_function_is_traced_once_inside_and_outside_of_a_step():
    traces = []

    @jax.jit
    def add(carry, x):
        traces.append(1)
        return carry + x, None

    scan(add, jnp.float32(0), jnp.arange(4.0))
    add(jnp.float32(0), jnp.float32(1))
    assert len(traces) == 1


def test_the_mark_is_of_the_loop_and_not_of_those_in_its_step():
    def inner(carry, x):
        return carry * x, None

    def loops(outer):
        jaxpr = jax.make_jaxpr(lambda xs: outer(lambda c, x: jax.lax.scan(inner, c, x), 1.0, xs))(
            jnp.ones((3, 4))
        ).jaxpr
        marks = [
            tag.tag_in(e.ctx.xla_metadata)
            for e in jaxprs.all_equations(jaxpr)
            if e.primitive.name == "scan"
        ]
        return [mark is not None for mark in marks]

    assert loops(scan) == [True, False]
    with tag.tagged(Tag()):  # as `optimize_scans` does
        assert loops(jax.lax.scan) == loops(scan) == [True, True]


def test_clear_caches_forgets_plans():
    jax.jit(lambda xs: scan(lambda c, x: (jnp.tanh(c + x), c), xs[0], xs)).lower(jnp.ones((4, 3)))
    plans = compiling.compile_loop.cache_info
    assert plans().currsize
    jax.clear_caches()
    assert not plans().currsize


def test_a_step_is_freed_with_what_it_holds():
    def run():
        weights = jnp.ones(3)

        def step(c, x):
            return c + weights, None

        scan(step, jnp.zeros(3), jnp.zeros((2, 3)))
        return weakref.ref(step)

    freed = run()
    gc.collect()
    assert freed() is None
