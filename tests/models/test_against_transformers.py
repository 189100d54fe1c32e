"""Every family against what transformers computed with tiny random models: scripts/record/transformers_models.py."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jrnn import models
from jrnn.models import files

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
PROMPT = 4  # as in the script
pytestmark = pytest.mark.usefixtures("little_optimization")


@pytest.fixture(scope="module", params=CASES)
def case(request):
    folder = GOLDEN / request.param
    return models.load(folder), load_file(folder / "oracle.safetensors")


def test_there_are_two_recordings_of_each_family():
    assert sorted(f"{name}_{k}" for name in models.FAMILIES for k in range(2)) == CASES


@pytest.mark.exhaustive(
    "falcon_mamba_0", "mamba2_0", "mamba_0", "qwen3_next_0", "recurrent_gemma_0", "rwkv_1", "xlstm_0"
)
def test_logits_decoding_ragged_batches_and_resets(case):
    """The whole, with lengths and resets, and step by step: transformers' logits of the whole, and its own decoding."""
    model, found = case
    tokens, expected, short = found["tokens"], found["logits"], found["short"]
    scale, size = abs(expected).max(), len(short)

    def close(logits, wanted, tolerance=1e-5):
        np.testing.assert_allclose(logits, wanted, rtol=tolerance, atol=tolerance * scale)

    none = np.zeros(tokens.shape, bool)
    close(model(tokens, lengths=np.array([9, 9]), resets=none)[0], expected)
    texts = np.stack([np.concatenate([tokens[1, :size], tokens[0, :4]]), tokens[1]])  # two texts in one row
    resets = none.copy()
    resets[0, size] = True
    logits, end = model(texts, lengths=np.array([9, size]), resets=resets)
    close(logits[0, :size], short)
    close(logits[1, :size], short)
    close(logits[0, size:], expected[0, :4])
    assert not np.asarray(logits[1, size:]).any()
    state = model.initial_state(2, tokens.shape[1])
    for t in range(tokens.shape[1]):
        logits, state = model.step(tokens[:, t], state)
        close(logits, expected[:, t], 2e-5)
        if "decoded" in found and t >= PROMPT - 1:
            close(logits, found["decoded"][:, t - PROMPT + 1], 2e-5)
    for t in range(size, size + 2):  # the state at the end of a short sequence
        logits, end = model.step(tokens[:, t], end)
        close(logits[1], expected[1, t], 2e-5)


@pytest.mark.sample("mamba_1", "xlstm_1")
def test_gradients_of_the_loss(case):
    model, found = case
    if "loss" not in found:
        pytest.skip("transformers computes no gradient, or it is too large to keep")
    tokens = jnp.asarray(found["tokens"])

    def loss(model):
        chances = jax.nn.log_softmax(model(tokens)[0][:, :-1])
        return -jnp.take_along_axis(chances, tokens[:, 1:, None], axis=-1).mean()

    value, gradient = jax.jit(jax.value_and_grad(loss))(model)
    np.testing.assert_allclose(value, found["loss"], rtol=1e-5)
    expected = {name.removeprefix("gradient."): g for name, g in found.items() if name.startswith("gradient.")}
    for name in [name for name in expected if name.endswith("experts.gate_up_proj")]:
        at = name.removesuffix("gate_up_proj")
        expected[f"{at}gate_proj"], expected[f"{at}up_proj"] = np.split(expected.pop(name), 2, axis=1)
    assert set(expected) == set(gradient.params)
    for name, value in gradient.params.items():
        scale = abs(expected[name]).max()
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-4 * scale + 1e-7, err_msg=name)


def test_it_is_saved_as_transformers_reads_it(case, tmp_path, request):
    model, _ = case
    name = request.node.callspec.params["case"]
    model.save(tmp_path, shard_bytes=4000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    ours = {n: v for file in set(index.values()) for n, v in load_file(tmp_path / file).items()}
    assert {n: index[n] for n in ours} == index
    theirs = {}
    for file in (GOLDEN / name).glob("model*.safetensors"):
        theirs |= load_file(file)
    assert set(ours) == set(theirs)
    for tensor, value in theirs.items():
        np.testing.assert_array_equal(ours[tensor], value)
    assert (tmp_path / "config.json").read_text() == (GOLDEN / name / "config.json").read_text()
    again = models.load(tmp_path)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), model.params, again.params))


@pytest.mark.exhaustive
def test_a_parameter_is_read_block_by_block(monkeypatch):
    folder = GOLDEN / "qwen3_next_1"  # with stacked experts
    whole = models.load(folder).params
    monkeypatch.setattr(files, "BLOCK", 100)
    blocks = models.load(folder).params
    for name, value in whole.items():
        np.testing.assert_array_equal(blocks[name], value)
