"""Records tests/golden/models for rwkv6 and rwkv7, which transformers lacks: tiny random models of flash-linear-attention.

    git clone https://github.com/fla-org/flash-linear-attention FOLDER
    python scripts/record/fla_models.py --fla FOLDER     (torch, transformers, triton and einops, on a CPU)

The modules are the package's own; what they call as kernels for GPUs is replaced by its naive recurrences and references.
The files are as transformers_models.py describes them, without `decoded`.
"""

import argparse
import sys
from pathlib import Path

import torch
import triton
from safetensors.torch import save_file
from torch.nn import functional

ROOT = Path(__file__).parents[2] / "tests" / "golden" / "models"
LENGTH = 5  # of the sequence alone
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "fuse_norm": True}
OTHER = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "vocab_size": 24,
    "norm_first": False,
    "norm_bias": False,
}
CASES = {
    "rwkv6": [
        SMALL | {"num_heads": 2, "proj_low_rank_dim": 4, "gate_low_rank_dim": 6, "hidden_ratio": 2},
        OTHER | {
            "num_heads": 3, "proj_low_rank_dim": 2, "gate_low_rank_dim": 3, "expand_k": 1.0, "expand_v": 2.0,
            "intermediate_size": 20, "norm_eps": 1e-3, "tie_word_embeddings": True,
        },
    ],
    "rwkv7": [
        SMALL | {
            "head_dim": 4, "decay_low_rank_dim": 3, "gate_low_rank_dim": 4, "a_low_rank_dim": 5, "v_low_rank_dim": 2,
            "hidden_ratio": 2,
        },
        OTHER | {
            "head_dim": None, "num_heads": 2, "decay_low_rank_dim": 2, "gate_low_rank_dim": None, "a_low_rank_dim": 3,
            "v_low_rank_dim": 4, "intermediate_size": 20, "norm_eps": 1e-3, "fuse_norm": False,
        },
    ],
}  # fmt: skip


def imported(folder):
    """The classes of the models by family, with references instead of kernels."""
    sys.path.insert(0, folder)
    triton.autotune = triton.heuristics = lambda *args, **options: (
        lambda kernel: kernel
    )  # kernels are defined, not run
    import fla.ops.utils.cache

    fla.ops.utils.cache.fla_cache_autotune = triton.autotune
    import fla.layers.rwkv6 as layer6
    import fla.layers.rwkv7 as layer7
    import fla.models.rwkv6.modeling_rwkv6 as model6
    import fla.models.rwkv7.modeling_rwkv7 as model7
    from fla.models.rwkv6 import RWKV6Config, RWKV6ForCausalLM
    from fla.models.rwkv7 import RWKV7Config, RWKV7ForCausalLM
    from fla.modules import GroupNorm, LayerNorm
    from fla.modules.activations import ACT2FN
    from fla.modules.token_shift import token_shift_ref
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6
    from fla.ops.rwkv7.fused_addcmul import torch_addcmul_rwkv7
    from fla.ops.rwkv7.fused_k_update import k_update_ref
    from fla.ops.rwkv7.gate_output_correction import gate_output_correction_ref

    def shift(x, cu_seqlens=None, cache=None, output_cache=False):
        assert cache is None
        return (token_shift_ref(x), None) if output_cache else token_shift_ref(x)

    def recurrent6(r, k, v, w, u, scale, **_):
        y, state = naive_recurrent_rwkv6(*(x.transpose(1, 2) for x in (r, k, v, w)), u, scale=scale)
        return y.transpose(1, 2), state

    def recurrent7(r, w, k, v, kk, a, scale, **_):
        r = r * scale * r.shape[-1] ** 0.5  # the reference divides it
        parts = (r, k, v, -kk, kk * a, w)
        y, state = dplr_recurrence(*(x.transpose(1, 2) for x in parts))
        return y.transpose(1, 2), state

    def layer_norm(self, x, residual=None, prenorm=False):
        x = x if residual is None else x + residual
        y = functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        return (y, x) if prenorm else y

    def group_norm(self, x):
        y = functional.group_norm(
            x.flatten(0, -2), self.num_groups, self.weight, self.bias, self.eps
        )
        return y.view_as(x)

    LayerNorm.forward, GroupNorm.forward = layer_norm, group_norm
    ACT2FN["sqrelu"], ACT2FN["swish"] = (lambda x: functional.relu(x) ** 2), functional.silu
    for module in (layer6, layer7, model6, model7):
        module.token_shift = shift
    for kind in (RWKV6ForCausalLM, RWKV7ForCausalLM):
        kind._tied_weights_keys = {
            "lm_head.weight": "model.embeddings.weight"
        }  # as newer versions of transformers want it
    layer6.fused_recurrent_rwkv6 = recurrent6
    layer7.fused_mul_recurrent_rwkv7 = recurrent7
    layer7.l2_norm = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    layer7.fused_addcmul_rwkv7 = torch_addcmul_rwkv7
    layer7.fused_k_rwkv7, layer7.gate_output_correction = k_update_ref, gate_output_correction_ref
    return {"rwkv6": (RWKV6Config, RWKV6ForCausalLM), "rwkv7": (RWKV7Config, RWKV7ForCausalLM)}


def record(folder, configuration, kind, options):
    config = configuration(**options, bos_token_id=None, eos_token_id=None, use_cache=False)
    torch.manual_seed(sum(map(ord, folder.name)))
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # no zeros and ones, behind which an error could hide
            parameter.add_(torch.randn_like(parameter) * 0.3)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embeddings.weight
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    names = dict(model.named_parameters())
    save_file(
        {n: p.detach().contiguous() for n, p in names.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    tokens = torch.randint(0, config.vocab_size, (2, 9))
    logits = model(tokens).logits
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    arrays = {
        "tokens": tokens,
        "logits": logits,
        "loss": loss,
        "short": model(tokens[-1:, :LENGTH]).logits[0],
    }
    arrays |= {
        f"gradient.{n}": torch.zeros_like(p) if p.grad is None else p.grad for n, p in names.items()
    }
    save_file(
        {n: v.detach().contiguous().clone() for n, v in arrays.items()},
        folder / "oracle.safetensors",
    )
    print(folder.name, "logits up to", logits.abs().max().item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fla", required=True)
    classes = imported(parser.parse_args().fla)
    for family, cases in CASES.items():
        for k, options in enumerate(cases):
            record(ROOT / f"{family}_{k}", *classes[family], options)
