"""Every rule has a case in rule_cases.py or the zoo, which is converted and verified; so has every function of jax.nn."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import pytest
from rule_cases import CASES
from zoo import MODELS, model, normal

import jrnn
from jrnn.convert.emitter import RULES
from jrnn.convert.groups import recognize
from jrnn.errors import ConversionError
from jrnn.jaxprs.flat import flatten

pytestmark = pytest.mark.usefixtures("little_compilation")


def trace(fn, args):
    return flatten(jax.make_jaxpr(fn)(*args))


@pytest.mark.exhaustive(
    "arguments of extremes",
    "convolutions",
    "sorting",
    "greatest",
    "writing at indices",
    "writing integers",
    "windows at indices",
    "transposed convolutions",
)
@pytest.mark.parametrize("name", CASES)
def test_case(name):
    fn, args = CASES[name]
    package = jrnn.from_jax(fn, *args)  # which compares the numbers
    wanted = jax.tree.leaves(jax.eval_shape(fn, *args))
    actual = jax.eval_shape(
        package.to_jax(), dict(zip(package.input_names, args, strict=True))
    ).values()
    assert [(v.shape, v.dtype) for v in actual] == [(v.shape, v.dtype) for v in wanted]


def seen_in(graph):
    """The primitives of a graph, those of the groups in it, and those of the jaxprs within."""
    names = {n.name for n in graph.nodes} | {n.name for n in recognize(graph).nodes}
    for node in graph.nodes:
        for value in node.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(item, "jaxpr") and hasattr(item, "consts"):
                    names |= seen_in(flatten(item))
    return names


@pytest.mark.exhaustive
def test_every_rule_has_a_case():
    seen = set()
    for fn, args in CASES.values():
        seen |= seen_in(trace(fn, args))
    for name in MODELS:
        if set(RULES) <= seen:
            break
        fn, args, params = model(name)
        if not jax.tree_util.treedef_is_leaf(jax.tree.structure(fn)):
            seen |= seen_in(trace(lambda module, *args: module(*args), (fn, *args)))
        elif params is not None:
            seen |= seen_in(trace(getattr(fn, "apply", fn), (params, *args)))
        else:
            seen |= seen_in(trace(fn, args))
    missing = set(RULES) - seen - {"copy"}  # which is read away before a program is converted
    assert not missing


# jax.nn ----------------------------------------------------------------------------------------------------------------

X = normal(3, 4)
Q, K, V = (normal(2, 5, 2, 4, seed=k) for k in range(3))

# name -> (function, arguments), where one array is not what the function takes
GIVEN = {
    "dot_product_attention": (
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
        (Q, K, V),
    ),
    "glu": (lambda x: (jax.nn.glu(x), jax.nn.glu(x, axis=1)), (X,)),
    "gelu": (lambda x: (jax.nn.gelu(x), jax.nn.gelu(x, approximate=False)), (X,)),
    "log1mexp": (jax.nn.log1mexp, (jnp.abs(X) + 0.1,)),
    "log_softmax": (lambda x: (jax.nn.log_softmax(x), jax.nn.log_softmax(x, axis=0)), (X,)),
    "logsumexp": (
        lambda x: (jax.nn.logsumexp(x), jax.nn.logsumexp(x, axis=1, keepdims=True)),
        (X,),
    ),
    "one_hot": (lambda i: jax.nn.one_hot(i, 5), (jnp.array([[0, 3], [4, 7]]),)),
    "scaled_dot_general": (
        lambda q, k: jax.nn.scaled_dot_general(q, k, (((3,), (3,)), ((0, 2), (0, 2)))),
        (Q, K),
    ),
    "softmax": (
        lambda x: (
            jax.nn.softmax(x),
            jax.nn.softmax(x, axis=0),
            jax.nn.softmax(x, where=x > -1, axis=1),
        ),
        (X,),
    ),
    "standardize": (lambda x: jax.nn.standardize(x, axis=0), (X,)),
}
NO_FUNCTIONS_OF_ARRAYS = {
    "initializers": "a module of functions that draw random numbers",
    "get_scaled_dot_general_config": "returns settings, no arrays",
}
E4M3, E8M0 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
SPEC = jax.ShapeDtypeStruct
REFUSED = {
    "scaled_matmul": (
        (
            SPEC((1, 4, 64), E4M3),
            SPEC((1, 4, 64), E4M3),
            SPEC((1, 4, 2), E8M0),
            SPEC((1, 4, 2), E8M0),
        ),
        r"an argument is float8_e4m3fn\[1,4,64\]; Caffe2 has float32, int32, int64 and bool",
    ),
}


def public():
    return [
        n
        for n in dir(jax.nn)
        if not n.startswith("_") and n not in {*NO_FUNCTIONS_OF_ARRAYS, *REFUSED}
    ]


@pytest.mark.parametrize("name", public())
def test_converts(name):
    fn, args = GIVEN.get(name, (getattr(jax.nn, name), (X,)))
    jrnn.from_jax(fn, *args)  # which compares the numbers


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name):
    args, reason = REFUSED[name]
    with pytest.raises(ConversionError, match=reason):
        jrnn.from_jax(getattr(jax.nn, name), *args)


def test_the_others_are_no_functions_of_arrays():
    assert inspect.ismodule(jax.nn.initializers)
    assert (
        "mode" in inspect.signature(inspect.unwrap(jax.nn.get_scaled_dot_general_config)).parameters
    )


def test_softmax_and_gelu_are_one_operator():
    assert [op.type for op in jrnn.from_jax(jax.nn.softmax, X).predict_net.ops] == ["Softmax"]
    assert [op.type for op in jrnn.from_jax(jax.nn.gelu, X).predict_net.ops] == ["Gelu"]


def test_softmax_beneath_vmap_is_one_operator():
    attend = jax.nn.dot_product_attention
    types = [op.type for op in jrnn.from_jax(attend, Q, K, V).predict_net.ops]
    assert types.count("Softmax") == 1 and "Exp" not in types
