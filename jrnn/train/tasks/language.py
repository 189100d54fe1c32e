"""Language models: the next character from the ones before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from ..models import TOKEN_MODELS, Model, Params, Signature, build_model
from ..text import Chunk, Streams, TextConfig, TextData, Vocabulary
from .generate import SampleConfig, generate
from .task import TaskKind, Trained


@dataclass(frozen=True)
class LanguageTask:
    """A text as streams of chunks, with the state carried from chunk to chunk; see `Task`."""

    text: TextData
    model: Model

    axes: ClassVar[Mapping[str, int]] = {"tokens": 1, "targets": 1}
    item: ClassVar[str] = "tokens"
    unit: ClassVar[str] = "nats a character"

    @classmethod
    def load(cls, config: Any) -> LanguageTask:
        text = TextData.load(config.data, config.seed)
        return cls(text, _model(config, text.fingerprint()))

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
        return {}

    def fingerprint(self) -> dict[str, Any]:
        return self.text.fingerprint()


def _model(config: Any, kept: Mapping[str, Any]) -> Model:
    known = len(Vocabulary(kept["characters"]))
    signature = Signature(True, known, known, every_step=True, loss="cross_entropy", carried=True)
    return build_model(config, signature)


def _write(trained: Trained, seed: int) -> str:
    vocabulary, settings = Vocabulary(trained.fingerprint["characters"]), trained.config.sample
    prompt = vocabulary.encode(settings.prompt)
    return vocabulary.decode(generate(trained.model, trained.params, prompt, settings, seed))


CHARACTERS = TaskKind("characters", TextConfig, TOKEN_MODELS, LanguageTask.load, _model, SampleConfig, _write)
