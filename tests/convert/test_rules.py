"""Every rule has a case here or in the zoo; each is converted, which verifies it, and compared once more."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from zoo import MODELS, normal

import jrnn
from jrnn.convert.flat import flatten
from jrnn.convert.groups import recognise
from jrnn.convert.rules import RULES

X, Y = normal(3, 4), normal(3, 4, seed=1)
SMALL = jnp.tanh(X)  # within (-1, 1)
I, J = jnp.arange(-6, 6).reshape(3, 4), jnp.array([[2, 1, 3, 5]])
B = X > 0

# name -> (function, arguments): primitives that no model of the zoo needs
CASES = {
    "trigonometry": (lambda x: (jnp.tan(x), jnp.arcsin(x), jnp.arccos(x), jnp.arctan(x)), (SMALL,)),
    "hyperbolic": (lambda x: (lax.sinh(x), lax.cosh(x), lax.cbrt(x), lax.exp2(x), lax.ceil(x)), (X,)),
    "powers": (
        lambda x: (x**-1, x**4, x**5, x**-3, jnp.abs(x) ** 1.5, jnp.abs(x) ** x, lax.rsqrt(x * x + 1), lax.square(x)),
        (X + 3,),
    ),
    "signs": (lambda x, i: (-x, -i, jnp.abs(i), jnp.sign(i), lax.square(i)), (X, I)),
    "logic": (lambda a, b: (a & b, a | ~b, a ^ b, a != b, a == b, jnp.all(a, 0), jnp.any(b)), (B, Y > 0)),
    "comparisons": (lambda i, j: (i < j, i <= j, i > j, i >= j, i == j, i != j), (I, jnp.broadcast_to(J, I.shape))),
    "integer division": (lambda i, j: (lax.div(i, j), lax.rem(i, j), i // j, i % j), (I, J)),
    "extremes": (lambda x, i: (x.min(1), x.max(), i.min(0), lax.clamp(-0.5, x, 0.5), jnp.clip(i, -1, 2)), (X, I)),
    "finite": (lambda x: jnp.isfinite(jnp.array([1.0, 2.0, 3.0]) / x), (jnp.array([0.0, 1.0, 2.0]),)),
    "arguments of extremes": (lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 0)), (X,)),
    "orders": (lambda x, b: (x.T, x[::-1], x[:, ::2], b.T, jnp.stack([b, ~b], 1), lax.rev(x, (0, 1))), (X, B)),
    "squeezes": (lambda x: (jnp.squeeze(x[:, :1], 1), lax.expand_dims(x, (1,)), x.reshape(-1)), (X,)),
    "splits": (lambda x, i: (*jnp.split(x, [1, 3], axis=1), *jnp.split(i, 2, axis=1)), (X, I)),
    "padding": (
        lambda x, v: (lax.pad(x, v, ((1, 2, 0), (-1, 0, 0))), jnp.pad(x, 1), lax.pad(x, 2.0, ((0, -1, 0), (0, 3, 0)))),
        (X, jnp.float32(3)),
    ),
    "picks": (
        lambda x, i, k: (x[i], x[:, i], x[i, i], jnp.take(x, k, axis=1), x[k], jnp.take(x, i + 2, axis=0, mode="clip")),
        (X, jnp.array([0, 2]), jnp.int32(1)),
    ),
    "moving slices": (
        lambda x, k: (
            lax.dynamic_slice(x, (k, k), (2, 3)),
            lax.dynamic_update_slice(x, x[:1, :2] * 2, (k, k)),
            lax.dynamic_update_slice(x, x[:1] * 2, (2, 0)),
        ),
        (X, jnp.int32(5)),
    ),
    "sums": (lambda x, i: (x.sum(), x.mean(0), i.sum(1), jnp.cumsum(x, 1), lax.cumsum(x, 0, reverse=True)), (X, I)),
    "products": (
        lambda x, y: (x @ y.T, x.T @ y, jnp.dot(x[0], y[1]), x @ y[0], jnp.einsum("ij,ik->jk", x, y), jnp.outer(x[0], y[0])),
        (X, Y),
    ),
    "batched products": (
        lambda x, y: (jnp.einsum("bij,bik->bjk", x, y), jnp.einsum("bij,bkj->ibk", x, y), jnp.einsum("bij,cbj->ci", x, y)),
        (normal(2, 2, 3), normal(2, 2, 3, seed=1)),
    ),
    "casts": (lambda x, i, b: (x.astype(jnp.int32), i.astype(jnp.float32), b.astype(jnp.int32), i.astype(bool)), (X, I, B)),
    "stops": (lambda x: x * lax.stop_gradient(x) + lax.optimization_barrier(x), (X,)),
    "pooling": (
        lambda x: (
            lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 1, 2), ((0, 0), (1, 0), (0, 0))),
            lax.reduce_window(x, 0.0, lax.add, (1, 3, 1), (1, 2, 1), "VALID"),
            lax.reduce_window(x, 0.0, lax.add, (1, 2, 2), (1, 1, 1), "SAME"),
        ),
        (normal(2, 5, 4),),
    ),
    "convolutions": (
        lambda x, w: (
            lax.conv_general_dilated(x, w, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
            lax.conv_general_dilated(x[:, None], w[None], (1, 1), ((0, 0), (2, 1)), rhs_dilation=(1, 2),
                                     dimension_numbers=("NHWC", "HWIO", "NCHW")),
        ),
        (normal(2, 7, 3), normal(3, 3, 5)),
    ),
    "random-free nn": (
        lambda x: (jax.nn.elu(x), jax.nn.leaky_relu(x), jax.nn.hard_tanh(x), jax.nn.logsumexp(x, 1),
                   jax.nn.one_hot(x[0].astype(jnp.int32), 3),
                   jax.nn.relu6(x), jax.nn.glu(x), jax.nn.mish(x), jax.nn.standardize(x), jax.nn.soft_sign(x)),
        (X,),
    ),
    "gelu": (lambda x: (jax.nn.gelu(x), jax.nn.gelu(x, approximate=False), lax.erfc(x)), (X,)),
    "vmap": (jax.vmap(lambda x, k: lax.dynamic_index_in_dim(x, k, keepdims=False)), (X, jnp.array([0, 3, 2]))),
}  # fmt: skip


def trace(fn, args):
    return flatten(jax.make_jaxpr(fn)(*args))


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    fn, args = CASES[name]
    package = jrnn.from_jax(fn, *args)
    found = package.to_jax()(dict(zip(package.input_names, args, strict=True)))
    for got, want in zip(found.values(), jax.tree.leaves(fn(*args)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def seen_in(graph):
    """The primitives of a graph, those of the groups in it, and those of the jaxprs within."""
    names = {n.name for n in graph.nodes} | {n.name for n in recognise(graph).nodes}
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
    for make in MODELS.values():
        fn, args, params = make()
        if not jax.tree_util.treedef_is_leaf(jax.tree.structure(fn)):
            seen |= seen_in(trace(lambda module, *args: module(*args), (fn, *args)))
        elif params is not None:
            seen |= seen_in(trace(getattr(fn, "apply", fn), (params, *args)))
        else:
            seen |= seen_in(trace(fn, args))
    known_by_other_versions = {
        "copy_p",
        "stack",
        "split",
        "expand_dims",
        "square",
        "add_any",
        "pvary",
        "sharding_constraint",
    }
    rare = {"device_put", "name", "reduce_precision", "is_finite", "tan", "dynamic_slice"}
    missing = set(RULES) - seen - known_by_other_versions - rare
    assert not missing
