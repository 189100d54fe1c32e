"""Quantized tensors against what bitsandbytes and torch make of them: scripts/record/quantized.py."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jrnn.errors import DataError
from jrnn.files.quantized_tensors import Dequantized, layouts
from jrnn.files.tensors import open_tensors

GOLDEN = Path(__file__).parents[1] / "golden" / "quantized.safetensors"
KINDS = {
    "blocks": "_scale_inv", "fp4": ".quant_state.bitsandbytes__fp4", "int8": "SCB",
    "nf4": ".quant_state.bitsandbytes__nf4", "rows": "_scale",
}  # fmt: skip


def read(path, name):
    with open_tensors(path, DataError) as opened:
        view = Dequantized(path, opened, name, layouts(opened.keys())[name])
        return view.get_shape(), view.get_dtype(), view[:]


@pytest.mark.parametrize("kind", KINDS)
def test_each_layout_is_read_as_numbers(kind):
    with open_tensors(GOLDEN, DataError) as opened:
        wanted, actual = opened.get_tensor(f"want.{kind}.weight"), layouts(opened.keys())
    assert actual[f"{kind}.weight"] == KINDS[kind]
    assert not [
        name
        for name in actual
        if name.startswith(kind) and name not in (f"{kind}.weight", f"{kind}.bias")
    ]
    shape, dtype, values = read(GOLDEN, f"{kind}.weight")
    assert shape == list(wanted.shape) and values.dtype == wanted.dtype
    assert dtype == ("BF16" if wanted.dtype == ml_dtypes.bfloat16 else "F32")
    np.testing.assert_array_equal(values, wanted)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (
            {"quant_state.bitsandbytes__nf4": np.frombuffer(b'{"shape": [9, 70]}', np.uint8)},
            "must hold a shape, a block",
        ),
        (
            {"quant_state.bitsandbytes__nf4": np.frombuffer(b"[", np.uint8)},
            "cannot be read as safetensors",
        ),
        ({"quant_map": np.zeros(3, np.float32)}, "is not quantized as its other tensors say"),
        ({"absmax": np.zeros(0, np.uint8)}, "cannot be read as safetensors|is not quantized"),
    ],
)
def test_tensors_that_do_not_fit_together_are_named(tmp_path, changes, rule):
    with open_tensors(GOLDEN, DataError) as opened:
        names = [name for name in opened.keys() if name.startswith("nf4")]  # noqa: SIM118
        tensors = {name: opened.get_tensor(name) for name in names}
    save_file(
        tensors | {f"nf4.weight.{name}": value for name, value in changes.items()},
        tmp_path / "a.safetensors",
    )
    with pytest.raises(DataError, match=rule):
        read(tmp_path / "a.safetensors", "nf4.weight")
    assert set(load_file(tmp_path / "a.safetensors")) == set(tensors)
