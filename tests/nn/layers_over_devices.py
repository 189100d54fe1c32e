"""Layers and models over devices by `jax.shard_map`, whose types say over which axes of the mesh values vary.

As a program with names of cases: the largest errors of values and gradients on 4 devices, as JSON.

Shapes: T time, N batch, D input.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import test_recurrent_layers
from flax import nnx
from jax.sharding import PartitionSpec as P
from test_recurrent_layers import D

from jrnn import nn

T, N = 6, 4
ROW = P(None, "batch")


def whole(make):
    """The layer in three calls: alone, with lengths and resets, and with a state that is the same on all devices."""
    layer = make(rngs=nnx.Rngs(0))

    def run(params, x, lengths, resets):
        graph, _, rest = nnx.split(layer, nnx.Param, ...)
        state = nnx.State({name: nnx.Param(value) for name, value in params.items()})
        module = nnx.merge(graph, state, rest)
        same = module.initial_state(x.shape[1])
        return (
            module(x),
            module(x, lengths=lengths, resets=resets),
            module(x, same),
            module.step(x[0], same),
        )

    return run, layer.params()


def of_stack(name, **options):
    """What `jrnn.nn.functional` has of one kind, and chunks."""
    layer = getattr(nn, name.upper())(D, 5, bidirectional=True, num_layers=2, rngs=nnx.Rngs(0))
    narrow = getattr(nn, name.upper())(D, 5, rngs=nnx.Rngs(1))
    call, step = (getattr(nn.functional, name + end) for end in ("", "_step"))

    def run(params, x, lengths, resets):
        stack, one = params
        noise = dict(
            recurrent_dropout=1.0, key=jax.random.key(0)
        )  # drawn, but the same on all devices
        masks = dict(lengths=lengths, resets=resets)
        packed = nn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return (
            call(stack, x),
            call(stack, x, **masks, return_states="all+initial"),
            call(one, packed)[0].data,
            step(one, x[0]),
            nn.chunked(narrow, x, size=4, **masks),
            call(one, x, **noise),
        )

    return run, (layer.params(), narrow.params())


def own():
    """A step whose carries differ in what they vary over: h, a counter, and one that is replaced by a constant."""

    def step(params, carry, x):
        h, count, _ = carry
        return (h := jnp.tanh(x @ params["w"] + h), count + 1, jnp.ones((len(x), 1))), h

    def first(batch):
        return jnp.zeros((batch, 3)), jnp.zeros(batch, jnp.int32), jnp.zeros((batch, 1))

    layer = nn.Recurrent(
        step, D, first, {"w": jnp.linspace(-1, 1, D * 3).reshape(D, 3)}, rngs=nnx.Rngs(0)
    )

    def run(params, x, lengths, resets):
        return layer.apply(params, x), layer.apply(params, x, lengths=lengths, resets=resets)

    return run, layer.params()


STACKS = {name: functools.partial(getattr(nn, name), D, 5) for name in ("RNN", "LSTM", "GRU")}
CASES = {
    **{
        name: functools.partial(whole, make)
        for name, make in {**test_recurrent_layers.LAYERS, **STACKS}.items()
    },
    **{name: functools.partial(of_stack, name) for name in ("rnn", "lstm", "gru")},
    "Recurrent": own,
}


def smooth(tree):
    return [
        jnp.abs(leaf) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]


def gradients(name, mesh=None):
    """The function and its arguments: the loss and its gradients with respect to parameters and x, over a mesh or whole."""
    run, params = CASES[name]()
    x = np.random.RandomState(0).standard_normal((T, N, D)).astype(np.float32)
    lengths, resets = np.array([6, 1, 4, 3]), np.random.RandomState(1).random((T, N)) < 0.3

    def loss(params, x):
        def part(params, x, lengths, resets):
            total = sum(jnp.sum(jnp.sin(leaf)) for leaf in smooth(run(params, x, lengths, resets)))
            return total if mesh is None else jax.lax.psum(total, "batch")

        if mesh is not None:
            part = jax.shard_map(
                part, mesh=mesh, in_specs=(P(), ROW, P("batch"), ROW), out_specs=P()
            )
        return part(params, x, lengths, resets)

    return jax.value_and_grad(loss, (0, 1)), (params, x)


def mesh_of(devices):
    return jax.make_mesh((devices,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))


def main(names):
    jax.config.update("jax_disable_most_optimizations", True)
    errors = {}
    for name in names:
        ours, theirs = (
            fn and jax.jit(fn)(*args) for fn, args in (gradients(name, mesh_of(4)), gradients(name))
        )
        pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
        errors[name] = float(max(np.max(np.abs(a - b)) / (1 + np.max(np.abs(b))) for a, b in pairs))
    print(json.dumps(errors))


if __name__ == "__main__":
    main(sys.argv[1:])
