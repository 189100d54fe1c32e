"""Pretrained recurrent language models, trained further.

Shapes: T steps, B examples side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jrnn import models
from jrnn.models import LanguageModel
from jrnn.models.loading import model_of, shapes_of
from jrnn.train.models.model import Carry, Outcome, Params, Signature, gradients_of
from jrnn.train.toml_codec import require


@dataclass(frozen=True)
class PretrainedConfig:
    """A model in the files of the Hugging Face hub."""

    kind: Literal["pretrained"] = "pretrained"
    pretrained: str | None = None  # its folder, with config.json and safetensors

    def __post_init__(self):
        require(self.pretrained is not None, "model.pretrained must name the folder of a model", None)


@dataclass(frozen=True)
class PretrainedModel:
    """A `LanguageModel` as a `Model` of rows that start with the initial state; its parameters are trained in float32.

    Attributes:
        folder: where the parameters are; they are read by `init`.
        text: config.json.
        types: the types of the parameters in the files.
        precision: as the key `train.precision`.
    """

    folder: str
    text: str
    types: Mapping[str, str]
    precision: str = "float32"

    @classmethod
    def of(cls, config: PretrainedConfig, precision: str, kept: Mapping[str, Any] | None) -> PretrainedModel:
        """Returns the model of a table [model]; `kept`: what `kept` returned, to do without the folder.

        Raises:
            ConfigError, FormatError: as `jrnn.models.load`.
        """
        if kept is None:
            loaded = models.load(config.pretrained)
            kept = {"config": loaded.text, "types": {name: str(p.dtype) for name, p in loaded.params.items()}}
        return cls(config.pretrained, kept["config"], kept["types"], precision)

    def kept(self) -> dict[str, Any]:
        """Returns what a run keeps of the model, as plain JSON."""
        return {"config": self.text, "types": dict(self.types)}

    @cached_property
    def _configured(self) -> LanguageModel:
        return model_of(self.text, self.folder)

    @property
    def vocabulary(self) -> int:
        return int(self._configured.config.vocab_size)

    @property
    def signature(self) -> Signature:
        v = self.vocabulary
        return Signature(True, v, v, every_step=True, loss="cross_entropy", carried=True, resets=True)

    def language_model(self, params: Params) -> LanguageModel:
        """Returns the model with these parameters, in the types of its files."""
        return replace(self._configured, params={name: p.astype(self.types[name]) for name, p in params.items()})

    def shapes(self) -> Params:
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes_of(self._configured).items()}

    def init(self, key: Any) -> Params:
        return {name: p.astype(jnp.float32) for name, p in models.load(self.folder).params.items()}

    def initial_carry(self, examples: int) -> Carry:
        return {}

    def loss(self, params: Params, carry: Carry, batch: Any, key: Any) -> tuple[Any, Carry]:
        logits, _ = self.predict(params, carry, batch)
        chosen = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(chosen, batch.targets[..., None], axis=-1)), carry

    def gradients(self, params: Params, carry: Carry, batch: Any, key: Any) -> Outcome:
        return gradients_of(self.loss, params, carry, batch, key)

    def predict(self, params: Params, carry: Carry, batch: Any) -> tuple[Any, Carry]:
        dtype = jnp.dtype(self.precision)
        model = replace(self._configured, params={name: p.astype(dtype) for name, p in params.items()})
        logits, _ = model(jnp.asarray(batch.tokens).T, resets=jnp.asarray(batch.resets).T)
        return jnp.swapaxes(logits, 0, 1), carry
