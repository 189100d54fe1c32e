"""The models that conversion is tried on, here and under the real Caffe2: name -> (function, example arguments, params)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax

import jrnn
from jrnn import nn


class Model(NamedTuple):
    fn: Callable
    args: tuple[Any, ...]
    params: Any = None


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


# functions -------------------------------------------------------------------------------------------------------------


def mlp() -> Model:
    params = {"a": {"w": normal(8, 3), "b": normal(8)}, "b": {"w": normal(4, 8), "b": normal(4)}}

    def fn(params, x):
        h = jnp.tanh(x @ params["a"]["w"].T + params["a"]["b"])
        return jax.nn.softmax(h @ params["b"]["w"].T + params["b"]["b"])

    return Model(fn, (normal(5, 3),), params)


def arithmetic() -> Model:
    def fn(x, y):
        z = jnp.where(x > 0.1, x * y - 2.0, y / (1.0 + x * x)) ** 2
        return {
            "z": jnp.exp(-z) + jnp.abs(y),
            "top": jnp.max(z, axis=1),
            "any": (z > 1).any(0),
            "best": jnp.argmax(z, 1),
        }

    return Model(fn, (normal(4, 3), normal(4, 3, seed=1)))


def functions() -> Model:
    def fn(x):
        parts = [
            jnp.sin(x),
            jnp.cos(x),
            jnp.log1p(x * x),
            jnp.sqrt(x * x + 1),
            lax.rsqrt(x * x + 1),
            x**3,
            jnp.floor(x),
        ]
        parts += [
            jnp.clip(x, -1.0, 0.5),
            jnp.sign(x),
            jax.nn.relu(x),
            jax.nn.gelu(x),
            jax.nn.silu(x),
            lax.erf(x),
        ]
        parts += [
            jnp.cumsum(x, 0),
            jnp.minimum(x, 0.3),
            jnp.expm1(x),
            jax.nn.log_softmax(x),
            jax.nn.softplus(x),
        ]
        return jnp.stack(parts)

    return Model(fn, (normal(3, 4),))


def shapes() -> Model:
    def fn(x, i):
        y = jnp.concatenate([x[:, 1:3], x[:, ::-1][:, :2]], axis=1).T
        z = jnp.pad(y, ((1, 0), (0, 2)), constant_values=0.5)
        w = lax.dynamic_slice(z, (i, 0), (2, 3))
        return (
            y.reshape(2, -1),
            z,
            w,
            lax.dynamic_update_slice(z, w * 2, (i, 1)),
            jnp.broadcast_to(x[None], (2, *x.shape)),
        )

    return Model(fn, (normal(3, 4), jnp.int32(1)))


def products() -> Model:
    def fn(x, y):
        return (
            jnp.einsum("bik,bkj->bij", x, y),
            jnp.einsum("bik,lik->bl", x, x),
            jnp.einsum("bik,jbk->jib", x, y[:3] * 0 + 1),
        )

    return Model(fn, (normal(3, 4, 3), normal(3, 3, 5)[:, :, :3]))


def embedding() -> Model:
    def fn(table, ids):
        picked = jnp.take_along_axis(table, ids, axis=1)
        return jnp.tanh(table[ids] * 2), picked, table[ids, ids[::-1]], table[:, ids[0]]

    return Model(fn, (jnp.array([[0, 3], [2, 1], [1, 1], [0, 0]]),), normal(4, 4))


def integers() -> Model:
    def fn(i, j):
        return (
            i // 3 + j * 2,
            jnp.maximum(i, j),
            (i % 4).astype(jnp.float32),
            (i > j) & (j != 2),
            jnp.clip(i, 1, 5),
        )

    return Model(fn, (jnp.arange(6), jnp.array([2, 0, 5, 1, 2, 9])))


# control flow ----------------------------------------------------------------------------------------------------------


def cond_and_while() -> Model:
    def fn(x, limit):
        y = lax.cond(x.sum() > 0, lambda a: (a * 2, a.sum()), lambda a: (a - 1, jnp.float32(3)), x)
        z = lax.while_loop(
            lambda s: (s[0].sum() < limit) & (s[1] < 40),
            lambda s: (s[0] * 1.5 + 1, s[1] + 1),
            (y[0], 0),
        )
        return y[1], z

    return Model(fn, (normal(3, 2), jnp.float32(50)))


def switch() -> Model:
    return Model(
        lambda i, x: lax.switch(i, [lambda a: a * 2, lambda a: a, lambda a: -a], x),
        (jnp.int32(1), normal(3, 2)),
    )


def fori() -> Model:
    return Model(
        lambda x, n: lax.fori_loop(0, n, lambda i, c: c * 0.9 + i * x, x), (normal(3), jnp.int32(4))
    )


def swap() -> Model:
    return Model(
        lambda x, y: lax.while_loop(
            lambda s: s[2] < 3, lambda s: (s[1], s[0], s[2] + 1), (x, y, 0)
        ),
        (normal(3), normal(3) + 1),
    )


def scan_of_many() -> Model:
    """Several sequences and carries, of several types and shapes, and outputs that are no carry."""

    def fn(xs, ids, mask, h):
        def step(carry, now):
            h, total, seen = carry
            x, y, i, m = now
            h = jnp.where(m[:, None], jnp.tanh(h + x + y[0]), h) * (1 + 0.1 * i.astype(jnp.float32))
            return (h, total * 7 + i, seen ^ m), (h.sum(), total, m)

        return lax.scan(
            step, (h, jnp.int32(-100000), jnp.zeros(2, bool)), (xs, xs[:, :1, 0], ids, mask)
        )

    return Model(
        fn,
        (normal(5, 2, 3), jnp.arange(5) % 3, jnp.arange(10).reshape(5, 2) % 2 == 0, normal(2, 3)),
    )


def scan_reversed() -> Model:
    w = normal(4, 4)
    return Model(
        lambda x, h: lax.scan(lambda c, x: ((n := jnp.tanh(c @ w + x)), n * 2), h, x, reverse=True),
        (normal(5, 2, 4), normal(2, 4)),
    )


def scan_of_steps() -> Model:
    return Model(lambda x: lax.fori_loop(0, 5, lambda i, c: c + i * x, x), (normal(3),))


def jrnn_scan() -> Model:
    params = {"w_ih": normal(4, 3), "w_hh": normal(4, 4) * 0.3, "b": normal(4)}

    def fn(params, x, h):
        def step(h, x):
            h = jnp.tanh(x @ params["w_ih"].T + h @ params["w_hh"].T + params["b"])
            return h, h

        return jrnn.scan(step, h, x)

    return Model(fn, (normal(6, 2, 3), normal(2, 4)), params)


# modules ---------------------------------------------------------------------------------------------------------------


def _rnn(cell: Any) -> Model:
    return Model(nnx.RNN(cell(3, 4, rngs=nnx.Rngs(0))), (normal(2, 5, 3),))


def nnx_lstm_cell() -> Model:
    return Model(
        nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0)), ((normal(2, 4), normal(2, 4, seed=1)), normal(2, 3))
    )


def nnx_gru_cell() -> Model:
    return Model(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)), (normal(2, 4), normal(2, 3)))


def nnx_rnn_lstm() -> Model:
    return _rnn(nnx.LSTMCell)


def nnx_rnn_optimized_lstm() -> Model:
    return _rnn(nnx.OptimizedLSTMCell)


def nnx_rnn_gru() -> Model:
    return _rnn(nnx.GRUCell)


def nnx_rnn_lengths() -> Model:
    rnn = nnx.RNN(nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0)), return_carry=True)
    return Model(
        lambda rnn, x, lengths: rnn(x, seq_lengths=lengths),
        (normal(2, 5, 3), jnp.array([2, 5])),
        rnn,
    )


def nnx_bidirectional() -> Model:
    forward, backward = (nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(k))) for k in (0, 1))
    return Model(nnx.Bidirectional(forward, backward), (normal(2, 5, 3),))


class _Convolutional(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.strided = nnx.Conv(
            4, 4, (3, 2), strides=2, padding="VALID", feature_group_count=2, rngs=rngs
        )
        self.out = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), strides=(2, 2))
        return self.out(nnx.avg_pool(self.strided(x), (1, 2)).mean((1, 2)))


def nnx_convolutional() -> Model:
    return Model(_Convolutional(nnx.Rngs(0)), (normal(2, 10, 8, 2),))


class _Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)
        self.before, self.after = nnx.LayerNorm(8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.before(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.after(x))))


def nnx_transformer_block() -> Model:
    return Model(_Block(nnx.Rngs(0)), (normal(2, 5, 8),))


class _Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(linen.relu(linen.Dense(4)(x)))


def linen_dense() -> Model:
    module, x = _Dense(), normal(5, 3)
    return Model(module, (x,), module.init(jax.random.key(0), x))


class _LinenConvolutional(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=True)(linen.relu(linen.Conv(4, (3, 3))(x)))
        x = linen.ConvTranspose(3, (3, 3), strides=(2, 2))(
            linen.avg_pool(x, (2, 2), strides=(2, 2))
        )
        return linen.Dense(3)(linen.GroupNorm(num_groups=3)(x).mean((1, 2)))


def linen_convolutional() -> Model:
    module, x = _LinenConvolutional(), normal(2, 6, 6, 2)
    return Model(module, (x,), module.init(jax.random.key(0), x))


class _LinenSequence(linen.Module):
    @linen.compact
    def __call__(self, ids):
        x = linen.Embed(7, 4)(ids)
        x = linen.Bidirectional(linen.RNN(linen.LSTMCell(4)), linen.RNN(linen.GRUCell(4)))(x)
        return linen.Dense(2)(x + linen.MultiHeadDotProductAttention(2)(linen.LayerNorm()(x)))


def linen_sequence() -> Model:
    module, ids = _LinenSequence(), jnp.array([[1, 2, 3], [0, 4, 6]])
    return Model(module, (ids,), module.init(jax.random.key(0), ids))


# jrnn.nn ---------------------------------------------------------------------------------------------------------------


def _torch_like(
    build: Callable[..., Any], *, lengths: bool = False, **options: Any
) -> Callable[[], Model]:
    def make() -> Model:
        module = build(3, 4, rngs=nnx.Rngs(0), **options)
        if not lengths:
            return Model(module, (normal(5, 2, 3),))
        return Model(
            lambda m, x, lengths: m(x, lengths=lengths),
            (normal(5, 2, 3), jnp.array([3, 5])),
            module,
        )

    return make


LAYERS = {
    "nn_rnn": _torch_like(nn.RNN),
    "nn_rnn_relu_lengths": _torch_like(nn.RNN, nonlinearity="relu", lengths=True),
    "nn_lstm_stacked_bidirectional": _torch_like(nn.LSTM, num_layers=2, bidirectional=True),
    "nn_lstm_lengths": _torch_like(nn.LSTM, lengths=True),
    "nn_lstm_projected": _torch_like(nn.LSTM, proj_size=2),
    "nn_lstm_layer_norm": _torch_like(nn.LSTM, layer_norm=True),
    "nn_gru": _torch_like(nn.GRU),
    "nn_gru_stacked_bidirectional_lengths": _torch_like(
        nn.GRU, num_layers=2, bidirectional=True, lengths=True
    ),
    "nn_gru_cell": lambda: Model(nn.GRUCell(3, 4, rngs=nnx.Rngs(0)), (normal(2, 3), normal(2, 4))),
    "nn_lstm_cell": lambda: Model(
        nn.LSTMCell(3, 4, rngs=nnx.Rngs(0)), (normal(2, 3), (normal(2, 4), normal(2, 4, seed=1)))
    ),
}


# nets ------------------------------------------------------------------------------------------------------------------


def _cell(build: Callable) -> Model:
    """A cell of jrnn's own, as a function of its weights and its inputs."""
    b = jrnn.NetBuilder("cell")
    outputs = build(b, b.input("x"), b.input("lengths"))
    net = b.build(outputs=outputs)
    weights = {
        name: np.asarray(value) * 1.0
        for name, value in jrnn.run_net(b.build_init(), {}, key=jax.random.key(0)).items()
    }
    run = jrnn.to_jax(net)
    blobs = {"x": normal(5, 2, 3), "lengths": jnp.array([5, 3], jnp.int32)}
    return Model(
        lambda weights, blobs: run({**weights, **blobs}),
        (blobs,),
        {k: jnp.asarray(v) for k, v in weights.items()},
    )


def _layer(layer: Callable, **options: Any) -> Callable[[], Model]:
    return lambda: _cell(lambda b, x, n: list(layer(b, x, n, None, 3, 4, "rnn", **options)))


def _attention() -> Model:
    def build(b, x, n):
        encoder = jrnn.nets.cells.Encoder(
            jrnn.nets.cells.LSTM(b, x, n, None, 3, 4, "encoder").hidden_all, 4, n
        )
        out = jrnn.nets.cells.LSTMWithAttention(b, x, n, None, 3, 4, encoder, "decoder")
        return list(dict.fromkeys(v for v in vars(out).values() if isinstance(v, str)))

    return _cell(build)


CELLS = {
    "cell_lstm_stacked": lambda: _cell(
        lambda b, x, n: list(jrnn.nets.cells.LSTM(b, x, n, None, 3, [4, 4], "rnn"))
    ),
    "cell_layer_norm_lstm": _layer(jrnn.nets.cells.LayerNormLSTM),
    "cell_milstm": _layer(jrnn.nets.cells.MILSTM),
    "cell_layer_norm_milstm": _layer(jrnn.nets.cells.LayerNormMILSTM),
    "cell_gru": _layer(jrnn.nets.cells.GRU),
    "cell_basic_rnn": _layer(jrnn.nets.cells.BasicRNN),
    "cell_lstm_with_attention": _attention,
}


MODELS: dict[str, Callable[[], Model]] = {
    f.__name__: f
    for f in (
        mlp, arithmetic, functions, shapes, products, embedding, integers, cond_and_while, switch, fori, swap, scan_of_many,
        scan_reversed, scan_of_steps, jrnn_scan, nnx_lstm_cell, nnx_gru_cell, nnx_rnn_lstm, nnx_rnn_optimized_lstm,
        nnx_rnn_gru, nnx_rnn_lengths, nnx_bidirectional, nnx_convolutional, nnx_transformer_block, linen_dense,
        linen_convolutional, linen_sequence,
    )
} | LAYERS | CELLS  # fmt: skip


@functools.cache
def model(name: str) -> Model:
    return MODELS[name]()
