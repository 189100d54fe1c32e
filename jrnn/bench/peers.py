"""The programs that are measured next to `jrnn.scan`.

A peer is a function `(cell, size, mode) -> Program | None`: None if it has no such cell. "train" computes the gradients of
the sum of squares of all outputs with respect to the weights and the input.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jrnn import nn
from jrnn.bench import measured_cells
from jrnn.bench.sizes import AFFINE, Size
from jrnn.errors import ScanError
from jrnn.files import read_text
from jrnn.loops import scan
from jrnn.loops.kernels.native import library
from jrnn.nets.builder import NetBuilder
from jrnn.nets.cells import GRUCell, LayerNormLSTMCell, LSTMCell
from jrnn.nets.cells.base import run_cell
from jrnn.nets.lowering import run_net, to_jax

Forward = Callable[[Any, Any], Any]  # (weights, x) -> outputs

NETS = {"lstm": LSTMCell, "gru": GRUCell, "layer_norm_lstm": LayerNormLSTMCell}
# torch is imported where it is used: loading it takes seconds.
_HAS_TORCH = importlib.util.find_spec("torch") is not None


@dataclass(frozen=True)
class Timed:
    """Something to time; `of` compiles a function of JAX.

    Attributes:
        run: runs it once, to the end, and returns the seconds that it took.
        compile_seconds: the seconds to compile it, or None.
        peak_bytes: temporary memory that the compiler plans, or None.
        close: frees resources outside this process.
    """

    run: Callable[[], float]
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    close: Callable[[], None] = lambda: None

    @staticmethod
    def of(
        fn: Callable[..., Any], *args: Any, timed: Callable[[Callable], Callable] | None = None
    ) -> Timed:
        """Compiles a function of JAX for these arguments. `timed` wraps its calls so that they return seconds."""
        start = time.perf_counter()
        call = jax.jit(fn).lower(*args).compile()
        seconds = time.perf_counter() - start
        memory = call.memory_analysis()
        size = None if memory is None else int(memory.temp_size_in_bytes)
        return Timed((timed or clocked)(lambda: jax.block_until_ready(call(*args))), seconds, size)


Peer = Callable[[str, Size, str], Timed | None]


def by_processor() -> bool:
    """Returns whether runs are timed by the time of the processor: on one core, where work of others should not count."""
    return cores() == 1 and jax.default_backend() == "cpu"


def clocked(fn: Callable[[], Any], clock: Callable[[], float] | None = None) -> Callable[[], float]:
    clock = clock or (time.process_time if by_processor() else time.perf_counter)

    def run() -> float:
        start = clock()
        fn()
        return clock() - start

    return run


class Function(NamedTuple):
    """The computation of a peer in JAX: a function `(weights, x) -> outputs` and its arguments."""

    forward: Forward
    weights: Any
    x: Any


def in_mode(forward: Forward, mode: str) -> Forward:
    """Returns the function itself, or for "train" its gradients with respect to the weights and the input."""

    def loss(weights: Any, x: Any) -> Any:
        return jnp.sum(forward(weights, x) ** 2)

    return jax.grad(loss, argnums=(0, 1)) if mode == "train" else forward


def compiled(forward: Forward, weights: Any, x: Any, mode: str) -> Timed:
    """Compiles a function `(weights, x) -> outputs`, or its gradients."""
    return Timed.of(in_mode(forward, mode), weights, x)


def _compiled(function: Callable[[str, Size], Function | None]) -> Peer:
    """Returns the peer that compiles a function of JAX."""

    def build(cell: str, size: Size, mode: str) -> Timed | None:
        program = function(cell, size)
        return None if program is None else compiled(*program, mode)

    return build


def scanned(which: Callable, cell: str, size: Size) -> Function:
    """Returns a cell of this benchmark through a scan."""
    weights, x = measured_cells.inputs(cell, size)
    carry = measured_cells.initial(cell, size)
    return Function(lambda p, x: which(measured_cells.make(cell, p), carry, x)[1], weights, x)


def flax_rnn(cell: str, size: Size) -> Function | None:
    """`flax.nnx.RNN` over its optimized LSTM cell or its GRU cell, time first."""
    cells = {"lstm": nnx.OptimizedLSTMCell, "gru": nnx.GRUCell}
    if cell not in cells:
        return None
    module = nnx.RNN(cells[cell](size.features, size.hidden, rngs=nnx.Rngs(0)), time_major=True)
    graph, weights, rest = nnx.split(module, nnx.Param, ...)
    x = measured_cells.inputs(cell, size)[1]
    carry = measured_cells.initial(cell, size)
    return Function(lambda p, x: nnx.merge(graph, p, rest)(x, initial_carry=carry), weights, x)


def jrnn_nn(cell: str, size: Size) -> Function | None:
    """`jrnn.nn.LSTM` or `GRU`."""
    modules = {"lstm": nn.LSTM, "gru": nn.GRU}
    if cell not in modules:
        return None
    graph, weights = nnx.split(modules[cell](size.features, size.hidden, rngs=nnx.Rngs(0)))
    x = measured_cells.inputs(cell, size)[1]
    return Function(lambda p, x: nnx.merge(graph, p)(x)[0], weights, x)


def caffe2_net(cell: str, size: Size) -> Function | None:
    """The net of a cell of Caffe2, by `to_jax`. Its GRU applies the reset gate before the product of the candidate."""
    if cell not in NETS:
        return None
    b = NetBuilder("net")
    layer = NETS[cell](size.features, size.hidden)
    run = run_cell(layer, b, b.input("x"), None, None, scope="cell")
    net = b.build(outputs=[run.output])
    weights = run_net(b.build_init(), {}, key=jax.random.key(0))
    fn = to_jax(net, [run.output])
    x = measured_cells.inputs(cell, size)[1]
    return Function(lambda p, x: fn({**p, "x": x})[run.output], weights, x)


# The peers that can be compiled for any device.
FUNCTIONS: dict[str, Callable[[str, Size], Function | None]] = {
    "jrnn": functools.partial(scanned, scan),
    "jrnn.nn": jrnn_nn,
    "net": caffe2_net,
    "lax.scan": functools.partial(scanned, jax.lax.scan),
    "flax": flax_rnn,
}


def torch_rnn(cell: str, size: Size, mode: str) -> Timed | None:
    """`torch.nn.LSTM` or `GRU`, on CUDA (cuDNN) if there is a GPU."""
    import torch

    cells = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
    if cell not in cells:
        return None
    module = cells[cell](size.features, size.hidden)
    return torch_program(module, measured_cells.inputs(cell, size)[1], mode)


def torch_program(module: Any, x: Any, mode: str) -> Timed:
    """A recurrent module of torch, time first."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = module.to(device)
    x = torch.tensor(np.array(x), device=device, requires_grad=mode == "train")

    def run() -> None:
        if mode == "train":
            x.grad = None
            module.zero_grad()
            (module(x)[0] ** 2).sum().backward()
        else:
            with torch.no_grad():
                module(x)
        if device == "cuda":
            torch.cuda.synchronize()

    return Timed(clocked(run))


def available() -> dict[str, Peer]:
    """Returns the peers that can run here, by name."""
    peers = {name: _compiled(function) for name, function in FUNCTIONS.items()}
    if _HAS_TORCH:
        peers["torch"] = torch_rnn
    executors = ["scan", "associative"]
    if not library.loaded().reason:
        executors.append("native")
    for executor in executors:
        peers[executor] = functools.partial(_by_executor, executor)
    return peers


def _by_executor(name: str, cell: str, size: Size, mode: str) -> Timed | None:
    """`jrnn.scan` by one executor, for the steps that it can run; by others than the kernel for cells that have two."""
    if name != "native" and cell not in AFFINE:
        return None
    try:
        return compiled(*scanned(functools.partial(scan, executor=name), cell, size), mode)
    except ScanError:
        return None


def cores() -> int:
    """Returns the number of the processor's cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Returns the model of this machine's processor."""
    with suppress(ScanError):
        for line in read_text("/proc/cpuinfo", ScanError).splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    numbers = {"python": platform.python_version()}
    numbers |= {module.__name__: module.__version__ for module in (jax, flax, np)}
    if _HAS_TORCH:
        numbers["torch"] = importlib.metadata.version("torch")
    return numbers
