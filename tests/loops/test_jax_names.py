"""What jrnn needs of the names of JAX that may move: `jaxprs/names.py` has them, and this JAX does what they are for."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jrnn
from jrnn.jaxprs import LOWERED_CALLS, all_equations, is_literal
from jrnn.jaxprs import names as jax_names
from jrnn.jaxprs.flat import evaluate, flatten

ROOT = Path(jrnn.__file__).parent
MOVING = {"jax._src", "jax.core", "jax.experimental", "jax.extend", "jax.interpreters", "jax.lib"}


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0]))
with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, g: (g,))


@pytest.mark.parametrize("wrapped", [jax.jit(jnp.sin), jax.checkpoint(jnp.sin), with_jvp, with_vjp])
def test_calls_hold_their_jaxpr_where_it_is_looked_for(wrapped):
    (eqn,) = jax.make_jaxpr(wrapped)(1.0).eqns
    body = eqn.params[LOWERED_CALLS[eqn.primitive.name]]
    assert [inner.primitive.name for inner in body.eqns] == ["sin"]


def test_what_jax_expands_when_it_lowers_is_expanded():
    sorted_, x = jnp.arange(5.0), jnp.array([0.5, 3.0])
    closed = jax.make_jaxpr(jnp.searchsorted)(sorted_, x)
    graph = flatten(closed)
    assert "call_hi_primitive" not in {node.name for node in graph.nodes}
    np.testing.assert_array_equal(evaluate(graph, [sorted_, x])[graph.outputs[0]], jnp.searchsorted(sorted_, x))
    for eqn in all_equations(closed.jaxpr):
        if eqn.primitive.name == "call_hi_primitive":
            run = jax_names.jaxpr_as_fun(jax_names.expanded(eqn))
            np.testing.assert_array_equal(run(sorted_, x)[0], jnp.searchsorted(sorted_, x))
        else:
            assert jax_names.expanded(eqn) is None


def test_a_literal_is_told_from_a_variable():
    (eqn,) = jax.make_jaxpr(lambda x: x * 3.0)(1.0).eqns
    assert [is_literal(atom) for atom in eqn.invars] == [False, True]
    assert eqn.invars[1].val == 3.0


def test_an_equation_knows_its_line():
    (eqn,) = jax.make_jaxpr(lambda x: jnp.negative(x))(1.0).eqns
    line = (lambda: 0).__code__.co_firstlineno - 1
    place = jax_names.source_line(eqn)
    assert f"{Path(__file__).name}:{line}" in place and "<lambda>" in place


def test_a_jaxpr_runs_with_other_constants():
    closed = jax.make_jaxpr(lambda x: x + np.arange(3.0))(1.0)
    assert len(closed.consts) == 1
    again = jax_names.ClosedJaxpr(closed.jaxpr, [np.full(3, 7.0)])
    assert jax_names.jaxpr_as_fun(again)(1.0)[0].tolist() == [8.0, 8.0, 8.0]


def test_a_primitive_has_rules_of_its_own():
    ad, triple = jax_names.ad, jax_names.Primitive("triple")
    triple.def_abstract_eval(lambda x: x)
    jax_names.mlir.register_lowering(triple, jax_names.mlir.lower_fun(lambda x: 3 * x, multiple_results=False))
    ad.primitive_jvps[triple] = lambda x, t: (
        triple.bind(*x),
        triple.bind(*map(ad.instantiate_zeros, t)),
    )
    ad.primitive_transposes[triple] = lambda ct, x: [triple.bind(ct)]
    jax_names.batching.primitive_batchers[triple] = lambda x, d: (triple.bind(*x), *d)
    assert jax.jit(jax.vmap(jax.grad(triple.bind)))(jnp.ones(2)).tolist() == [3.0, 3.0]
    assert isinstance(ad.Zero(jax.typeof(1.0)), ad.Zero)


def test_only_what_is_traced_is_traced():
    seen = []
    jax.jit(lambda x: seen.append(jax_names.is_traced(x)) or x)(1.0)
    jax.grad(lambda x: seen.append(jax_names.is_traced(x)) or x)(1.0)
    assert seen == [True, True]
    assert not any(map(jax_names.is_traced, (1.0, np.ones(2), jnp.ones(2))))


def test_values_are_computed_except_inside_of_jit():
    seen = []

    def see(x):
        seen.append(jax_names.is_staged())
        return x

    for transform in (lambda f: f, jax.grad, lambda f: jax.vmap(f, axis_size=2, in_axes=None)):
        transform(see)(1.0)
        jax.jit(lambda x, transform=transform: transform(see)(x))(1.0)
    jax.lax.scan(lambda c, _: (see(c), None), 1.0, None, length=2)
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    jax.shard_map(see, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(jnp.ones(1))
    assert seen == [False, True] * 3 + [True, True]
    assert not jax.make_jaxpr(lambda x: x if jax_names.is_staged() else -x)(1.0).eqns


def test_one_process_gathers_from_itself():
    tree = {"a": np.arange(3.0)}
    np.testing.assert_array_equal(jax_names.broadcast_one_to_all(tree)["a"], tree["a"])
    np.testing.assert_array_equal(jax_names.process_allgather(tree, tiled=True)["a"], tree["a"])


def test_a_device_that_is_not_there_is_described_by_a_topology():
    """tests/bench/test_compile_for.py compiles for one, where a compiler for it is installed."""
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        jax_names.topologies.get_topology_desc("", platform="no such platform")


def _names(path):
    """The dotted names of a file that begin with `jax.`, and their lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jax":
            yield f"jax.{node.attr}", node.lineno


@pytest.mark.exhaustive
def test_no_other_file_uses_them():
    """The loops are a part of JAX's machinery. Private names stand in the rules alone."""
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        if parts[:2] == ("loops", "rules"):
            continue
        for name, line in _names(path):
            assert not name.startswith("jax._src"), f"{path}:{line}: {name} belongs into loops/rules"
            if parts[0] not in ("jaxprs", "loops"):
                assert ".".join(name.split(".")[:2]) not in MOVING, (
                    f"{path}:{line}: {name} belongs into jaxprs/names.py"
                )
