"""The GPU target: the values of `jax.lax.scan`, and what XLA is given.

Kernels are counted by `jrnn bench --compile-for h100`.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

import custom_steps  # noqa: F401 - it enters its steps
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy

import jrnn
from jrnn import jaxprs, nn
from jrnn.bench import measured_cells
from jrnn.bench.sizes import Size
from jrnn.jaxprs import primitives
from jrnn.loops import install, scan
from jrnn.loops.compile import compile_loop
from jrnn.loops.costs.target import Target
from jrnn.loops.explanations.explain import plans_in
from jrnn.loops.ir import Loop
from jrnn.loops.passes.gpu_one_kernel import one_kernel_per_stage
from jrnn.loops.passes.gpu_packed_outputs import pack_stacks

pytestmark = pytest.mark.usefixtures("rewritten")

SIZE = Size(7, 2, 3, 4)  # no multiple of the steps of a trip
CUDA = Target("cuda")


def loss_of(which, cell, size=SIZE):
    """A loss of the outputs and of the last carry, of the weights and the input."""

    def loss(weights, x):
        last, ys = which(measured_cells.make(cell, weights), measured_cells.initial(cell, size), x)
        return jnp.sum(jnp.sin(ys)) + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(last))

    return loss


def loops_for(target, cell, size=SIZE):
    """What runs the forward and the reverse loop of a gradient."""
    closed = jax.make_jaxpr(jax.grad(loss_of(scan, cell, size), argnums=(0, 1)))(
        *measured_cells.inputs(cell, size)
    )
    plans = plans_in(closed.jaxpr, target)
    assert [plan.strategy for plan in plans] == ["scan", "scan"]
    return [plan.node.inner for plan in plans]


def given_to_xla(node):
    """The loop that XLA is given."""
    return given_to_xla(node.inner) if hasattr(node, "inner") else node.loop


@pytest.fixture
def for_cuda(monkeypatch):
    """Plans for CUDA, lowered for this machine's default device."""
    seen = []

    def compiled(scan, _, *tag):
        seen.append(scan)
        return compile_loop(scan, CUDA, *tag)

    monkeypatch.setattr(install, "compile_loop", compiled)
    return seen


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "cell", ["lstm", "gru", "slstm", "layer_norm_lstm", "peephole_lstm", "relu_mlp", "memory"]
)
def test_values_and_gradients_are_those_of_the_loop(cell, for_cuda):
    weights, x = measured_cells.inputs(cell, SIZE)
    ours, theirs = (
        jax.value_and_grad(loss_of(which, cell), argnums=(0, 1)) for which in (scan, jax.lax.scan)
    )
    actual, wanted = jax.jit(ours)(weights, x), by_numpy(theirs)(weights, x)
    assert len(for_cuda) == 2, "the loops were planned for CUDA"
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), actual, wanted
    )


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_each_loop_has_one_product_and_writes_one_array(cell):
    forward, reverse = map(given_to_xla, loops_for(CUDA, cell))
    for loop in (forward, reverse):
        assert len(loop.ys) == 1 and loop.unroll == 4
        assert sum(map(primitives.is_contraction, loop.eqns)) == 1
    (fence,) = [e for e in forward.eqns if e.primitive.name == "optimization_barrier"]
    assert len({v.aval.shape for v in fence.outvars}) == 1, (
        "results of one shape, which one kernel makes"
    )
    (product,) = [e for e in reverse.eqns if primitives.is_contraction(e)]
    assert product.outvars[0].aval.ndim == 3, (
        "a product of the cotangents of the gates, part by part"
    )
    carried = [v for v in reverse.carry_out if v.aval.ndim == 3]
    assert len(carried) == (cell == "lstm"), (
        "the cotangent of c is a part of the stack, which is the carry"
    )


@pytest.mark.grid(every=2)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_two_directions_share_the_products_of_one_loop(kind, for_cuda):
    layout = nn.Layout(getattr(nn.units, kind.upper()), 3, 4, bidirectional=True)
    weights, x = layout.init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (7, 2, 3))

    def gradient(merge):
        run = getattr(nn.functional, kind)
        return jax.grad(lambda w, x: jnp.sum(jnp.sin(run(w, x, merge_directions=merge)[0])), (0, 1))

    merged = jax.jit(gradient(True))(weights, x)
    assert len(for_cuda) == 2, "one loop forward and one in reverse"
    plans = [plan.node for plan in plans_in(jax.make_jaxpr(gradient(True))(weights, x).jaxpr, CUDA)]
    for loop in map(given_to_xla, plans):
        (product,) = [e for e in loop.eqns if primitives.is_contraction(e)]
        assert 2 in product.outvars[0].aval.shape[:-2]
    assert product.outvars[0].aval.ndim == 4, "of each gate and direction"
    with jrnn.plain_scans():
        apart = by_numpy(gradient(False))(weights, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), merged, apart)


def test_the_cpu_is_given_none_of_it():
    for loop in map(given_to_xla, loops_for(Target("cpu"), "gru")):
        assert (
            all(e.primitive.name != "optimization_barrier" for e in loop.eqns) and loop.unroll == 1
        )


def test_divided_programs_join_nothing():
    """Arrays that are divided among devices along the joined axis would have to move."""
    for staged in loops_for(Target("cuda", devices=8), "lstm"):
        staged_loop = staged.inner.split_loop.loop
        assert {v.aval.ndim for v in staged_loop.carry} == {2}, "no stack of several carries"
        assert len(given_to_xla(staged).ys) == len(staged.inner.split_loop.residual.ys)


@pytest.mark.exhaustive
def test_what_is_large_is_not_packed():
    (staged, _) = loops_for(CUDA, "lstm", Size(7, 64, 4, 4096))
    assert len(given_to_xla(staged).ys) == 6, (
        "each stack alone: taking 6 MiB a step apart costs more than six kernels"
    )


def test_a_long_contraction_that_xla_would_cut_and_pad_is_cut_in_two(for_cuda):
    size = Size(3, 2, 2, 522)
    forward, _ = loops_for(CUDA, "gru", size)
    (product,) = [e for e in given_to_xla(forward).eqns if primitives.is_contraction(e)]
    assert product.outvars[0].aval.shape == (2, 2, 3 * 522)
    weights, x = measured_cells.inputs("gru", size)
    actual = jax.jit(loss_of(scan, "gru", size))(weights, x)
    wanted = by_numpy(loss_of(jax.lax.scan, "gru", size))(weights, x)
    np.testing.assert_allclose(actual, wanted, rtol=1e-5)


def _loop(fn, *avals, n_carry):
    program = jaxprs.trace(fn, avals)
    carry, xs = program.invars[:n_carry], program.invars[n_carry:]
    return Loop(
        program.eqns,
        (),
        carry,
        xs,
        program.outvars[:n_carry],
        program.outvars[n_carry:],
        5,
        False,
        1,
    ).verify()


def test_packed_stacks_are_taken_apart_by_type_and_shape():
    row, wide = jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((2, 1), jnp.float32)

    def step(c, x, s):
        return c + 1, c * 2, (c > 0), x, s * 3, jnp.sum(x, keepdims=True)

    loop = _loop(step, row, wide, jax.ShapeDtypeStruct((), jnp.float32), n_carry=1)
    packed, apart = pack_stacks(loop, 1 << 20)
    assert [y.aval.shape for y in packed.ys] == [(2, 4), (2, 3), (), (1, 1)]
    given = [jnp.ones((2, 3))], [jnp.arange(10.0).reshape(5, 2, 1), jnp.arange(5.0)]
    for actual, wanted in zip(
        jax.tree.leaves(apart(packed.run, [], *given, 5)),
        jax.tree.leaves(loop.run([], *given, 5)),
    ):
        assert actual.dtype == wanted.dtype
        np.testing.assert_array_equal(actual, wanted)
    assert pack_stacks(loop, 10) == (loop, None), "nothing fits"


def test_a_result_that_is_two_carries_is_in_the_stack_once():
    def step(matrix, a, b, dh, x):
        u, v = a * x, b + x
        z = jnp.concatenate([u, v], 1)
        return u, u, z @ matrix + dh, z

    matrix, row = jnp.ones((4, 2)), jax.ShapeDtypeStruct((3, 2), jnp.float32)
    program = jaxprs.trace(step, [jax.ShapeDtypeStruct((4, 2), jnp.float32), *[row] * 4])
    inputs, outs = program.invars, program.outvars
    loop = Loop(program.eqns, inputs[:1], inputs[1:4], inputs[4:], outs[:3], outs[3:], 5, False, 1)
    staged, adapter = one_kernel_per_stage(loop.verify())
    assert [v.aval.shape for v in staged.carry] == [(3, 2), (3, 2), (2, 3, 2)], "and one stack"
    init, xs = [jnp.full((3, 2), float(i + 1)) for i in range(3)], [jnp.ones((5, 3, 2))]
    results = adapter(staged.verify().run, [matrix], init, xs, 5)
    jax.tree.map(np.testing.assert_array_equal, results, tuple(loop.run([matrix], init, xs, 5)))
