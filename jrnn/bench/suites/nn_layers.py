"""`jrnn.nn` as a user calls it, next to torch.nn, flax.nnx.RNN and the bare `jrnn.scan`.

The layers are one layer and two bidirectional ones, forward and train (gradients of the sum of squares of the output with
respect to the parameters and the input). "nn" is a module under `nnx.jit`, "nn.functional" the same function of a dict
under `jax.jit`, "jrnn.scan" only the scan of one layer, "flax" `nnx.RNN` (in `nnx.Bidirectional`) under `nnx.jit`, and
"torch" torch.nn.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jrnn import nn
from jrnn.bench.peers import Program, clocked, compiled, scanned, torch_program
from jrnn.bench.sizes import MODES, Size, flops
from jrnn.bench.suites import Job, Options
from jrnn.loops import scan

OURS = ("nn",)
TAKES = ("cells", "modes", "sizes", "peers")
SIZES = ("100x1x128x128", "100x32x128x128", "500x8x64x64", "50x64x256x256")
STACKS = {"one layer": (1, False), "2 bidirectional": (2, True)}
FLAX = {"lstm": nnx.OptimizedLSTMCell, "gru": nnx.GRUCell}


def jobs(options: Options) -> Iterator[Job]:
    known = {name: peer for name, peer in PEERS.items() if name != "torch" or importlib.util.find_spec("torch")}
    sizes, modes = options.chosen_sizes(SIZES), options.chosen("modes", MODES)
    cells, names = options.chosen("cells", FLAX), options.chosen("peers", known)
    for cell, (stack, (layers, both)), mode, size in product(cells, STACKS.items(), modes, sizes):
        built = {name: known[name](cell, size, mode, layers, both) for name in names}
        work = flops(cell, size, mode) if layers == 1 else 0.0
        yield Job(f"{cell}, {stack}", mode, str(size), built, work)


def nn_module(cell: str, size: Size, mode: str, layers: int, both: bool) -> Program:
    module = getattr(nn, cell.upper())(size.features, size.hidden, layers, bidirectional=both, rngs=nnx.Rngs(0))
    return _nnx_program(lambda module, x: module(x)[0], module, size, mode)


def _nnx_program(forward: Callable[[Any, Any], Any], module: Any, size: Size, mode: str) -> Program:
    def loss(module: Any, x: Any) -> Any:
        return jnp.sum(forward(module, x) ** 2)

    fn, x = nnx.jit(nnx.grad(loss, argnums=(0, 1)) if mode == "train" else forward), _input(size)
    return Program(clocked(lambda: jax.block_until_ready(fn(module, x))))


def nn_functional(cell: str, size: Size, mode: str, layers: int, both: bool) -> Program:
    module = getattr(nn, cell.upper())(size.features, size.hidden, layers, bidirectional=both, rngs=nnx.Rngs(0))
    return compiled(lambda p, x: getattr(nn.functional, cell)(p, x)[0], module.params(), _input(size), mode)


def bare_scan(cell: str, size: Size, mode: str, layers: int, both: bool) -> Program | None:
    return compiled(*scanned(scan, cell, size), mode) if layers == 1 else None


def flax_rnn(cell: str, size: Size, mode: str, layers: int, both: bool) -> Program:
    rngs, features, stack = nnx.Rngs(0), size.features, nnx.List([])
    for _ in range(layers):
        made = [nnx.RNN(FLAX[cell](features, size.hidden, rngs=rngs), time_major=True) for _ in range(1 + both)]
        stack.append(nnx.Bidirectional(*made, time_major=True) if both else made[0])
        features = size.hidden * (1 + both)

    def forward(stack: Any, x: Any) -> Any:
        for layer in stack:
            x = layer(x)
        return x

    return _nnx_program(forward, stack, size, mode)


def torch_rnn(cell: str, size: Size, mode: str, layers: int, both: bool) -> Program:
    import torch

    module = getattr(torch.nn, cell.upper())(size.features, size.hidden, layers, bidirectional=both)
    return torch_program(module, _input(size), mode)


def _input(size: Size) -> Any:
    shape = (size.steps, size.batch, size.features)
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)


PEERS: dict[str, Callable[[str, Size, str, int, bool], Program | None]] = {
    "nn": nn_module,
    "nn.functional": nn_functional,
    "jrnn.scan": bare_scan,
    "flax": flax_rnn,
    "torch": torch_rnn,
}
