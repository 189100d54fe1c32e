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
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
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
            "num_key_value_heads": 1, "attention_window_size": 3, "logits_soft_cap": 3.0, "pad_token_id": None,
        },
        {
            "hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 24, "intermediate_size": 24, "num_attention_heads": 3,
            "lru_width": 18, "conv1d_width": 2, "block_types": ["attention", "recurrent"], "attention_window_size": 16,
            "tie_word_embeddings": False, "attention_bias": True, "w_init_variance_scale": 1.0, "pad_token_id": None,
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
}  # fmt: skip


def cached(model, family, tokens, past):
    """One call with a cache: the logits and the cache."""
    out = model(tokens, use_cache=True, **past)
    if family == "rwkv":
        return out.logits, {"state": out.state}
    if family in ("recurrent_gemma", "qwen3_next"):
        return out.logits, {"past_key_values": out.past_key_values} if "past_key_values" in out else past
    return out.logits, {"cache_params": out.cache_params}


def decode(model, family, tokens):
    """Logits of a prompt's last step, and of one step after another, with a cache."""
    past = {}
    if family == "recurrent_gemma":  # its output has no cache, so that the caller brings one
        model.model._setup_cache(model.config, len(tokens), "cpu", torch.float32)
        past = {"past_key_values": transformers.DynamicCache(config=model.config)}
    found = []
    with torch.no_grad():
        logits, past = cached(model, family, tokens[:, :PROMPT], past)
        found.append(logits[:, -1:])
        for t in range(PROMPT, tokens.shape[1]):
            extra = {"position_ids": torch.full((1, 1), t)} if family == "recurrent_gemma" else {}
            logits, past = cached(model, family, tokens[:, t : t + 1], past | extra)
            past.pop("position_ids", None)
            found.append(logits)
    return torch.cat(found, 1)


def record(folder, family, options):
    config = AutoConfig.for_model(family, **options)
    torch.manual_seed(len(str(folder)))
    if options.get("weight_mode") == "fused":  # transformers cannot initialize it; torch's own initial values do
        transformers.xLSTMPreTrainedModel._init_weights = lambda self, module: None
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # no zeros and ones, behind which an error could hide
            parameter.add_(torch.randn_like(parameter) * 0.3)
    sharded = family == "mamba2" and folder.name.endswith("0")
    model.save_pretrained(folder, max_shard_size=5000 if sharded else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokens = torch.randint(0, config.vocab_size, (2, 9))
    found = {"tokens": tokens, "short": None}
    with torch.no_grad():
        found["logits"] = model(tokens, use_cache=False).logits
        found["short"] = model(tokens[-1:, :LENGTH], use_cache=False).logits[0]
    if family != "xlstm" or config.hidden_size % 64 == 0:  # its cache has sizes rounded to 64
        # A step of transformers' rwkv mixes the sequences of a batch, so that each is decoded alone.
        parts = tokens.split(1) if family == "rwkv" else [tokens]
        found["decoded"] = torch.cat([decode(model, family, part) for part in parts])
    if family not in ("rwkv",) and not (family == "xlstm" and config.hidden_size == 64):
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        found["loss"] = loss.detach()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found |= {f"gradient.{n}": g for n, g in gradients.items()}
    if config.to_dict().get("time_step_limit", [0.0])[0]:
        del found["decoded"]  # a step of transformers' mamba2 ignores the limit
    save_file({n: v.contiguous().clone() for n, v in found.items()}, folder / "oracle.safetensors")
    drift = (found["decoded"] - found["logits"][:, PROMPT - 1 :]).abs().max().item() if "decoded" in found else None
    print(folder.name, "decoding differs from the whole by", drift, "logits up to", found["logits"].abs().max().item())


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
        json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}) + "\n", encoding="utf-8"
    )
