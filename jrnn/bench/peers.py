"""What is measured beside `jrnn.scan`.

A peer is a function `(cell, size, mode) -> Program | None`: None where it has no such cell. "train" computes the sum of
squares of all outputs and its gradients with respect to the weights and the input.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jrnn.bench import steps
from jrnn.bench.sizes import AFFINE, Size
from jrnn.errors import DataError
from jrnn.executor import scan

_HAS_TORCH = importlib.util.find_spec("torch") is not None  # imported where it is used: loading it takes seconds


@dataclass(frozen=True)
class Program:
    """Something to time.

    Attributes:
        run: runs it once, to the end, and returns the seconds that it took.
        compile_seconds: what making it took, or None.
        peak_bytes: temporary memory that the compiler plans, or None.
        close: frees what it holds outside this process.
    """

    run: Callable[[], float]
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    close: Callable[[], None] = lambda: None


Peer = Callable[[str, Size, str], Program | None]


def clocked(fn: Callable[[], Any]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        fn()
        return time.perf_counter() - start

    return run


def _compiled(forward: Callable[[Any, Any], Any], weights: Any, x: Any, mode: str) -> Program:
    def loss(weights: Any, x: Any) -> Any:
        return jnp.sum(forward(weights, x) ** 2)

    fn = jax.grad(loss, argnums=(0, 1)) if mode == "train" else forward
    start = time.perf_counter()
    compiled = jax.jit(fn).lower(weights, x).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return Program(
        clocked(lambda: jax.block_until_ready(compiled(weights, x))),
        seconds,
        None if memory is None else int(memory.temp_size_in_bytes),
    )


def _scanned(which: Callable) -> Peer:
    def build(cell: str, size: Size, mode: str) -> Program:
        weights, x = steps.inputs(cell, size)
        carry = steps.initial(cell, size)
        return _compiled(lambda p, x: which(steps.STEPS[cell](p), carry, x)[1], weights, x, mode)

    return build


def flax_rnn(cell: str, size: Size, mode: str) -> Program | None:
    """`flax.nnx.RNN` over its optimized LSTM cell or its GRU cell, time first."""
    cells = {"lstm": nnx.OptimizedLSTMCell, "gru": nnx.GRUCell}
    if cell not in cells:
        return None
    module = nnx.RNN(cells[cell](size.features, size.hidden, rngs=nnx.Rngs(0)), time_major=True)
    graph, weights, rest = nnx.split(module, nnx.Param, ...)
    x, carry = steps.inputs(cell, size)[1], steps.initial(cell, size)
    return _compiled(lambda p, x: nnx.merge(graph, p, rest)(x, initial_carry=carry), weights, x, mode)


def torch_rnn(cell: str, size: Size, mode: str) -> Program | None:
    """`torch.nn.LSTM` or `GRU`, on CUDA (cuDNN) where there is one."""
    import torch

    cells = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
    if cell not in cells:
        return None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = cells[cell](size.features, size.hidden).to(device)
    x = torch.tensor(np.array(steps.inputs(cell, size)[1]), device=device, requires_grad=mode == "train")

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

    return Program(clocked(run))


def caffe2(python: str, cell: str, size: Size, mode: str) -> Program | None:
    """Caffe2 itself, in a process of its own that waits for its turns."""
    if cell != "lstm":
        return None
    script = Path(__file__).with_name("caffe2_worker.py")
    arguments = [str(size.steps), str(size.batch), str(size.features), str(size.hidden), mode]
    worker = subprocess.Popen(
        [python, str(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert worker.stdin is not None and worker.stdout is not None
    to, back = worker.stdin, worker.stdout

    def run() -> float:
        with contextlib.suppress(BrokenPipeError):  # a dead process also answers nothing
            to.write("run\n")
            to.flush()
        line = back.readline()
        if not line:
            again = " ".join([python, str(script), *arguments])
            raise DataError(f"the Caffe2 process ended with status {worker.wait()}; see what it says: {again}")
        return float(json.loads(line))

    def close() -> None:
        with contextlib.suppress(BrokenPipeError):
            to.close()
        worker.wait(timeout=30)
        back.close()

    return Program(run, close=close)


def available(caffe2_python: str | None) -> dict[str, Peer]:
    """The peers that can run here, by name; jrnn comes first."""
    found: dict[str, Peer] = {"jrnn": _scanned(scan), "lax.scan": _scanned(jax.lax.scan), "flax": flax_rnn}
    if _HAS_TORCH:
        found["torch"] = torch_rnn
    if caffe2_python:
        found["caffe2"] = functools.partial(caffe2, caffe2_python)
    found |= {name: functools.partial(_by_executor, name) for name in ("scan", "associative")}
    return found


def _by_executor(name: str, cell: str, size: Size, mode: str) -> Program | None:
    """`jrnn.scan` by one executor, for cells that it may choose between two for."""
    if cell not in AFFINE:
        return None
    return _scanned(functools.partial(scan, executor=name))(cell, size, mode)


def versions() -> dict[str, str]:
    """Of what takes part."""
    found = {
        "python": sys.version.split()[0],
        "jax": jax.__version__,
        "flax": flax.__version__,
        "numpy": np.__version__,
    }
    if _HAS_TORCH:
        found["torch"] = importlib.metadata.version("torch")
    return found
