"""Safetensors files of strangers, and writing them: the package opens a file by its name, so it is checked before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jrnn.errors import JrnnError
from jrnn.files.checked import parse_json
from jrnn.files.reading import open_file
from jrnn.files.writing import new_file

_LONGEST_HEADER = 100_000_000  # bytes, as of the package
ALIGNMENT = 64  # bytes, of XLA's buffers
BLOCK = 1 << 24  # bytes of a tensor that are read at once


@contextlib.contextmanager
def open_tensors(path: str | os.PathLike[str], error: type[JrnnError]) -> Iterator[Any]:
    """Gives an open safetensors file, as `safetensors.safe_open` does, whose tensors numpy reads.

    Raises:
        JrnnError: of type `error`, for a file that is missing or damaged, and for one with a tensor twice.
    """
    with open_file(path, error, None) as opened:
        size = min(int.from_bytes(opened.read(8), "little"), _LONGEST_HEADER, os.fstat(opened.fileno()).st_size)
        header = opened.read(size)
    parse_json(
        header, f"{path}: cannot be read as safetensors: the header", error
    )  # also for a tensor that is there twice
    try:
        with safe_open(path, framework="np") as tensors:
            yield tensors
    except (SafetensorError, OSError, ValueError) as e:
        if isinstance(e, JrnnError):
            raise
        raise error(f"{path}: cannot be read as safetensors: {e}") from None


def write_tensors(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Any],
    error: type[JrnnError],
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes arrays to a safetensors file in one step; raises `error` if it cannot be written."""
    with new_file(path, error) as half:
        try:
            save_file({name: np.asarray(x, order="C") for name, x in arrays.items()}, half, metadata)
        except SafetensorError as e:
            raise error(f"{path}: cannot be written: {e}") from None


def read_aligned(read: Callable[[tuple[slice, ...]], np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Reads a tensor block by block of its first axis, into memory that a CPU's devices take without a copy."""
    if not shape:
        return read(())
    first = read((slice(0, 1),))
    size = int(np.prod(shape)) * first.itemsize
    room = np.empty(size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    array = room[start : start + size].view(first.dtype).reshape(shape)
    rows = max(BLOCK // max(first.nbytes, 1), 1)
    for k in range(0, shape[0], rows):
        array[k : k + rows] = read((slice(k, min(k + rows, shape[0])),))
    return array
