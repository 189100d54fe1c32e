"""The family glm5_next_text: Kimi delta attention, latent attention to chosen tokens, and several residual streams."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

from jrnn.errors import ConfigError
from jrnn.models.blocks import Indexed, Indexer, MeanNorm, Mlp, Side, Streams
from jrnn.models.config import divides
from jrnn.models.families.linear_attention import RENAMED, KimiLinearConfig, delta_of, latent, latent_layers
from jrnn.models.family import Branch, Decoder, Family, Norm, Part


@dataclass(frozen=True)
class Glm5Config(KimiLinearConfig):
    linear_lower_bound: float | None = -5.0
    indexer_types: tuple[str, ...] | None = None  # else from the next three
    index_topk_pattern: str | tuple[str, ...] | None = None
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2
    index_topk: int = 2048
    index_head_dim: int = 128
    index_n_heads: int = 32
    index_kpool: int = 16
    index_kpool_always_select_tail: bool = True
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_eps: float = 1e-6
    hc_sinkhorn_iters: int = 20

    @property
    def indexes(self) -> list[bool]:
        """Whether each layer has an indexer, if it attends."""
        since, every = 1 - self.index_skip_topk_offset, self.index_topk_freq
        otherwise = ["SF"[max(k + since, 0) % every == 0] for k in range(self.num_hidden_layers)]
        found = self.indexer_types or self.index_topk_pattern or otherwise
        if len(found) != self.num_hidden_layers or set(found) - {"full", "shared", "F", "S"}:
            raise ConfigError(f"indexer_types is {found!r:.80}; it must have 'full' or 'shared' for each layer")
        return [kind in ("full", "F") for kind in found]


def decoder(c: Glm5Config) -> Decoder:
    d, own, norm = c.hidden_size, dict(c.linear_attn_config or ()), Norm(c.hidden_size, c.rms_norm_eps)
    if c.qk_rope_head_dim or c.q_lora_rank is None or c.key_heads != c.num_attention_heads:
        raise ConfigError(
            "qk_rope_head_dim must be 0, q_lora_rank a number, and num_key_value_heads num_attention_heads"
        )
    pools = divides("index_kpool", c.index_kpool, "index_topk", c.index_topk)
    given = (c.index_n_heads, c.index_head_dim, pools, c.index_kpool, c.index_kpool_always_select_tail)
    attention = latent(c, Indexed, epsilon=c.rms_norm_eps, indexer=Indexer(d, c.q_lora_rank, *given))
    bound = own.get("gate_lower_bound", c.linear_lower_bound)
    bound = -5.0 if bound is None and own and own.get("safe_gate", True) else bound
    mixers: dict[str, Part] = {"linear_attention": delta_of(c, flat=True, bound=bound), "full_attention": attention}
    one = Mlp(d, c.moe_intermediate_size, limit=c.swiglu_limit)
    attends, bias = range(3, c.num_hidden_layers, 4), "gate.e_score_correction_bias"
    layers, indexed = [], False
    for own_indexer, branches in zip(c.indexes, latent_layers(c, mixers, attends, one, bias, ("self_attn", "mlp"))):
        streams = []
        for name, branch in zip(("attn", "ffn"), branches):
            part = branch.part
            if part is attention and not own_indexer:
                if not indexed:
                    raise ConfigError("indexer_types has 'shared' for a layer that follows none with an indexer")
                part = replace(attention, indexer=None)
            sides = (Side(branch.before, norm), Side(branch.name, part))
            streams.append(Branch("", Streams(sides, name, c.hc_mult, c.hc_sinkhorn_iters, c.hc_eps), keep=0.0))
        indexed = branches[0].part is attention and own_indexer
        layers.append(tuple(streams))
    return Decoder.of(c, layers, MeanNorm(d, c.rms_norm_eps), embed=lambda x: jnp.tile(x, c.hc_mult))


GLM5 = {"vocab_size": 154880, "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 45}
GLM5 |= {"num_attention_heads": 64, "num_local_experts": 288, "rms_norm_eps": 1e-5, "q_lora_rank": 1536}
GLM5 |= {"qk_rope_head_dim": 0, "qk_nope_head_dim": 256, "v_head_dim": 256, "routed_scaling_factor": 2.5}
GLM5 |= {"linear_num_heads": 64, "first_k_dense_replace": 3}
LAST = ("model.layers.45.", "model.language_model.layers.45.")  # the layer that predicts several tokens at once
ALIASES = RENAMED | {"head_dim": ""}  # of rotary positions, which there are not
GLM5_NEXT = Family("glm5_next_text", Glm5Config, decoder, ALIASES, unused=LAST, defaults=GLM5)
