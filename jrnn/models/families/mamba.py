"""The families mamba, falcon_mamba and mamba2, blocks of a norm and a state space, and zamba2.

zamba2 is Mamba-2, and in some layers a transformer before it, whose weights those layers share.

Shapes: T time, N batch, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from jax import Array

from jrnn.errors import ConfigError, near
from jrnn.files import AtLeast, checked
from jrnn.models.blocks import Attention, Mamba1, Mamba2, Mlp
from jrnn.models.family import (
    Block,
    Branch,
    Decoder,
    Family,
    Names,
    Norm,
    Outputs,
    Scoped,
    Shapes,
    State,
    linear,
    under,
)
from jrnn.models.model_config import Limit, Mamba2Keys, Rope, divides

NAMES = Names("backbone.embeddings.weight", "backbone.layers", "backbone.norm_f")
RENAMED = (("backbone.embedding.", "backbone.embeddings."),)  # in the files of the first releases


@dataclass(frozen=True)
class Keys:
    """The keys that all three read, with the defaults of transformers for mamba."""

    vocab_size: int = 50280
    hidden_size: int = 768
    state_size: int = 16
    num_hidden_layers: int = 32
    layer_norm_epsilon: float = 1e-5
    expand: float = 2
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    tie_word_embeddings: bool = True


@dataclass(frozen=True)
class MambaConfig(Keys):
    intermediate_size: int | None = None
    time_step_rank: int | Literal["auto"] = "auto"
    mixer_rms_eps: float | None = None  # of falcon_mamba


@dataclass(frozen=True)
class Mamba2Config(Keys):
    num_heads: int = 128
    head_dim: int = 64
    n_groups: int = 8
    time_step_limit: Limit = (0.0, float("inf"))


def _blocks(c: Keys, mixer: Block) -> Decoder:
    layers = ((Branch("mixer", mixer, before="norm"),),) * c.num_hidden_layers
    norm = Norm(c.hidden_size, c.layer_norm_epsilon)
    return Decoder(c.hidden_size, c.vocab_size, layers, norm, c.tie_word_embeddings, NAMES)


def mamba1(c: MambaConfig) -> Decoder:
    inner = c.intermediate_size or int(c.expand * c.hidden_size)
    rank = -(-c.hidden_size // 16) if c.time_step_rank == "auto" else c.time_step_rank
    options = (c.conv_kernel, c.use_bias, c.use_conv_bias, c.hidden_act, c.mixer_rms_eps)
    return _blocks(c, Mamba1(c.hidden_size, inner, c.state_size, rank, *options))


def mamba2(c: Mamba2Config) -> Decoder:
    inner = int(c.expand * c.hidden_size)
    if inner != c.num_heads * c.head_dim:
        problem = f"expand times hidden_size is {inner}, but num_heads times head_dim is {c.num_heads * c.head_dim}"
        raise ConfigError(f"{problem}; they must be equal")
    sizes = (c.hidden_size, c.num_heads, c.head_dim, c.state_size, c.n_groups, c.conv_kernel)
    options = (
        c.use_bias,
        None,
        c.use_conv_bias,
        c.hidden_act,
        c.time_step_limit,
        c.layer_norm_epsilon,
    )
    return _blocks(c, Mamba2(*sizes, *options))


SIZES = {
    "vocab_size": 32768,
    "hidden_size": 4096,
    "state_size": 128,
    "num_hidden_layers": 64,
    "tie_word_embeddings": False,
}
MAMBA = Family("mamba", MambaConfig, mamba1, {"mixer_rms_eps": ""}, renamed=RENAMED)
FALCON_MAMBA = Family("falcon_mamba", MambaConfig, mamba1, defaults={"mixer_rms_eps": 1e-6})
MAMBA2 = Family("mamba2", Mamba2Config, mamba2, renamed=RENAMED, defaults=SIZES)


# Keys of ssm_cfg in the files of mamba_ssm: their names here, and those that say only how to begin training or to compute.
SSM_KEYS = {
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "expand": "expand",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
}
SSM = {
    "mamba": (SSM_KEYS | {"dt_rank": "time_step_rank"}, {}),
    "mamba2": (
        SSM_KEYS | {"headdim": "head_dim", "ngroups": "n_groups", "dt_limit": "time_step_limit"},
        {"d_state": 128, "headdim": 64, "ngroups": 1},
    ),
}
SSM_TRAINING = (
    "dt_min",
    "dt_max",
    "dt_init",
    "dt_scale",
    "dt_init_floor",
    "A_init_range",
    "conv_init",
)
SSM_TRAINING += ("chunk_size", "use_fast_path", "use_mem_eff_path")
SSM_ONLY = {
    "d_ssm": None,
    "D_has_hdim": False,
    "rmsnorm": True,
    "norm_before_gate": False,
    "activation": "swish",
}


def of_mamba_ssm(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The config of mamba or mamba2 from one of mamba_ssm, which has `d_model`, `n_layer` and `ssm_cfg`.

    Raises:
        ConfigError: for options that change what is computed and that mamba and mamba2 do not have.
    """
    only = {"rms_norm": True, "d_intermediate": 0, "attn_layer_idx": [], "attn_cfg": {}}
    ssm = dict(checked(dict, given.get("ssm_cfg", {}), f"{where}: ssm_cfg", ConfigError))
    kind = {"Mamba1": "mamba", "Mamba2": "mamba2"}.get(layer := ssm.pop("layer", "Mamba1"))
    if kind is None:
        raise ConfigError(
            f"{where}: ssm_cfg.layer is {layer!r:.80}; only 'Mamba1' and 'Mamba2' are supported"
        )
    for name, value in (
        *only.items(),
        *((f"ssm_cfg.{name}", value) for name, value in SSM_ONLY.items()),
    ):
        present = (ssm if "." in name else given).get(name.removeprefix("ssm_cfg."), value)
        if present != value:
            raise ConfigError(f"{where}: {name} is {present!r:.80}; only {value!r} is supported")
    keys, defaults = SSM[kind]
    if unknown := [name for name in ssm if name not in (*keys, *SSM_TRAINING, *SSM_ONLY)]:
        raise ConfigError(
            f"{where}: ssm_cfg has the unknown key {unknown[0]!r}{near(unknown[0], keys)}"
        )
    names = ("d_model", "n_layer", "vocab_size")
    sizes = {}
    for n in names:
        sizes[n] = checked(Annotated[int, AtLeast(1)], given.get(n), f"{where}: {n}", ConfigError)
    name = "pad_vocab_size_multiple"
    multiple = checked(
        Annotated[int, AtLeast(1)], given.get(name, 8), f"{where}: {name}", ConfigError
    )
    config = {keys[name]: value for name, value in (defaults | ssm).items() if name in keys}
    config |= {
        "model_type": kind,
        "hidden_size": sizes["d_model"],
        "num_hidden_layers": sizes["n_layer"],
        "vocab_size": -(-sizes["vocab_size"] // multiple) * multiple,
        "tie_word_embeddings": given.get("tie_embeddings", True),
    }
    if kind == "mamba2":
        size = checked(
            Annotated[int, AtLeast(1)], config["head_dim"], f"{where}: ssm_cfg.headdim", ConfigError
        )
        expand = checked(float, config.get("expand", 2), f"{where}: ssm_cfg.expand", ConfigError)
        config["num_heads"] = int(expand * sizes["d_model"]) // size
    return config


@dataclass(frozen=True)
class Zamba2Config(Mamba2Keys):
    time_step_min: float = 0.001
    intermediate_size: int | None = None  # type: ignore[assignment]  # else four times hidden_size
    num_mem_blocks: int = 1
    use_shared_attention_adapter: bool = False
    adapter_rank: int = 128
    use_mem_rope: bool = False


@dataclass(frozen=True)
class SharedTransformer(Block):
    """A layer with a shared transformer: Mamba-2 of x + linear(transformer(x, embedded tokens)).

    Attributes:
        mamba, attention, mlp: its parts.
        norm: of D features.
        home: the layer whose files hold the transformer, from this one.
        here: whether this is that layer.
        number: the number of this layer among layers with a transformer; own: the numbers of layers that share its weights.
        rank: of the adapters; adapts: whether the projections of q, k and v have some.
    """

    mamba: Mamba2
    attention: Attention
    mlp: Mlp
    norm: Norm
    home: str
    here: bool
    number: int
    own: tuple[int, ...]
    rank: int
    adapts: bool

    places = True

    def tensors(self) -> Shapes:
        d = self.norm.size
        shapes = linear("linear", d, d) | under("mamba_decoder.mamba", self.mamba.tensors())
        shapes |= under("mamba_decoder.input_layernorm", self.norm.tensors())
        if not self.here:
            return shapes
        inside: Shapes = {"input_layernorm.weight": (2 * d,), "pre_ff_layernorm.weight": (d,)}
        inside |= under("self_attn", self.attention.tensors()) | under(
            "feed_forward", self.mlp.tensors()
        )
        for k in self.own:
            name = f"feed_forward.gate_up_proj_adapter_list.{k}"
            inside |= linear(f"{name}.0", self.rank, d) | linear(
                f"{name}.1", 2 * self.mlp.inner, self.rank
            )
            for letter in "qkv" if self.adapts else "":
                name = f"self_attn.linear_{letter}_adapter_list.{k}"
                inside |= linear(f"{name}.0", self.rank, 2 * d) | linear(
                    f"{name}.1", 2 * d, self.rank
                )
        return shapes | under("shared_transformer", inside)

    def holds(self, room: int) -> Shapes:
        return self.mamba.holds(room) | self.attention.holds(room)

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        shared = w._replace(prefix=self.home)

        def adapted(part: str, name: str, adapter: str | None, given: Array) -> Array:
            y = shared.linear(f"{part}.{name}", given)
            if adapter is None:
                return y
            name = f"{part}.{adapter}_adapter_list.{self.number}"
            return y + shared.linear(f"{name}.1", shared.linear(f"{name}.0", given))

        both = replace(self.norm, size=2 * self.norm.size)
        y = both(shared.at("input_layernorm"), jnp.concatenate([x, w.embedded], axis=-1))
        q, k, v = (
            adapted("self_attn", f"{n}_proj", f"linear_{n}" if self.adapts else None, y)
            for n in "qkv"
        )
        y, after = self.attention.mix(shared.at("self_attn"), q, k, v, state)
        y = self.norm(shared.at("pre_ff_layernorm"), y)
        y = self.mlp.after(
            shared.at("feed_forward"),
            adapted("feed_forward", "gate_up_proj", "gate_up_proj", y),
        )
        y = self.norm(w.at("mamba_decoder.input_layernorm"), x + w.linear("linear", y))
        y, own = self.mamba.run(w.at("mamba_decoder.mamba"), y, state)
        return y, after | own


HYBRIDS = (6, 12, 18, 24, 30, 36, 42, 47, 51)  # of Zamba2-2.7B


def zamba2(c: Zamba2Config) -> Decoder:
    d = c.hidden_size
    count = c.num_attention_heads
    kinds = c.kinds(
        ("linear_attention", "hybrid"), lambda k: "hybrid" if k in HYBRIDS else "linear_attention"
    )
    mamba = Mamba2.of(c, act="silu", limit=(c.time_step_min, float("inf")), epsilon=1e-5)
    head = divides("num_attention_heads", count, "twice hidden_size", 2 * d)
    rope = Rope.of(c, head) if c.use_mem_rope else None
    attention = Attention(
        2 * d, count, c.key_heads, head, rope=rope, scale=(head / 2) ** -0.5, out_width=d
    )
    names = ("gate_up_proj", "gate_up_proj", "down_proj")
    mlp = Mlp(d, c.intermediate_size or 4 * d, c.hidden_act, names, c.mamba_proj_bias)
    norm = Norm(d, c.rms_norm_eps)
    hybrids = [k for k, kind in enumerate(kinds) if kind == "hybrid"]
    layers: list[tuple[Branch, ...]] = []
    for k, kind in enumerate(kinds):
        if kind == "linear_attention":
            layers.append((Branch("mamba", mamba, "input_layernorm"),))
            continue
        number = hybrids.index(k)
        block = number % c.num_mem_blocks
        own = tuple(range(block, len(hybrids), c.num_mem_blocks))
        home = f"model.layers.{hybrids[block]}.shared_transformer."
        part = SharedTransformer(
            mamba, attention, mlp, norm, home, number < c.num_mem_blocks, number, own, c.adapter_rank,
            c.use_shared_attention_adapter,
        )  # fmt: skip
        layers.append((Branch("", part),))
    return Decoder.of(c, layers, norm, names=Names(norm="model.final_layernorm"))


SIZES = {
    "hidden_size": 2560,
    "num_hidden_layers": 54,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 8,
    "mamba_d_state": 64,
    "tie_word_embeddings": True,
}
ALIASES = {
    "layers_block_type": "layer_types",
    "n_mamba_heads": "mamba_n_heads",
    "mamba_ngroups": "mamba_n_groups",
    "use_conv_bias": "mamba_conv_bias",
    "add_bias_linear": "mamba_proj_bias",
    "time_step_limit": "",
}
ZAMBA2 = Family("zamba2", Zamba2Config, zamba2, ALIASES, defaults=SIZES)
