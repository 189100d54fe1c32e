"""Records tests/golden/models: tiny random models of `transformers`, as it saves them, and what they compute.

    python -m venv VENV && VENV/bin/pip install torch transformers safetensors
    VENV/bin/python scripts/record/transformers_models.py tests/golden/models

Each folder has what `save_pretrained` wrote, and `oracle.safetensors`:

    tokens [N, T], logits [N, T, V], loss, gradient.NAME    of the whole batch, with tokens[:, 1:] as targets
    decoded [N, T - PROMPT + 1, V]                          logits of the prompt's last step, and of one step after another
    short [LENGTH, V]                                       logits of the first LENGTH tokens of the last sequence alone
"""

import json
import sys
import tempfile
from pathlib import Path

import glm5_next  # noqa: F401, which registers a class
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

PROMPT, LENGTH = 4, 5
CASES = {
    "mamba": [
        {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 32},
        {
            "hidden_size": 12, "num_hidden_layers": 1, "state_size": 3, "vocab_size": 24, "expand": 3, "conv_kernel": 3,
            "use_bias": True, "use_conv_bias": False, "time_step_rank": 5, "tie_word_embeddings": False,
            "layer_norm_epsilon": 1e-3,
        },
    ],
    "falcon_mamba": [
        {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 32},
        {
            "hidden_size": 12, "num_hidden_layers": 1, "state_size": 3, "vocab_size": 24, "mixer_rms_eps": 1e-2,
            "tie_word_embeddings": False, "use_bias": True,
        },
    ],
    "mamba2": [
        {
            "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 32, "num_heads": 4, "head_dim": 8,
            "n_groups": 2, "chunk_size": 4,
        },
        {
            "hidden_size": 12, "num_hidden_layers": 1, "state_size": 3, "vocab_size": 24, "num_heads": 2, "head_dim": 12,
            "n_groups": 1, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True, "chunk_size": 16,
            "time_step_limit": [0.02, 0.06],
        },
    ],
    "recurrent_gemma": [
        {
            "hidden_size": 16, "num_hidden_layers": 3, "vocab_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
            "num_key_value_heads": 1, "attention_window_size": 3, "logits_soft_cap": 3.0,
        },
        {
            "hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 24, "intermediate_size": 24, "num_attention_heads": 3,
            "lru_width": 18, "conv1d_width": 2, "block_types": ["attention", "recurrent"], "attention_window_size": 16,
            "tie_word_embeddings": False, "attention_bias": True, "w_init_variance_scale": 1.0,
        },
    ],
    "xlstm": [
        {
            "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "num_heads": 2, "qk_dim_factor": 1.0,
            "ffn_round_up_to_multiple_of": 8, "gate_soft_cap": 4.0, "output_logit_soft_cap": 3.0, "use_bias": True,
        },
        {
            "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 24, "num_heads": 4, "qk_dim_factor": 1.0,
            "ffn_proj_factor": 0.5, "ffn_round_up_to_multiple_of": 8, "weight_mode": "fused", "tie_word_embeddings": False,
        },
    ],
    "rwkv": [
        {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32},
        {
            "hidden_size": 12, "num_hidden_layers": 3, "vocab_size": 24, "intermediate_size": 20, "rescale_every": 1,
            "tie_word_embeddings": True, "layer_norm_epsilon": 1e-3,
        },
    ],
    "qwen3_next": [
        {
            "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
            "num_experts": 4, "num_experts_per_tok": 2, "layer_types": ["linear_attention", "full_attention"],
        },
        {
            "hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_num_key_heads": 2,
            "linear_num_value_heads": 2, "linear_conv_kernel_dim": 2, "moe_intermediate_size": 4,
            "shared_expert_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": False,
            "mlp_only_layers": [1], "intermediate_size": 20, "attention_bias": True, "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention"],
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ],
    "qwen3_5_text": [
        {
            "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "linear_key_head_dim": 8,
            "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
        {
            "hidden_size": 12, "num_hidden_layers": 4, "vocab_size": 24, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 20, "linear_key_head_dim": 4,
            "linear_value_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 2, "attention_bias": True, "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0]},
        },
    ],
    "qwen3_5_moe_text": [
        {
            "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
        {
            "hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 24, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 6,
            "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 2,
            "moe_intermediate_size": 4, "shared_expert_intermediate_size": 6, "num_experts": 4,
            "num_experts_per_tok": 3, "attention_bias": True, "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention"],
        },
    ],
    "bamba": [
        {
            "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 24, "attn_layer_indices": [1], "mamba_n_heads": 4,
            "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_chunk_size": 4,
        },
        {
            "hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 24, "num_attention_heads": 3,
            "num_key_value_heads": 1, "intermediate_size": 20, "attn_layer_indices": [0], "mamba_n_heads": 3,
            "mamba_n_groups": 1, "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_conv_bias": False,
            "mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
            "mamba_chunk_size": 16, "rms_norm_eps": 0.001, "hidden_act": "gelu",
        },
    ],
    "falcon_h1": [
        {
            "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 24, "mamba_d_ssm": 24, "mamba_n_heads": 4,
            "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_chunk_size": 4, "mamba_rms_norm": True,
            "mamba_norm_before_gate": False, "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9], "key_multiplier": 0.6,
            "lm_head_multiplier": 0.5, "embedding_multiplier": 1.7, "mlp_multipliers": [0.8, 1.3],
            "attention_in_multiplier": 1.1, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.8,
        },
        {
            "hidden_size": 12, "num_hidden_layers": 1, "vocab_size": 24, "num_attention_heads": 3,
            "num_key_value_heads": 1, "intermediate_size": 20, "mamba_d_ssm": None, "mamba_n_heads": 3,
            "mamba_n_groups": 1, "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_conv_bias": False,
            "mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True, "mlp_bias": True,
            "tie_word_embeddings": True, "mamba_chunk_size": 16,
        },
    ],
    "granitemoehybrid": [
        {
            "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 8, "shared_intermediate_size": 12,
            "layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4, "mamba_n_groups": 2,
            "mamba_d_state": 4, "mamba_chunk_size": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
            "embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
        {
            "hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 24, "num_attention_heads": 3,
            "intermediate_size": 8, "shared_intermediate_size": 10, "layer_types": ["full_attention",
            "linear_attention"], "mamba_n_heads": 3, "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_conv_bias": False,
            "mamba_proj_bias": True, "attention_bias": True, "num_local_experts": 0, "position_embedding_type": "rope",
            "tie_word_embeddings": True, "mamba_chunk_size": 16,
        },
    ],
    "nemotron_h": [
        {
            "hidden_size": 16, "vocab_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "intermediate_size": 24, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "ssm_state_size": 4, "mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2, "chunk_size": 4,
            "n_routed_experts": 4, "moe_intermediate_size": 8, "moe_shared_expert_intermediate_size": 12,
            "num_experts_per_tok": 2, "routed_scaling_factor": 1.5,
        },
        {
            "hidden_size": 12, "vocab_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4,
            "intermediate_size": 20, "layers_block_type": ["moe", "linear_attention", "full_attention"], "ssm_state_size": 5,
            "mamba_num_heads": 3, "mamba_head_dim": 4, "n_groups": 1, "conv_kernel": 3, "use_conv_bias": False,
            "use_bias": True, "mlp_bias": True, "chunk_size": 16, "n_routed_experts": 6, "moe_intermediate_size": 6,
            "moe_shared_expert_intermediate_size": 10, "moe_latent_size": 8, "n_group": 2, "topk_group": 1,
            "num_experts_per_tok": 2, "norm_topk_prob": False, "tie_word_embeddings": True, "mlp_hidden_act": "silu",
        },
    ],
    "zamba2": [
        {
            "hidden_size": 16, "num_hidden_layers": 4, "vocab_size": 32, "num_attention_heads": 4, "mamba_d_state": 4,
            "n_mamba_heads": 4, "mamba_ngroups": 2, "chunk_size": 4, "intermediate_size": 24, "adapter_rank": 3,
            "num_mem_blocks": 1, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        },
        {
            "hidden_size": 12, "num_hidden_layers": 4, "vocab_size": 24, "num_attention_heads": 3, "mamba_d_state": 5,
            "n_mamba_heads": 3, "mamba_ngroups": 1, "chunk_size": 16, "intermediate_size": 20, "adapter_rank": 2,
            "num_mem_blocks": 2, "mamba_d_conv": 3, "use_shared_attention_adapter": True, "use_mem_rope": True,
            "add_bias_linear": True, "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
        },
    ],
    "jamba": [
        {
            "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
            "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
            "mamba_d_state": 4, "mamba_dt_rank": 3,
        },
        {
            "hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 24, "num_attention_heads": 3,
            "num_key_value_heads": 1, "intermediate_size": 20, "num_experts": 3, "num_experts_per_tok": 1,
            "expert_layer_period": 2, "expert_layer_offset": 0, "attn_layer_period": 2, "attn_layer_offset": 0,
            "mamba_d_state": 3, "mamba_d_conv": 3, "mamba_expand": 3, "mamba_conv_bias": False,
            "mamba_proj_bias": True, "tie_word_embeddings": True,
        },
    ],
    "lfm2": [
        {
            "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 24, "block_multiple_of": 8, "full_attn_idxs": [1],
        },
        {
            "hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 24, "num_attention_heads": 3,
            "num_key_value_heads": 1, "intermediate_size": 20, "block_auto_adjust_ff_dim": False, "conv_bias": True,
            "conv_L_cache": 4, "layer_types": ["full_attention", "conv"], "tie_word_embeddings": False,
            "norm_eps": 0.001,
        },
    ],
    "lfm2_moe": [
        {
            "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 24, "moe_intermediate_size": 8, "num_dense_layers": 1,
            "num_experts": 4, "num_experts_per_tok": 2, "layer_types": ["conv", "full_attention"],
            "routed_scaling_factor": 1.5,
        },
        {
            "hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 24, "num_attention_heads": 3,
            "num_key_value_heads": 1, "intermediate_size": 20, "moe_intermediate_size": 6, "num_dense_layers": 0,
            "num_experts": 3, "num_experts_per_tok": 1, "layer_types": ["full_attention", "conv"],
            "use_expert_bias": False, "norm_topk_prob": False, "conv_bias": True, "tie_word_embeddings": False,
        },
    ],
    "olmo_hybrid": [
        {
            "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4,
            "intermediate_size": 24, "layer_types": ["linear_attention", "full_attention"],
        },
        {
            "hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 24, "num_attention_heads": 3,
            "num_key_value_heads": 1, "intermediate_size": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 2,
            "linear_allow_neg_eigval": False, "attention_bias": True, "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "layer_types": ["full_attention",
            "linear_attention"],
        },
    ],
    "minimax": [
        {
            "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
            "block_size": 4,
        },
        {
            "hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 24, "num_attention_heads": 3,
            "num_key_value_heads": 1, "head_dim": 6, "intermediate_size": 10, "num_local_experts": 3,
            "num_experts_per_tok": 2, "block_size": 16, "full_attn_alpha_factor": 1.5, "full_attn_beta_factor": 0.5,
            "linear_attn_alpha_factor": 1.2, "linear_attn_beta_factor": 0.7, "mlp_alpha_factor": 0.8,
            "mlp_beta_factor": 1.1, "layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": True,
        },
    ],
    "kimi_linear": [
        {
            "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 4, "intermediate_size": 24, "moe_intermediate_size": 8, "kv_lora_rank": 6,
            "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8, "num_local_experts": 4,
            "num_experts_per_tok": 2, "linear_head_dim": 4, "linear_num_heads": 3, "layer_types": ["linear_attention",
            "full_attention"],
        },
        {
            "hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 24, "num_attention_heads": 2,
            "num_key_value_heads": 2, "intermediate_size": 20, "moe_intermediate_size": 6, "kv_lora_rank": 4,
            "q_lora_rank": 5, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 3, "num_local_experts": 4,
            "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 2, "norm_topk_prob": False,
            "linear_head_dim": 5, "linear_num_heads": 2, "linear_conv_kernel_dim": 2, "layer_types": ["full_attention",
            "linear_attention"], "mlp_layer_types": ["sparse", "dense"],
        },
    ],
    "bailing_hybrid": [
        {
            "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 4, "intermediate_size": 24, "moe_intermediate_size": 8, "kv_lora_rank": 6,
            "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8, "num_local_experts": 8,
            "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "head_dim": 4, "layer_group_size": 2,
            "first_k_dense_replace": 1, "rope_theta": 100.0, "num_mtp_layers": 0,
        },
        {
            "hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 24, "num_attention_heads": 2,
            "num_key_value_heads": 2, "intermediate_size": 20, "moe_intermediate_size": 6, "kv_lora_rank": 4,
            "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 7, "num_local_experts": 4,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "norm_topk_prob": False,
            "head_dim": 5, "short_conv_kernel_size": 2, "kda_safe_gate": False, "layer_types": ["full_attention",
            "linear_attention"], "mlp_layer_types": ["sparse", "dense"], "num_mtp_layers": 0,
        },
    ],
    "glm5_next_text": [
        {
            "hidden_size": 16, "num_hidden_layers": 3, "vocab_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 4, "intermediate_size": 24, "moe_intermediate_size": 8, "kv_lora_rank": 6,
            "q_lora_rank": 5, "qk_nope_head_dim": 6, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "linear_head_dim": 4, "linear_num_heads": 3, "index_topk": 4, "index_kpool": 2, "index_head_dim": 4,
            "index_n_heads": 8, "swiglu_limit": 0.5, "hc_sinkhorn_iters": 3,
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
            "indexer_types": ["full", "full", "shared"], "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        {
            "hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 24, "num_attention_heads": 2,
            "num_key_value_heads": 2, "intermediate_size": 20, "moe_intermediate_size": 6, "kv_lora_rank": 4,
            "q_lora_rank": 5, "qk_nope_head_dim": 4, "v_head_dim": 3, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "n_group": 2, "topk_group": 1, "n_shared_experts": 2, "norm_topk_prob": False, "linear_head_dim": 5,
            "linear_num_heads": 2, "linear_conv_kernel_dim": 2, "linear_lower_bound": None, "index_topk": 3,
            "index_kpool": 3, "index_kpool_always_select_tail": False, "index_head_dim": 6, "index_n_heads": 8,
            "attention_bias": True, "hc_mult": 2, "hc_eps": 1e-3, "hc_sinkhorn_iters": 1, "rms_norm_eps": 1e-3,
            "layer_types": ["full_attention", "linear_attention"], "mlp_layer_types": ["sparse", "dense"],
            "tie_word_embeddings": True,
        },
    ],
}  # fmt: skip


FIXED = (
    "e_score_correction_bias",
    "expert_bias",
    "slope_rate",
    "query_decay",
    "key_decay",
    "diagonal_decay",
)  # buffers


def cached(model, family, tokens, past):
    """One call with a cache: the logits and the cache."""
    out = model(tokens, use_cache=True, **past)
    if family == "rwkv":
        return out.logits, {"state": out.state}
    name = (
        "past_key_values"
        if "past_key_values" in past or "past_key_values" in out
        else "cache_params"
    )
    return out.logits, {name: getattr(out, name, None) or past[name]}


def decode(model, family, tokens):
    """Logits of a prompt's last step, and of one step after another, with a cache."""
    past = {}
    if family == "recurrent_gemma":  # its output has no cache, so that the caller brings one
        model.model._setup_cache(model.config, len(tokens), "cpu", torch.float32)
        past = {"past_key_values": transformers.DynamicCache(config=model.config)}
    steps = []
    with torch.no_grad():
        logits, past = cached(model, family, tokens[:, :PROMPT], past)
        steps.append(logits[:, -1:])
        for t in range(PROMPT, tokens.shape[1]):
            # Where a model does not count its positions itself, the caller does.
            counts = family in ("recurrent_gemma", "bamba")
            extra = (
                {"position_ids": torch.full((len(tokens) if family == "bamba" else 1, 1), t)}
                if counts
                else {}
            )
            logits, past = cached(model, family, tokens[:, t : t + 1], past | extra)
            past.pop("position_ids", None)
            steps.append(logits)
    return torch.cat(steps, 1)


def gradients(model, tokens):
    """The loss, and the gradient of each tensor by its name in the files: a model with gradients as parameters is saved."""
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for parameter in model.parameters():
            parameter.copy_(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
    return {"loss": loss.detach()} | {
        f"gradient.{n}": g for n, g in tensors.items() if not n.endswith(FIXED)
    }


def record(folder, family, options):
    config = AutoConfig.for_model(
        family, **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None} | options
    )
    torch.manual_seed(sum(map(ord, folder.name)))
    if (
        options.get("weight_mode") == "fused"
    ):  # transformers cannot initialize it; torch's own initial values do
        transformers.xLSTMPreTrainedModel._init_weights = lambda self, module: None
    config._experts_implementation = (
        "eager"  # its products of groups want sizes that are multiples of 16 bytes
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # no zeros and ones, behind which an error could hide
            parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith(FIXED[:2]):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    sharded = family == "mamba2" and folder.name.endswith("0")
    model.save_pretrained(folder, max_shard_size=5000 if sharded else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokens = torch.randint(0, config.vocab_size, (2, 9))
    arrays = {"tokens": tokens, "short": None}
    with torch.no_grad():
        arrays["logits"] = model(tokens, use_cache=False).logits
        arrays["short"] = model(tokens[-1:, :LENGTH], use_cache=False).logits[0]
    if family != "xlstm" or config.hidden_size % 64 == 0:  # its cache has sizes rounded to 64
        # A step of transformers' rwkv mixes the sequences of a batch, so that each is decoded alone.
        parts = tokens.split(1) if family == "rwkv" else [tokens]
        arrays["decoded"] = torch.cat([decode(model, family, part) for part in parts])
    drift = (
        (arrays["decoded"] - arrays["logits"][:, PROMPT - 1 :]).abs().max().item()
        if "decoded" in arrays
        else None
    )
    if config.to_dict().get("time_step_limit", [0.0])[0] or family in ("nemotron_h", "zamba2"):
        arrays.pop(
            "decoded", None
        )  # a step of transformers' Mamba-2 ignores the limit of the time step
    if family == "minimax" and config.layer_types[0] == "linear_attention":
        arrays.pop("decoded")  # its cache counts the positions by the first layer, which has none
    if family not in ("rwkv",) and not (family == "xlstm" and config.hidden_size == 64):
        arrays |= gradients(model, tokens)
    save_file({n: v.contiguous().clone() for n, v in arrays.items()}, folder / "oracle.safetensors")
    print(
        folder.name,
        "decoding differs from the whole by",
        drift,
        "logits up to",
        arrays["logits"].abs().max().item(),
    )


def keys(family):
    """The keys that the config of a family has besides those of every config."""
    own = AutoConfig.for_model(family)
    return sorted(
        set(own.to_dict()) - set(transformers.PreTrainedConfig().to_dict()) | set(own.attribute_map)
    )


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for family, cases in CASES.items():
        for k, options in enumerate(cases):
            folder = root / f"{family}_{k}"
            if folder.name not in (sys.argv[2:] or [folder.name]):  # further arguments choose cases
                continue
            folder.mkdir(parents=True, exist_ok=True)
            record(folder, family, options)
    (root / "versions.json").write_text(
        json.dumps(
            {"torch": torch.__version__, "transformers": transformers.__version__}
            | {"keys": {n: keys(n) for n in CASES}},
            indent=1,
        )
        + "\n",
        encoding="utf-8",
    )
