"""Families with attention without a softmax: gated delta rule, Kimi delta attention, lightning attention.

qwen3_next, qwen3_5_text and qwen3_5_moe_text, olmo_hybrid, kimi_linear, bailing_hybrid, glm5_next_text, minimax.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jrnn.errors import ConfigError
from jrnn.models.blocks import (
    Attention,
    Both,
    Delta,
    Experts,
    HyperStreams,
    Indexed,
    Indexer,
    Kda,
    Latent,
    Lightning,
    MeanNorm,
    Mlp,
    Router,
    Side,
)  # fmt: skip
from jrnn.models.family import Block, Branch, Decoder, Family, Mixers, Names, Norm, pairs
from jrnn.models.model_config import DecoderKeys, Rope, ScoreKeys, divides

Parts = dict[str, Block]  # by the type of a layer


@dataclass(frozen=True)
class QwenConfig(DecoderKeys):
    """The keys that all three read."""

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    full_attention_interval: int = 4


@dataclass(frozen=True)
class MoeConfig(QwenConfig):
    """With experts."""

    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts_per_tok: int = 8
    num_experts: int = 256
    # this and the next are of qwen3_next, which has experts in some layers
    decoder_sparse_step: int = 1
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[int, ...] = ()


def _experts(c: MoeConfig, normalize: bool) -> Both:
    one, shared = (
        Mlp(c.hidden_size, inner, c.hidden_act)
        for inner in (c.moe_intermediate_size, c.shared_expert_intermediate_size)
    )
    router = Router(c.num_experts, c.num_experts_per_tok, normalize=0.0 if normalize else None)
    gated = Side("shared_expert", shared, gate=("shared_expert_gate", c.hidden_size))
    return Both((Side("", Experts(one, router)), gated))


def _decoder(c: QwenConfig, products: str, feed_forward: Callable[[int], Block]) -> Decoder:
    """`feed_forward` gives the part of each layer."""
    sizes = (
        c.linear_num_key_heads,
        c.linear_num_value_heads,
        c.linear_key_head_dim,
        c.linear_value_head_dim,
    )
    delta = Delta(
        c.hidden_size, *sizes, c.linear_conv_kernel_dim, c.hidden_act, c.rms_norm_eps, products
    )
    norm = Norm(c.head, c.rms_norm_eps, offset=True)
    attention = Attention.of(
        c, c.attention_bias, rope=Rope.of(c, c.head, 0.25), norm=norm, gated=True
    )
    mixers: Mixers = {
        "linear_attention": ("linear_attn", delta),
        "full_attention": ("self_attn", attention),
    }
    kinds = c.kinds(
        mixers,
        lambda k: "linear_attention" if (k + 1) % c.full_attention_interval else "full_attention",
    )
    layers = pairs(
        (mixers[kind] for kind in kinds), "mlp", map(feed_forward, range(c.num_hidden_layers))
    )
    return Decoder.of(c, layers, Norm(c.hidden_size, c.rms_norm_eps, offset=True))


def qwen3_next(c: MoeConfig) -> Decoder:
    dense = {
        k
        for k in range(c.num_hidden_layers)
        if (k + 1) % c.decoder_sparse_step or k in c.mlp_only_layers
    }
    dense = dense if c.num_experts else set(range(c.num_hidden_layers))
    mlp = Mlp(c.hidden_size, c.intermediate_size, c.hidden_act)
    return _decoder(c, "by head", lambda k: mlp if k in dense else _experts(c, c.norm_topk_prob))


def qwen3_5(c: QwenConfig) -> Decoder:
    return _decoder(c, "together", lambda k: Mlp(c.hidden_size, c.intermediate_size, c.hidden_act))


def qwen3_5_moe(c: MoeConfig) -> Decoder:
    return _decoder(c, "together", lambda k: _experts(c, normalize=True))


QWEN = {
    "vocab_size": 248320,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
QWEN_MOE = QWEN | {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2}
QWEN_NEXT = QWEN_MOE | {
    "vocab_size": 151936,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_experts_per_tok": 10,
    "num_experts": 512,
}
QWEN3_NEXT = Family("qwen3_next", MoeConfig, qwen3_next, unused=("mtp.",), defaults=QWEN_NEXT)
QWEN3_5 = Family("qwen3_5_text", QwenConfig, qwen3_5, unused=("mtp.",), defaults=QWEN)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text", MoeConfig, qwen3_5_moe, unused=("mtp.",), defaults=QWEN_MOE
)


@dataclass(frozen=True)
class OlmoHybridConfig(DecoderKeys):
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int = 4
    linear_allow_neg_eigval: bool = True


def olmo(c: OlmoHybridConfig) -> Decoder:
    d = c.hidden_size
    count = c.num_hidden_layers
    otherwise = ["full_attention" if k % 4 == 3 else "linear_attention" for k in range(count)]
    if "full_attention" not in otherwise:
        otherwise[-1] = "full_attention"
    kinds = c.kinds(("linear_attention", "full_attention"), lambda k: otherwise[k])
    key_heads = c.linear_num_key_heads or c.num_attention_heads
    key = c.linear_key_head_dim or int(0.75 * d / key_heads)
    sizes = (
        key_heads,
        c.linear_num_value_heads or c.num_attention_heads,
        key,
        c.linear_value_head_dim or 2 * key,
    )
    beta = 2.0 if c.linear_allow_neg_eigval else 1.0
    delta = Delta(d, *sizes, c.linear_conv_kernel_dim, c.hidden_act, 1e-5, "each", beta)
    turns = c.rope_theta is not None or dict(c.rope_parameters or ()).get("rope_theta") is not None
    rope = Rope.of(c, c.head) if turns else None
    attention = Attention.of(
        c, c.attention_bias, rope=rope, norm=Norm(d, c.rms_norm_eps), norm_whole=True
    )
    mlp = Mlp(d, c.intermediate_size, c.hidden_act)
    before = (
        Branch("linear_attn", delta, "attention_layer_norm"),
        Branch("mlp", mlp, "feedforward_layer_norm"),
    )
    names = ("feedforward_layer_norm", "post_feedforward_layernorm")
    after = (Branch("self_attn", attention, after=names[0]), Branch("mlp", mlp, after=names[1]))
    return Decoder.of(c, (before if kind == "linear_attention" else after for kind in kinds))


OLMO = {
    "vocab_size": 100352,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_attention_heads": 30,
}
OLMO_HYBRID = Family("olmo_hybrid", OlmoHybridConfig, olmo, defaults=OLMO)


@dataclass(frozen=True)
class LatentConfig(ScoreKeys):
    """The keys of latent attention and Kimi delta attention."""

    n_shared_experts: int = 1
    kv_lora_rank: int = 512
    q_lora_rank: int | None = None
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    qk_nope_head_dim: int = 128
    mlp_layer_types: tuple[str, ...] | None = None
    first_k_dense_replace: int = 1
    linear_head_dim: int | None = None
    linear_num_heads: int | None = None
    linear_conv_kernel_dim: int = 4
    # the last three, in the files of kimi_linear's authors
    linear_attn_config: tuple[tuple[str, Any], ...] | None = ()


@dataclass(frozen=True)
class BailingConfig(LatentConfig):
    layer_group_size: int = 6
    kda_safe_gate: bool = True
    kda_lower_bound: float = -5.0


def latent(c: LatentConfig, kind: type[Latent] = Latent, **more: Any) -> Latent:
    sizes = (c.kv_lora_rank, c.q_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim)
    return kind(c.hidden_size, c.num_attention_heads, *sizes, bias=c.attention_bias, **more)


def delta_of(c: LatentConfig, **more: Any) -> Kda:
    own = dict(c.linear_attn_config or ())
    heads = own.get("num_heads", c.linear_num_heads or 32)
    sizes = (heads, own.get("head_dim", c.linear_head_dim or 128))
    taps = own.get("short_conv_kernel_size", c.linear_conv_kernel_dim)
    return Kda(c.hidden_size, *sizes, taps, c.hidden_act, c.rms_norm_eps, **more)


def latent_layers(
    c: LatentConfig,
    mixers: Parts,
    attends: Container[int],
    one: Mlp,
    bias: str,
    names: tuple[str, str],
) -> Iterator[tuple[Branch, ...]]:
    """`one`: an expert; `bias`: the name of the router's; `names`: of the mixer and the feed-forward part."""
    d = c.hidden_size
    count = c.num_hidden_layers
    kinds = c.kinds(mixers, lambda k: "full_attention" if k in attends else "linear_attention")
    shared = Mlp(d, c.moe_intermediate_size * c.n_shared_experts, c.hidden_act, limit=one.limit)
    experts = Both(
        (Side("", Experts(one, Router.of_scores(c, bias))), Side("shared_experts", shared))
    )
    feeds: Parts = {
        "dense": replace(shared, inner=c.intermediate_size),
        "sparse": experts,
    }
    chosen = c.mlp_layer_types or [
        "dense" if k < c.first_k_dense_replace else "sparse" for k in range(count)
    ]
    if len(chosen) != count or set(chosen) - set(feeds):
        raise ConfigError(
            f"mlp_layer_types is {chosen!r:.80}; it must have 'dense' or 'sparse' for each layer"
        )
    return pairs(
        ((names[0], mixers[kind]) for kind in kinds), names[1], (feeds[feed] for feed in chosen)
    )


def kimi(c: LatentConfig) -> Decoder:
    d = c.hidden_size
    own = dict(c.linear_attn_config or ())
    given = own.get("full_attn_layers")
    attends = range(4, c.num_hidden_layers, 4) if given is None else [k - 1 for k in given]
    one = Mlp(d, c.moe_intermediate_size, c.hidden_act, ("w1", "w3", "w2"))
    mixers: Parts = {"linear_attention": delta_of(c), "full_attention": latent(c)}
    names = ("self_attn", "block_sparse_moe")
    layers = latent_layers(c, mixers, attends, one, "gate.e_score_correction_bias", names)
    return Decoder(d, c.vocab_size, tuple(layers), Norm(d, c.rms_norm_eps))


def bailing(c: BailingConfig) -> Decoder:
    d = c.hidden_size
    sizes = (
        c.linear_num_heads or c.num_attention_heads,
        c.linear_head_dim or c.head,
        c.linear_conv_kernel_dim,
    )
    bound = c.kda_lower_bound if c.kda_safe_gate else None
    kda = Kda(
        d, *sizes, c.hidden_act, c.rms_norm_eps, low=False, flat=True, bound=bound, out="dense"
    )
    attention = latent(
        c, rope=Rope.of(c, c.qk_rope_head_dim, theta=6e6), gate="g_proj", out="dense"
    )
    attends = range(c.layer_group_size - 1, c.num_hidden_layers, c.layer_group_size)
    one = Mlp(d, c.moe_intermediate_size, c.hidden_act)
    mixers: Parts = {"linear_attention": kda, "full_attention": attention}
    layers = latent_layers(c, mixers, attends, one, "gate.expert_bias", ("attention", "mlp"))
    names = Names("model.word_embeddings.weight")
    return Decoder(d, c.vocab_size, tuple(layers), Norm(d, c.rms_norm_eps), names=names)


KIMI = {
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
}
BAILING = {
    "vocab_size": 157184,
    "hidden_size": 2560,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 42,
    "num_local_experts": 512,
    "n_group": 8,
    "topk_group": 4,
    "head_dim": 128,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 2,
}
RENAMED = {
    "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group", "num_experts": "num_local_experts",
    "n_routed_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts", "short_conv_kernel_size": "linear_conv_kernel_dim",
}  # fmt: skip
OLD = ((".mlp.", ".block_sparse_moe."),)  # in the files of its authors, of layers without experts
KIMI_LINEAR = Family("kimi_linear", LatentConfig, kimi, RENAMED, renamed=OLD, defaults=KIMI)
# The layer after the last predicts several tokens at once.
LAST = ("model.layers.42.",)
BAILING_HYBRID = Family(
    "bailing_hybrid", BailingConfig, bailing, RENAMED, unused=LAST, defaults=BAILING
)


@dataclass(frozen=True)
class Glm5Config(LatentConfig):
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
        since = 1 - self.index_skip_topk_offset
        every = self.index_topk_freq
        otherwise = []
        for k in range(self.num_hidden_layers):
            otherwise.append("SF"[max(k + since, 0) % every == 0])
        kinds = self.indexer_types or self.index_topk_pattern or otherwise
        if len(kinds) != self.num_hidden_layers or set(kinds) - {"full", "shared", "F", "S"}:
            raise ConfigError(
                f"indexer_types is {kinds!r:.80}; it must have 'full' or 'shared' for each layer"
            )
        return [kind in ("full", "F") for kind in kinds]


def glm5_next(c: Glm5Config) -> Decoder:
    d = c.hidden_size
    own = dict(c.linear_attn_config or ())
    norm = Norm(c.hidden_size, c.rms_norm_eps)
    if c.qk_rope_head_dim or c.q_lora_rank is None or c.key_heads != c.num_attention_heads:
        wanted = "qk_rope_head_dim must be 0, q_lora_rank a number, and num_key_value_heads num_attention_heads"
        raise ConfigError(wanted)
    pools = divides("index_kpool", c.index_kpool, "index_topk", c.index_topk)
    given = (
        c.index_n_heads,
        c.index_head_dim,
        pools,
        c.index_kpool,
        c.index_kpool_always_select_tail,
    )
    attention = latent(
        c, Indexed, epsilon=c.rms_norm_eps, indexer=Indexer(d, c.q_lora_rank, *given)
    )
    bound = own.get("gate_lower_bound", c.linear_lower_bound)
    bound = -5.0 if bound is None and own and own.get("safe_gate", True) else bound
    mixers: Parts = {
        "linear_attention": delta_of(c, flat=True, bound=bound),
        "full_attention": attention,
    }
    one = Mlp(d, c.moe_intermediate_size, limit=c.swiglu_limit)
    attends = range(3, c.num_hidden_layers, 4)
    bias = "gate.e_score_correction_bias"
    layers = []
    indexed = False
    for own_indexer, branches in zip(
        c.indexes, latent_layers(c, mixers, attends, one, bias, ("self_attn", "mlp"))
    ):
        streams = []
        for name, branch in zip(("attn", "ffn"), branches):
            part = branch.part
            if part is attention and not own_indexer:
                if not indexed:
                    raise ConfigError(
                        "indexer_types has 'shared' for a layer that follows none with an indexer"
                    )
                part = replace(attention, indexer=None)
            sides = (Side(branch.before, norm), Side(branch.name, part))
            streams.append(
                Branch(
                    "",
                    HyperStreams(sides, name, c.hc_mult, c.hc_sinkhorn_iters, c.hc_eps),
                    keep=0.0,
                )
            )
        indexed = branches[0].part is attention and own_indexer
        layers.append(tuple(streams))
    return Decoder.of(
        c, layers, MeanNorm(d, c.rms_norm_eps), embed=lambda x: jnp.tile(x, c.hc_mult)
    )


GLM5 = {
    "vocab_size": 154880,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_local_experts": 288,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 256,
    "v_head_dim": 256,
    "routed_scaling_factor": 2.5,
    "linear_num_heads": 64,
    "first_k_dense_replace": 3,
}
# the layer that predicts several tokens at once
AFTER_LAST = ("model.layers.45.", "model.language_model.layers.45.")
GLM5_NAMES = RENAMED | {"head_dim": ""}  # of rotary positions, which there are not
GLM5_NEXT = Family(
    "glm5_next_text", Glm5Config, glm5_next, GLM5_NAMES, unused=AFTER_LAST, defaults=GLM5
)


@dataclass(frozen=True)
class MiniMaxConfig(DecoderKeys):
    num_experts_per_tok: int = 2
    num_local_experts: int = 8
    full_attn_alpha_factor: float = 1
    full_attn_beta_factor: float = 1
    linear_attn_alpha_factor: float = 1
    linear_attn_beta_factor: float = 1
    mlp_alpha_factor: float = 1
    mlp_beta_factor: float = 1


def minimax(c: MiniMaxConfig) -> Decoder:
    d = c.hidden_size
    count = c.num_hidden_layers
    attention = Attention.of(c, rope=Rope.of(c, c.head, theta=1e6))
    one = Mlp(d, c.intermediate_size, c.hidden_act, ("w1", "w3", "w2"))
    experts = Experts(one, Router(c.num_local_experts, c.num_experts_per_tok, normalize=0.0))
    factors = {"keep": c.mlp_alpha_factor, "scale": c.mlp_beta_factor}
    feed = Branch(
        "block_sparse_moe", experts, "post_attention_layernorm", of_normed=True, **factors
    )
    kinds = ("full_attention", "linear_attention")
    layers = []
    for k, kind in enumerate(c.kinds(kinds, lambda k: kinds[k % 2])):
        if kind == "full_attention":
            mixer = attention
            keep = c.full_attn_alpha_factor
            scale = c.full_attn_beta_factor
        else:
            share = 1 - k / (count - 1 + 1e-5) + 1e-5
            mixer = Lightning(d, c.num_attention_heads, c.head, share, c.hidden_act)
            keep = c.linear_attn_alpha_factor
            scale = c.linear_attn_beta_factor
        layers.append(
            (
                Branch(
                    "self_attn", mixer, "input_layernorm", keep=keep, scale=scale, of_normed=True
                ),
                feed,
            )
        )
    return Decoder.of(c, layers)


# transformers saves the powers of the decays, which follow from the config.
DERIVED = tuple(
    f".self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
)
OPTIONS = {"unused": DERIVED, "defaults": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}}
MINIMAX = Family("minimax", MiniMaxConfig, minimax, {"num_experts": "num_local_experts"}, **OPTIONS)
