"""Every rule has a case here or in the zoo; each is converted, which verifies it, and compared once more."""

from __future__ import annotations

import jax
import pytest
from rule_cases import CASES
from zoo import MODELS, model

import jrnn
from jrnn.convert import write_python
from jrnn.convert.emit import RULES
from jrnn.convert.flat import flatten
from jrnn.convert.groups import recognize


def trace(fn, args):
    return flatten(jax.make_jaxpr(fn)(*args))


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    fn, args = CASES[name]
    package = jrnn.from_jax(fn, *args)  # which compares the numbers
    wanted = jax.tree.leaves(jax.eval_shape(fn, *args))
    found = jax.eval_shape(package.to_jax(), dict(zip(package.input_names, args, strict=True))).values()
    assert [(v.shape, v.dtype) for v in found] == [(v.shape, v.dtype) for v in wanted]


@pytest.mark.grid(every=4)
@pytest.mark.parametrize("name", CASES)
def test_case_as_python(name, tmp_path):
    fn, args = CASES[name]
    write_python(jrnn.from_jax(fn, *args), tmp_path / "model.py")  # which compares the numbers


def seen_in(graph):
    """The primitives of a graph, those of the groups in it, and those of the jaxprs within."""
    names = {n.name for n in graph.nodes} | {n.name for n in recognize(graph).nodes}
    for node in graph.nodes:
        for value in node.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(item, "jaxpr") and hasattr(item, "consts"):
                    names |= seen_in(flatten(item))
    return names


def test_every_rule_has_a_case():
    seen = set()
    for fn, args in CASES.values():
        seen |= seen_in(trace(fn, args))
    for name in MODELS:
        fn, args, params = model(name)
        if not jax.tree_util.treedef_is_leaf(jax.tree.structure(fn)):
            seen |= seen_in(trace(lambda module, *args: module(*args), (fn, *args)))
        elif params is not None:
            seen |= seen_in(trace(getattr(fn, "apply", fn), (params, *args)))
        else:
            seen |= seen_in(trace(fn, args))
    missing = set(RULES) - seen
    assert not missing
