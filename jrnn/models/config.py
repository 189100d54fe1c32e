"""The file config.json of a model: which keys a family reads, which it may ignore, and errors for all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import jax

from jrnn.errors import ConfigError, near
from jrnn.files import AtLeast, checked

T = TypeVar("T")

MOST_BLOCKS = 100_000  # layers times experts

# Keys of every model of transformers that change neither its parameters nor what it computes.
IGNORED = frozenset(
    [
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": jax.nn.gelu,
}


def read_config(cls: type[T], given: Mapping[str, Any], ignored: str, where: str) -> T:
    """Makes a family's config, a frozen dataclass, from the keys of config.json.

    Args:
        cls: its fields are the keys that the family reads; one without a default must be given.
        given: the contents of config.json.
        ignored: further keys that have no effect here.
        where: the place for messages.

    Raises:
        ConfigError: for an unknown, missing or unsupported key.
    """
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    kinds = get_type_hints(cls, include_extras=True)
    for name in given:
        if name not in known and name not in IGNORED and name not in ignored.split():
            raise ConfigError(
                f"{where}: the key {name!r:.80} is unknown{near(name, known)}; its effect cannot be computed"
            )
    found: dict[str, Any] = {}
    for name, field in known.items():
        if name in given and given[name] is not None:
            found[name] = _field(kinds[name], given[name], f"{where}: {name}")
        elif field.default is MISSING:
            raise ConfigError(f"{where}: lacks the key {name!r}")
    config = cls(**found)
    layers, experts = (getattr(config, name, 1) for name in ("num_hidden_layers", "num_experts"))
    if layers * max(experts, 1) > MOST_BLOCKS:
        raise ConfigError(
            f"{where}: num_hidden_layers times num_experts is {layers * experts:,}; at most {MOST_BLOCKS:,}"
        )
    activation = getattr(config, "hidden_act", getattr(config, "hidden_activation", "silu"))
    if activation not in ACTIVATIONS:
        raise ConfigError(f"{where}: the activation is {activation!r}; there are {', '.join(ACTIVATIONS)}")
    return config


def _field(kind: Any, value: Any, where: str) -> Any:
    """A field's value, checked; numbers without bounds of their own are positive, or at least 0 if they are no integers."""
    try:
        found = checked(kind, _plain(value), where, ConfigError)
    except ValueError as e:
        raise (e if isinstance(e, ConfigError) else ConfigError(f"{where} must be a number: {e}")) from None
    if kind in (int, float, int | None, float | None) and found is not None:
        least = int(type(found) is int)
        if not least <= found < 2**32:
            raise ConfigError(f"{where} must be at least {least} and less than 2^32, is {found}")
    return found


def _plain(value: Any) -> Any:
    """Lists as tuples and dicts as tuples of pairs, so that configs can be hashed; infinity as transformers writes it."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(str(value["__float__"]))
        return tuple(sorted((name, _plain(part)) for name, part in value.items()))
    return tuple(_plain(part) for part in value) if isinstance(value, (list, tuple)) else value


def rotary(config: Any, where: str, partial: float) -> tuple[float, int]:
    """The base of rotary positions, and how many of a head's features turn.

    They stand in `rope_parameters`, or, written by older versions, in `rope_theta` and `partial_rotary_factor`.
    """
    given = dict(config.rope_parameters)
    if given.get("rope_type", "default") != "default":
        raise ConfigError(
            f"{where}: rope_parameters.rope_type is {given['rope_type']!r:.80}; only 'default' is supported"
        )
    base = _field(float, given.get("rope_theta", config.rope_theta), f"{where}: rope_theta")
    share = given.get("partial_rotary_factor", config.partial_rotary_factor or partial)
    share = checked(Annotated[float, AtLeast(0, 1)], share, f"{where}: partial_rotary_factor", ConfigError)
    turned = int(config.head_dim * share)
    if turned % 2:
        raise ConfigError(
            f"{where}: partial_rotary_factor {share} of {config.head_dim} features is {turned}; it must be even"
        )
    return base, turned
