"""Single frames, next to torch and onnxruntime; and many small series by one `vmap`, next to a loop over them.

Frames: an LSTM of 64 features, batch 1, with carried state, numpy in and out. Series: many series of 100 steps, each with
its own GRU, H = 8, whose parameters are mapped over. Needs torch and onnxruntime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jrnn import nn
from jrnn.bench.peers import Timed, clocked, in_mode
from jrnn.bench.sizes import MODES
from jrnn.bench.suites import Job, SuiteOptions
from jrnn.nn import functional
from jrnn.onnx import to_onnx

OURS = ("nn.compiled_step", "vmap")
TAKES = ()
NEEDS = {"torch": "torch", "onnxruntime": "'jrnn[onnx]'"}
HIDDEN, SERIES, CALLS = (64, 128, 256), (10, 100, 1000), 200


def jobs(options: SuiteOptions) -> Iterator[Job]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for hidden in HIDDEN:
        yield Job("LSTM frame", "forward", f"1x1x64x{hidden}", frames(hidden))
    torch.set_num_threads(threads)
    for count in SERIES:
        for mode in MODES:
            yield Job("GRU series", mode, f"{count} of 100x1x1x8", series(count, mode))


def carried(step: Callable, state: object) -> Timed:
    """Times the mean of CALLS calls, each of which continues from the state of the one before."""

    def call() -> None:
        nonlocal state
        for _ in range(CALLS):
            y, state = step(state)
            np.asarray(y)

    run = clocked(call)
    return Timed(lambda: run() / CALLS)


def frames(hidden: int) -> dict[str, Timed]:
    import onnxruntime
    import torch

    x, zeros = np.ones((1, 64), np.float32), np.zeros((1, 1, hidden), np.float32)
    module = nn.LSTM(64, hidden, rngs=nnx.Rngs(0))
    step, jitted = nn.compiled_step(module), nnx.jit(lambda module, x, state: module.step(x, state))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    proto = to_onnx(
        lambda x, state: module(x, state), jnp.asarray(x)[None], module.initial_state(1)
    )
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    names = [i.name for i in session.get_inputs()]
    lstm, cell = torch.nn.LSTM(64, hidden), torch.nn.LSTMCell(64, hidden)

    @torch.inference_mode()
    def by_lstm(state: Any) -> Any:
        return lstm(torch.from_numpy(x)[None], state)

    @torch.inference_mode()
    def by_cell(state: Any) -> Any:
        state = cell(torch.from_numpy(x), state)
        return state[0], state

    def by_onnxruntime(state: Any) -> Any:
        y, h, c = session.run(None, dict(zip(names, (x[None], *state), strict=True)))
        return y, (h, c)

    zero = torch.zeros(1, hidden)
    return {
        "nn.compiled_step": carried(lambda s: step(x, s), module.initial_state(1)),
        "nnx.jit of step": carried(lambda s: jitted(module, x, s), module.initial_state(1)),
        "torch LSTM": carried(by_lstm, (zero[None], zero[None])),
        "torch LSTMCell": carried(by_cell, (zero, zero)),
        "onnxruntime, of to_onnx": carried(by_onnxruntime, (zeros, zeros)),
    }


def series(count: int, mode: str) -> dict[str, Timed]:
    rng = np.random.default_rng(0)
    shapes = nn.GRU(1, 8, rngs=nnx.Rngs(0)).layout.shapes()
    params = {
        name: jnp.asarray(rng.uniform(-0.3, 0.3, (count, *s)), jnp.float32)
        for name, s in shapes.items()
    }
    x = jnp.asarray(rng.standard_normal((count, 100, 1)), jnp.float32)
    single = jax.tree.map(lambda p: p[0], params)
    fn = in_mode(lambda p, x: functional.gru(p, x)[0], mode)
    together, alone = jax.jit(jax.vmap(fn)), jax.jit(fn)
    one = clocked(lambda: jax.block_until_ready(alone(single, x[0])))
    return {
        "vmap": Timed(clocked(lambda: jax.block_until_ready(together(params, x)))),
        "one after the other": Timed(lambda: one() * count),
    }
