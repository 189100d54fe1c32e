"""Enclosures of steps: results of all points of a box lie in the box of the result, and what jumps is reported."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrnn import jaxprs
from jrnn.loops.newton.enclosure import _RULES, Box, NotEnclosed, enclosed

X, Y = np.random.default_rng(0).uniform(0.2, 0.9, (2, 3, 3))


def polynomial(x, coefficients):
    """With JAX's primitive, where this version has one."""
    if hasattr(jax.lax, "polynomial"):
        return jax.lax.polynomial(x, coefficients)
    return sum(a * x**k for k, a in enumerate(coefficients))


SMOOTH = {
    "functions": lambda x, y: [
        f(x) for f in (jnp.tanh, jnp.exp, jnp.exp2, jnp.expm1, jnp.log, jnp.log1p, jnp.sqrt)
    ],
    "others": lambda x, y: [
        f(x) for f in (jax.lax.rsqrt, jnp.sin, jnp.cos, jnp.arctan, jnp.arcsinh, jnp.sinh, jnp.cosh)
    ],
    "arcs": lambda x, y: [
        f(x) for f in (jnp.arcsin, jnp.arccos, jnp.arctanh, jnp.tan, jnp.cbrt, jax.lax.erf_inv)
    ],
    "rarer": lambda x, y: [
        jnp.log2(x),
        jnp.arccosh(1 + x),
        jnp.arctan2(x, -y),
        jax.lax.bessel_i0e(x),
        jax.lax.bessel_i1e(x),
        polynomial(x, [0.5, -1.0, y, 2.0]),
    ],
    "gates": lambda x, y: [
        jax.nn.sigmoid(x),
        jax.lax.erf(x),
        jax.lax.erfc(y),
        jnp.square(x),
        x**3,
        x**-2,
        x**0.5,
        abs(x),
    ],
    "arithmetic": lambda x, y: [
        x + y,
        x - y,
        x * y,
        x / y,
        -x,
        jnp.maximum(x, y),
        jnp.minimum(x, y),
        jnp.clip(x, 0.3, y),
    ],
    "products": lambda x, y: [
        x @ y,
        x @ X,
        jnp.einsum("ij,ij->i", x, y),
        jnp.sum(x, 0),
        jnp.cumsum(x, 1),
        jnp.mean(x),
    ],
    "views": lambda x, y: [
        x.T[1:],
        x.reshape(9),
        jnp.pad(x, 1),
        x[::-1],
        jnp.concatenate([x, y]),
        jnp.stack([x, y]),
        x[:, :1],
    ],
    "places": lambda x, y: [
        x[jnp.array([2, 0])],
        x.at[1].add(y[0]),
        x.at[0].set(y[1]),
        jnp.tile(x, 2),
        *jnp.split(x, 3),
    ],
    "choices": lambda x, y: [
        jnp.where(x > 0, x, y),
        jnp.max(x, 0),
        jnp.min(x, 1),
        jax.nn.relu(x - y),
        jax.nn.softmax(x),
    ],
    "norms": lambda x, y: [
        jax.nn.softplus(x - y),
        jax.nn.logsumexp(x, 1),
        (x - x.mean()) / (x.std() + 0.1),
        jax.nn.silu(x),
    ],
    "types": lambda x, y: [
        x.astype(jnp.float32),
        x.astype(jnp.bfloat16),
        (x > 0).astype(float) * y,
        jnp.floor(x) + y,
    ],
}
JUMPS = {
    "where": lambda x: jnp.where(x > 0.5, x, -x),
    "sign": lambda x: jnp.sign(x - 0.5),
    "floor": lambda x: jnp.floor(2 * x),
    "round": lambda x: jnp.round(x),
    "ceil": lambda x: jnp.ceil(2 * x),
    "integer": lambda x: (2 * x).astype(int),
    "comparison": lambda x: (x >= 0.5).astype(float),
}


def boxed(fn, radii, *args):
    program = jaxprs.inlined(jax.make_jaxpr(fn)(*args), jaxprs.LOWERED_CALLS)
    boxes, jumps = enclosed(program, map(Box, args, radii))
    return boxes, bool(jumps)


@pytest.mark.parametrize("radius", [1e-9, 1e-3, 0.1])
@pytest.mark.parametrize("name", SMOOTH)
def test_results_of_a_box_lie_in_its_box(name, radius, x64):
    random = np.random.default_rng(1)
    boxes, _ = boxed(SMOOTH[name], [jnp.full((3, 3), radius)] * 2, jnp.asarray(X), jnp.asarray(Y))
    for _ in range(40):
        points = [
            v + radius * random.choice([-1, 1, random.uniform(-1, 1)], size=v.shape) for v in (X, Y)
        ]
        for box, value in zip(boxes, SMOOTH[name](*map(jnp.asarray, points)), strict=True):
            off = np.abs(np.asarray(value, float) - np.asarray(box.center, float))
            rounding = (
                float(jnp.finfo(value.dtype).eps) * np.abs(np.asarray(value, float)) + 1e-14
            )  # of the point and of its value
            assert np.all(off <= np.asarray(box.radius) * (1 + 1e-6) + rounding), name
    if radius == 1e-9 and name not in ("types", "choices"):
        assert all(np.max(box.radius) < 1e-6 for box in boxes), (
            "a box is not useful if it is much larger"
        )


@pytest.mark.parametrize("name", JUMPS)
def test_what_may_jump_is_reported(name, x64):
    (box,), jumps = boxed(JUMPS[name], [jnp.asarray(1e-3)], jnp.asarray(0.5005))
    assert jumps and box.radius >= 0.5
    _, jumps = boxed(JUMPS[name], [jnp.asarray(1e-3)], jnp.asarray(0.6))
    assert not jumps


def test_outside_of_a_domain_nothing_is_known(x64):
    for fn in (jnp.log, jnp.sqrt, jnp.cbrt, lambda x: 1 / x, lambda x: x**0.5):
        (box,), _ = boxed(fn, [jnp.asarray(0.2)], jnp.asarray(0.1))
        assert box.radius == jnp.inf
    for fn, at in ((jnp.arccosh, 1.1), (jnp.arctanh, 0.9), (jnp.arcsin, -0.9), (jnp.tan, 1.5)):
        (box,), _ = boxed(fn, [jnp.asarray(0.2)], jnp.asarray(at))
        assert box.radius == jnp.inf
    for y in (0.1, 2.0):  # at the cut, and away from it
        (box,), _ = boxed(jnp.arctan2, [jnp.asarray(0.2), None], jnp.asarray(y), jnp.asarray(-1.0))
        assert (box.radius == jnp.inf) == (y == 0.1)


def test_an_equation_without_a_rule_is_named():
    with pytest.raises(NotEnclosed, match="sort"):
        boxed(jnp.sort, [jnp.ones(3)], jnp.ones(3))
    assert "sort" not in _RULES
    (box,), _ = boxed(lambda x, y: jnp.sort(y), [jnp.ones(3), None], jnp.ones(3), jnp.ones(3))
    assert box.is_exact


def test_no_result_lies_outside_of_what_a_function_returns():
    """The table of primitives says between which numbers: so a wide box of a gate is no wider than that."""
    program = jaxprs.trace(
        lambda x: [jax.nn.sigmoid(x), jnp.tanh(x), x * 2], [jax.ShapeDtypeStruct((3,), jnp.float32)]
    )
    box = Box(jnp.array([-1.0, 0.0, 2.0]), jnp.full(3, jnp.inf))
    (gate, bounded, free), _ = enclosed(program, [box])
    for result, lo, hi in ((gate, 0, 1), (bounded, -1, 1)):
        farthest = np.maximum(hi - result.center, result.center - lo)
        np.testing.assert_allclose(result.radius, farthest, rtol=1e-5)
    assert np.isinf(free.radius).all()
