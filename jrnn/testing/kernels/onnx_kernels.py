"""ONNX models as kernels, run by onnxruntime.

An input named as an option (`resets`, `lengths`, ...) is that option. The others are matched by the names of the arrays in
xs and the state, or, where a name matches none, all by their order. Outputs are those of the step, then the last state.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_flatten_with_path

from jrnn.errors import LayerError
from jrnn.jaxprs.arguments import path_of
from jrnn.testing.kernels.kernel import FEATURES
from jrnn.testing.subjects import PyTree

# onnxruntime's names of types whose names in numpy are others
_TYPES = {"float": "float32", "double": "float64"}


def onnx_kernel(
    model: bytes | str | os.PathLike[str],
    xs: PyTree,
    state: PyTree,
    layout: str,
    returns_state: bool | None,
) -> dict[str, Any]:
    """The call of an ONNX model, as fields of a `Kernel`. It has no gradients."""
    try:
        import onnxruntime
    except ImportError:
        raise LayerError("an ONNX model needs onnxruntime: pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    source = model if isinstance(model, bytes) else os.fspath(model)
    try:
        session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own have no common base
        raise LayerError(f"onnxruntime does not load the model: {error}") from error
    inputs = session.get_inputs()
    types = {}
    for i in inputs:
        kind = i.type.removeprefix("tensor(").removesuffix(")")
        types[i.name] = np.dtype(_TYPES.get(kind, kind))
    free = [i for i in inputs if i.name not in FEATURES]
    names = _names_of("xs", xs)
    states = _names_of("state", state)
    takes_state = len(free) > len(names)
    arrays = [*names, *states] if takes_state else names
    if len(free) != len(arrays):
        shown = ", ".join(i.name for i in free)
        raise LayerError(
            f"the model has the inputs {shown}; xs have {len(names)} arrays and the state {len(states)}"
        )
    order = _matched(arrays, [i.name for i in free])
    of_states = layout.replace("T", "")
    for i in free:
        axes = layout if i.name in order[: len(names)] else of_states
        if any(isinstance(size, int) for size in i.shape[: len(axes)]):
            raise LayerError(
                f"input {i.name!r} of the model has the shape {i.shape}; its axes {axes} must be open, so that other sizes "
                "can be tried: export the model with dynamic axes"
            )
    if returns_state is None:
        returns_state = len(session.get_outputs()) > len(states)

    def forward(params: PyTree, x: PyTree, state: PyTree, **options: Any) -> Any:
        leaves = jax.tree.leaves((x, state if takes_state else None))
        feeds = {}
        for name, leaf in [*zip(order, leaves, strict=True), *options.items()]:
            feeds[name] = np.asarray(leaf).astype(types[name])
        results = session.run(None, feeds)
        if not returns_state:
            return results, None
        return results[: -len(states)], results[-len(states) :]

    features: dict[str, Any] = {name: name in types for name in FEATURES}
    return features | {
        "forward": forward,
        "backward": None,
        "takes_state": takes_state,
        "needs_state": takes_state,
        "returns_state": returns_state,
        "types": ("float32",),
    }


def _names_of(prefix: str, tree: PyTree) -> list[str]:
    return [path_of(prefix, path) for path, _ in tree_flatten_with_path(tree)[0]]


def _matched(arrays: Sequence[str], inputs: Sequence[str]) -> list[str]:
    """The input of each array: the one with its name, or with the last part of its path; else all in their order."""
    order = []
    for name in arrays:
        last = name.rpartition("/")[2]
        same = [i for i in inputs if i in (name, last) or i.endswith(f"/{last}")]
        if len(same) != 1:
            return list(inputs)
        order.append(same[0])
    return order if len(set(order)) == len(order) else list(inputs)
