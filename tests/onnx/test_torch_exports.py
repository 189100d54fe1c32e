"""Files that torch exports compute what torch computes; recorded by scripts/record/torch_onnx.py."""

from pathlib import Path

import jax
import numpy as np
import pytest

import jrnn

with np.load(Path(__file__).parents[1] / "golden" / "torch_onnx.npz", allow_pickle=False) as stored:
    GOLDEN = dict(stored)
CASES = sorted({name.split("|")[0] for name in GOLDEN})


@pytest.mark.parametrize("case", CASES)
def test_export(case):
    model = jrnn.from_onnx(GOLDEN[f"{case}|file"].tobytes())
    (tokens,) = model.inputs
    found = jax.jit(lambda x: model({tokens.name: x}))(GOLDEN[f"{case}|tokens"])
    for k, spec in enumerate(model.outputs):
        np.testing.assert_allclose(found[spec.name], GOLDEN[f"{case}|output{k}"], atol=1e-6)


def test_every_exporter_and_kind_was_recorded():
    assert len(CASES) == 18
