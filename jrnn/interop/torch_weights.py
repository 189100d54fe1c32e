"""PyTorch state dicts: the names and bits of its tensors, from a dict, a safetensors file, or a file of `torch.save`.

In PyTorch: `safetensors.torch.save_file(model.state_dict(), path)` and `model.load_state_dict(load_file(path))`.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jrnn.errors import ConversionError, near
from jrnn.files.tensors import open_tensors, write_tensors
from jrnn.files.torch_files import as_array, is_of_torch, read_torch
from jrnn.interop.cells import Params
from jrnn.interop.folded import folded

_TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,  # numpy lacks it, and safetensors' numpy reader rejects it
}


def load_state_dict(source: Mapping[str, Any] | str | PathLike[str], prefix: str = "") -> Params:
    """Reads the floating-point arrays of a PyTorch state dict whose names begin with `prefix`.

    Args:
        source: a dict of tensors or arrays, such as `model.state_dict()`; the path of a safetensors file; or the path of a
            file of `torch.save(model.state_dict(), path)`, which torch reads with `weights_only=True`: no code in it runs.
        prefix: the name of a recurrent module in a larger model, such as "encoder.rnn". The dot after it may be left out.

    Returns:
        numpy arrays of the source's own types and bits; give them to `jrnn.nn.functional` or `jrnn.nn.LSTM(...).load`. A
        weight that weight_norm, spectral_norm or pruning stores in parts is the weight that PyTorch's layer uses.

    Raises:
        ConversionError: for another parametrization, a missing file, one that needs torch if torch is missing, values that
            are not floating tensors, or no name with `prefix`.

    >>> state = {"rnn.weight_ih_l0": np.ones((4, 3)), "head.weight": np.ones(2)}
    >>> load_state_dict(state, prefix="rnn.")["weight_ih_l0"].shape
    (4, 3)
    """
    if not isinstance(source, (Mapping, str, PathLike)):
        raise ConversionError(f"a state dict is a dict or the path of a file, not a {type(source).__name__}")
    if isinstance(source, Mapping):
        where, entries = "state dict", {str(name): value for name, value in source.items()}
    else:
        where, entries = str(source), _read(Path(source))
    entries = {name: value for name, value in entries.items() if not name.endswith("num_batches_tracked")}  # an integer
    prefix += "." if any(name.startswith(f"{prefix}.") for name in entries) else ""
    taken = {name: value for name, value in entries.items() if name.startswith(prefix)}
    if inner := [name for name, value in taken.items() if isinstance(value, Mapping)]:
        key = max(
            inner,
            key=lambda name: sum(hasattr(value, "dtype") or hasattr(value, "detach") for value in taken[name].values()),
        )
        raise ConversionError(
            f"{where}: {key} is a dict of {sorted(map(str, taken[key]))[:8]}; give the state dict within a checkpoint, "
            f"as in load_state_dict(torch.load(path, weights_only=True)[{key!r}])"
        )
    params = folded({name.removeprefix(prefix): _array(where, name, v) for name, v in taken.items()})
    if not params:
        raise ConversionError(
            f"{where}: no name begins with {prefix!r}{near(prefix, entries)}; it has {sorted(entries)}"
        )
    return params


def _read(path: Path) -> dict[str, Any]:
    """Returns the contents of a file by name: arrays, or anything else that torch has saved."""
    if is_of_torch(path, ConversionError):
        return read_torch(path, ConversionError)
    with open_tensors(path, ConversionError) as tensors:
        types = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 - no mapping
        return {name: tensors.get_tensor(name) if kind in _TYPES else kind for name, kind in types.items()}


def _array(where: str, name: str, value: Any) -> np.ndarray:
    """Returns a floating tensor or array as a numpy array of the same type and bits."""
    if hasattr(value, "detach"):
        try:
            value = as_array(value)
        except ValueError as error:
            raise ConversionError(f"{where}: {name} is not an ordinary tensor: {error}") from error
    given = value if isinstance(value, str) else getattr(value, "dtype", type(value).__name__)
    if given not in _TYPES.values():
        raise ConversionError(
            f"{where}: {name} is {given}; weights must be one of {sorted(_TYPES)}; a prefix, such as 'encoder.', takes the "
            "weights of one module"
        )
    return np.asarray(value)


def save_state_dict(params: Mapping[str, Any], path: str | PathLike[str], prefix: str = "") -> None:
    """Writes parameters (`module.params()`) to a safetensors file that PyTorch's `load_state_dict` takes, bit for bit.

    Raises:
        ConversionError: the file cannot be written, or has the name of a file of `torch.save`.
    """
    if str(path).endswith((".pt", ".pth")):
        raise ConversionError(f"{path}: the file is safetensors, which torch.load cannot read; name it .safetensors")
    write_tensors(path, {prefix + name: value for name, value in params.items()}, ConversionError)
