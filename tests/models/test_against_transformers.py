"""Every family against recordings of tiny random models: scripts/record/transformers_models.py and fla_models.py."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jrnn import models
from jrnn.errors import ConfigError
from jrnn.files import tensors
from jrnn.models.loading import model_of
from jrnn.models.model_config import ONLY

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


@pytest.mark.sample(
    "falcon_h1_0",
    "glm5_next_text_0",
    "minimax_1",
    "nemotron_h_1",
    "qwen3_5_text_0",
    "rwkv_1",
    "zamba2_1",
)
def test_logits_decoding_ragged_batches_and_resets(case):
    """The whole, with lengths and resets, and step by step: transformers' logits of the whole, and its own decoding."""
    model, actual = case
    tokens, expected, short = actual["tokens"], actual["logits"], actual["short"]
    scale, size = abs(expected).max(), len(short)

    def close(logits, wanted, tolerance=1e-5):
        np.testing.assert_allclose(logits, wanted, rtol=tolerance, atol=tolerance * scale)

    none = np.zeros(tokens.shape, bool)
    close(model(tokens, lengths=np.array([9, 9]), resets=none)[0], expected)
    texts = np.stack(
        [np.concatenate([tokens[1, :size], tokens[0, :4]]), tokens[1]]
    )  # two texts in one row
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
        if "decoded" in actual and t >= PROMPT - 1:
            close(logits, actual["decoded"][:, t - PROMPT + 1], 2e-5)
    for t in range(size, size + 2):  # the state at the end of a short sequence
        logits, end = model.step(tokens[:, t], end)
        close(logits[1], expected[1, t], 2e-5)


@pytest.mark.sample("lfm2_moe_0", "mamba_1", "olmo_hybrid_0")
def test_gradients_of_the_loss(case):
    model, actual = case
    if "loss" not in actual:
        pytest.skip("transformers computes no gradient, or it is too large to keep")
    tokens = jnp.asarray(actual["tokens"])

    def loss(model):
        chances = jax.nn.log_softmax(model(tokens)[0][:, :-1])
        return -jnp.take_along_axis(chances, tokens[:, 1:, None], axis=-1).mean()

    value, gradient = jax.jit(jax.value_and_grad(loss))(model)
    np.testing.assert_allclose(value, actual["loss"], rtol=1e-5)
    expected = {
        name.removeprefix("gradient."): g
        for name, g in actual.items()
        if name.startswith("gradient.")
    }
    greatest = max(abs(g).max() for g in expected.values())
    for name, merge in model.decoder.parameters().items():
        if name.endswith(
            ("e_score_correction_bias", "expert_bias")
        ):  # it chooses experts, and has no gradient
            assert not np.asarray(gradient.params[name]).any()
            continue
        parts = [expected.pop(part) for part in (merge.names if merge else (name,))]
        wanted = (
            parts[0]
            if merge is None
            else np.stack(parts)
            if merge.stacks
            else np.concatenate(parts)
        )
        scale = abs(wanted).max() + 1e-2 * greatest
        np.testing.assert_allclose(
            gradient.params[name], wanted, rtol=1e-4, atol=1e-4 * scale, err_msg=name
        )
    assert not expected


@pytest.mark.sample("granitemoehybrid_0", "mamba2_0", "olmo_hybrid_1", "zamba2_0")
def test_it_is_saved_as_transformers_reads_it(case, tmp_path, request):
    """Names, shapes, types and values of all tensors, in several files, and config.json."""
    model, _ = case
    name = request.node.callspec.params["case"]
    model.save(tmp_path, shard_bytes=4000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    ours = {n: v for file in set(index.values()) for n, v in load_file(tmp_path / file).items()}
    assert {n: index[n] for n in ours} == index
    theirs = {}
    for file in (GOLDEN / name).glob("model*.safetensors"):
        theirs |= load_file(file)
    theirs = {n: v for n, v in theirs.items() if not n.endswith(model.family.unused)}
    assert set(ours) == set(theirs)
    joined = [m.names for m in model.decoder.parameters().values() if m and not m.stacks]
    for names in joined:  # transformers cuts them into equal parts, whatever their sizes
        whole = [np.concatenate([weights.pop(n) for n in names]) for weights in (ours, theirs)]
        np.testing.assert_array_equal(*whole)
    for tensor, value in theirs.items():
        np.testing.assert_array_equal(ours[tensor], value)
    assert (tmp_path / "config.json").read_text() == (GOLDEN / name / "config.json").read_text()
    again = models.load(tmp_path)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), model.params, again.params))


@pytest.mark.exhaustive
def test_a_parameter_is_read_block_by_block(monkeypatch):
    folder = GOLDEN / "qwen3_next_1"  # with stacked experts
    whole = models.load(folder).params
    monkeypatch.setattr(tensors, "BLOCK", 100)
    blocks = models.load(folder).params
    for name, value in whole.items():
        np.testing.assert_array_equal(blocks[name], value)


@pytest.mark.parametrize("name", ["qwen3_5", "glm5_next"])
def test_the_language_model_of_a_model_of_texts_and_images(name, tmp_path):
    """config.json and names as transformers writes them for both, without most of what is for images."""
    folder = GOLDEN / f"{name}_text_1"
    text, tensors = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    whole = {"model_type": name, "text_config": text, "vision_config": {"depth": 1}}
    (tmp_path / "config.json").write_text(
        json.dumps(whole | {"tie_word_embeddings": text["tie_word_embeddings"]})
    )
    renamed = {
        f"model.language_{n}" if n.startswith("model.") else n: v for n, v in tensors.items()
    }
    save_file(
        renamed | {"model.visual.patch_embed.proj.bias": np.zeros(3)},
        tmp_path / "model.safetensors",
    )
    model = models.load(tmp_path)
    recorded = load_file(folder / "oracle.safetensors")
    np.testing.assert_array_equal(
        model(recorded["tokens"])[0], models.load(folder)(recorded["tokens"])[0]
    )
    model.save(tmp_path / "alone")
    assert (
        json.loads((tmp_path / "alone" / "config.json").read_text())["model_type"] == f"{name}_text"
    )
    assert set(load_file(tmp_path / "alone" / "model.safetensors")) == set(tensors)
    (tmp_path / "config.json").write_text(json.dumps(text | {"model_type": name}))
    assert models.load(tmp_path).config == model.config


def test_layers_that_share_a_choice_follow_one_that_chooses():
    config = json.loads((GOLDEN / "glm5_next_text_0" / "config.json").read_text())
    with pytest.raises(ConfigError, match="'shared' for a layer that follows none with an indexer"):
        model_of(json.dumps(config | {"indexer_types": ["full", "shared", "full"]}), "config.json")
    with pytest.raises(ConfigError, match="index_kpool is 3, which does not divide index_topk, 4"):
        model_of(json.dumps(config | {"index_kpool": 3}), "config.json")


# Keys of configs of transformers that change neither what is computed nor the parameters: initial values, kernels, ...
HARMLESS = """
attention_dropout attention_head_dim attention_hidden_size attn_mode autocast_kernel_dtype aux_loss_coef block_size
bos_token_id chunk_size chunkwise_kernel context_length dropout embedding_dim eos_token_id final_w_init_variance_scale
fuse_cross_entropy fuse_linear_cross_entropy fuse_norm hidden_dropout hybrid_layer_ids inference_state_dtype
initializer_range kv_channels layer_types layers_block_type linear_a_log_max linear_a_log_min linear_dt_init_floor
linear_dt_max linear_dt_min mamba_chunk_size mamba_headdim mamba_ssm_cache_dtype max_inference_chunksize
max_position_embeddings mode model_max_length moe_shared_expert_overlap mtp_layers_block_type mtp_loss_scaling_factor
n_shared_experts norm_reduction_force_float32 num_blocks num_logits_to_keep num_mtp_layers num_nextn_predict_layers
num_query_groups output_router_logits pad_token_id pretraining_tp qk_head_dim rescale_prenorm_residual
residual_in_fp32 return_last_states router_aux_loss_coef router_jitter_noise sequence_kernel step_kernel
time_step_floor time_step_init_scheme time_step_max time_step_scale use_associative_scan use_cache use_falcon_mambapy
use_l2warp use_long_context use_mamba_kernels use_mambapy use_mem_eff_path w_init_variance_scale z_loss_coefficient
"""
OF_FAMILIES = {  # the same of one family; others read a key of that name
    "falcon_mamba": "time_step_min",
    "mamba": "time_step_min",
    "mamba2": "time_step_min time_step_rank",
    "nemotron_h": "expand mamba_proj_bias time_step_limit",
}


def test_every_key_of_transformers_is_read_or_changes_nothing():
    """A key that no family reads is ignored, as transformers does: so none that counts may be missing."""
    keys = json.loads((GOLDEN / "versions.json").read_text())["keys"]
    for name, family in models.FAMILIES.items():
        read = {field.name for field in dataclasses.fields(family.config)} | {
            *family.aliases,
            *family.only,
            *ONLY,
        }
        given = (
            keys[name]
            if name in keys
            else json.loads((GOLDEN / f"{name}_0" / "config.json").read_text())
        )
        missing = (
            set(given)
            - {"architectures", "dtype", "model_type", "transformers_version"}
            - read
            - {*HARMLESS.split()}
        )
        assert missing == set(OF_FAMILIES.get(name, "").split()), name
