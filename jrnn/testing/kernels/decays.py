"""Where the decays of a kernel's inputs are, and inputs with other ones."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_flatten_with_path

from jrnn.errors import LayerError, near
from jrnn.jaxprs.arguments import path_of
from jrnn.testing.kernels.kernel import Kernel
from jrnn.testing.subjects import PyTree


def _place(kernel: Kernel) -> tuple[int, bool]:
    """Which array holds the decays, and whether it holds their logarithms."""
    decay = kernel.decay
    assert isinstance(decay, str)
    is_log = decay.startswith("exp(") and decay.endswith(")")
    name = decay.removeprefix("exp(").removesuffix(")") if is_log else decay
    names = [path_of("", path) for path, _ in tree_flatten_with_path(kernel.x)[0]]
    if name not in names:
        raise LayerError(f"decay is {decay!r}, but xs have no {name!r}{near(name, names)}")
    return names.index(name), is_log


def is_decay(kernel: Kernel, k: int) -> bool:
    """Whether the array with this number holds decays."""
    return isinstance(kernel.decay, str) and _place(kernel)[0] == k


def with_decay(kernel: Kernel, x: PyTree, factor: float) -> Any:
    """Inputs whose every step has the decay `factor`."""
    if callable(kernel.decay):
        return jax.tree.map(np.asarray, kernel.decay(x, factor))
    place, is_log = _place(kernel)
    with np.errstate(divide="ignore"):
        value = np.log(factor) if is_log else factor
    leaves, structure = jax.tree.flatten(x)
    leaves[place] = np.full_like(leaves[place], value)
    return jax.tree.unflatten(structure, leaves)
