"""The file config.json of a model: which keys a family reads, their types, and errors for what changes the computation.

The files are other people's. A key that no computation reads is no error, as in transformers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jrnn.errors import ConfigError, near
from jrnn.files import AtLeast, checked

Limit = tuple[float, Annotated[float, AtLeast(0, math.inf)]]  # of a time step
LIMITS = {
    "num_hidden_layers": 10_000,
    "num_experts": 10_000,
    "num_local_experts": 10_000,
    "n_routed_experts": 10_000,
}
MAYBE_NONE = (
    "num_experts num_local_experts num_dense_layers first_k_dense_replace attn_layer_offset expert_layer_offset "
    "qk_rope_head_dim index_skip_topk_offset"
)
LEAST = dict.fromkeys(MAYBE_NONE.split(), 0) | {"rescale_every": -1}  # other sizes are at least 1
# old and other names of layers
LEGACY = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "indexed_attention": "full_attention",
}
# Keys of any family that change what is computed, with the values that change nothing.
ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "rope_scaling": (None,),
    "sliding_window": (None,),
}
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "sqrelu": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": jax.nn.gelu,
    "gelu_new": jax.nn.gelu,
}


def read_config(family: Any, given: Mapping[str, Any], where: str, by_hand: bool) -> Any:
    """Makes the config of a `Family` from the keys of config.json.

    Args:
        family: see `Family`; a key of its config without a default must be given.
        given: the contents of config.json.
        where: the place for messages.
        by_hand: whether someone wrote the keys for jrnn, so that one that is nearly a known one is a mistake.

    Raises:
        ConfigError: for a missing or unsupported key, or a value of another type.
    """
    known = {field.name: field for field in fields(family.config)}
    hints = _hints(family.config)
    keys = {family.aliases.get(name, name): value for name, value in given.items()}
    for name, values in {**ONLY, **family.only}.items():
        if name not in known and keys.get(name) not in (None, *values):
            accepted = " or ".join(map(repr, values))
            raise ConfigError(
                f"{where}: {name} is {keys[name]!r:.80}; only {accepted} is supported"
            )
    spare = [name for name in keys if name not in known and name != "model_type"]
    for name in spare if by_hand else ():
        if hint := near(name, known):
            raise ConfigError(f"{where}: no computation reads the key {name!r}{hint}")
    if spare:
        logging.getLogger("jrnn.models").debug(
            "%s: no computation reads the keys %s", where, ", ".join(spare)
        )
    settings: dict[str, Any] = {}
    for name, field in known.items():
        if keys.get(name) is not None:
            settings[name] = value = checked(
                hints[name], _plain(keys[name]), f"{where}: {name}", ConfigError
            )
            least = LEAST.get(name, 1)
            most = LIMITS.get(name, 2**32)
            if type(value) is int and not least <= value <= most:
                raise ConfigError(
                    f"{where}: {name} must be at least {least} and at most {most}, is {value}"
                )
        elif name in keys and types.NoneType in typing.get_args(hints[name]):
            settings[name] = None
        elif name in family.defaults:
            settings[name] = family.defaults[name]
        elif field.default is MISSING:
            raise ConfigError(f"{where}: lacks the key {name!r}")
    config = family.config(**settings)
    for name in ("hidden_act", "mamba_hidden_act"):
        if name in known and (activation := getattr(config, name)) not in ACTIVATIONS:
            raise ConfigError(
                f"{where}: {name} is {activation!r}; there are {', '.join(ACTIVATIONS)}"
            )
    return config


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _plain(value: Any) -> Any:
    """Lists as tuples and dicts as tuples of pairs, so that configs can be hashed; infinity as transformers writes it."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            with contextlib.suppress(ValueError):
                return float(str(value["__float__"]))
        return tuple(sorted((str(name), _plain(part)) for name, part in value.items()))
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class RopeKeys:
    """The keys of rotary positions, without which they are the family's."""

    rope_parameters: tuple[tuple[str, Any], ...] | None = ()
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None


class Rope(NamedTuple):
    """Rotary positions: the base of the rates, and how many of a head's features turn."""

    base: float
    size: int

    @classmethod
    def of(cls, config: RopeKeys, head: int, share: float = 1.0, theta: float = 10000.0) -> Rope:
        """From `rope_parameters`, or, written by older versions, `rope_theta` and `partial_rotary_factor`.

        Args:
            config: has the keys.
            head: features of a head.
            share, theta: the family's defaults.
        """
        given = dict(config.rope_parameters or ())
        if given.get("rope_type", "default") != "default":
            raise ConfigError(
                f"rope_parameters.rope_type is {given['rope_type']!r}; only 'default' is supported"
            )
        base = given.get("rope_theta", config.rope_theta or theta)
        share = given.get("partial_rotary_factor", config.partial_rotary_factor or share)
        base = checked(Annotated[float, AtLeast(1e-9)], base, "rope_theta", ConfigError)
        share = checked(
            Annotated[float, AtLeast(0, 1)], share, "partial_rotary_factor", ConfigError
        )
        size = int(head * share)
        if size % 2 or size > head:
            problem = f"partial_rotary_factor {share} of {head} features is {size}"
            raise ConfigError(f"{problem}; it must be even and at most {head}")
        return cls(float(base), size)


def layer_types(given: tuple[str, ...], count: int, known: Iterable[str]) -> list[str]:
    """The type of each layer, with old names replaced."""
    kinds = [LEGACY.get(kind, kind) for kind in given]
    if len(kinds) != count:
        raise ConfigError(f"layer_types has {len(kinds)} entries for {count} layers")
    for kind in kinds:
        if kind not in known:
            raise ConfigError(f"layer_types has {kind!r}; there are {', '.join(known)}")
    return kinds


@dataclass(frozen=True)
class DecoderKeys(RopeKeys):
    """The keys that most families read; where their defaults differ, `Family.defaults` has them."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    layer_types: tuple[str, ...] | None = None

    @property
    def key_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head(self) -> int:
        """Features of a head."""
        count = self.num_attention_heads
        size = self.hidden_size
        return self.head_dim or divides("num_attention_heads", count, "hidden_size", size)

    def kinds(self, known: Iterable[str], otherwise: Callable[[int], str]) -> list[str]:
        """The type of each layer; by `otherwise` if the config has no types."""
        count = self.num_hidden_layers
        given = self.layer_types
        return layer_types(
            tuple(map(otherwise, range(count))) if given is None else given, count, known
        )


@dataclass(frozen=True)
class MambaKeys(DecoderKeys):
    """With Mamba."""

    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: float = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    @property
    def inner(self) -> int:
        return int(self.mamba_expand * self.hidden_size)


@dataclass(frozen=True)
class Mamba2Keys(MambaKeys):
    """With Mamba-2; see `Mamba2.of`."""

    mamba_n_heads: int = 128
    mamba_d_head: int | Literal["auto"] = "auto"
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    time_step_limit: Limit = (0.0, float("inf"))


@dataclass(frozen=True)
class ScoreKeys(DecoderKeys):
    """With experts that are chosen as in DeepSeek-V3; see `Router.of_scores`."""

    moe_intermediate_size: int = 1024
    num_local_experts: int = 256
    num_experts_per_tok: int = 8
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0


def divides(part: str, count: int, whole: str, size: int) -> int:
    """size / count; raises a ConfigError unless it is an integer."""
    if count < 1 or size % count:
        raise ConfigError(f"{part} is {count}, which does not divide {whole}, {size}")
    return size // count
