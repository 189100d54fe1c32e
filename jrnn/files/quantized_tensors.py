"""Quantized tensors in safetensors files, read as numbers.

Layouts: int8 and 4 bits (nf4, fp4) of bitsandbytes, and float8 (e4m3) with scales of the whole, of rows, or of blocks.

Shapes: R rows, C columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

TYPES = {
    "float32": ("F32", np.float32),
    "float16": ("F16", np.float16),
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
}
BLOCK = 128  # rows and columns that share a scale of float8
_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", *_STATES)
_SCALES = ("_scale_inv", "_scale")


def layouts(names: Iterable[str]) -> dict[str, str]:
    """The tensors of a file by name, with the end of the name of what each is dequantized by; "" for a plain one.

    >>> layouts(["a.weight", "a.SCB", "a.weight_format", "b.weight", "b.weight_scale_inv", "c.bias"])
    {'a.weight': 'SCB', 'b.weight': '_scale_inv', 'c.bias': ''}
    """
    there = dict.fromkeys(names)
    ends = {}
    spare = set()
    for name in there:
        module = name.removesuffix("weight")
        if module != name and f"{module}SCB" in there:
            ends[name] = "SCB"
            spare |= {f"{module}SCB", f"{module}weight_format"}
            continue
        for end in (*_STATES, *_SCALES):
            if name + end in there:
                ends[name] = end
                spare.update(map(name.__add__, (*_PARTS, *_SCALES)))
                break
    return {name: ends.get(name, "") for name in there if name not in spare}


class Dequantized:
    """A quantized tensor as a slice of safetensors is; it is read whole when a part of it is asked for.

    Attributes:
        path, opened: a file, and as it is open.
        name: the tensor's.
        layout: as `layouts` gives it.
    """

    def __init__(self, path: Path, opened: Any, name: str, layout: str) -> None:
        self.path = path
        self.opened = opened
        self.name = name
        self.layout = layout

    def _tensor(self, end: str) -> Any:
        return self.opened.get_tensor(self.name + end)

    @cached_property
    def _state(self) -> dict[str, Any]:
        """What bitsandbytes wrote about a tensor of 4 bits."""
        if self.layout not in _STATES:
            return {}
        state = json.loads(self._tensor(self.layout).tobytes())
        sizes = [
            state.get("blocksize"),
            state.get("nested_blocksize", 1),
            *state.get("shape", [None]),
        ]
        if (
            not all(type(size) is int and size > 0 for size in sizes)
            or state.get("dtype") not in TYPES
        ):
            raise ValueError(
                f"{self.name}{self.layout} must hold a shape, a blocksize and a dtype, holds {state!r:.200}"
            )
        return dict(state)

    def get_shape(self) -> list[int]:
        if self._state:
            return list(self._state["shape"])
        return list(self.opened.get_slice(self.name).get_shape())

    def get_dtype(self) -> str:
        return TYPES[self._state.get("dtype", "bfloat16")][0]

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._values[index]
        except (LookupError, TypeError) as e:
            raise ValueError(
                f"{self.name} is not quantized as its other tensors say: {e}"
            ) from None

    @cached_property
    def _values(self) -> Any:
        if self._state:
            values = self._four_bits()
        elif self.layout == "SCB":  # a row's greatest magnitude, which is 127
            scales = self.opened.get_tensor(self.name.removesuffix("weight") + "SCB")
            scales = scales.astype(np.float32)[:, None] / 127
            values = self._tensor("").astype(np.float32) * scales
        else:
            values = self._stored().astype(np.float32) * self._scales()
        return values.astype(TYPES[self._state.get("dtype", "bfloat16")][1])

    def _stored(self) -> Any:
        """Numbers of 8 bits; the package's reader for numpy lacks float8."""
        if (view := self.opened.get_slice(self.name)).get_dtype() != "F8_E4M3":
            return self._tensor("")
        with self.path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            begin, end = json.loads(file.read(size))[self.name]["data_offsets"]
            file.seek(8 + size + begin)
            stored = np.frombuffer(file.read(end - begin), ml_dtypes.float8_e4m3fn)
        return stored.reshape(view.get_shape())

    def _scales(self) -> Any:
        """The scales of float8, [R or 1, C or 1]."""
        scales = self._tensor(self.layout).astype(np.float32)
        rows, columns = self.get_shape()
        if scales.size == 1:
            return scales.reshape(1, 1)
        if scales.size == rows:
            return scales.reshape(rows, 1)
        if scales.shape != (-(-rows // BLOCK), -(-columns // BLOCK)):
            raise ValueError(
                f"{self.name} [{rows}, {columns}] has scales {list(scales.shape)}, not of blocks of {BLOCK}"
            )
        return np.repeat(np.repeat(scales, BLOCK, axis=0)[:rows], BLOCK, axis=1)[:, :columns]

    def _four_bits(self) -> Any:
        state = self._state
        packed = self._tensor("").reshape(-1)
        greatest = self._tensor(".absmax").reshape(-1)
        if "nested_blocksize" in state:  # the greatest values of blocks are quantized too
            nested = np.arange(greatest.size) // state["nested_blocksize"]
            codes = self._tensor(".nested_quant_map").take(greatest)
            offset = float(state["nested_offset"])
            greatest = codes * self._tensor(".nested_absmax").take(nested) + offset
        numbers = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)
        codes = self._tensor(".quant_map").take(numbers)
        size = math.prod(state["shape"])
        scales = greatest.take(np.arange(size) // state["blocksize"])
        return (codes[:size] * scales).reshape(state["shape"])
