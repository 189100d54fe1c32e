"""Records files that onnxruntime wrote, with inputs and its outputs: tests/golden/onnxruntime_files.npz.

    pip install torch onnx onnxruntime onnxscript && python scripts/record/onnxruntime_files.py

Each model is exported by torch, and written again by onnxruntime's three levels of optimization and by `quantize_dynamic`.
What the latter wrote is written at the second level, too. A file that equals one of a lower level is left out. Weights are
quantized to 7 bits, because sums of 8-bit products saturate in onnxruntime on processors without VNNI. Outputs are those of
one thread: with several, a quantized LSTM quantizes the rows of each thread by themselves, so that its results depend on
the machine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.quantization import quantize_dynamic
from torch import nn
from torch.nn import functional as F

OUT = Path(__file__).resolve().parents[2] / "tests" / "golden" / "onnxruntime_files.npz"
LEVELS = {
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


class Recurrent(nn.Module):
    """A recurrent layer and a linear layer."""

    def __init__(self, kind: str, **options):
        super().__init__()
        self.rnn = getattr(nn, kind)(6, 8, batch_first=True, **options)
        self.head = nn.Linear(16 if options.get("bidirectional") else 8, 5)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Tagger(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.embed, self.rnn = (
            nn.Embedding(11, 6),
            getattr(nn, kind)(6, 8, batch_first=True, bidirectional=True),
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, tokens):
        return torch.log_softmax(self.head(self.norm(self.rnn(self.embed(tokens))[0])), -1)


class Attentive(nn.Module):
    """Two layers, and attention over their outputs, by products that are scaled and transposed."""

    def __init__(self):
        super().__init__()
        self.rnn, self.query, self.head = (
            nn.LSTM(6, 8, 2, batch_first=True),
            nn.Linear(8, 8),
            nn.Linear(16, 3),
        )

    def forward(self, x):
        y, _ = self.rnn(x)
        weights = torch.softmax(self.query(y) @ y.transpose(1, 2) * 8**-0.5, -1)
        return self.head(torch.cat([y, weights @ y], -1))


class Convolved(nn.Module):
    """Convolutions with activations, then a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.second = (
            nn.Conv1d(6, 8, 3, padding=1),
            nn.Conv1d(8, 8, 3, padding=2, dilation=2),
        )
        self.rnn = nn.GRU(8, 8, batch_first=True)

    def forward(self, x):
        x = torch.relu(self.conv(x.transpose(1, 2)))
        return self.rnn(F.leaky_relu(self.second(x), 0.1).transpose(1, 2))[0]


class Images(nn.Module):
    """A column of an image at each step."""

    def __init__(self):
        super().__init__()
        self.conv, self.rnn = nn.Conv2d(1, 3, 3, padding=1), nn.GRU(9, 8, batch_first=True)

    def forward(self, x):
        y = torch.sigmoid(self.conv(x[:, None]))
        return self.rnn(F.max_pool2d(y, (1, 2)).permute(0, 2, 1, 3).flatten(2))[0]


class Activations(nn.Module):
    """Exact, fast and quick GELU, with biases, between layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.rnn = (
            nn.Linear(6, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.GRU(8, 8),
        )

    def forward(self, x):
        x = F.gelu(self.b(F.gelu(self.a(x))), approximate="tanh")
        x = self.rnn(x)[0]
        x = self.c(x)
        return x * torch.sigmoid(1.702 * x), F.gelu(x) + F.silu(x)


class Normalized(nn.Module):
    """Residual layers with a layer norm, and with one of the root mean square."""

    def __init__(self):
        super().__init__()
        self.rnns = nn.ModuleList(nn.GRU(8, 8, batch_first=True) for _ in range(2))
        self.first, self.scale, self.head = (
            nn.LayerNorm(8),
            nn.Parameter(torch.rand(8)),
            nn.Linear(8, 8),
        )

    def forward(self, x):
        x = self.first(x + self.rnns[0](x)[0])
        x = x + self.rnns[1](x)[0]
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return self.first(x + self.head(x))


class Translator(nn.Module):
    """An encoder's last state is the decoder's first one; the decoder attends to the encoder."""

    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(11, 6), nn.Embedding(13, 6)
        self.encoder, self.decoder = nn.GRU(6, 8, batch_first=True), nn.GRU(6, 8, batch_first=True)
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 13)

    def forward(self, source, target):
        memory, state = self.encoder(self.source(source))
        y, _ = self.decoder(self.target(target), state)
        return self.head(y + self.attention(y, memory, memory, need_weights=False)[0])


class Gated(nn.Module):
    """A loop of cells that is written out, and a gated linear unit."""

    def __init__(self):
        super().__init__()
        self.cell, self.gate = nn.GRUCell(6, 8), nn.Linear(8, 16)

    def forward(self, x):
        h, rows = x.new_zeros(x.shape[0], 8), []
        for k in range(3):
            h = self.cell(x[:, k], h)
            rows.append(h)
        return F.glu(self.gate(torch.stack(rows, 1)), -1)


OLDER = ("activations", "lstm tagger", "norms")  # the exporter of TorchScript writes these


def models() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    x, tokens = torch.randn(2, 7, 6), torch.randint(0, 11, (2, 7))
    encoder = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
    first = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
    return {
        "rnn": (Recurrent("RNN"), (x,)),
        "lstm": (Recurrent("LSTM"), (x,)),
        "gru, both directions": (Recurrent("GRU", bidirectional=True, num_layers=2), (x,)),
        "lstm tagger": (Tagger("LSTM"), (tokens,)),
        "gru tagger": (Tagger("GRU"), (tokens,)),
        "attention": (Attentive(), (x,)),
        "convolutions": (Convolved(), (x,)),
        "images": (Images(), (x,)),
        "activations": (Activations(), (x,)),
        "norms": (Normalized(), (torch.randn(2, 7, 8),)),
        "encoder layer": (nn.Sequential(nn.Linear(6, 8), encoder), (x,)),
        "encoder layer, norm first": (nn.Sequential(nn.Linear(6, 8), first), (x,)),
        "translator": (Translator(), (tokens, torch.randint(0, 13, (2, 5)))),
        "cells": (Gated(), (x,)),
    }


def plain(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model without what exporters write for debuggers."""
    del proto.metadata_props[:], proto.graph.metadata_props[:], proto.graph.value_info[:]
    for node in (*proto.graph.node, *(n for f in proto.functions for n in f.node)):
        del node.metadata_props[:]
        node.doc_string = ""
    return proto


def written(source: Path, target: Path, level: str) -> bytes:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level, options.optimized_model_filepath = LEVELS[level], str(target)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    return plain(onnx.load(target)).SerializeToString()


def files(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], folder: Path, dynamo: bool
) -> dict[str, bytes]:
    path, quantized, out = folder / "m.onnx", folder / "q.onnx", folder / "o.onnx"
    if dynamo:
        torch.onnx.export(model, inputs, dynamo=True, verbose=False).save(path)
    else:
        torch.onnx.export(model, inputs, str(path), dynamo=False, opset_version=17)
    onnx.save(plain(onnx.load(path)), path)
    stored = {level: written(path, out, level) for level in LEVELS}
    quantize_dynamic(path, quantized, reduce_range=True)
    stored["quantized"] = plain(onnx.load(quantized)).SerializeToString()
    stored["quantized extended"] = written(quantized, out, "extended")
    return stored


def main() -> None:
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)  # the older exporter does not know its operator
    stored: dict[str, np.ndarray] = {}
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    for name, (model, inputs) in models().items():
        seen = set()
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            for level, file in files(model.eval(), inputs, Path(folder), name not in OLDER).items():
                if file in seen:
                    continue
                seen.add(file)
                session = onnxruntime.InferenceSession(
                    file, options, providers=["CPUExecutionProvider"]
                )
                feeds = {
                    i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)
                }
                key = f"{name}|{level}"
                stored[f"{key}|file"] = np.frombuffer(file, np.uint8)
                stored |= {
                    f"{key}|output{k}": value for k, value in enumerate(session.run(None, feeds))
                }
                stored |= {f"{name}|input{k}": x.numpy() for k, x in enumerate(inputs)}
    np.savez_compressed(OUT, **stored)
    print(f"{sum(key.endswith('file') for key in stored)} files, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
