"""Language models: the next character, or the next word, from the ones before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from jrnn.train.models import TOKEN_MODELS, Model, Params, Signature, build_model
from jrnn.train.tasks.generate import SampleConfig, generate
from jrnn.train.tasks.task import TaskKind, Trained
from jrnn.train.text import Chunk, Streams, TextConfig, TextData, Vocabulary, WordsConfig, WordVocabulary


@dataclass(frozen=True)
class LanguageTask:
    """A text as streams of chunks, with the state carried from chunk to chunk; see `Task`."""

    text: TextData
    model: Model
    unit: str

    axes: ClassVar[Mapping[str, int]] = {"tokens": 1, "targets": 1}
    item: ClassVar[str] = "tokens"

    @property
    def train(self) -> Streams:
        return self.text.train

    @property
    def items(self) -> int:
        return len(self.train.streams) * self.train.chunk

    @cached_property
    def _validation(self) -> tuple[Chunk, ...]:
        return tuple(self.text.validation.one_pass())

    def validation(self) -> Sequence[Chunk]:
        return self._validation

    def evaluate(self, params: Params, loss: float) -> dict[str, float]:
        """Of words, the perplexity; of characters, bits a character."""
        if isinstance(self.text.vocabulary, WordVocabulary):
            return {"perplexity": math.exp(min(loss, 700))}
        return {"bits_per_character": loss / math.log(2)}

    def fingerprint(self) -> dict[str, Any]:
        vocabulary = self.text.vocabulary
        if isinstance(vocabulary, WordVocabulary):
            return {"words": list(vocabulary.words), "sha256": self.text.sha256}
        return {"characters": vocabulary.characters, "sha256": self.text.sha256}


def _vocabulary(kept: Mapping[str, Any]) -> Vocabulary | WordVocabulary:
    return WordVocabulary(tuple(kept["words"])) if "words" in kept else Vocabulary(kept["characters"])


def _load_characters(config: Any) -> LanguageTask:
    text = TextData.load(config.data, config.seed)
    return LanguageTask(text, _build(config, len(text.vocabulary)), "nats a character")


def _load_words(config: Any) -> LanguageTask:
    text = TextData.load_words(config.data, config.seed)
    return LanguageTask(text, _build(config, len(text.vocabulary)), "nats a word")


def _model(config: Any, kept: Mapping[str, Any]) -> Model:
    return _build(config, len(_vocabulary(kept)))


def _build(config: Any, known: int) -> Model:
    tokens = config.data.batch * config.data.chunk
    signature = Signature(True, known, known, every_step=True, loss="cross_entropy", carried=True)
    return build_model(config, replace(signature, tokens_of_a_batch=tokens))


def _write(trained: Trained, seed: int) -> str:
    vocabulary, settings = _vocabulary(trained.fingerprint), trained.config.sample
    prompt = vocabulary.encode(settings.prompt)
    return vocabulary.decode(generate(trained.model, trained.params, prompt, settings, seed))


CHARACTERS = TaskKind("characters", TextConfig, TOKEN_MODELS, _load_characters, _model, SampleConfig, _write)
WORDS = TaskKind("words", WordsConfig, TOKEN_MODELS, _load_words, _model, SampleConfig, _write)
