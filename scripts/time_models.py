"""Times jrnn.models next to transformers in torch, on one core, interleaved; prints rows of docs/benchmarks/pretrained.json.

    VENV/bin/pip install torch transformers safetensors jax flax optax
    PYTHONPATH=. taskset -c 0 VENV/bin/python scripts/time_models.py [FAMILY ...]

Random models of four layers of 256 features, in float32. Prefill: the logits of 256 tokens. Decode: 32 likeliest tokens
after a prompt of 8, with states or caches. Train: the loss of 2 rows of 128 tokens and its gradients. Figures are the least
processor time of several repetitions. transformers computes on a CPU what it has no kernels for in plain torch.
"""

import inspect
import math
import os
import sys
import tempfile
import time

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import record.glm5_next  # noqa: F401, which registers a class
import torch
import transformers

from jrnn import models

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
LAYERS, ROUNDS = 4, 4
BASE = {
    "hidden_size": 256, "num_hidden_layers": LAYERS, "vocab_size": 1024, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 4, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TYPES = {"layer_types": ["linear_attention", "full_attention"] * 2}
DELTA = TYPES | {
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 256}
HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}
LATENT = LOCAL | {
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "n_group": 1,
}
OWN = {
    "bailing_hybrid": LATENT | TYPES | {"head_dim": 64, "topk_group": 1, "num_mtp_layers": 0},
    "bamba": HYBRID | {"attn_layer_indices": [1, 3]},
    "falcon_h1": HYBRID | {"mamba_d_ssm": 512},
    "falcon_mamba": {"state_size": 16},
    "glm5_next_text": LATENT | {
        "layer_types": ["linear_attention", "indexed_attention"] * 2, "linear_head_dim": 64, "linear_num_heads": 4,
        "q_lora_rank": 128, "qk_rope_head_dim": 0, "topk_group": 1, "index_topk": 64, "index_kpool": 8,
        "index_n_heads": 4, "index_head_dim": 32, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "granitemoehybrid": HYBRID | TYPES | LOCAL | {"shared_intermediate_size": 256},
    "jamba": EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": LATENT | TYPES | {"linear_head_dim": 64, "linear_num_heads": 4},
    "lfm2": {"full_attn_idxs": [1, 3]},
    "lfm2_moe": EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    "mamba": {"state_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 64, "state_size": 64, "n_groups": 1},
    "minimax": LOCAL | {"layer_types": ["full_attention", "linear_attention"] * 2},
    "nemotron_h": LOCAL | {
        "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 1, "head_dim": 64,
        "moe_shared_expert_intermediate_size": 256,
        "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
    },
    "olmo_hybrid": DELTA,
    "qwen3_5_moe_text": DELTA | SHARED | {"head_dim": 64},
    "qwen3_5_text": DELTA | {"head_dim": 64},
    "qwen3_next": DELTA | SHARED | {"head_dim": 64},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 64},
    "rwkv": {},
    "xlstm": {"num_heads": 4},
    "zamba2": {
        "n_mamba_heads": 8, "mamba_d_state": 64, "mamba_headdim": 64, "adapter_rank": 8, "num_mem_blocks": 1,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
}  # fmt: skip


def least(*actions):
    """The minimum of the processor time of each action in seconds, interleaved, after one call that compiles."""
    for action in actions:
        action()
    shortest = [math.inf] * len(actions)
    for _ in range(ROUNDS):
        for k, action in enumerate(actions):
            start = time.process_time()
            action()
            shortest[k] = min(shortest[k], time.process_time() - start)
    return shortest


def lines_of(model):
    """The lines of what only families need: the config, the decoder, and the parts and helpers that it names."""
    waiting, lengths = [model.family.config, model.family.decoder], {}
    while waiting:
        one = waiting.pop()
        if not getattr(one, "__module__", "").startswith("jrnn.models.families") or one in lengths:
            continue
        lengths[one] = len(inspect.getsource(one).splitlines())
        if inspect.isclass(one):
            functions = [f for f in vars(one).values() if inspect.isfunction(f)]
            waiting += one.__bases__
        else:
            functions = [one]
        for function in functions:
            codes = [function.__code__]
            for code in codes:
                codes += [const for const in code.co_consts if inspect.iscode(const)]
                named = (function.__globals__.get(name) for name in code.co_names)
                waiting += [f for f in named if inspect.isfunction(f) or inspect.isclass(f)]
    return sum(lengths.values())


def times(family):
    config = transformers.AutoConfig.for_model(family, **BASE | OWN[family])
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = models.load(folder)
    tokens = torch.randint(0, 1024, (2, 256))
    mine = jnp.asarray(tokens.numpy())

    def loss(model, tokens):
        chances = jax.nn.log_softmax(model(tokens)[0][:, :-1])
        return -jnp.take_along_axis(chances, tokens[:, 1:, None], axis=-1).mean()

    forward = jax.jit(lambda model, tokens: model(tokens)[0])
    gradient = jax.jit(jax.value_and_grad(loss))

    @torch.no_grad()
    def read():
        theirs(tokens[:1], use_cache=False)

    @torch.no_grad()
    def write():
        theirs.generate(tokens[:1, :8], max_new_tokens=32, min_new_tokens=32, do_sample=False)

    def train():
        theirs.zero_grad()
        theirs(tokens[:, :128], labels=tokens[:, :128], use_cache=False).loss.backward()

    actions = {
        "prefill": (256, least(lambda: forward(ours, mine[:1]).block_until_ready(), read)),
        "decode": (
            32,
            least(
                lambda: ours.generate(mine[:1, :8], 32, temperature=0)[0].block_until_ready(), write
            ),
        ),
    }
    if family != "rwkv":  # of which transformers computes no gradient
        pair = least(lambda: jax.block_until_ready(gradient(ours, mine[:, :128])), train)
        actions["train"] = 256, pair
    return sum(math.prod(p.shape) for p in ours.params.values()), lines_of(ours), actions


def main():
    logs = {"prefill": [], "decode": [], "train": []}
    print("| | parameters | lines | prefill | decode | train |")
    print("|---|---:|---:|---:|---:|---:|")
    for family in sys.argv[1:] or OWN:
        try:
            count, lines, actions = times(family)
        except Exception as error:
            print(f"{family}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        cells = []
        for name, log in logs.items():
            if name not in actions:
                cells.append("")
                continue
            tokens, (own, other) = actions[name]
            log.append(math.log(own / other))
            cells.append(f"{tokens / own:,.0f} ({tokens / other:,.0f})")
        print(f"| `{family}` | {count / 1e6:.1f} M | {lines} | {' | '.join(cells)} |", flush=True)
    means = [f"{math.exp(sum(log) / len(log)):.2f}" if log else "" for log in logs.values()]
    print(f"| time of jrnn / transformers, geometric mean | | | {' | '.join(means)} |")


if __name__ == "__main__":
    main()
