"""PyTorch state dicts in safetensors files: the names and bytes that torch writes, without pickle.

In PyTorch: `safetensors.torch.save_file(model.state_dict(), path)` and `model.load_state_dict(load_file(path))`.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from jrnn.errors import ConversionError, near
from jrnn.interop.cells import Params

_TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,  # numpy has none of its own, and safetensors' numpy reader refuses it
}


def load_state_dict(path: str | PathLike[str], prefix: str = "") -> Params:
    """The floating arrays of a safetensors file whose names begin with `prefix`, without it.

    Args:
        path: the file.
        prefix: the place of a recurrent module in a larger model, such as "encoder.rnn.".

    Returns:
        numpy arrays of the file's own types and bits; give them to `jrnn.nn.functional` or `jrnn.nn.LSTM(...).load`.

    Raises:
        ConversionError: not a safetensors file, or nothing in it begins with `prefix`.
    """
    try:
        entries = deserialize(Path(path).read_bytes())
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path} cannot be read as safetensors: {error}") from error
    names = [name for name, _ in entries]
    params = {}
    for name, entry in entries:
        if not name.startswith(prefix):
            continue
        if entry["dtype"] not in _TYPES:
            raise ConversionError(
                f"{path}: {name} is {entry['dtype']}; weights must be one of {sorted(_TYPES)}; a prefix, such as "
                "'encoder.', takes the weights of one module"
            )
        flat = np.frombuffer(entry["data"], _TYPES[entry["dtype"]])
        params[name.removeprefix(prefix)] = flat.reshape(entry["shape"])
    if not params:
        raise ConversionError(f"{path}: no name begins with {prefix!r}{near(prefix, names)}; it holds {sorted(names)}")
    return params


def save_state_dict(params: Mapping[str, Any], path: str | PathLike[str], prefix: str = "") -> None:
    """Writes parameters (`module.params()`) to a safetensors file that PyTorch's `load_state_dict` takes, bit for bit.

    Raises:
        ConversionError: the file cannot be written.
    """
    arrays = {prefix + name: np.ascontiguousarray(np.asarray(value)) for name, value in params.items()}
    try:
        save_file(arrays, path)
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path} cannot be written as safetensors: {error}") from error
