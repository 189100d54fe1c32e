"""Measures one frame at a time, next to torch and onnxruntime, and many small series, next to a loop over them.

    pip install torch onnx onnxruntime && python scripts/benchmark_streaming.py

Frames: an LSTM of 64 features, batch 1, the state carried, numpy in and out; microseconds, medians of 2,000 calls.
Series: a GRU of its own, H = 8, for each of many series of 100 steps, by one `vmap` over parameters; milliseconds, medians
of 20 calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import torch
from flax import nnx

import jrnn
from jrnn import nn
from jrnn.nn import functional


def median(call: Callable[[], object], times: int) -> float:
    """Seconds."""
    for _ in range(times // 10 + 1):
        call()
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def carried(step: Callable, state: object) -> Callable[[], object]:
    """A call that keeps its state for the next."""

    def call() -> object:
        nonlocal state
        y, state = step(state)
        return np.asarray(y)

    return call


def frames(hidden: int) -> dict[str, float]:
    x, zeros = np.ones((1, 64), np.float32), np.zeros((1, 1, hidden), np.float32)
    module = nn.LSTM(64, hidden, rngs=nnx.Rngs(0))
    step, jitted = nn.compiled_step(module), nnx.jit(lambda module, x, state: module.step(x, state))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    proto = jrnn.to_onnx(lambda x, state: module(x, state), jnp.asarray(x)[None], module.initial_state(1))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    names = [i.name for i in session.get_inputs()]
    lstm, cell = torch.nn.LSTM(64, hidden), torch.nn.LSTMCell(64, hidden)

    def by_onnxruntime(state):
        y, h, c = session.run(None, dict(zip(names, (x[None], *state), strict=True)))
        return y, (h, c)

    def by_cell(state):
        state = cell(torch.from_numpy(x), state)
        return state[0], state

    zero = torch.zeros(1, hidden)
    calls = {
        "nn.compiled_step": carried(lambda s: step(x, s), module.initial_state(1)),
        "nnx.jit of step": carried(lambda s: jitted(module, x, s), module.initial_state(1)),
        "torch LSTM": carried(lambda s: lstm(torch.from_numpy(x)[None], s), (zero[None], zero[None])),
        "torch LSTMCell": carried(by_cell, (zero, zero)),
        "onnxruntime, of to_onnx": carried(by_onnxruntime, (zeros, zeros)),
    }
    with torch.inference_mode():
        return {name: 1e6 * median(call, 2000) for name, call in calls.items()}


def series(count: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    shapes = nn.GRU(1, 8, rngs=nnx.Rngs(0)).layout.shapes()
    params = {name: jnp.asarray(rng.uniform(-0.3, 0.3, (count, *s)), jnp.float32) for name, s in shapes.items()}
    x = jnp.asarray(rng.standard_normal((count, 100, 1)), jnp.float32)
    single = jax.tree.map(lambda p: p[0], params)

    def loss(params, x):
        return jnp.sum(functional.gru(params, x)[0] ** 2)

    found = {}
    for mode, fn in (("forward", lambda p, x: functional.gru(p, x)[0]), ("train", jax.grad(loss))):
        together, alone = jax.jit(jax.vmap(fn)), jax.jit(fn)
        found[f"{mode}, vmap"] = 1e3 * median(lambda f=together: jax.block_until_ready(f(params, x)), 20)
        one = median(lambda f=alone: jax.block_until_ready(f(single, x[0])), 50)
        found[f"{mode}, one after the other"] = 1e3 * one * count
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for hidden in (64, 128, 256):
        print(f"H = {hidden}:", ", ".join(f"{name} {value:.0f}" for name, value in frames(hidden).items()))
    for count in (10, 100, 1000):
        print(f"{count} series:", ", ".join(f"{name} {value:.1f}" for name, value in series(count).items()))
