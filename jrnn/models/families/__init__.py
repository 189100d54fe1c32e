"""The families of models, by the `model_type` of config.json; one file each."""

from __future__ import annotations

from typing import Any

from jrnn.errors import ConfigError, near
from jrnn.models.families import mamba, mamba2, qwen3_next, recurrent_gemma, rwkv, xlstm
from jrnn.models.family import Family

_ALL = (mamba.MAMBA, mamba.FALCON_MAMBA, mamba2.MAMBA2, recurrent_gemma.RECURRENT_GEMMA, rwkv.RWKV, xlstm.XLSTM)
FAMILIES: dict[str, Family] = {family.name: family for family in (*_ALL, qwen3_next.QWEN3_NEXT)}


def family_of(model_type: Any, where: str) -> Family:
    """The family of a `model_type`.

    Raises:
        ConfigError: if there is none.

    >>> family_of("mamba3", "config.json")
    Traceback (most recent call last):
    jrnn.errors.ConfigError: config.json: model_type is 'mamba3'; did you mean 'mamba' or 'mamba2'?; there are the \
families falcon_mamba, mamba, mamba2, qwen3_next, recurrent_gemma, rwkv, xlstm
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type is {model_type!r:.80}{near(str(model_type), FAMILIES)}; there are the families "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
