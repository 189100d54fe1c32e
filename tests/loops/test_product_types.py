"""The type of products on accelerators is the step's: in chunks, and in gradients of products of 16 bits.

Shapes: T time, N batch, H hidden.
"""

import functools

import chunk_layers as layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from flax import nnx
from test_batched_chunks import batched_chunks  # noqa: F401
from test_matrix_states import loss, problem

import jrnn
from jrnn import nn
from jrnn.loops.affine.chunkwise import rounded_product
from jrnn.loops.costs.target import Target, planned_platform
from jrnn.loops.explanations.explain import plans_in

pytestmark = pytest.mark.usefixtures("rewritten")

BF16 = jnp.dtype(jnp.bfloat16)
F16 = jnp.dtype(jnp.float16)
HIGHEST = jax.lax.Precision.HIGHEST


def narrow(tree, dtype):
    return jax.tree.map(lambda x: x if x.dtype == bool else jnp.asarray(x, dtype), tree)


def relative_error(actual, exact):
    """The largest error of the arrays of a tree, in norms."""
    errors = []
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(exact), strict=True):
        if a.dtype != jax.dtypes.float0:
            a, b = (np.asarray(x, np.float64) for x in (a, b))
            errors.append(np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-3))
    return max(errors)


def of_step(step, init, xs):
    """What the products of a step's chunks are computed in."""
    closed = jax.make_jaxpr(functools.partial(jrnn.scan, step))(init, xs)
    (plan,) = plans_in(closed.jaxpr, Target("cuda"))
    node = plan.node
    while hasattr(node, "inner"):
        node = node.inner
    (form,) = node.stages[0].forms
    return form.batched_precision


def test_chunks_multiply_in_the_type_in_which_the_step_contracts_its_state(in_chunks_always):
    step = layers.gla
    init, xs = problem(step, 128, jnp.float32)
    assert of_step(step, init, xs) == HIGHEST
    for dtype in (BF16, F16):
        assert of_step(step, *narrow((init, xs), dtype)) == dtype
        assert of_step(step, init, narrow(xs, dtype)) == HIGHEST  # it promotes to float32
    precisions = {
        "tensorfloat32": jax.lax.Precision.HIGH,
        "BF16_BF16_F32": BF16,
        "F16_F16_F32": F16,
    }
    for asked, precision in precisions.items():
        with jax.default_matmul_precision(asked):
            assert of_step(step, init, xs) == precision
    with jax.default_matmul_precision("TF32_TF32_F32"):
        assert of_step(step, init, xs) == jax.lax.DotAlgorithmPreset.TF32_TF32_F32

    def rounds(S, x):
        S = jnp.exp(x["gk"])[..., None] * S + layers.outer(x["k"], x["v"]).astype(S.dtype)
        q, state = x["q"], S.astype(x["q"].dtype)
        return S, jnp.einsum("bhk,bhkv->bhv", q, state, preferred_element_type=S.dtype)

    assert of_step(rounds, init, narrow(xs, BF16)) == BF16


def with_gradients(scan, step):
    return jax.value_and_grad(
        functools.partial(loss, scan, step), (0, 1), has_aux=True, allow_int=True
    )


@pytest.mark.exhaustive("gla-bfloat16", "gated_delta-float16")
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("step", [layers.gla, layers.gated_delta], ids=["gla", "gated_delta"])
def test_the_error_is_at_most_twice_that_of_the_steps(step, dtype, batched_chunks):  # noqa: F811
    init, xs = problem(step, 24, np.float64, K=8, V=8)
    with jax.enable_x64(True):
        exact = by_numpy(with_gradients(jax.lax.scan, step))(init, xs)
    given = narrow((init, xs), dtype)
    errors = []
    for scan in (jrnn.scan, jax.lax.scan):
        (_, values), gradients = jax.jit(with_gradients(scan, step))(*given)
        errors.append(relative_error((values, gradients), (exact[0][1], exact[1])))
    of_chunks, of_steps = errors
    assert 1e-5 < of_chunks < 2 * of_steps
    assert batched_chunks


def values_in_chunks(step, init, xs):
    """The values of a loop that is being differentiated."""

    def run(q):
        return jrnn.scan(step, init, {**xs, "q": q})

    return jax.jit(lambda q: jax.jvp(run, (q,), (q,))[0])(xs["q"])


def test_decays_of_almost_0_exactly_0_and_1(batched_chunks):  # noqa: F811
    def step(S, x):
        S = x["d"][..., None] * S + layers.outer(x["k"], x["v"])
        return S, layers.read(S, x["q"])

    init, xs = problem(layers.gla, 24, np.float64)
    decays = np.array([1e-6, 0.0, 1.0, 1.0])
    xs = {n: xs[n] for n in "qkv"}
    xs["d"] = (
        np.random.default_rng(0).permuted(np.broadcast_to(decays, xs["k"].shape), axis=-1).copy()
    )
    with jax.enable_x64(True):
        exact = by_numpy(functools.partial(jax.lax.scan, step))(init, xs)
    given = narrow((init, xs), BF16)
    of_steps = relative_error(jax.lax.scan(step, *given), exact)
    assert relative_error(values_in_chunks(step, *given), exact) < 2 * of_steps
    assert batched_chunks


def test_what_overflows_float16_in_chunks_alone_runs_by_steps(batched_chunks):  # noqa: F811
    init, xs = narrow(problem(layers.linear, 24, np.float32), F16)
    init = jax.tree.map(jnp.zeros_like, init)
    xs = {"q": 0 * xs["q"] + 300, "k": 0 * xs["k"] + 100, "v": xs["v"] / 1024}  # q . k is 120,000
    ours = values_in_chunks(layers.linear, init, xs)
    theirs = jax.lax.scan(layers.linear, init, xs)
    assert np.isfinite(np.asarray(theirs[1], np.float32)).all()
    assert relative_error(ours, theirs) == 0
    assert batched_chunks


def test_all_products_of_a_gradient_round_their_operands():
    numbers = (((2,), (2,)), ((0,), (0,)))
    key, other = jax.random.split(jax.random.key(0))
    a, b = jax.random.normal(key, (2, 3, 4)), jax.random.normal(other, (2, 5, 4))

    def product(a, b):
        return rounded_product.rounded_product(a, b, numbers, BF16)

    def total(a, b):
        return jnp.sum(jnp.sin(product(a, b)))

    rounded = (x.astype(BF16).astype(jnp.float32) for x in (a, b))
    np.testing.assert_allclose(
        product(a, b), jnp.einsum("bmk,bnk->bmn", *rounded), rtol=1e-5, atol=1e-6
    )

    lowered = jax.jit(jax.vmap(jax.grad(total, (0, 1)), (0, None))).lower(jnp.stack([a, a]), b)
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert len(products) == 3
    assert all(line.count("xbf16>") == 2 and line.endswith("xf32>") for line in products)

    of_both = jax.vmap(jax.grad(total, (0, 1)), (0, None))(jnp.stack([a, 2 * a]), b)
    of_first = jax.grad(total, (0, 1))(a, b)
    for both, first in zip(of_both, of_first):
        np.testing.assert_allclose(both[0], first, rtol=1e-5, atol=1e-6)
    exact = jax.grad(lambda a, b: jnp.sum(jnp.sin(jnp.einsum("bmk,bnk->bmn", a, b))), (0, 1))(a, b)
    assert 1e-4 < relative_error(of_first, exact) < 2e-2


def test_layers_of_16_bits_on_a_gpu(in_chunks_always):
    layer = nn.GatedDeltaNet(8, num_heads=2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jnp.ones((128, 2, 8))
    for platform, precision in (("cuda", BF16), ("cpu", HIGHEST)):
        with planned_platform(platform):
            closed = jax.make_jaxpr(lambda x: layer(x)[0])(x)
        plans = plans_in(closed.jaxpr, Target("cuda"))
        (node,) = [plan.node for plan in plans if plan.strategy == "chunks"]
        while hasattr(node, "inner"):
            node = node.inner
        (form,) = node.stages[0].forms
        assert form.batched_precision == precision


@pytest.mark.parametrize(
    "dtype, types", [(BF16, {(BF16, BF16)}), (None, {(jnp.dtype("float32"),) * 2})]
)
def test_gradients_of_an_lstm_read_weights_as_they_are(dtype, types):
    module = nn.LSTM(4, 8, dtype=dtype, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(module)

    def of_weights(weights, x):
        return jnp.sum(nnx.merge(graph, weights)(x)[0].astype(jnp.float32) ** 2)

    x = jnp.ones((20, 2, 4), dtype or jnp.float32)
    closed = jax.make_jaxpr(jax.grad(of_weights, (0, 1)))(weights, x)
    plans = plans_in(closed.jaxpr, Target("cuda"))
    products = []
    for plan in plans:
        loop = plan.node
        while not hasattr(loop, "loop"):
            loop = loop.inner
        products += [e for e in loop.loop.eqns if e.primitive.name == "dot_general"]
    assert {tuple(a.aval.dtype for a in e.invars) for e in products} == types
    assert len(plans) == 2 and len(products) == 2


def test_numpy_compares_programs_without_rounding():
    """A chunk is compared with its steps in exact arithmetic, in which rounding would look like a fault."""
    random = np.random.RandomState(0)
    a = random.standard_normal((3, 4)).astype(np.float32)
    b = random.standard_normal((5, 4)).astype(np.float32)

    def product(a, b):
        return rounded_product.rounded_product(a, b, (((1,), (1,)), ((), ())), BF16)

    (exact,) = jax.tree.leaves(by_numpy(product)(a, b))
    np.testing.assert_allclose(exact, a @ b.T, rtol=1e-6)
    assert np.abs(np.asarray(product(a, b)) - exact).max() > 1e-4
