"""Pretrained recurrent language models, trained further.

Shapes: T steps, B examples side by side.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jrnn import models
from jrnn.errors import ConfigError
from jrnn.files import kind_of, read_text
from jrnn.files.reading import read_tokenizer
from jrnn.models import LanguageModel
from jrnn.models.hub import folder_of
from jrnn.models.loading import model_of, shapes_of
from jrnn.train.models.interface import (
    Carry,
    Model,
    Outputs,
    Params,
    Signature,
    known_targets,
    mean_loss,
)
from jrnn.train.toml_codec import Natural, check_bounds, require

# the ends of the names of low-rank parts, [rank, columns] and [rows, rank]
A = "lora_a"
B = "lora_b"
FIRST = "first."  # how the names of the arrays of a trained first state begin
FILES = (  # next to the weights: the defaults of generation, and the files of a tokenizer besides tokenizer.json
    "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True)
class PretrainedConfig:
    """A model in the files of the Hugging Face hub."""

    kind: Literal["pretrained"] = "pretrained"
    pretrained: str | None = (
        None  # its folder, with config.json and safetensors, or owner/name of the hub
    )
    lora_rank: Natural = 0  # rank of trained matrices that are added to frozen ones; 0: none are
    lora_alpha: float = 16.0  # their product is multiplied by lora_alpha / lora_rank
    # patterns of the frozen ones' names
    lora_targets: list[str] = field(default_factory=lambda: ["*proj*.weight"])
    # what is trained: parameters, or only the recurrent state before each text
    tune: Literal["parameters", "state"] = "parameters"

    def __post_init__(self):
        require(
            self.pretrained is not None, "model.pretrained must name the folder of a model", None
        )
        check_bounds("model", self)
        require(self.lora_alpha > 0, "model.lora_alpha must be positive", self.lora_alpha)
        require(
            not (self.lora_rank and self.tune == "state"),
            "model.lora_rank must be 0 where model.tune is 'state'",
            self.lora_rank,
        )

    @property
    def trained(self) -> list[str]:
        """Patterns of the names of the parameters that are trained unless `optimizer.only` says others; none are all."""
        if self.tune == "state":
            return [f"{FIRST}*"]
        return [f"*.{A}", f"*.{B}"] if self.lora_rank else []


@dataclass(frozen=True)
class PretrainedModel(Model):
    """A `LanguageModel` as a `Model` of rows that start with the initial state; its parameters are trained in float32.

    Attributes:
        config: the table [model]; `init` reads the parameters from its folder.
        text: config.json.
        types: the types of the parameters in the files.
        precision: as the key `train.precision`.
        targets: the parameters that have a low-rank part (Hu et al., 2021). Of NAME it is NAME.lora_b NAME.lora_a.
    """

    config: PretrainedConfig
    text: str
    types: Mapping[str, str]
    precision: str = "float32"
    targets: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, config: PretrainedConfig, precision: str, kept: Mapping[str, Any] | None
    ) -> PretrainedModel:
        """Returns the model of a table [model]; `kept`: what `kept` returned, to do without the folder.

        Raises:
            ConfigError, FormatError: as `jrnn.models.load`, or if no matrix has a name like one of `lora_targets`.
        """
        if kept is None:
            loaded = models.load(config.pretrained)
            kept = {
                "config": loaded.text,
                "types": {name: str(p.dtype) for name, p in loaded.params.items()},
            }
        model = cls(config, kept["config"], kept["types"], precision)
        if config.tune == "state" and not model._first_shapes:
            raise ConfigError(
                f"model.tune: {model._configured.name} has no recurrent state to train; leave it at 'parameters'"
            )
        if not config.lora_rank:
            return model
        shapes = shapes_of(model._configured)
        names = [name for name, shape in shapes.items() if len(shape) == 2]
        require(
            len(config.lora_targets) > 0,
            "model.lora_targets must have a pattern, with lora_rank",
            config.lora_targets,
        )
        chosen: set[str] = set()
        for pattern in config.lora_targets:
            matrices = fnmatch.filter(names, pattern)
            if not matrices:
                others = fnmatch.filter(shapes, pattern)
                found = f"; {others[-1]} is {list(shapes[others[-1]])}" if others else ""
                raise ConfigError(
                    f"model.lora_targets: no matrix has a name like {pattern!r}{found}; such as {', '.join(names[-3:])}"
                )
            chosen.update(matrices)
        return replace(model, targets=tuple(name for name in names if name in chosen))

    def kept(self) -> dict[str, Any]:
        """Returns what a run keeps of the model, as plain JSON."""
        return {"config": self.text, "types": dict(self.types)}

    def files(self, tokenizer: str) -> dict[str, str]:
        """Returns the texts of the folder's `FILES`; the tokenizer's files only if it is `tokenizer`."""
        folder = folder_of(str(self.config.pretrained))
        path = folder / "tokenizer.json"
        same = kind_of(path) == "a file" and read_tokenizer(path).to_str() == tokenizer
        texts = {}
        for name in FILES if same else FILES[:1]:
            if kind_of(folder / name):
                texts[name] = read_text(folder / name, ConfigError)
        return texts

    @cached_property
    def _configured(self) -> LanguageModel:
        return model_of(self.text, self.config.pretrained)

    @property
    def vocabulary(self) -> int:
        return int(self._configured.config.vocab_size)

    @property
    def signature(self) -> Signature:
        return Signature(
            tokens=True,
            inputs=self.vocabulary,
            outputs=self.vocabulary,
            every_step=True,
            loss="cross_entropy",
            carried=True,
            resets=True,
        )

    def language_model(self, params: Params) -> LanguageModel:
        """Returns the model with these parameters, low-rank parts added, in the types of its files."""
        merged = self._merged(params)
        for name, p in merged.items():
            merged[name] = p.astype(self.types[name])
        return replace(self._configured, params=merged, first=self.first_state(params))

    def first_state(self, params: Params) -> Params:
        """Returns the trained state before each text; empty if parameters are trained."""
        return {name: params[FIRST + name] for name in self._first_shapes}

    @cached_property
    def _first_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._configured.decoder.first_shapes() if self.config.tune == "state" else {}

    def _merged(self, params: Params) -> Params:
        """Returns the parameters of the model itself, low-rank parts added."""
        merged = {}
        for name, p in params.items():
            if not name.endswith((f".{A}", f".{B}")) and not name.startswith(FIRST):
                merged[name] = p
        for name in self.targets:
            scale = self.config.lora_alpha / self.config.lora_rank
            merged[name] += scale * params[f"{name}.{B}"] @ params[f"{name}.{A}"]
        return merged

    def shapes(self) -> Params:
        shapes = shapes_of(self._configured)
        for name in self.targets:
            rows, columns = shapes[name]
            rank = self.config.lora_rank
            shapes |= {f"{name}.{A}": (rank, columns), f"{name}.{B}": (rows, rank)}
        shapes |= {FIRST + name: shape for name, shape in self._first_shapes.items()}
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def init(self, key: Any) -> Params:
        params = {}
        for name, p in models.load(self.config.pretrained).params.items():
            params[name] = p.astype(jnp.float32)
        shapes = self.shapes()
        for k, name in enumerate(self.targets):  # the products are 0 at first
            a = shapes[f"{name}.{A}"]
            b = shapes[f"{name}.{B}"]
            drawn = jax.random.normal(jax.random.fold_in(key, k), a.shape)
            params[f"{name}.{A}"] = drawn / a.shape[1] ** 0.5
            params[f"{name}.{B}"] = jnp.zeros(b.shape)
        for name, shape in self._first_shapes.items():
            params[FIRST + name] = jnp.zeros(shape)
        return params

    def loss(self, params: Params, carry: Carry, batch: Any, key: Any) -> Outputs:
        logits, _ = self.predict(params, carry, batch)
        return mean_loss(self.signature, logits.astype(jnp.float32), batch.targets), carry

    def count(self, batch: Any) -> Any:
        return known_targets(self.signature, batch.targets)

    def predict(self, params: Params, carry: Carry, batch: Any) -> Outputs:
        dtype = jnp.dtype(self.precision)
        merged = self._merged(params)
        for name, p in merged.items():
            merged[name] = p.astype(dtype)
        model = replace(self._configured, params=merged, first=self.first_state(params))
        logits, _ = model(jnp.asarray(batch.tokens).T, resets=jnp.asarray(batch.resets).T)
        return jnp.swapaxes(logits, 0, 1), carry
