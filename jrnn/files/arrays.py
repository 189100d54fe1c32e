"""Arrays in .npy and .npz files of strangers: no pickles, and no more memory than the file has bytes for.

The header of a file may say that it holds more elements than there are; numpy allocates them before it reads any.
"""

from __future__ import annotations

import math
import os
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jrnn.errors import JrnnError
from jrnn.files import open_file
from jrnn.files.memory import free


def load_npy(path: str | Path, error: type[JrnnError]) -> np.ndarray:
    """Returns the array of a .npy file; raises `error` for a file that is missing, damaged, or holds Python objects."""
    try:
        with open_file(path, error, None) as opened:
            return _array(opened, os.fstat(opened.fileno()).st_size)
    except error:
        raise
    except Exception as e:  # whatever numpy, zipfile or a codec raises for a damaged file
        raise error(f"{path}: is not a .npy file of numbers: {_reason(e)}") from None


def load_npz(path: str | Path, error: type[JrnnError]) -> dict[str, np.ndarray]:
    """Returns the arrays of a .npz file by name; raises `error` as `load_npy` does."""
    try:
        with open_file(path, error, None) as opened_file, zipfile.ZipFile(opened_file) as archive:
            members = archive.infolist()
            total, most = sum(m.file_size for m in members), free()
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
                    except Exception as e:  # whatever numpy, zipfile or a codec raises for a damaged file
                        raise ValueError(f"array {name!r}: {_reason(e)}") from None
            return arrays
    except error:
        raise
    except Exception as e:  # whatever numpy, zipfile or a codec raises for a damaged file
        raise error(f"{path}: is not a .npz file of numbers: {_reason(e)}") from None


def _array(opened: BinaryIO | Any, size: int) -> np.ndarray:
    """Reads the array of a .npy file of so many bytes."""
    version = np.lib.format.read_magic(opened)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"its version is {version[0]}.{version[1]}; 1.0 and 2.0 are read")
    shape, _, dtype = readers[version](opened)
    if dtype.hasobject:
        raise ValueError(
            "it holds Python objects, which are never read, because that can run code; save numbers or bytes"
        )
    needed, held = math.prod(shape) * dtype.itemsize, size - opened.tell()
    if needed > held:
        raise ValueError(f"its header says {dtype}{list(shape)}, which needs {needed:,} bytes, and {held:,} follow")
    opened.seek(0)
    return np.asarray(np.lib.format.read_array(opened, allow_pickle=False))


def _reason(e: BaseException) -> str:
    return str(e).partition("\n")[0] or type(e).__name__
