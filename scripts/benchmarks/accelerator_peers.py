"""The programs of other libraries next to jrnn's on a GPU: layers with matrix states, and LSTM and GRU, in any type.

The libraries are in the folder `gpu_peers` (`scripts/gpu_peers.py`), or installed. Each function raises an error where its
library or a GPU is missing, which the day says as the failure of this peer.

Shapes: T time, N batch or heads, D input or keys, H hidden or values.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.bench.sizes import Size

FOLDER = Path(__file__).parents[2] / "gpu_peers"
TORCH_CELLS = {"lstm": "LSTM", "gru": "GRU"}

Run = Callable[[], Any]


def library(peer: str, module: str) -> Any:
    """Imports a module of a peer. What is installed comes first."""
    folder = str(FOLDER / peer)
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(module)


def gates_of(layer: str, xs: Mapping[str, Any], of: Any) -> dict[str, Any]:
    """Returns the inputs of a layer as gated linear attention with a decay has them: q, k, v, log decays g, and beta.

    Args:
        layer: a name of `linear_layers.py`.
        xs: its inputs.
        of: `jax.numpy`, or torch with the same functions.
    """
    inputs = {name: xs[name] for name in ("q", "k", "v")}
    if layer == "gla":
        inputs["g"] = xs["gk"]
    elif layer == "gated_delta_rule":
        inputs |= {"g": xs["g"], "beta": xs["b"]}
    elif layer == "mamba2":
        softplus = jax.nn.softplus if of is jnp else of.nn.functional.softplus
        dt = softplus(xs["i"])
        inputs |= {"g": dt * xs["g"], "k": xs["k"] * dt[..., None]}
    else:
        inputs["g"] = 0 * xs["q"][..., 0]
    return inputs


def after(layer: str, xs: Mapping[str, Any], y: Any, of: Any) -> Any:
    """Returns the outputs of a layer from what was read from its state."""
    if layer != "mamba2":
        return y
    silu = jax.nn.silu if of is jnp else of.nn.functional.silu
    return (y + 0.5 * xs["v"]) * silu(xs["v2"])


def jla(layer: str) -> Callable[[Any, Any], Any]:
    """Returns a layer by jax-linear-attention: kernels in Pallas on Hopper GPUs, and JAX elsewhere."""
    ops = library("jla", "jla.ops")
    kind = {"gla": "gla", "gated_delta_rule": "gated_deltanet"}.get(layer, "simple_gla")

    def run(S: Any, xs: Any) -> tuple[Any, Any]:
        inputs = {name: x[None] for name, x in gates_of(layer, xs, jnp).items()}
        vectors = [inputs.pop(name) for name in ("q", "k", "v")]
        inputs = {name: x.astype(jnp.float32) for name, x in inputs.items()}
        state = S[None].astype(jnp.float32)
        y, last = ops.linear_attention(
            kind, *vectors, **inputs, scale=1.0, initial_state=state, output_final_state=True
        )
        return last[0], after(layer, xs, y[0], jnp)

    return run


def fla(layer: str, S: Any, xs: Mapping[str, Any], mode: str) -> Run:
    """Returns a layer by flash-linear-attention: kernels in Triton."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("flash-linear-attention needs a GPU")
    names = {"gla": "gla", "gated_delta_rule": "gated_delta_rule"}
    name = names.get(layer, "simple_gla")
    kernel = getattr(library("fla", f"fla.ops.{name}"), f"chunk_{name}")
    leaves = {key: on_gpu(x, mode) for key, x in xs.items()}
    state = on_gpu(S, mode)

    def forward() -> Any:
        inputs = {key: x[None] for key, x in gates_of(layer, leaves, torch).items()}
        y, last = kernel(
            **inputs, scale=1.0, initial_state=state[None].float(), output_final_state=True
        )
        return last[0], after(layer, leaves, y[0], torch)

    return in_torch_mode(forward, [state, *leaves.values()], mode)


def cudnn(cell: str, size: Size, dtype: Any, mode: str) -> Run:
    """Returns torch's LSTM or GRU in a type; on a GPU it is cuDNN's."""
    import torch

    module = getattr(torch.nn, TORCH_CELLS[cell])(size.features, size.hidden)
    module = module.to(torch_device(), getattr(torch, jnp.dtype(dtype).name))
    rng = np.random.RandomState(0)
    x = jnp.asarray(rng.randn(size.steps, size.batch, size.features), dtype)
    given = on_gpu(x, mode)
    return in_torch_mode(lambda: module(given)[0], [given, *module.parameters()], mode)


def flashrnn(cell: str, size: Size, dtype: Any, mode: str) -> Run:
    """Returns an LSTM with one head by FlashRNN's kernel in Triton, which needs no C++ compiler. Its input is projected."""
    import torch

    if cell != "lstm" or not torch.cuda.is_available():
        raise RuntimeError("FlashRNN is measured for LSTM, on a GPU")
    run = library("flashrnn", "flashrnn").flashrnn
    name = jnp.dtype(dtype).name
    rng = np.random.RandomState(0)
    shapes = (
        (size.batch, size.steps, 4, 1, size.hidden),
        (4, 1, size.hidden, size.hidden),
        (4, 1, size.hidden),
    )
    given = [on_gpu(jnp.asarray(0.05 * rng.randn(*shape), dtype), mode) for shape in shapes]
    return in_torch_mode(
        lambda: run(*given, function=cell, backend="triton_fused", dtype=name)[0], given, mode
    )


def torch_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def on_gpu(x: Any, mode: str) -> Any:
    """Returns an array of JAX as a tensor of the same type."""
    import torch

    tensor = torch.tensor(np.asarray(x, np.float32), device=torch_device())
    tensor = tensor.to(getattr(torch, jnp.dtype(x.dtype).name))
    return tensor.requires_grad_(mode == "train")


def in_torch_mode(forward: Run, leaves: list[Any], mode: str) -> Run:
    """Returns a function that runs forward, or for "train" computes the gradients of the sum of squares, to the end."""
    import torch

    def run() -> Any:
        if mode == "train":
            for leaf in leaves:
                leaf.grad = None
            results = forward()
            parts = results if isinstance(results, tuple) else (results,)
            sum((part.float() ** 2).sum() for part in parts).backward()
        else:
            with torch.no_grad():
                results = forward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return results

    return run
