"""Models become nets and come back with the same results and gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from jax.tree_util import keystr, tree_flatten_with_path
from zoo import MODELS

import jrnn

pytestmark = pytest.mark.usefixtures("little_compilation")

TOLERANCE = 1e-5
NO_FLOATS = {"integers"}
OF_TESTED_PARTS = {
    "nn_lstm_stacked_bidirectional",
    "nn_gru_stacked_bidirectional_lengths",
    "nn_rnn_relu_lengths",
    "nn_lstm_projected",
    "linen_sequence",
    *(name for name in MODELS if name.startswith("cell_")),
}
LOOPS = {"swap", "fori", "cond_and_while"}  # of a length that JAX differentiates forwards alone


@functools.cache
def converted(name: str):
    fn, args, params = model = zoo.model(name)
    return model, jrnn.from_jax(fn, *args, params=params)


def call(model, args, params):
    if model.params is not None:
        fn = getattr(model.fn, "apply", model.fn)
        return jax.tree.leaves(fn(params, *args))
    return jax.tree.leaves(model.fn(*args))


def assert_close(actual, wanted):
    scale = max(1.0, float(np.max(np.abs(wanted), initial=0)))
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=TOLERANCE * scale)


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


@pytest.mark.sample("swap", "nn_gru_cell")
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name, tmp_path):
    """A saved and loaded package is the same, and gives the values and gradients of the function."""
    model, package = converted(name)
    package.save(tmp_path)
    again = jrnn.convert.Package.load(tmp_path)
    assert again == package
    own = model.params is None and not jax.tree_util.treedef_is_leaf(jax.tree.structure(model.fn))
    if own:
        model = model._replace(fn=lambda module, *args: module(*args), params=model.fn)
    weights = again.weights()
    leaves, structure = jax.tree.flatten((model.args, model.params))
    inputs = dict(zip(again.input_names, jax.tree.leaves(model.args), strict=True))
    run = again.to_jax()

    def loss_and_outputs(outputs):
        return sum(jnp.sum(jnp.sin(1.0 + y)) for y in outputs if is_float(y)), list(outputs)

    def direct(floats):
        rest = iter(floats)
        args, params = jax.tree.unflatten(
            structure, [next(rest) if is_float(x) else x for x in leaves]
        )
        return loss_and_outputs(call(model, args, params))

    def by_net(given):
        outputs = run({**inputs, **given}, given)
        assert list(outputs) == list(again.output_names)
        return loss_and_outputs(outputs.values())

    floats = [x for x in leaves if is_float(x)]
    given = {n: jnp.asarray(v) for n, v in {**inputs, **weights}.items() if is_float(v)}
    if name in NO_FLOATS | OF_TESTED_PARTS | LOOPS:
        (_, wanted), (_, actual) = jax.jit(direct)(floats), jax.jit(by_net)(given)
    else:
        (_, wanted), wanted_gradients = jax.jit(jax.value_and_grad(direct, has_aux=True))(floats)
        (_, actual), gradients = jax.jit(jax.value_and_grad(by_net, has_aux=True))(given)
        rest = iter(wanted_gradients)
        of_args, of_params = jax.tree.unflatten(
            structure, [next(rest) if is_float(x) else x for x in leaves]
        )
        for blob, want in zip(again.input_names, jax.tree.leaves(of_args)):
            if blob in gradients:
                assert_close(gradients[blob], want)
        for path, want in tree_flatten_with_path(of_params)[0]:
            blob = keystr(path, simple=True, separator="/")
            blob = blob.removesuffix("/value") if own or not blob.startswith("params") else blob
            if is_float(want) and blob in weights:
                assert_close(gradients[blob], want)
    for have, want in zip(actual, wanted, strict=True):
        assert have.dtype == want.dtype
        assert_close(have, want)


@pytest.mark.sample("swap")
@pytest.mark.parametrize("name", sorted(LOOPS))
def test_gradients_of_loops(name):
    """The gradient of the round trip against JAX's derivative of the function, along one direction."""
    model, package = converted(name)
    run, names = package.to_jax(), package.input_names
    floats = {n: x for n, x in zip(names, model.args) if jnp.issubdtype(x.dtype, jnp.floating)}

    def loss(outputs):
        return sum(
            jnp.sum(jnp.sin(1.0 + y)) for y in outputs if jnp.issubdtype(y.dtype, jnp.floating)
        )

    def direct(floats):
        args = [floats.get(n, x) for n, x in zip(names, model.args)]
        return loss(jax.tree.leaves(model.fn(*args)))

    def around(floats):
        return loss(run({**dict(zip(names, model.args)), **floats}).values())

    direction = jax.tree.map(jnp.cos, floats)
    _, wanted = jax.jvp(direct, (floats,), (direction,))
    gradients = jax.jit(jax.grad(around))(floats)
    actual = sum(jnp.vdot(gradients[n], direction[n]) for n in floats)
    assert abs(float(wanted)) > 0.1
    assert_close(actual, wanted)
