"""Kernels of torch as functions of numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import LayerError
from jrnn.testing.subjects import PyTree

BFLOAT16 = np.dtype(jnp.bfloat16)


def torch_kernel(kernel: Callable, with_params: bool, device: str) -> dict[str, Any]:
    """The calls of a torch function or module, as fields of a `Kernel`."""
    try:
        import torch
    except ImportError:
        raise LayerError("a kernel of torch needs torch: pip install torch") from None

    def tensor(array: Any) -> Any:
        """A copy, as torch may write into it. NumPy and torch share no name for bfloat16, so its bits are handed over."""
        array = np.array(array)
        if array.dtype == BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
        return torch.from_numpy(array).to(device)

    def array(tensor: Any) -> Any:
        tensor = tensor.detach().cpu().contiguous()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(BFLOAT16)
        return tensor.numpy()

    def arrays(tree: PyTree) -> Any:
        return jax.tree.map(array, tree)

    def run(params: PyTree, x: PyTree, state: PyTree, options: Mapping[str, Any]) -> Any:
        arguments = [params] if with_params else []
        arguments.append(x)
        if state is not None:
            arguments.append(state)
        results = kernel(*arguments, **jax.tree.map(tensor, dict(options)))
        return results if isinstance(results, tuple) else (results, None)

    def forward(params: PyTree, x: PyTree, state: PyTree, **options: Any) -> Any:
        with torch.no_grad():
            y, last = run(*jax.tree.map(tensor, (params, x, state)), options)
        return arrays(y), arrays(last)

    def backward(
        params: PyTree, x: PyTree, state: PyTree, dy: Any, dlast: Any, **options: Any
    ) -> Any:
        tensors, structure = jax.tree.flatten(jax.tree.map(tensor, (params, x, state)))
        inputs = [t.requires_grad_() for t in tensors if t.is_floating_point()]
        y, last = run(*jax.tree.unflatten(structure, tensors), options)
        outputs = []
        seeds = []
        seeds_of_all = jax.tree.leaves((dy, None if last is None else dlast))
        for output, seed in zip(jax.tree.leaves((y, last)), seeds_of_all, strict=True):
            if output.requires_grad:
                outputs.append(output)
                seeds.append(tensor(seed).to(output.dtype))
        if not outputs:
            raise LayerError("no result of the kernel has a gradient")
        slopes = iter(torch.autograd.grad(outputs, inputs, seeds, allow_unused=True))
        gradients = []
        for t in tensors:
            slope = next(slopes) if t.is_floating_point() else None
            gradients.append(array(torch.zeros_like(t) if slope is None else slope))
        return (arrays(y), arrays(last), *jax.tree.unflatten(structure, gradients))

    return {"forward": forward, "backward": backward}
