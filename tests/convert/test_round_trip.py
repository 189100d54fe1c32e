"""Models become nets and come back with the same results and gradients, and as Python files that do the same."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from flax import nnx
from jax.tree_util import keystr, tree_flatten_with_path
from zoo import MODELS

import jrnn
from jrnn.convert import write_python

TOLERANCE = 1e-5
NO_FLOATS = {"integers"}
OF_TESTED_PARTS = {
    "nn_lstm_stacked_bidirectional",
    "nn_gru_stacked_bidirectional_lengths",
    "nn_rnn_relu_lengths",
    "nn_lstm_projected",
    "linen_sequence",
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


@functools.cache
def results(name: str):
    """What the function itself gives."""
    model = zoo.model(name)

    if isinstance(model.fn, nnx.Module):  # a pytree of arrays: an argument like the others
        return jax.jit(lambda fn, args: call(model._replace(fn=fn), args, None))(model.fn, model.args)
    return jax.jit(lambda args, params: call(model, args, params))(model.args, model.params)


def assert_close(found, wanted):
    scale = max(1.0, float(np.max(np.abs(wanted), initial=0)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * scale)


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name, tmp_path):
    model, package = converted(name)
    package.save(tmp_path)
    again = jrnn.Package.load(tmp_path)
    assert again == package
    inputs = dict(zip(package.input_names, jax.tree.leaves(model.args), strict=True))
    found = jax.jit(again.to_jax())(inputs)
    wanted = results(name)
    assert list(found) == list(package.output_names)
    for name_out, want in zip(package.output_names, wanted, strict=True):
        assert found[name_out].dtype == want.dtype
        assert_close(found[name_out], want)


@pytest.mark.parametrize("name", [n for n in MODELS if n not in NO_FLOATS | OF_TESTED_PARTS | LOOPS])
def test_gradients(name):
    model, package = converted(name)
    own = model.params is None and not jax.tree_util.treedef_is_leaf(jax.tree.structure(model.fn))
    if own:
        model = model._replace(fn=lambda module, *args: module(*args), params=model.fn)
    weights = package.weights()

    def is_float(x):
        return jnp.issubdtype(x.dtype, jnp.floating)

    leaves, structure = jax.tree.flatten((model.args, model.params))
    floats = [x for x in leaves if is_float(x)]

    def loss(outputs):
        return sum(jnp.sum(jnp.sin(1.0 + y)) for y in outputs if is_float(y))

    def direct(floats):
        rest = iter(floats)
        args, params = jax.tree.unflatten(structure, [next(rest) if is_float(x) else x for x in leaves])
        return loss(call(model, args, params))

    inputs = dict(zip(package.input_names, jax.tree.leaves(model.args), strict=True))
    run = package.to_jax()

    def by_net(given):
        return loss(run({**inputs, **given}, given).values())

    wanted_args, wanted_params = jax.tree.unflatten(
        structure, _filled(leaves, jax.jit(jax.grad(direct))(floats), is_float)
    )
    given = {n: jnp.asarray(v) for n, v in {**inputs, **weights}.items() if is_float(v)}
    found = jax.jit(jax.grad(by_net))(given)
    for blob, want in zip(package.input_names, jax.tree.leaves(wanted_args)):
        if blob in found:
            assert_close(found[blob], want)
    for path, want in tree_flatten_with_path(wanted_params)[0]:
        blob = keystr(path, simple=True, separator="/")
        blob = blob.removesuffix("/value") if own or not blob.startswith("params") else blob
        if is_float(want) and blob in weights:
            assert_close(found[blob], want)


@pytest.mark.parametrize("name", sorted(LOOPS))
def test_gradients_of_loops(name):
    """The gradient of the round trip against JAX's derivative of the function, along one direction."""
    model, package = converted(name)
    run, names = package.to_jax(), package.input_names
    floats = {n: x for n, x in zip(names, model.args) if jnp.issubdtype(x.dtype, jnp.floating)}

    def loss(outputs):
        return sum(jnp.sum(jnp.sin(1.0 + y)) for y in outputs if jnp.issubdtype(y.dtype, jnp.floating))

    def direct(floats):
        args = [floats.get(n, x) for n, x in zip(names, model.args)]
        return loss(jax.tree.leaves(model.fn(*args)))

    def around(floats):
        return loss(run({**dict(zip(names, model.args)), **floats}).values())

    direction = jax.tree.map(jnp.cos, floats)
    _, wanted = jax.jvp(direct, (floats,), (direction,))
    gradients = jax.jit(jax.grad(around))(floats)
    found = sum(jnp.vdot(gradients[n], direction[n]) for n in floats)
    assert abs(float(wanted)) > 0.1
    assert_close(found, wanted)


def _filled(leaves, gradients, is_float):
    rest = iter(gradients)
    return [next(rest) if is_float(x) else x for x in leaves]


@pytest.mark.parametrize("name", MODELS)
def test_written_as_python(name, tmp_path):
    _, package = converted(name)
    path = tmp_path / "model.py"
    write_python(package, path)  # which compares the numbers
    assert "jrnn" not in path.read_text()
