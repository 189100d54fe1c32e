"""Passes over a step of 2 n equations take about twice the operations that they take over n equations.

Operations are the instructions of Python that the package runs. Nothing looks at a clock.
"""

from __future__ import annotations

import itertools
import os
import sys

import jax
import jax.numpy as jnp
import pytest

import jrnn
from jrnn.jaxprs import axes, carry_groups
from jrnn.loops.affine import associative
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.ir import traced_loops
from jrnn.loops.kernels.native.operations import Array, Operation, View
from jrnn.loops.kernels.native.stages import schedule
from jrnn.loops.passes import compose_views, gates, pads_to_concatenate, split
from jrnn.loops.passes.canonical.shared_operands import join_products
from jrnn.loops.passes.gpu_one_kernel import one_kernel_per_stage
from jrnn.loops.segments.starts import stages

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="instructions are counted by sys.monitoring"
)

TOOL = 4  # of `sys.monitoring`, whose numbers up to 5 are for any tool
FOLDER = os.path.dirname(jrnn.__file__) + os.sep
H = 4
GROWTH = 2.2  # from 32 to 64, n grows to twice as much, and n^2 to 4 times


def operations_of(run):
    """Returns how many instructions of the package run."""
    monitoring = sys.monitoring
    event = monitoring.events.INSTRUCTION
    count = 0

    def each(code, offset):
        nonlocal count
        if not code.co_filename.startswith(FOLDER):
            return monitoring.DISABLE
        count += 1
        return None

    monitoring.use_tool_id(TOOL, "growth of passes")
    monitoring.register_callback(TOOL, event, each)
    monitoring.set_events(TOOL, event)
    try:
        run()
    finally:
        monitoring.set_events(TOOL, monitoring.events.NO_EVENTS)
        monitoring.register_callback(TOOL, event, None)
        monitoring.free_tool_id(TOOL)
    return count


def loop_of(step, init, xs, reverse=False):
    """The loop of a step, or its reverse loop."""

    def run(init, xs):
        return jax.lax.scan(step, init, xs)[1]

    def gradient(init, xs):
        return jax.vjp(run, init, xs)[1](jnp.ones((8, H)))

    return traced_loops(gradient if reverse else run, init, xs)[-1]


def vectors(n):
    return tuple(jnp.ones(H) for _ in range(n))


def axes_in_a_chain(n):
    (eqn,) = jax.make_jaxpr(jnp.split, static_argnums=1)(jnp.ones(n), n).eqns[-1:]

    def run():
        classes = axes.Classes()
        for a, b in itertools.pairwise(eqn.outvars):
            classes.join(a, 0, b, 0)
        assert len({classes.root((v, 0)) for v in eqn.outvars}) == 1

    return run


def units(h, x):
    """Gates of n units, each of a slice of its own."""
    for q in jnp.split(x, x.shape[-1] // H, axis=-1):
        h = jax.nn.sigmoid(q) * h + jnp.tanh(q)
    return h, h


def an_estimate_of_units(n):
    loop = loop_of(units, jnp.ones(H), jnp.ones((8, n * H)), reverse=True)
    return lambda: Estimator(loop).whole()


def an_estimate_of_selections(n):
    def step(y, x):
        for i in range(n):
            y = jnp.where(y > i, y / 2, jnp.maximum(y, 0.1))
        return y, y

    loop = loop_of(step, jnp.ones(H), jnp.ones((8, H)), reverse=True)
    return lambda: Estimator(loop).whole()


def sums_of_products(n):
    a, *biases = jnp.ones((n + 2, H, H))

    def step(h, x):
        gates = [h @ a, h @ (2 * a)]
        for b in biases:
            gates = [gates[0] + b[0], gates[1] + b[1]]
        return jnp.tanh(gates[0]) * gates[1], x

    loop = loop_of(step, jnp.ones(H), jnp.ones((32, H)))
    assert join_products(loop) is not loop
    return lambda: join_products(loop)


def cotangents_of_slices(n):
    def step(h, x):
        for i in range(n):
            h = jnp.sin(h) + x[i]
        return h, h

    loop = loop_of(step, jnp.ones(H), jnp.ones((8, n, H)), reverse=True)
    names = [eqn.primitive.name for eqn in pads_to_concatenate(loop).eqns]
    assert "pad" not in names
    return lambda: pads_to_concatenate(loop)


def slices_of_a_concatenation(n):
    def step(h, x):
        whole = jnp.concatenate([h * i for i in range(n)])
        return sum(whole[i * H : (i + 1) * H] for i in range(n)), x

    loop = loop_of(step, jnp.ones(H), jnp.ones((8, H)))
    return lambda: compose_views(loop)


def reshapes_of_reshapes(n):
    def step(h, x):
        for shape in [(2, 2), (1, 4)] * n:
            h = h.reshape(shape)
        return h.reshape(H), x

    loop = loop_of(step, jnp.ones(H), jnp.ones((8, H)))
    return lambda: compose_views(loop)


def stages_for_a_gpu(n):
    def step(h, x):
        for _ in range(n):
            h = h + jnp.tanh(h @ jnp.ones((H, H)) + x)
        return h, h

    loop = loop_of(step, jnp.ones((2, H)), jnp.ones((8, 2, H)))
    return lambda: one_kernel_per_stage(loop)


def outputs_that_leave(n):
    w = jnp.ones((H, H))

    def step(h, x):
        return jnp.tanh(h), [jnp.tanh((h + i) @ w) for i in range(n)]

    loop = loop_of(step, jnp.ones((2, H)), jnp.ones((8, 2, H)))
    assert len(split(loop).sunk_vars) == n
    return lambda: split(loop)


def joined_gates(n):
    def step(h, x):
        parts = [jax.nn.sigmoid(gate) for gate in jnp.split(x, 2 * n)]
        parts = [*parts[::2], *parts[1::2]]
        return h, jnp.concatenate(parts)

    loop = loop_of(step, jnp.ones(H), jnp.ones((8, 2 * n * H)))
    return lambda: gates.prefers_separate_slices(loop)


def operations_of_two_widths(n):
    arrays = [Array(8 + i % 2) for i in range(n + 1)]
    views = [View(a, ((a.width, 1),)) for a in arrays]
    chain = [Operation("tanh", out, [of], None) for of, out in itertools.pairwise(views)]
    return lambda: schedule(chain, ())


def carries_in_a_chain(n):
    def step(carries, x):
        new = []
        for c in carries:
            x = 0.9 * c + 0.1 * x
            new.append(x)
        return tuple(new), x

    return loop_of(step, vectors(n), jnp.ones((8, H)))


def carries_in_a_ring(n):
    def step(carries, x):
        return (*carries[1:], 0.5 * carries[0]), x

    return loop_of(step, vectors(n), jnp.ones((8, H)))


def groups_of_carries(n):
    loop = carries_in_a_ring(n)
    return lambda: carry_groups(loop.eqns, loop.carry, loop.carry_out)


def stages_of_carries(n):
    loop = carries_in_a_chain(n)
    return lambda: stages(loop, {}, 2)


def a_refusal_of_carries(n):
    loop = carries_in_a_chain(n)
    return lambda: associative.refusal(loop)


def bounds_of_carries(n):
    loop = carries_in_a_chain(n)
    return lambda: associative.is_bounded(loop)


def carries_one_after_another(n):
    loop = carries_in_a_chain(n)

    def solve(init, xs):
        return associative.solve_loop(loop, [], init, [xs], 8)

    return lambda: jax.eval_shape(solve, list(vectors(n)), jnp.ones((8, H)))


@pytest.mark.parametrize(
    "planned",
    [
        axes_in_a_chain,
        an_estimate_of_units,
        an_estimate_of_selections,
        sums_of_products,
        cotangents_of_slices,
        slices_of_a_concatenation,
        reshapes_of_reshapes,
        stages_for_a_gpu,
        outputs_that_leave,
        joined_gates,
        operations_of_two_widths,
        groups_of_carries,
        stages_of_carries,
        a_refusal_of_carries,
        bounds_of_carries,
        carries_one_after_another,
    ],
)
def test_twice_the_equations_take_twice_the_operations(planned):
    few, many = (operations_of(planned(n)) for n in (32, 64))
    assert few > 1000
    assert many < GROWTH * few
