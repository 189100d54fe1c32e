"""Every family that has matrix states is trained in chunks, which a plan shows without running anything."""

import jax
import jax.numpy as jnp
import pytest

import jrnn
from jrnn import models

SIZES = {"vocab_size": 16, "hidden_size": 256}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "intermediate_size": 16, "layer_types": ["linear_attention"],
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 64, "intermediate_size": 16, "num_attention_heads": 8}
EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
LOCAL = {"num_local_experts": 2, "num_experts_per_tok": 1}
CONFIGS = {
    "bailing_hybrid": {"head_dim": 64, "num_attention_heads": 2, "intermediate_size": 16},
    "bamba": MAMBA,
    "falcon_h1": MAMBA | {"mamba_d_ssm": None},
    "glm5_next_text": {
        "linear_head_dim": 64, "linear_num_heads": 2, "intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 2, "qk_rope_head_dim": 0, "q_lora_rank": 8, "layer_types": ["linear_attention"],
        "mlp_layer_types": ["dense"],
    },
    "granitemoehybrid": MAMBA | {"shared_intermediate_size": 16, "num_local_experts": 0},
    "kimi_linear": {"linear_head_dim": 64, "linear_num_heads": 2, "intermediate_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 64, "state_size": 64, "n_groups": 1},
    "minimax": LOCAL
    | {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 8,
       "layer_types": ["linear_attention"]},
    "nemotron_h": {
        "n_groups": 1,
        "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 64,
        "layers_block_type": ["linear_attention"],
    },
    "olmo_hybrid": DELTA | {"num_attention_heads": 4},
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA | EXPERTS,
    "rwkv6": {"num_heads": 4, "expand_k": 1.0},
    "rwkv7": {"head_dim": 64},
    "xlstm": {"num_heads": 4},
    "zamba2": {"n_mamba_heads": 8, "layers_block_type": ["linear_attention"], "num_attention_heads": 4},
}  # fmt: skip


def test_every_family_with_matrix_states_is_here():
    others = {"falcon_mamba", "jamba", "lfm2", "lfm2_moe", "mamba", "recurrent_gemma", "rwkv"}
    assert set(CONFIGS) | others == set(models.FAMILIES)


@pytest.mark.sample("falcon_h1", "kimi_linear", "minimax", "qwen3_5_text", "xlstm")
@pytest.mark.parametrize("family", CONFIGS)
def test_it_is_trained_in_chunks(family):
    layers = {} if family == "nemotron_h" else {"num_hidden_layers": 1}
    config = {"model_type": family} | SIZES | layers | CONFIGS[family]
    model = models.create(config, jax.random.key(0))
    tokens = jnp.zeros((2, 256), jnp.int32)
    plans = jrnn.explain(jax.grad(lambda model: model(tokens)[0].sum()), model)
    assert plans.loops[0].strategy == "chunks", str(plans)
