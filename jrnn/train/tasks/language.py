"""Language models: the next character, or the next word, from the previous ones; and text that they write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from jrnn.errors import DataError
from jrnn.train.models import TOKEN_MODELS, Model, Params, Signature, build_model
from jrnn.train.tasks.task import Axes, Kept, Metrics, TaskKind, Trained, kept_value
from jrnn.train.text_streams import (
    Streams,
    TextChunk,
    TextConfig,
    TextData,
    Vocabulary,
    WordsConfig,
    WordVocabulary,
)
from jrnn.train.toml_codec import NonNegative, Positive, Tables, check_bounds, require


@dataclass(frozen=True)
class LanguageTask:
    """A text as streams of chunks, with the state carried from chunk to chunk; see `Task`."""

    text: TextData
    model: Model

    axes: ClassVar[Axes] = {"tokens": 1, "targets": 1}
    item: ClassVar[str] = "tokens"

    @property
    def train(self) -> Streams:
        return self.text.train

    @property
    def unit(self) -> str:
        return f"nats a {self.text.vocabulary.item}"

    @property
    def items(self) -> int:
        return len(self.train.streams) * self.train.chunk

    def validation(self) -> Sequence[TextChunk]:
        return list(self.text.validation.one_pass())

    def evaluate(self, params: Params, loss: float) -> Metrics:
        """Returns the perplexity of words, or bits a character."""
        if isinstance(self.text.vocabulary, WordVocabulary):
            return {"perplexity": math.exp(min(loss, 700))}
        return {"bits_per_character": loss / math.log(2)}

    def fingerprint(self) -> Tables:
        vocabulary = self.text.vocabulary
        if isinstance(vocabulary, WordVocabulary):
            return {"words": list(vocabulary.words), "sha256": self.text.sha256}
        return {"characters": vocabulary.characters, "sha256": self.text.sha256}


@dataclass(frozen=True)
class SampleConfig:
    """The text that a trained model writes."""

    length: Positive = 400  # characters, words or tokens after the prompt
    # below 1 more predictable, above 1 more random, 0 always the most probable
    temperature: NonNegative = 0.7
    prompt: str = "The "  # how the text begins

    def __post_init__(self):
        check_bounds("sample", self)
        require(self.prompt != "", "sample.prompt must hold at least one character", self.prompt)


def written(trained: Trained, prompt: np.ndarray, seed: int) -> list[int]:
    """Returns a prompt [T] and the tokens that a model writes after it; raises DataError for an empty prompt."""
    if not len(prompt):
        raise DataError("the prompt is empty; it must hold at least one character")
    settings = trained.config.sample
    assert trained.generate is not None
    new, _ = trained.generate(
        prompt[None], settings.length, temperature=settings.temperature, key=jax.random.key(seed)
    )
    return [*prompt.tolist(), *new[0].tolist()]


def _vocabulary(kept: Kept) -> Vocabulary | WordVocabulary:
    if "words" in kept:
        return WordVocabulary(kept_value(kept, "words", tuple[str, ...]))
    return Vocabulary(kept_value(kept, "characters", str))


def _load(config: Any) -> LanguageTask:
    text = TextData.load(config.data, config.seed)
    return LanguageTask(text, build_language_model(config, len(text.vocabulary)))


def _model(config: Any, kept: Kept) -> Model:
    return build_language_model(config, len(_vocabulary(kept)))


def build_language_model(config: Any, known: int, resets: bool = False) -> Model:
    """Returns the model of a `Config` that reads and predicts `known` tokens; `resets`: see `Signature`."""
    signature = Signature(
        tokens=True,
        inputs=known,
        outputs=known,
        every_step=True,
        carried=True,
        resets=resets,
        tokens_of_a_batch=config.data.batch * config.data.chunk,
    )
    return build_model(config, signature)


def _write(trained: Trained, seed: int) -> str:
    vocabulary = _vocabulary(trained.fingerprint)
    prompt = vocabulary.encode(trained.config.sample.prompt)
    return vocabulary.decode(written(trained, prompt, seed))


CHARACTERS = TaskKind("characters", TextConfig, TOKEN_MODELS, _load, _model, SampleConfig, _write)
WORDS = TaskKind("words", WordsConfig, TOKEN_MODELS, _load, _model, SampleConfig, _write)
