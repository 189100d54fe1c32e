"""The families of models, by the `model_type` of config.json: every `Family` of the files of this folder.

In: config.json as a mapping. Out: a `Family`: parameters and blocks of the model. Read `mamba.py` first.
"""

from __future__ import annotations

from typing import Any

from jrnn.errors import ConfigError
from jrnn.models.families import hybrids, linear_attention, mamba, recurrent_gemma, rwkv, xlstm
from jrnn.models.family import Family

_FILES = (hybrids, linear_attention, mamba, recurrent_gemma, rwkv, xlstm)
FAMILIES: dict[str, Family] = {}
for _file in _FILES:
    for _value in vars(_file).values():
        if isinstance(_value, Family):
            FAMILIES[_value.name] = _value
FAMILIES = dict(sorted(FAMILIES.items()))


def family_of(model_type: Any, where: str) -> Family:
    """The family of a `model_type`.

    Raises:
        ConfigError: if there is none.

    >>> family_of("mamba", "config.json").name
    'mamba'
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type is {model_type!r:.80}, which is not supported; there are {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]
