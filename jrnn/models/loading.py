"""Where models come from: folders that transformers or `LanguageModel.save` wrote, and random parameters."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn.errors import ConfigError, FormatError
from jrnn.files import parse_json, read_text
from jrnn.files.reading import available
from jrnn.models.families import FAMILIES, family_of
from jrnn.models.families.mamba import of_mamba_ssm
from jrnn.models.files import Tensors, parameter
from jrnn.models.hub import folder_of
from jrnn.models.model import LanguageModel
from jrnn.nn.checks import Shape

# methods whose tensors are dequantized
QUANTIZED = (
    "bitsandbytes",
    "compressed-tensors",
    "fbgemm_fp8",
    "fp8",
)
# keys that are read
BESIDE_TEXT_CONFIG = (
    "eos_token_id",
    "quantization_config",
    "tie_word_embeddings",
)


def load(
    folder: str | PathLike[str],
    *,
    revision: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> LanguageModel:
    """Reads a model from config.json and weights, as `save_pretrained` of transformers or mamba_ssm writes them.

    Tensors are read one after the other and keep their types, so that memory holds little more than the file's bytes.

    Args:
        folder: has config.json and model.safetensors, or several files with model.safetensors.index.json; or
            pytorch_model.bin, which torch reads with `weights_only=True` if it is installed. Of a model with `text_config`,
            such as qwen3_5, the language model is loaded. An output layer that differs from the embedding to which
            config.json ties it is kept, with a warning. Or `owner/name` of the Hugging Face hub, if there is no such folder:
            its files are downloaded once (extra `hub`).
        revision: the branch, tag or commit of a model of the hub. None: the hub's default.
        mesh: devices that share the parameters: the longest axis of each that the number of devices divides is divided.
            None: the default device holds all.

    Raises:
        ConfigError: for an unknown family, or an unsupported key or value of config.json.
        FormatError: if a file is missing or damaged, or tensors are missing, unknown, or of other shapes or types.

    >>> import tempfile, jrnn
    >>> config = {"model_type": "mamba", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1}
    >>> folder = tempfile.mkdtemp()
    >>> jrnn.models.create(config, jax.random.key(0)).save(folder)
    >>> model = jrnn.models.load(folder)
    >>> model.family.name, model.config.hidden_size
    ('mamba', 8)
    """
    folder = folder_of(folder, revision)
    model = model_of(read_text(folder / "config.json", FormatError), str(folder / "config.json"))
    tensors = Tensors(folder, model.family)
    names = model.decoder.names
    if model.decoder.tied and not tensors.tie(names):
        logging.getLogger("jrnn.models").warning(
            "%s: %s differs from %s, so they are not tied, although config.json has tie_word_embeddings",
            folder, names.head, names.embedding,
        )  # fmt: skip
        model = _untied(model)
    tensors.check(model.decoder)
    merges = model.decoder.parameters()
    return replace(
        model,
        params={name: parameter(tensors, name, merge, mesh) for name, merge in merges.items()},
    )


def _untied(model: LanguageModel) -> LanguageModel:
    """Unties the output layer from the embedding, also in config.json, because `save` writes both."""
    tied = "tie_word_embeddings"
    given = parse_json(model.text, "config.json", ConfigError, finite=False)
    keys = {}
    for key, value in given.items():
        if model.family.aliases.get(key) != tied:
            keys[key] = value
    text = json.dumps(keys | {tied: False}, indent=2)
    return replace(model, config=replace(model.config, tie_word_embeddings=False), text=text)


def model_of(text: str, where: str) -> LanguageModel:
    """The model that the text of a config.json describes, without parameters; raises as `configured`.

    Of a model of texts and images it is the part for texts, which `text_config` describes; of a quantized one, the model
    of numbers.
    """
    config = parse_json(text, where, ConfigError, finite=False)
    log = logging.getLogger("jrnn.models")
    given = config if isinstance(config, dict) else {}
    if "model_type" not in given and {"d_model", "n_layer"} <= set(given):
        config = given = of_mamba_ssm(given, where)
        text = json.dumps(config, indent=2, sort_keys=True)
    kind = f"{given.get('model_type')}_text"
    # or they stand alone
    inner = given.get("text_config", given | {"model_type": kind} if kind in FAMILIES else None)
    if isinstance(inner, dict) and given.get("model_type") not in FAMILIES:
        config = (
            {"model_type": kind}
            | inner
            | {key: given[key] for key in BESIDE_TEXT_CONFIG if key in given}
        )
        log.info("%s: only the language model of text_config is loaded", where)
    quantized = config.get("quantization_config") if given else None
    if isinstance(quantized, dict) and (method := quantized.get("quant_method")) in QUANTIZED:
        config = {key: value for key, value in config.items() if key != "quantization_config"}
        log.warning("%s: tensors are dequantized (%s)", where, method)
    return configured(
        config, text if config is given else json.dumps(config, indent=2, sort_keys=True), where
    )


def configured(
    config: Mapping[str, Any], text: str, where: str, by_hand: bool = False
) -> LanguageModel:
    """The model that the keys of config.json describe, without parameters; raises a ConfigError as `read_config`."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: must hold an object, holds {config!r:.80}")
    family = family_of(config.get("model_type"), where)
    return LanguageModel({}, family, family.read(config, where, by_hand), text)


def shapes_of(model: LanguageModel) -> dict[str, Shape]:
    """The shape of each parameter; experts' parameters are stacked."""
    shapes = model.decoder.shapes()
    merges = model.decoder.parameters()
    return {name: merge.shape(shapes) if merge else shapes[name] for name, merge in merges.items()}


def create(config: Mapping[str, Any], key: Array, dtype: Any = jnp.float32) -> LanguageModel:
    """A new model with random parameters, to train from the beginning or to try things out.

    Matrices are normal with the variance 1 / columns, and gains of norms are neutral. The parameters of decays are spread,
    so that units remember for different times.

    Args:
        config: the keys of config.json, with `model_type`; missing keys have transformers' defaults.
        key: a key of `jax.random`.
        dtype: the type of the parameters.

    Raises:
        ConfigError: for an unknown family, or an unsupported key or value.

    >>> config = {"model_type": "mamba", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1}
    >>> model = create(config, jax.random.key(0))
    >>> model(jnp.zeros((2, 3), int))[0].shape
    (2, 3, 16)
    """
    model = configured(
        config, json.dumps(dict(config), indent=2, sort_keys=True), "create", by_hand=True
    )
    shapes = shapes_of(model)
    size = sum(map(math.prod, shapes.values())) * jnp.dtype(dtype).itemsize
    if size > (most := available()):
        raise ConfigError(f"create: the parameters need {size:,} bytes, and {most:,} are available")
    params = {}
    for k, (name, shape) in enumerate(shapes.items()):
        params[name] = _initial(
            name, shape, jax.random.fold_in(key, k), model.decoder.norm.offset
        ).astype(dtype)
    return replace(model, params=params)


def _initial(name: str, shape: Shape, key: Array, around_one: bool) -> Array:
    """The initial value of a parameter.

    Args:
        around_one: whether the family adds 1 to the gains of norms, except for the gated delta rule's norm.
    """
    last = name.rpartition(".")[2]
    if last == "A_log":
        return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))
    if last in ("dt_bias", "time_decay", "time_first", "recurrent_param") or name.endswith(
        "dt_proj.bias"
    ):
        return jax.random.uniform(key, shape, minval=-5.0, maxval=-1.0)
    if last.startswith("time_mix"):
        return jax.random.uniform(key, shape)
    if last == "bias" or last.endswith(("_bias", "_base")):
        return jnp.zeros(shape)
    if len(shape) == 1:
        return jnp.full(
            shape, 0.0 if around_one and not name.endswith("linear_attn.norm.weight") else 1.0
        )
    return jax.random.normal(key, shape) / np.sqrt(shape[-1])
