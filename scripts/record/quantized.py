"""Records tests/golden/quantized.safetensors: tensors as bitsandbytes and float8 checkpoints store them, and their values.

    python scripts/record/quantized.py     (torch and bitsandbytes, on a CPU)

`want.NAME` is what bitsandbytes dequantizes NAME to, or, for float8, the product with the scales in torch.
"""

from pathlib import Path

import bitsandbytes as bnb
import torch
from bitsandbytes import functional
from safetensors.torch import save_file

PATH = Path(__file__).parents[2] / "tests" / "golden" / "quantized.safetensors"
torch.manual_seed(0)
arrays = {}
for kind, rows, columns, nested, dtype in [
    ("nf4", 9, 70, True, torch.bfloat16),
    ("fp4", 6, 64, False, torch.float32),
]:
    layer = bnb.nn.Linear4bit(
        columns, rows, bias=False, quant_type=kind, compress_statistics=nested
    )
    weight = torch.randn(rows, columns, dtype=dtype)
    layer.weight = bnb.nn.Params4bit(
        weight, requires_grad=False, quant_type=kind, compress_statistics=nested, blocksize=64
    )
    layer = layer.to("cpu")
    arrays |= {f"{kind}.{name}": value for name, value in layer.state_dict().items()}
    arrays[f"want.{kind}.weight"] = functional.dequantize_4bit(
        layer.weight.data, layer.weight.quant_state
    ).to(dtype)
layer = bnb.nn.Linear8bitLt(32, 5, bias=False, has_fp16_weights=False)
layer.weight = bnb.nn.Int8Params(torch.randn(5, 32), requires_grad=False, has_fp16_weights=False)
state = layer.to("cpu").state_dict()
arrays |= {f"int8.{name}": value for name, value in state.items()}
values = functional.int8_vectorwise_dequant(state["weight"], state["SCB"])
arrays["want.int8.weight"] = values.to(torch.bfloat16)
blocks = torch.rand(2, 3) + 0.5
weight = torch.randn(130, 260).to(torch.float8_e4m3fn)
spread = blocks.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :260]
arrays |= {"blocks.weight": weight, "blocks.weight_scale_inv": blocks}
arrays["want.blocks.weight"] = (weight.float() * spread).to(torch.bfloat16)
rows = torch.rand(4, 1) + 0.5
weight = torch.randn(4, 6).to(torch.float8_e4m3fn)
arrays |= {"rows.weight": weight, "rows.weight_scale": rows, "rows.bias": torch.randn(4)}
arrays["want.rows.weight"] = (weight.float() * rows).to(torch.bfloat16)
save_file({name: value.contiguous() for name, value in arrays.items()}, PATH)
