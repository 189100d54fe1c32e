"""Measures `jrnn.nn` as a user calls it beside torch.nn, flax.nnx.RNN and the bare `jrnn.scan`, in turns.

python scripts/benchmark_nn.py --json docs/benchmarks/nn_cpu.json

One layer, and two bidirectional ones, forward and train (the sum of squares of the output, with gradients of the parameters
and the input). What the peers are: "nn" is a module under `nnx.jit`, "nn.functional" the same function of a dict under
`jax.jit`, "jrnn.scan" one layer of the same step with nothing around it, "flax" `nnx.RNN` (in `nnx.Bidirectional`) under
`nnx.jit`, "torch" torch.nn. A minute or two on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from jrnn import nn, scan
from jrnn.bench import measure, report
from jrnn.bench.main import conditions
from jrnn.bench.peers import Program, clocked, torch_program
from jrnn.bench.sizes import MODES, Size, flops
from jrnn.bench.steps import STEPS
from jrnn.executor import host_memory

SIZES = ("100x1x128x128", "100x32x128x128", "500x8x64x64", "50x64x256x256")
STACKS = {"one layer": (1, False), "2 bidirectional": (2, True)}
FLAX = {"lstm": nnx.OptimizedLSTMCell, "gru": nnx.GRUCell}


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
    return _pure_program(lambda p, x: getattr(nn.functional, cell)(p, x)[0], module.params(), size, mode)


def bare_scan(cell: str, size: Size, mode: str, layers: int, both: bool) -> Program | None:
    if layers > 1:
        return None
    wide = {"lstm": 4, "gru": 3}[cell] * size.hidden
    draw = np.random.default_rng(0).standard_normal
    shapes = {"wx": (size.features, wide), "wh": (size.hidden, wide), "b": (1, wide)}
    weights = {n: jnp.asarray(draw(s) / np.sqrt(size.hidden), jnp.float32) for n, s in shapes.items()}
    h = jnp.zeros((size.batch, size.hidden))
    carry = (h, h) if cell == "lstm" else h
    return _pure_program(lambda p, x: scan(STEPS[cell](p), carry, x)[1], weights, size, mode)


def _pure_program(forward: Callable[[Any, Any], Any], weights: Any, size: Size, mode: str) -> Program:
    def loss(weights: Any, x: Any) -> Any:
        return jnp.sum(forward(weights, x) ** 2)

    fn, x = jax.jit(jax.grad(loss, argnums=(0, 1)) if mode == "train" else forward), _input(size)
    return Program(clocked(lambda: jax.block_until_ready(fn(weights, x))))


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


PEERS = {
    "nn": nn_module,
    "nn.functional": nn_functional,
    "jrnn.scan": bare_scan,
    "flax": flax_rnn,
    "torch": torch_rnn,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default="lstm,gru")
    parser.add_argument("--sizes", default=",".join(SIZES), help="T x N x D x H, separated by commas")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    host_memory.keep()
    gemm, records = measure.gemm_flops(), []
    console = Console(width=None if sys.stdout.isatty() else 140)
    jobs = [(c, s, m, t) for c in args.cells.split(",") for s in STACKS for m in MODES for t in args.sizes.split(",")]
    for cell, stack, mode, text in jobs:
        size, (layers, both) = Size.parse(text), STACKS[stack]
        built = {name: PEERS[name](cell, size, mode, layers, both) for name in args.peers.split(",")}
        timings = measure.in_turns({name: program for name, program in built.items() if program}, args.turns)
        for name, t in timings.items():
            rate = flops(cell, size, mode) / t.median if layers == 1 else float("nan")
            job = (f"{cell}, {stack}", text, mode, name)
            records.append(report.Record(*job, t.median, t.low, t.high, t.turns, None, None, rate))
    console.print(report.times_table(records, gemm))
    console.print(report.ratios_table(records, "nn"))
    if args.json:
        report.save(args.json, conditions(gemm, args.turns), records)


if __name__ == "__main__":
    main()
