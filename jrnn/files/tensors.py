"""Arrays in .safetensors, .npy and .npz files of strangers, and writing safetensors.

The package safetensors opens a file by its name, so it is checked before. In .npy files, pickles are not read; a header may
say that there are more elements than the file has bytes for, and numpy allocates them before it reads any: checked, too.
"""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jrnn.errors import ErrorType, JrnnError
from jrnn.files.checked import parse_json
from jrnn.files.reading import PathName, free, open_file
from jrnn.files.writing import new_file

_LONGEST_HEADER = 100_000_000  # bytes, as of the package
ALIGNMENT = 64  # bytes, of XLA's buffers
BLOCK = 1 << 24  # bytes of a tensor that are read at once


@contextlib.contextmanager
def open_tensors(path: PathName, error: ErrorType) -> Iterator[Any]:
    """Gives an open safetensors file, as `safetensors.safe_open` does, whose tensors numpy reads.

    Raises:
        JrnnError: of type `error`, for a file that is missing or damaged, and for one with a tensor twice.
    """
    with open_file(path, error, None) as opened:
        size = int.from_bytes(opened.read(8), "little")
        most = min(_LONGEST_HEADER, os.fstat(opened.fileno()).st_size)
        header = opened.read(min(size, most))
    # Also for a tensor that is there twice.
    parse_json(header, f"{path}: cannot be read as safetensors: the header", error)
    try:
        with safe_open(path, framework="np") as tensors:
            yield tensors
    except (SafetensorError, OSError, ValueError) as e:
        if isinstance(e, JrnnError):
            raise
        raise error(f"{path}: cannot be read as safetensors: {e}") from None


def write_tensors(
    path: PathName,
    arrays: Mapping[str, Any],
    error: ErrorType,
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes arrays to a safetensors file in one step; raises `error` if it cannot be written."""
    with new_file(path, error) as half:
        in_order = {name: np.asarray(x, order="C") for name, x in arrays.items()}
        try:
            save_file(in_order, half, metadata)
        except SafetensorError as e:
            raise error(f"{path}: cannot be written: {e}") from None


def read_aligned(
    read: Callable[[tuple[slice, ...]], np.ndarray], shape: tuple[int, ...]
) -> np.ndarray:
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


def load_npy(path: str | Path, error: ErrorType) -> np.ndarray:
    """Returns the array of a .npy file; raises `error` for a file that is missing, damaged, or holds Python objects."""
    try:
        with open_file(path, error, None) as opened:
            return _array(opened, os.fstat(opened.fileno()).st_size)
    except error:
        raise
    except Exception as e:  # whatever numpy, zipfile or a codec raises for a damaged file
        raise error(f"{path}: is not a .npy file of numbers: {_reason(e)}") from None


def load_npz(path: str | Path, error: ErrorType) -> dict[str, np.ndarray]:
    """Returns the arrays of a .npz file by name; raises `error` as `load_npy` does."""
    try:
        with open_file(path, error, None) as opened_file, zipfile.ZipFile(opened_file) as archive:
            members = archive.infolist()
            total = sum(m.file_size for m in members)
            most = free()
            if total > most:
                raise ValueError(f"its arrays need {total:,} bytes, and {most:,} are free")
            arrays = {}
            for m in members:
                with archive.open(m) as opened:
                    name = m.filename.removesuffix(".npy")
                    if name in arrays:
                        raise ValueError(f"it holds two arrays {name!r}")
                    try:
                        arrays[name] = _array(opened, m.file_size)
                    except Exception as e:  # whatever numpy, zipfile or a codec raises
                        raise ValueError(f"array {name!r}: {_reason(e)}") from None
            return arrays
    except error:
        raise
    except Exception as e:  # whatever numpy, zipfile or a codec raises for a damaged file
        raise error(f"{path}: is not a .npz file of numbers: {_reason(e)}") from None


def _array(opened: BinaryIO | Any, size: int) -> np.ndarray:
    """Reads the array of a .npy file of `size` bytes."""
    version = np.lib.format.read_magic(opened)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"its version is {version[0]}.{version[1]}; 1.0 and 2.0 are read")
    shape, _, dtype = readers[version](opened)
    if dtype.hasobject:
        raise ValueError(
            "it holds Python objects, which are never read, because that can run code; save numbers or bytes"
        )
    needed = math.prod(shape) * dtype.itemsize
    remaining = size - opened.tell()
    if needed > remaining:
        raise ValueError(
            f"its header says {dtype}{list(shape)}, which needs {needed:,} bytes, and {remaining:,} follow"
        )
    opened.seek(0)
    return np.asarray(np.lib.format.read_array(opened, allow_pickle=False))


def _reason(e: BaseException) -> str:
    return str(e).partition("\n")[0] or type(e).__name__
