"""Loops whose step is in a `jax.checkpoint`: in pieces, with the same gradients, in the memory that it promises."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from spelled_cells import problem
from spellings import programs

from jrnn.bench.peers import in_mode
from jrnn.bench.sizes import Size
from jrnn.jaxprs import all_equations, sub_jaxprs
from jrnn.jaxprs.jax_internals import XLA_KEEPS_BARRIERS
from jrnn.loops import scan
from jrnn.loops.derivatives import checkpointed
from jrnn.loops.ir import observers, strict_passes
from jrnn.loops.kernels.native import library

SIZE = Size.parse("64x32x64x256")
CHECKPOINTED = "a checkpointed step"


def train(cell, spelling, which=scan):
    return in_mode(programs(cell, SIZE, which, "train")[spelling], "train")


def steps_of(fn, *args):
    """The lengths of the forward loops and of the reverse loops of a program."""

    def loops_in(jaxpr):
        """A jaxpr that is called several times counts each time."""
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan":
                yield eqn.params
            for inner in sub_jaxprs(eqn):
                yield from loops_in(inner)

    loops = list(loops_in(jax.make_jaxpr(fn)(*args).jaxpr))
    return [
        [loop["length"] for loop in loops if loop["reverse"] == reverse]
        for reverse in (False, True)
    ]


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.skipif(not XLA_KEEPS_BARRIERS, reason="all pieces are in a loop, and computed again")
def test_the_last_piece_is_not_computed_again(cell):
    forward, reverse = steps_of(train(cell, CHECKPOINTED), *problem(cell, SIZE))
    assert sum(reverse) == SIZE.steps and len(reverse) > 1
    assert sum(forward) == 2 * SIZE.steps - max(reverse), "the last piece is the longest"


@pytest.mark.skipif(
    bool(library.loaded().reason),
    reason="the sizes of pieces are those of the plans with the kernel",
)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_memory_is_what_a_checkpoint_promises(cell):
    def temporary(which):
        compiled = jax.jit(train(cell, CHECKPOINTED, which)).lower(*problem(cell, SIZE)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(scan) < 1.1 * temporary(jax.lax.scan) + 1e6


POLICIES = {
    "dots": jax.checkpoint_policies.checkpoint_dots,
    "dots without rows": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("product"),
}


@pytest.mark.parametrize("size, length", [(5, 2), (64, 64)])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_policy_decides_what_is_computed_again(policy, size, length):
    @functools.partial(jax.checkpoint, policy=policy)
    def cell(w, h):
        for _ in range(2):
            h = jnp.sin(checkpoint_name(h @ w, "product"))
        return h

    def counts(loop):
        def last(w):
            return loop(lambda h, _: (cell(w, h), None), jnp.ones(size), None, length)[0]

        w = jnp.ones((size, size))
        backward = jax.make_jaxpr(jax.vjp(last, w)[1])(jnp.ones(size)).jaxpr
        whole = jax.make_jaxpr(jax.grad(lambda w: jnp.sum(last(w))))(w).jaxpr
        names = [Counter(e.primitive.name for e in all_equations(j)) for j in (backward, whole)]
        return [[each[name] for name in ("sin", "cos", "dot_general")] for each in names]

    assert counts(scan) == counts(jax.lax.scan)


@pytest.mark.parametrize("count, reverse", [(1, False), (3, False), (3, True), (4, True)])
def test_gradients_are_those_of_lax_scan(count, reverse, monkeypatch, x64):
    monkeypatch.setattr(checkpointed, "_count_segments", lambda *_: count)
    rng = np.random.default_rng(0)
    w, xs = jnp.asarray(0.2 * rng.normal(size=(4, 8))), jnp.asarray(rng.normal(size=(11, 3, 4)))

    @jax.checkpoint
    def step(h, t):
        x, k = t
        a, b = jnp.split(jnp.tanh(x @ w) + h @ w, 2, -1)
        return jnp.sin(a) * h + 0.5 * b, (a.sum(-1), k + 1)

    def loss(which, h, xs):
        last, (sums, counts) = which(step, h, (xs, jnp.arange(11)), reverse=reverse)
        return jnp.sum(last**2) + jnp.sum(jnp.sin(sums)) + jnp.sum(counts)

    h = jnp.ones((3, 4))
    ours = jax.jit(jax.grad(functools.partial(loss, scan), argnums=(0, 1)))(h, xs)
    expected = by_numpy(jax.grad(functools.partial(loss, jax.lax.scan), argnums=(0, 1)))(h, xs)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11), ours, expected
    )


@pytest.mark.parametrize("kind", ["names", "control flow", "recompute", "no checkpoint"])
def test_other_steps_are_left_alone(kind, monkeypatch):
    """A policy that JAX alone can obey, a step with control flow, and one that the caller's option is about."""
    counted = []
    monkeypatch.setattr(checkpointed, "_tagged", lambda *args: counted.append(args))
    w = jnp.ones((256, 256))

    def step(h, x):
        h = checkpoint_name(jnp.tanh(h @ w + x), "h")
        h = jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, h) if kind == "control flow" else jnp.sin(h)
        return h, h

    policy = jax.checkpoint_policies.save_only_these_names("h") if kind == "names" else None
    body = step if kind == "no checkpoint" else jax.checkpoint(step, policy=policy)
    options = {"recompute": "contractions"} if kind == "recompute" else {}
    loss = lambda h: jnp.sum(scan(body, h, jnp.ones((64, 32, 256)), **options)[1])  # noqa: E731
    jax.make_jaxpr(jax.grad(loss))(jnp.ones((32, 256)))
    assert not counted


def test_inside_of_shard_map():
    """The types of a step inside of it say over which axes of the mesh its values vary."""
    w, xs = 0.05 * jnp.ones((256, 256)), jnp.ones((64, 32, 256))
    step = jax.checkpoint(lambda h, x, w: (h := jnp.tanh(h @ w + x), h))
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(None, "d")), out_specs=P())
    def loss(w, xs):
        ys = scan(lambda h, x: step(h, x, w), jnp.zeros_like(xs[0]), xs)[1]
        return jax.lax.psum(jnp.sum(ys), "d")

    counts = []
    with strict_passes(True), observers.collected() as plans:
        jax.make_jaxpr(jax.grad(loss))(w, xs)
        counts += [note for note in plans.notes if "jax.checkpoint" in note]
    assert counts
