"""Steps that `jax.vmap` maps over the batch: their matrices stand on the left of products.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import D, H, N, T, draw
from plans_of import scan_plans

from jrnn.loops import scan
from jrnn.loops.passes.sums import dot_smaller_first

pytestmark = pytest.mark.usefixtures("rewritten")

SHAPES = dict(wx=(3 * H, D), wh=(3 * H, H), b=(3 * H,), h0=(N, H), x=(T, N, D))


def gates(p, h, x):
    """A cell of one sequence, as libraries write it that leave the batch to `jax.vmap`."""
    a, b, c = jnp.split(p["wx"] @ x + p["wh"] @ h + p["b"], 3)
    h = jax.nn.sigmoid(a) * h + jnp.tanh(b) * c
    return h, h


def gates_apart(p, h, x):
    """A GRU whose two products are cut before they are added, as Equinox has it."""
    (a, b, c), (u, v, w) = (jnp.split(z, 3) for z in (p["wx"] @ x + p["b"], p["wh"] @ h))
    z = jax.nn.sigmoid(b + v)
    h = z * h + (1 - z) * jnp.tanh(c + jax.nn.sigmoid(a + u) * w)
    return h, h


def rank_one(p, h, x):
    """Products of other ranks: an inner and an outer one of matrices and vectors."""
    inner = jnp.tensordot(p["wh"], jnp.outer(jnp.resize(x, 3 * H), h), 2)
    outer = jnp.tensordot(p["wx"], x[None, :1] * h[:, None], 0).sum((0, 1, 3))
    h = jnp.tanh(inner + outer + jnp.tensordot(h[:, None] * p["wh"].T, p["b"], 1))
    return h, h


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", [gates, gates_apart, rank_one])
@pytest.mark.parametrize("reverse", [False, True])
def test_values_and_gradients(cell, reverse, x64):
    p = jax.tree.map(jnp.asarray, draw(11, **SHAPES))

    def loss(run, p):
        last, ys = run(jax.vmap(functools.partial(cell, p)), p["h0"], p["x"], reverse=reverse)
        return jnp.sum(jnp.sin(last)) + jnp.sum(ys**2)

    ours, theirs = (
        jax.jit(jax.value_and_grad(functools.partial(loss, run)))(p) for run in (scan, jax.lax.scan)
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-12), ours, theirs
    )


@pytest.mark.exhaustive("gates_apart-40")
@pytest.mark.parametrize("cell, size", [(gates, 3 * H), (gates_apart, 10 * H)])
def test_nothing_is_transposed_in_the_loops_or_stacked_twice(cell, size):
    p = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), draw(11, **SHAPES))
    explained = scan_plans(jax.vmap(functools.partial(cell, p)), p["h0"], p["x"])
    for plan in (*explained.forward, *explained.training):
        node = (
            plan.node if hasattr(plan.node, "split_loop") else plan.node.inner
        )  # of the canonical form
        assert "transpose" not in {eqn.primitive.name for eqn in node.split_loop.residual.eqns}
    forward, reverse = explained.training
    assert [item.type for item in forward.hoisted] == [f"float32[{N},{3 * H}]"]
    assert all(item.type.startswith(f"float32[{N},") for item in reverse.stacked)
    assert sum(item.bytes for item in reverse.stacked) <= T * N * size * 4


@pytest.mark.parametrize("rows", [16, 9])
def test_a_matrix_that_the_loop_reads_transposed_is_copied_once(rows):
    """XLA:CPU since jaxlib 0.12 copies a transposition over two axes twice: as it is, then in the other order."""

    def forward(run, w, xs):
        def step(h, x):
            h = jnp.tanh(jax.lax.dot_general(h[:, :D] + x, w, (((1,), (1,)), ((), ()))))
            return h, h

        return run(step, jnp.zeros((1, rows)), xs)[1]

    w, xs = (jnp.asarray(v, jnp.float32) for v in draw(12, w=(rows, D), xs=(T, 1, D)).values())
    program = jax.jit(functools.partial(forward, scan)).lower(w, xs).compile()
    if rows % 2 == 0:
        assert f"f32[{D},{rows}]{{0,1}}" not in program.as_text()
    np.testing.assert_allclose(program(w, xs), forward(jax.lax.scan, w, xs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows, merged", [(4, True), (40, False)])
@pytest.mark.parametrize("m, w", [(32, 64), (64, 32)])
def test_transpositions_are_merged_with_sums_of_few_rows(m, w, rows, merged):
    """For few rows a copy of an operand is smaller than one of the gradient. Kept apart, it took 1.7 times the time."""
    a, b = draw(0, a=(rows, 1, m), b=(rows, 1, w)).values()

    def transposed_gradient(a, b):
        return dot_smaller_first(a, b, ((0, 1), (0, 1)), None, None).T

    program = jax.jit(transposed_gradient).lower(a, b).compile()
    np.testing.assert_allclose(program(a, b), np.einsum("tnm,tnw->wm", a, b), rtol=1e-5, atol=1e-5)
    products = set(
        re.findall(r"= f\d+(\[\d+,\d+\])\S* (?:dot|fusion|custom-call)\(", program.as_text())
    )
    assert (f"[{m},{w}]" not in products) == (merged or m > w), (
        products
    )  # the smaller operand is first
