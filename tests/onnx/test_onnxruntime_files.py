"""Files that onnxruntime optimized and quantized: scripts/record/onnxruntime_files.py recorded them, with its outputs."""

from pathlib import Path

import jax
import numpy as np
import onnx
import onnxruntime
import pytest

import jrnn
from jrnn.errors import UnknownOperatorError

with np.load(
    Path(__file__).parents[1] / "golden" / "onnxruntime_files.npz", allow_pickle=False
) as stored:
    GOLDEN = dict(stored)
FILES = [name.removesuffix("|file") for name in GOLDEN if name.endswith("|file")]
OF_ONE_MACHINE = [name for name in FILES if b"ReorderOutput" in GOLDEN[f"{name}|file"].tobytes()]


def read(name):
    model = jrnn.from_onnx(GOLDEN[f"{name}|file"].tobytes())
    return model, {
        s.name: GOLDEN[f"{name.split('|')[0]}|input{k}"] for k, s in enumerate(model.inputs)
    }


@pytest.mark.sample("norms|extended", "lstm tagger|quantized extended", "translator|extended")
@pytest.mark.parametrize("name", [name for name in FILES if name not in OF_ONE_MACHINE])
def test_a_file_computes_what_onnxruntime_computed(name):
    model, feeds = read(name)
    outputs = jax.jit(model)(feeds)
    for k, spec in enumerate(model.outputs):
        np.testing.assert_allclose(outputs[spec.name], GOLDEN[f"{name}|output{k}"], atol=1e-5)


def test_all_models_and_levels_were_recorded():
    levels = [name.split("|")[1] for name in FILES]
    assert (
        len({name.split("|")[0] for name in FILES})
        == 14
        == levels.count("basic")
        == levels.count("quantized")
    )
    types = {
        n.op_type
        for f in FILES
        for n in onnx.load_from_string(GOLDEN[f"{f}|file"].tobytes()).graph.node
        if n.domain
    }
    assert types >= {
        "FusedMatMul",
        "FusedConv",
        "SkipLayerNormalization",
        "DynamicQuantizeMatMul",
        "DynamicQuantizeLSTM",
    }


def test_a_file_for_one_kind_of_processor_says_how_to_write_it_for_all():
    assert OF_ONE_MACHINE == ["images|all"]
    with pytest.raises(
        UnknownOperatorError, match="an order of one kind of processor.*level ORT_ENABLE_EXTENDED"
    ):
        read("images|all")


def test_what_is_saved_after_tuning_has_onnxruntimes_operators(tmp_path):
    model, feeds = read("norms|extended")
    assert any(
        n.op_type == "SimplifiedLayerNormalization" and not n.domain for n in model.proto.graph.node
    )
    tuned = {name: 1.5 * value for name, value in model.params.items()}
    model.save(tmp_path / "tuned.onnx", tuned)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    expected = onnxruntime.InferenceSession(tmp_path / "tuned.onnx", options).run(None, feeds)
    np.testing.assert_allclose(next(iter(model(feeds, tuned).values())), expected[0], atol=1e-5)
