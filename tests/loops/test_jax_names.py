"""What jrnn needs of the names of JAX that may move: `jaxprs/jax_internals` has them, and they do what they are for."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jrnn
from jrnn.jaxprs import LOWERED_CALLS, all_equations, is_literal, jax_internals
from jrnn.jaxprs.flat import evaluate_graph, flatten
from jrnn.jaxprs.jax_internals import lowering

ROOT = Path(jrnn.__file__).parent
INTERNALS = sorted(Path(jax_internals.__file__).parent.glob("*.py"))
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
    np.testing.assert_array_equal(
        evaluate_graph(graph, [sorted_, x])[graph.outputs[0]], jnp.searchsorted(sorted_, x)
    )
    for eqn in all_equations(closed.jaxpr):
        if eqn.primitive.name == "call_hi_primitive":
            run = jax_internals.jaxpr_as_fun(jax_internals.expanded(eqn))
            np.testing.assert_array_equal(run(sorted_, x)[0], jnp.searchsorted(sorted_, x))
        else:
            assert jax_internals.expanded(eqn) is None


def test_a_literal_is_told_from_a_variable():
    (eqn,) = jax.make_jaxpr(lambda x: x * 3.0)(1.0).eqns
    assert [is_literal(atom) for atom in eqn.invars] == [False, True]
    assert eqn.invars[1].val == 3.0


def test_an_equation_knows_its_line():
    (eqn,) = jax.make_jaxpr(lambda x: jnp.negative(x))(1.0).eqns
    line = (lambda: 0).__code__.co_firstlineno - 1
    place = jax_internals.source_line(eqn)
    assert f"{Path(__file__).name}:{line}" in place and "<lambda>" in place


def test_a_jaxpr_runs_with_other_constants():
    closed = jax.make_jaxpr(lambda x: x + np.arange(3.0))(1.0)
    assert len(closed.consts) == 1
    again = jax_internals.ClosedJaxpr(closed.jaxpr, [np.full(3, 7.0)])
    assert jax_internals.jaxpr_as_fun(again)(1.0)[0].tolist() == [8.0, 8.0, 8.0]


def test_a_primitive_has_rules_of_its_own():
    ad, triple = jax_internals.ad, jax_internals.Primitive("triple")
    triple.def_abstract_eval(lambda x: x)
    jax_internals.mlir.register_lowering(
        triple, jax_internals.mlir.lower_fun(lambda x: 3 * x, multiple_results=False)
    )
    ad.primitive_jvps[triple] = lambda x, t: (
        triple.bind(*x),
        triple.bind(*map(ad.instantiate_zeros, t)),
    )
    ad.primitive_transposes[triple] = lambda ct, x: [triple.bind(ct)]
    jax_internals.batching.primitive_batchers[triple] = lambda x, d: (triple.bind(*x), *d)
    assert jax.jit(jax.vmap(jax.grad(triple.bind)))(jnp.ones(2)).tolist() == [3.0, 3.0]
    assert isinstance(ad.Zero(jax.typeof(1.0)), ad.Zero)


def test_only_what_is_traced_is_traced():
    seen = []
    jax.jit(lambda x: seen.append(jax_internals.is_traced(x)) or x)(1.0)
    jax.grad(lambda x: seen.append(jax_internals.is_traced(x)) or x)(1.0)
    assert seen == [True, True]
    assert not any(map(jax_internals.is_traced, (1.0, np.ones(2), jnp.ones(2))))


def test_values_are_computed_except_inside_of_jit():
    seen = []

    def see(x):
        seen.append(jax_internals.is_staged())
        return x

    for transform in (lambda f: f, jax.grad, lambda f: jax.vmap(f, axis_size=2, in_axes=None)):
        transform(see)(1.0)
        jax.jit(lambda x, transform=transform: transform(see)(x))(1.0)
    jax.lax.scan(lambda c, _: (see(c), None), 1.0, None, length=2)
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    jax.shard_map(see, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(jnp.ones(1))
    assert seen == [False, True] * 3 + [True, True]
    assert not jax.make_jaxpr(lambda x: x if jax_internals.is_staged() else -x)(1.0).eqns


def test_one_process_gathers_from_itself():
    tree = {"a": np.arange(3.0)}
    np.testing.assert_array_equal(jax_internals.broadcast_one_to_all(tree)["a"], tree["a"])
    np.testing.assert_array_equal(jax_internals.process_allgather(tree, tiled=True)["a"], tree["a"])


def test_a_device_that_is_not_there_is_described_by_a_topology():
    """tests/bench/test_compile_for.py compiles for one, where a compiler for it is installed."""
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        jax_internals.topologies.get_topology_desc("", platform="no such platform")


def _names(path):
    """The dotted names of a file that begin with `jax.`, and their lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "jax"
        ):
            yield f"jax.{node.attr}", node.lineno


def test_no_other_room_uses_them_or_compares_versions():
    """What is known of JAX's insides stands in one folder; tests/loops/renamed_in_jax.py renames it there."""
    assert {path.name for path in INTERNALS} == {"__init__.py", "lowering.py", "tracing.py"}
    for path in ROOT.rglob("*.py"):
        if path not in INTERNALS:
            for name, line in _names(path):
                moves = ".".join(name.split(".")[:2]) in MOVING
                assert not moves, f"{path}:{line}: {name} belongs into jaxprs/jax_internals"
            versions = re.findall(
                r"__version_info__|\bjax(?:lib)?\.version\b|jax.__version__ *[<>=!]",
                path.read_text("utf-8"),
            )
            assert not versions, f"{path}: {versions} belong into jaxprs/jax_internals"


def _private_names():
    """The private names that `jax_internals` asks this version of JAX for, as the text there: a string."""
    of_some = {"fancy_transposes": lowering._FIXES_ZEROS}
    of_some["partial_eval_jaxpr_custom_rules"] = lowering._FIXES_CONTEXTS
    of_some |= dict.fromkeys(
        ("custom_partial_eval_rules", "partial_eval_jaxpr_nounits"), lowering._FIXES_RESIDUALS
    )
    for path in INTERNALS:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "private_name":
                name = node.args[1].value
                if of_some.get(name, True):
                    yield f'{name}"'


COUNTS = 'num_carry"]' if jax.__version_info__ < (0, 11) else 'ft_in"]'
ATTRIBUTES = (
    ".jaxpr_eqn_ctx", ".module_context", ".axis_context", ".num_devices", ".lowering_parameters", ".for_export", "eqn.ctx",
    "eqn.ctx.xla_metadata", "eqn.ctx.manager", "eqn.source_info", "eqn.source_info.name_stack", COUNTS,
)  # fmt: skip
PARTS = jax_internals.LINEARIZATION_PARTS


def _renamed(text, is_untested=False):
    """A case: the name at the end of a text gets another end. The warning says it."""
    name = text.rstrip('"]')
    return text, f"{name}_renamed{text.removeprefix(name)}", is_untested, "_renamed"


CASES = [
    _renamed(".jaxpr_eqn_ctx", True),
    _renamed('primitive_linearizations"'),
    _renamed(".num_devices"),
    ("scan_p, lower,", "cond_p, lower,", True, "it does not call jrnn's rules for loops"),
]
MORE = [
    *map(_renamed, [*_private_names(), *ATTRIBUTES]),
    _renamed(COUNTS, True),
    (
        '"rematted_computation"',
        '"renamed"',
        True,
        "what jax.checkpoint computes again has no scope",
    ),
    (
        "LINEARIZATION_PARTS = ",
        "LINEARIZATION_PARTS = 1 + ",
        True,
        f"for linearization returns {PARTS} values",
    ),
    ("Versions", "Versions", True, None),
]


@pytest.mark.exhaustive("more")
@pytest.mark.parametrize("cases", [CASES, MORE], ids=["some", "more"])
def test_a_name_that_jax_renames_is_one_warning_and_right_values(cases):
    """Loops may then be those of `jax.lax.scan`, but not in silence."""
    program = [
        sys.executable,
        Path(__file__).parent / "renamed_in_jax.py",
        json.dumps([case[:3] for case in cases]),
    ]
    done = subprocess.run(
        program, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT.parent)}
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(cases), done.stderr
    for case, line in zip(cases, lines):
        difference, heard = json.loads(line)
        assert isinstance(difference, float) and difference < 1e-5, f"{case}: {difference}"
        said = case[3]
        assert len(heard) == (said is not None) and all(said in text for text in heard), (
            f"{case}: {heard}"
        )
        assert all(jax.__version__ in text for text in heard)
