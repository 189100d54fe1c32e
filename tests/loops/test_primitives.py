"""A new primitive is one row of `jrnn/jaxprs/primitives/table.py`: everything that reads the table then knows it."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import ad, batching, mlir

import jrnn
from jrnn.jaxprs import inlined, primitives, trace
from jrnn.jaxprs.axes import aligned
from jrnn.jaxprs.by_numpy import Evaluator, evaluate_by_numpy
from jrnn.jaxprs.flat import body_of
from jrnn.jaxprs.primitives import row as row_with
from jrnn.jaxprs.primitives.numpy_rules import of_kinds
from jrnn.jaxprs.primitives.table import TABLE
from jrnn.jaxprs.ranges import largest_size
from jrnn.jaxprs.resized import SMALL, resized
from jrnn.loops import scan
from jrnn.loops.compile import canonical_form
from jrnn.loops.costs.equation_costs import element_seconds, is_call
from jrnn.loops.explanations.explain import explain
from jrnn.loops.kernels.native import library
from jrnn.loops.newton.enclosure import Box, enclosed

pytestmark = pytest.mark.usefixtures("rewritten")

T, N, H = 6, 4, 16


def softsign(x):
    return x / (1 + abs(x))


toy_p = jex.Primitive("toy_softsign")
toy_p.def_impl(softsign)
toy_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(toy_p, mlir.lower_fun(softsign, multiple_results=False))
batching.defvectorized(toy_p)
ad.defjvp(toy_p, lambda g, x: g / (1 + abs(x)) ** 2)


@pytest.fixture
def row(monkeypatch):
    columns = dict(cost=2.0, image=(-1.0, 1.0), definition=softsign, numpy=of_kinds("f")(softsign))
    monkeypatch.setitem(TABLE, "toy_softsign", row_with("elementwise", **columns))


def equation():
    (eqn,) = trace(lambda x: [toy_p.bind(x)], [jax.typeof(jnp.ones((N, H)))]).eqns
    return eqn


def test_a_primitive_without_a_row_stays_and_is_a_call():
    eqn = equation()
    assert not primitives.is_movable(eqn) and not primitives.is_cheap(eqn) and is_call(eqn)
    assert primitives.why_immovable(eqn) == "jrnn does not know this primitive"
    assert aligned(eqn, 0, eqn.outvars[0]) == {}


def test_a_row_is_all_that_moving_costs_axes_and_ranges_need(row):
    eqn = equation()
    tanh = trace(lambda x: [jnp.tanh(x)], [jax.typeof(jnp.ones((N, H)))]).eqns[0]
    assert primitives.is_movable(eqn) and primitives.is_cheap(eqn) and not is_call(eqn)
    assert element_seconds(eqn) == 2 * element_seconds(tanh)
    assert aligned(eqn, 0, eqn.outvars[0]) == {0: 0, 1: 1}
    assert largest_size(jax.make_jaxpr(lambda x: toy_p.bind(x))(jnp.ones(3))) == [1.0]


def test_numpy_evaluates_it(row, monkeypatch):
    x = np.linspace(-2, 2, 5, dtype=np.float32)
    closed = jax.make_jaxpr(toy_p.bind)(x)
    monkeypatch.setattr(Evaluator, "_by_jax", None)
    np.testing.assert_allclose(evaluate_by_numpy(closed.jaxpr, closed.consts, [x])[0], softsign(x))


def test_it_is_resized_as_tanh_is(row):
    program = trace(lambda x: [toy_p.bind(x) + x], [jax.typeof(jnp.ones((N, 100)))])
    run, (small,) = resized(program)
    assert small.shape[0] == N and small.shape[1] <= SMALL
    x = jnp.ones(small.shape)
    np.testing.assert_allclose(run(x)[0], softsign(x) + x)


def test_rooms_that_emit_or_bound_values_read_its_definition(row):
    """The kernel for CPUs, Newton's enclosures, Caffe2 and ONNX."""

    def step(h, x):
        h = toy_p.bind(x @ w + h)
        return h, h

    w = jnp.full((H, H), 0.1)
    args = jnp.ones((N, H)), jnp.linspace(-1, 1, T * N * H).reshape(T, N, H)
    if not library.loaded().reason:  # the kernel was built
        (plan,) = explain(lambda h, xs: scan(step, h, xs, executor="native"), *args).loops
        assert plan.strategy == "native"
        for ours, theirs in zip(scan(step, *args, executor="native"), jax.lax.scan(step, *args)):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)

    x = jnp.linspace(-2, 2, N * H).reshape(N, H)
    program = trace(lambda x: [toy_p.bind(x)], [jax.typeof(x)])
    (box,), jumps = enclosed(program, [Box(x, jnp.full_like(x, 1e-3))])
    assert not jumps and 1e-4 < box.radius.max() < 1e-2

    x = np.asarray(x)
    assert jrnn.from_jax(toy_p.bind, x).output_names  # the values are compared with the function's
    pytest.importorskip("onnxruntime")
    assert jrnn.to_onnx(toy_p.bind, x).graph.output


def loop(shape, run=scan):
    def step(h, x):
        h = jnp.tanh(toy_p.bind(x) @ w + h)
        return h, h

    w = jnp.full((H, H), 0.1)
    return lambda h, xs: run(step, h, xs), jnp.ones(shape), jnp.ones((T, *shape))


def test_without_a_row_what_reads_it_stays_too():
    run, *args = loop((N, H))
    (plan,) = explain(run, *args).loops
    assert plan.contractions == 1 and "toy_softsign stays in the loop" in str(plan)


def test_it_leaves_a_loop_and_its_axes_get_their_canonical_form(row):
    (plain,) = explain(*loop((N, H))).loops
    assert plain.contractions == 0
    for shape in ((1, N, H), (N, 1, H)):
        run, *args = loop(shape)
        (plan,) = explain(run, *args).loops
        assert plan.contractions == 0
        forms = [
            [str(eqn.outvars[0].aval.shape) for eqn in canonical_form(p.loop)[0].eqns]
            for p in (plan, plain)
        ]
        assert forms[0] == forms[1] == 4 * [str((N, H))]
        for ours, theirs in zip(run(*args), loop(shape, jax.lax.scan)[0](*args)):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_every_row_is_a_primitive_of_jax():
    lowered = {p.name for p in mlir._lowerings}
    of_platforms = {p.name for rules in mlir._platform_specific_lowerings.values() for p in rules}
    since_jax_0_12 = {"log2", "one_minus_square", "polynomial"}
    assert {*TABLE} - lowered - of_platforms <= since_jax_0_12


def test_a_search_is_of_primitives_of_the_table():
    """`jnp.searchsorted` compares numbers by their bits."""

    def search(edges, x):
        return jnp.searchsorted(edges, x, method="compare_all")

    closed = jax.make_jaxpr(search)(jnp.arange(5.0), jnp.ones(H))
    program = inlined(closed, body_of)
    assert {"lt_to", "le_to"}.intersection(eqn.primitive.name for eqn in program.eqns)
    assert all(map(primitives.is_movable, program.eqns))
