"""Loops and layers that become LinearAttention and CausalConvWithState, and loops that only look alike.

`to_onnx` itself compares each model with onnxruntime.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from flax import nnx

import jrnn
from jrnn import nn
from jrnn.onnx.attention_loops import OPSET

if onnx.defs.onnx_opset_version() < OPSET:
    pytest.skip("onnx is older than the operators", allow_module_level=True)

NAMES = ("LinearAttention", "CausalConvWithState", "Scan")


def counted(model):
    types = collections.Counter(node.op_type for node in model.graph.node)
    return tuple(types[name] for name in NAMES)


def rule_of(model):
    (node,) = [node for node in model.graph.node if node.op_type == "LinearAttention"]
    return next(a.s.decode() for a in node.attribute if a.name == "update_rule")


def run(model, *args):
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(
        None, {i.name: np.asarray(a) for i, a in zip(session.get_inputs(), args, strict=True)}
    )


LAYERS = {
    "GatedDeltaNet": (1, 1, 0), "GLA": (1, 0, 0), "RetNet": (1, 0, 0), "DeltaNet": (1, 1, 0), "Mamba2": (1, 1, 0),
    "Mamba": (0, 1, 1), "RWKV7": (0, 0, 1),
}  # fmt: skip


@pytest.mark.sample("GatedDeltaNet")
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_one_operator_with_open_sizes(kind):
    layer = getattr(nn, kind)(16, rngs=nnx.Rngs(0), **({} if kind == "Mamba" else {"num_heads": 2}))
    x = jax.random.normal(jax.random.key(1), (3, 2, 16))
    model = jrnn.to_onnx(layer, x, dims="T, N, ...", opset=OPSET)
    assert counted(model) == LAYERS[kind]
    longer = jax.random.normal(jax.random.key(2), (9, 3, 16))
    expected, read = jax.tree.leaves(layer(longer)), jrnn.from_onnx(model)({"x": longer})
    for ours, theirs, back in zip(expected, run(model, longer), read.values(), strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-5)
        np.testing.assert_allclose(back, ours, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_layer_of_one_head_is_one_operator(batch):
    layer = nn.GatedDeltaNet(8, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (3, batch, 8))
    model = jrnn.to_onnx(layer, x, dims="T, N, ..." if batch > 1 else "T, ...", opset=OPSET)
    assert counted(model) == (1, 1, 0)
    longer = jax.random.normal(jax.random.key(2), (9, batch, 8))
    for ours, theirs in zip(jax.tree.leaves(layer(longer)), run(model, longer), strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-5)


RNG = np.random.default_rng(0)
T, N, H, K, V = 5, 2, 3, 4, 6


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def heads(*last):
    return normal(T, N, H, *last)


Q, KEYS, VALUES, BETA = heads(K), heads(K) / 2, heads(V), 1 / (1 + np.exp(heads()))
S0 = normal(N, H, K, V)


def gated(S, at):
    q, k, v, a = at
    S = jnp.exp(a)[..., None] * S + k[..., None] * v[..., None, :]
    return S, jnp.einsum("nhk,nhkv->nhv", q, S)


def ungated(S, at):
    S = S + jnp.einsum("nhk,nhv->nhkv", at[1], at[2])
    return S, 0.5 * jnp.einsum("nhk,nhkv->nhv", at[0], S)


def delta(S, at):
    q, k, v, b = at
    stored = jnp.einsum("nhk,nhkv->nhv", k, S)
    S = S + b[..., None, None] * jnp.einsum("nhk,nhv->nhkv", k, v - stored)
    return S, jnp.tanh(jnp.einsum("nhk,nhkv->nhv", q, S)) + v.sum(-1, keepdims=True)


def gated_delta(S, at):
    q, k, v, b, a = at
    S = jax.nn.sigmoid(a)[..., None, None] * S
    stored = (k[..., None] * S).sum(2)
    S = S + k[..., None] * ((v - stored) * b[..., None])[..., None, :]
    return S, (q[..., None] * S).sum(2)


def turned(S, at):
    """S [V, K], with one decay for all, and no batch."""
    q, k, v = at
    S = 0.9 * S + jnp.outer(v, k)
    return S, S @ q


LOOPS = {  # a step, its inputs, the first state, and the rule that it is
    "gated": (gated, (Q, KEYS, VALUES, -np.abs(heads(K))), S0, "gated"),
    "gated, one a head": (gated, (Q, KEYS, VALUES, -np.abs(heads(1))), S0, "gated"),
    "linear": (ungated, (Q, KEYS, VALUES), S0, "linear"),
    "delta": (delta, (Q, KEYS, VALUES, BETA), S0, "delta"),
    "gated delta": (gated_delta, (Q, KEYS, VALUES, BETA, heads()), S0, "gated_delta"),
    "turned": (turned, (Q[:, 0, 0], KEYS[:, 0, 0], VALUES[:, 0, 0]), S0[0, 0].T, "gated"),
    "a batch by vmap": (
        jax.vmap(turned),
        (Q[:, :, 0], KEYS[:, :, 0], VALUES[:, :, 0]),
        S0[:, 0].swapaxes(1, 2),
        "gated",
    ),
}


@pytest.mark.sample("gated delta-True", "turned-False", "linear-False")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", LOOPS)
def test_a_recurrence_in_a_loop_is_one_operator(name, reverse):
    step, xs, first, rule = LOOPS[name]

    def call(S, *xs):
        return jrnn.scan(step, S, xs, reverse=reverse)

    model = jrnn.to_onnx(call, first, *xs, opset=OPSET)
    assert counted(model) == (1, 0, 0) and rule_of(model) == rule
    S, rows = np.asarray(first), []
    for t in range(T)[::-1] if reverse else range(T):
        S, y = step(S, tuple(x[t] for x in xs))
        rows.append(np.asarray(y))
    expected = S, np.stack(rows[::-1] if reverse else rows)
    for theirs, ours in zip(run(model, first, *xs), expected, strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-5)
    back = jrnn.from_onnx(model)(dict(zip([i.name for i in model.graph.input], (first, *xs))))
    np.testing.assert_allclose(back["output/1"], expected[1], atol=1e-5)


def before(S, at):
    """y is read before S is written."""
    q, k, v = at
    return 0.9 * S + k[..., None] * v[..., None, :], jnp.einsum("nhk,nhkv->nhv", q, S)


def whole(S, at):
    S, y = gated(S, at)
    return S, (S.sum(), y)


def signed(S, at):
    q, k, v, a = at
    S = jnp.tanh(a)[..., None] * S + k[..., None] * v[..., None, :]
    return S, jnp.einsum("nhk,nhkv->nhv", q, S)


def other_key(S, at):
    q, k, v, b = at
    return S + q[..., None] * (v - jnp.einsum("nhk,nhkv->nhv", k, S))[..., None, :], jnp.einsum(
        "nhk,nhkv->nhv", q, S
    )


def undecayed(S, at):
    """What k stored is read from S before its decay."""
    q, k, v, b = at
    stored = jnp.einsum("nhk,nhkv->nhv", k, S)
    S = 0.9 * S + k[..., None] * (b[..., None] * (v - stored))[..., None, :]
    return S, jnp.einsum("nhk,nhkv->nhv", q, S)


def twice(S, at):
    S, y = ungated(S, at)
    return S, (y, jnp.einsum("nhk,nhkv->nhv", at[1], S))


def by_columns(S, at):
    q, k, v, a = at
    S = jnp.exp(-jnp.abs(v))[..., None, :] * S + k[..., None] * v[..., None, :]
    return S, jnp.einsum("nhk,nhkv->nhv", q, S)


GATES = -np.abs(heads(K))
ALIKE = {
    "read before": (before, (Q, KEYS, VALUES)),
    "S as an output": (whole, (Q, KEYS, VALUES, GATES)),
    "a decay that may be negative": (signed, (Q, KEYS, VALUES, GATES)),
    "another key": (other_key, (Q, KEYS, VALUES, BETA)),
    "a read without decay": (undecayed, (Q, KEYS, VALUES, BETA)),
    "two reads": (twice, (Q, KEYS, VALUES)),
    "a decay per column": (by_columns, (Q, KEYS, VALUES, GATES)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_loop_that_looks_alike_stays_a_scan(name):
    step, xs = ALIKE[name]
    model = jrnn.to_onnx(lambda S, *xs: jrnn.scan(step, S, xs), S0, *xs, opset=OPSET)
    assert counted(model) == (0, 0, 1)
    used = {name for node in model.graph.node for name in node.input} | {
        o.name for o in model.graph.output
    }
    body = next(node for node in model.graph.node if node.op_type == "Scan").attribute[0].g
    used |= {name for node in body.node for name in node.input}
    assert all(used.intersection(node.output) for node in model.graph.node)


@pytest.mark.exhaustive
def test_older_operator_sets_and_gradients_have_scans():
    step, xs, first, _ = LOOPS["linear"]
    assert counted(
        jrnn.to_onnx(lambda S, *xs: jrnn.scan(step, S, xs), first, *xs, opset=OPSET - 1)
    ) == (0, 0, 1)
    layer, x = nn.DeltaNet(8, num_heads=2, rngs=nnx.Rngs(0)), normal(3, 2, 8)
    assert counted(jrnn.to_onnx(jax.grad(lambda x: layer(x)[0].sum()), x, opset=OPSET))[1] == 0
    halves = nn.GLA(8, num_heads=2, dtype="bfloat16", rngs=nnx.Rngs(0))
    assert sum(counted(jrnn.to_onnx(halves, x, opset=OPSET))[::2]) == 1


def test_a_convolution_with_lengths_and_with_a_state():
    layer = nn.Mamba(4, state_size=3, rngs=nnx.Rngs(0))
    model = jrnn.to_onnx(
        lambda x, lengths, state: layer(x, state, lengths=lengths),
        *(normal(6, 3, 4), np.array([4, 0, 6]), (normal(3, 3, 8), normal(3, 8, 3))),
        dims=("T, N, ...", "N", ("N, ...", "N, ...")),
        opset=OPSET,
    )
    assert counted(model) == (0, 1, 1)
    args = normal(9, 2, 4), np.array([2, 9]), normal(2, 3, 8), normal(2, 8, 3)
    expected = layer(args[0], args[2:], lengths=args[1])
    for theirs, ours in zip(run(model, *args), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-5)


@pytest.mark.exhaustive
def test_a_convolution_with_resets_stays_as_it_was():
    layer = nn.DeltaNet(8, num_heads=2, rngs=nnx.Rngs(0))
    resets = jnp.zeros((5, 2), bool).at[2, 1].set(True)
    model = jrnn.to_onnx(
        lambda x, resets: layer(x, resets=resets), normal(5, 2, 8), resets, opset=OPSET
    )
    assert counted(model)[1] == 0
