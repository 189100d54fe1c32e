"""Files of `torch.save`: torch reads them, if it is there, without running code in them."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jrnn.errors import ErrorType, JrnnError
from jrnn.files.reading import free, open_file

# Names of types in safetensors.
NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_MAGIC = (b"PK\x03\x04", b"\x80\x02")  # a zip archive, or a pickle before torch 1.6


def is_of_torch(path: Path, error: ErrorType) -> bool:
    """Whether a file begins as one of `torch.save`; raises `error` if it cannot be read."""
    with open_file(path, error, free()) as opened:
        return opened.read(4).startswith(_MAGIC)


def read_torch(path: Path, error: ErrorType) -> dict[str, Any]:
    """The contents of a file by name: tensors of torch, or anything else that torch has saved.

    Raises:
        JrnnError: of type `error`, if torch is missing, or reads no state dict without running code.
    """
    try:
        import torch
    except ImportError:
        stem = "model" if path.name.startswith("pytorch_model") else path.stem
        out = str(path.with_name(f"{stem}.safetensors"))
        raise error(
            f"{path} is a file of torch.save, which only torch can read, and torch is not installed; with torch, these "
            "lines convert the file:\n"
            "    import safetensors.torch, torch\n"
            f"    tensors = torch.load({str(path)!r}, weights_only=True)\n"
            f"    safetensors.torch.save_file({{name: t.clone() for name, t in tensors.items()}}, {out!r})\n"
            "If the file is a checkpoint, save the state dict in it: torch.load(...)['state_dict']"
        ) from None
    try:
        is_zip = zipfile.is_zipfile(path)
        file = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as e:
        # whatever torch, pickle or zipfile raises for a file that is damaged or holds objects
        raise error(
            f"{path}: torch reads no state dict from it: {str(e).strip().partition('.')[0]}; in PyTorch, save one with "
            "torch.save(model.state_dict(), path)"
        ) from e
    if not isinstance(file, Mapping):
        raise error(
            f"{path}: holds a {type(file).__name__}; it must hold a state dict, names to tensors"
        )
    return {str(name): value for name, value in file.items()}


def as_array(tensor: Any) -> np.ndarray:
    """A tensor of torch as an array of the same type and bits; raises ValueError if numpy lacks its type."""
    try:
        tensor = tensor.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":  # which numpy lacks
            return np.asarray(tensor.float().numpy().astype(ml_dtypes.bfloat16))
        return np.asarray(tensor.numpy())
    except (NotImplementedError, RuntimeError, TypeError) as e:
        # it is quantized, sparse, or without data (meta)
        raise ValueError(str(e).partition("\n")[0][:200]) from e


class _Slice:
    """A tensor of torch as safetensors gives a slice."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        name = str(self._tensor.dtype).removeprefix("torch.")
        return NAMES.get(name, name)

    def __getitem__(self, index: Any) -> np.ndarray:
        return as_array(self._tensor[index] if self.get_shape() else self._tensor)


class _TorchTensors:
    """The tensors of a file of torch, with the methods of `safetensors.safe_open`."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._tensors[name])

    def get_tensor(self, name: str) -> np.ndarray:
        return as_array(self._tensors[name])


@contextlib.contextmanager
def open_torch_tensors(path: Path, error: ErrorType) -> Iterator[Any]:
    """Gives the tensors of a file of `torch.save` as `open_tensors` does; raises `error` as `read_torch`."""
    if not is_of_torch(path, error):
        raise error(f"{path}: is no file of torch.save")
    file = read_torch(path, error)
    for name, value in file.items():
        if not hasattr(value, "detach"):
            raise error(
                f"{path}: {name!r} is a {type(value).__name__}; the file must hold a state dict, names to tensors"
            )
    try:
        yield _TorchTensors(file)
    except ValueError as e:
        if isinstance(e, JrnnError):
            raise
        raise error(f"{path}: holds a tensor that is not ordinary: {e}") from None
