"""The families of models, by the `model_type` of config.json."""

from __future__ import annotations

from typing import Any

from jrnn.errors import ConfigError
from jrnn.models.families.glm5_next import GLM5_NEXT
from jrnn.models.families.lfm2 import LFM2, LFM2_MOE
from jrnn.models.families.linear_attention import (
    BAILING_HYBRID,
    KIMI_LINEAR,
    MINIMAX,
    OLMO_HYBRID,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
)  # fmt: skip
from jrnn.models.families.mamba import FALCON_MAMBA, MAMBA, MAMBA2
from jrnn.models.families.mamba_hybrids import BAMBA, FALCON_H1, GRANITE, JAMBA, NEMOTRON_H
from jrnn.models.families.recurrent_gemma import RECURRENT_GEMMA
from jrnn.models.families.rwkv import RWKV, RWKV6, RWKV7
from jrnn.models.families.xlstm import XLSTM
from jrnn.models.families.zamba2 import ZAMBA2
from jrnn.models.family import Family

_ALL = (
    BAILING_HYBRID, BAMBA, FALCON_H1, FALCON_MAMBA, GLM5_NEXT, GRANITE, JAMBA, KIMI_LINEAR, LFM2, LFM2_MOE, MAMBA, MAMBA2,
    MINIMAX, NEMOTRON_H, OLMO_HYBRID, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, RECURRENT_GEMMA, RWKV, RWKV6, RWKV7, XLSTM, ZAMBA2,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def family_of(model_type: Any, where: str) -> Family:
    """The family of a `model_type`.

    Raises:
        ConfigError: if there is none.

    >>> family_of("mamba", "config.json").name
    'mamba'
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type is {model_type!r:.80}, which is not supported; there are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
