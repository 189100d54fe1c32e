"""PyTorch state dicts: the names and bits of its tensors, from a dict, a safetensors file, or a file of `torch.save`.

In PyTorch: `safetensors.torch.save_file(model.state_dict(), path)` and `model.load_state_dict(load_file(path))`.

Weights that PyTorch stores in parts, because they are normalized or pruned, are read as the weights that its layers use:

| in PyTorch | parts of `weight` | the weight |
|---|---|---|
| `utils.weight_norm` | `weight_g`, `weight_v` | g v / norm(v) |
| `utils.parametrizations.weight_norm` | `parametrizations.weight.original0`, `.original1` | the same |
| `utils.spectral_norm` | `weight_orig`, `weight_u`, `weight_v` | W / (u^T W v) |
| `utils.parametrizations.spectral_norm` | `parametrizations.weight.original`, `.0._u`, `.0._v` | the same |
| `utils.prune` | `weight_orig`, `weight_mask` | W mask |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jrnn.errors import ConversionError, near
from jrnn.files.tensors import open_tensors, write_tensors
from jrnn.files.torch_files import as_array, is_of_torch, read_torch
from jrnn.interop.cell_weights import Params

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
        raise ConversionError(
            f"a state dict is a dict or the path of a file, not a {type(source).__name__}"
        )
    if isinstance(source, Mapping):
        where = "state dict"
        weights = source
    else:
        where = str(source)
        weights = _read(Path(source))
    entries = {}
    for name, value in weights.items():
        # The number of batches is an integer, and no weight.
        if not str(name).endswith("num_batches_tracked"):
            entries[str(name)] = value
    if any(name.startswith(f"{prefix}.") for name in entries):
        prefix += "."
    taken = {name: value for name, value in entries.items() if name.startswith(prefix)}
    inner = [name for name, value in taken.items() if isinstance(value, Mapping)]
    if inner:
        key = max(inner, key=lambda name: _tensors_in(taken[name]))
        raise ConversionError(
            f"{where}: {key} is a dict of {sorted(map(str, taken[key]))[:8]}; give the state dict within a checkpoint, "
            f"as in load_state_dict(torch.load(path, weights_only=True)[{key!r}])"
        )
    arrays = {}
    for name, value in taken.items():
        arrays[name.removeprefix(prefix)] = _array(where, name, value)
    params = folded(arrays)
    if not params:
        raise ConversionError(
            f"{where}: no name begins with {prefix!r}{near(prefix, entries)}; it has {sorted(entries)}"
        )
    return params


def _tensors_in(entries: Mapping[str, Any]) -> int:
    """How many values of a dict are tensors or arrays."""
    count = 0
    for value in entries.values():
        count += hasattr(value, "dtype") or hasattr(value, "detach")
    return count


def _read(path: Path) -> dict[str, Any]:
    """Returns the contents of a file by name: arrays, or anything else that torch has saved."""
    if is_of_torch(path, ConversionError):
        return read_torch(path, ConversionError)
    with open_tensors(path, ConversionError) as tensors:
        entries = {}
        for name in tensors.keys():  # noqa: SIM118 - no mapping
            kind = tensors.get_slice(name).get_dtype()
            entries[name] = tensors.get_tensor(name) if kind in _TYPES else kind
        return entries


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
        raise ConversionError(
            f"{path}: the file is safetensors, which torch.load cannot read; name it .safetensors"
        )
    write_tensors(path, {prefix + name: value for name, value in params.items()}, ConversionError)


def _normalized(g: np.ndarray, v: np.ndarray) -> np.ndarray:
    """g v / norm(v), with the norm over the axes along which g is constant."""
    axes = tuple(k for k in range(v.ndim) if g.ndim == 0 or g.shape[k] == 1)
    wide = v.astype(np.promote_types(v.dtype, np.float32))
    return np.asarray(g * wide / np.sqrt(np.sum(wide * wide, axis=axes, keepdims=True)), v.dtype)


def _is_normalized(g: np.ndarray, v: np.ndarray) -> bool:
    along = [n for n in g.shape if n != 1]
    return v.ndim > 1 and (
        not g.ndim or (g.ndim == v.ndim and len(along) < 2 and {*along} <= {*v.shape})
    )


def _by_largest(weight: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """W / (u^T W v): u is along the first axis of W, or along the second if W is of a transposed convolution."""
    singular_values = []
    for axis, size in enumerate(weight.shape):
        if size == u.size:
            rows = np.moveaxis(weight, axis, 0).reshape(u.size, -1).astype(np.float64)
            singular_values.append(u @ rows @ v)
    return np.asarray(weight / max(singular_values, key=abs), weight.dtype)


def _is_spectral(weight: np.ndarray, u: np.ndarray, v: np.ndarray) -> bool:
    return u.ndim == v.ndim == 1 and u.size in weight.shape and u.size * v.size == weight.size


def _is_masked(weight: np.ndarray, mask: np.ndarray) -> bool:
    return mask.shape == weight.shape


_PARAMETRIZED = "parametrizations."
# The names of the parts, of the weight {0}; which arrays are such parts; and the weight.
_Rule = tuple[tuple[str, ...], Callable[..., bool], Callable[..., np.ndarray]]
_RULES: tuple[_Rule, ...] = (
    (("{}_orig", "{}_u", "{}_v"), _is_spectral, _by_largest),
    (("{}_orig", "{}_mask"), _is_masked, np.multiply),
    (("{}_g", "{}_v"), _is_normalized, _normalized),
    (("{}.original0", "{}.original1"), _is_normalized, _normalized),
    (("{}.original", "{}.0._u", "{}.0._v"), _is_spectral, _by_largest),
)


def folded(params: Params) -> Params:
    """The parameters with weights in place of their parts.

    Raises:
        ConversionError: for a weight that is parametrized in another manner.

    >>> folded({"w_g": np.ones((2, 1)), "w_v": np.array([[3.0, 4.0], [0.0, 2.0]]), "b": np.ones(2)})["w"].tolist()
    [[0.6, 0.8], [0.0, 1.0]]
    """
    whole = dict(params)
    for names, applies, weight_of in _RULES:
        for first in [name for name in whole if name.endswith(names[0][2:])]:
            base = first.removesuffix(names[0][2:])
            parts = [name.format(base) for name in names]
            if base in whole or not whole.keys() >= set(parts):
                continue
            arrays = [whole[name] for name in parts]
            if applies(*arrays):
                whole[base.replace(_PARAMETRIZED, "")] = weight_of(*arrays)
                for name in parts:
                    del whole[name]
    for name in whole:
        if _PARAMETRIZED in name:
            module, _, rest = name.rpartition(_PARAMETRIZED)
            weight = rest.partition(".")[0]
            raise ConversionError(
                f"{name}: {module}{weight} is parametrized by neither weight_norm nor spectral_norm; in PyTorch, call "
                f"torch.nn.utils.parametrize.remove_parametrizations(module, {weight!r}) and save the state dict again"
            )
    return whole
