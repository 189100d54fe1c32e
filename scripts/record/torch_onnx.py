"""Records what torch exports as ONNX, with inputs and torch's outputs: tests/golden/torch_onnx.npz.

    pip install torch onnx onnxscript && python scripts/record/torch_onnx.py

Each model is an embedding, a recurrent stack and a linear layer. The TorchScript exporter ("script") keeps both sizes open;
the newer one ("dynamo") wrote the example's sizes into the file for open ones too (torch 2.13), so it is given fixed ones.
"""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import numpy as np
import torch

OUT = Path(__file__).resolve().parents[2] / "tests" / "golden" / "torch_onnx.npz"


class Tagger(torch.nn.Module):
    def __init__(self, kind: str, **options):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 3)
        self.rnn = getattr(torch.nn, kind)(3, 4, **options)
        self.head = torch.nn.Linear(4 * (2 if options.get("bidirectional") else 1), 2)

    def forward(self, tokens):
        y, state = self.rnn(self.embed(tokens))
        return torch.log_softmax(self.head(y), -1), state


def main() -> None:
    torch.manual_seed(0)
    stored = {}
    options = ({}, {"num_layers": 2, "bidirectional": True, "batch_first": True}, {"bias": False})
    for exporter, kind, more in itertools.product(
        ("script", "dynamo"), ("RNN", "LSTM", "GRU"), options
    ):
        model, tokens, name = (
            Tagger(kind, **more).eval(),
            torch.randint(0, 11, (5, 3)),
            f"{exporter}-{kind}-{len(more)}",
        )
        if exporter == "script":
            file = io.BytesIO()
            axes = {"tokens": {0: "a", 1: "b"}}
            torch.onnx.export(
                model, (tokens,), file, dynamo=False, input_names=["tokens"], dynamic_axes=axes
            )
            tokens, exported = torch.randint(0, 11, (7, 2)), file.getvalue()
        else:
            try:
                exported = torch.onnx.export(
                    model, (tokens,), dynamo=True, verbose=False
                ).model_proto.SerializeToString()
            except Exception as error:
                print(f"{name}: torch does not export it: {str(error).splitlines()[0]}")
                continue
        stored[f"{name}|file"] = np.frombuffer(exported, np.uint8)
        stored[f"{name}|tokens"] = tokens.numpy()
        for k, value in enumerate(torch.utils._pytree.tree_leaves(model(tokens))):
            stored[f"{name}|output{k}"] = value.detach().numpy()
    np.savez_compressed(OUT, **stored)
    print(f"{len(stored)} arrays, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
