"""Sequence to sequence: dates in any spelling to ISO 8601, and strings to their reverse.

Shapes: S steps of the inputs, T of the targets, N examples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jrnn.errors import ConfigError, DataError
from jrnn.train.models.model import Compute, Params
from jrnn.train.plot import draw_attention
from jrnn.train.seq2seq.model import Seq2SeqConfig, Seq2SeqModel, seq2seq
from jrnn.train.seq2seq.pairs import END, VOCABULARY, Pairs, encode
from jrnn.train.tasks.task import TaskKind, Trained
from jrnn.train.toml_codec import require, require_at_least

GREEDY = {"width": 1, "normalization": 0.0}


@dataclass(frozen=True)
class Seq2SeqData:
    """Pairs drawn anew for every step; one target in ten is held out, and never trained on."""

    batch: int = 64
    reversals: float = 0.25  # the share of strings to reverse; the rest are dates
    longest: int = 10  # characters of a string to reverse
    first_year: int = 1900
    last_year: int = 2099
    validation: int = 1024  # held-out pairs of each kind

    def __post_init__(self):
        require_at_least(1, "data", self, "batch", "longest", "validation")
        require_at_least(1000, "data", self, "first_year")
        require(0 <= self.reversals <= 1, "data.reversals must lie between 0 and 1", self.reversals)
        require(self.last_year <= 9999, "data.last_year must be at most 9999", self.last_year)
        require(self.first_year <= self.last_year, "data.first_year must not be after data.last_year", self.first_year)


@dataclass(frozen=True)
class Seq2SeqSample:
    """A prompt, and how its answers are searched."""

    prompt: str = "18 Nov 2026"
    beam: int = 4  # the width of the beam search, which is also the number of answers
    normalization: float = 1.0  # see `beam_search`
    attention: str | None = None  # a file for a picture of what the best answer attended to: .png, .svg or .pdf

    def __post_init__(self):
        require(self.prompt != "", "sample.prompt must hold at least one character", self.prompt)
        require_at_least(1, "sample", self, "beam")
        require_at_least(0, "sample", self, "normalization")


class PairBatch(NamedTuple):
    """Pairs as numbers, see `Encoded`; the decoder reads END, then the targets except the last."""

    inputs: Any
    input_lengths: Any
    decoder_inputs: Any
    targets: Any
    target_lengths: Any
    fresh: Any

    @classmethod
    def of(cls, pairs: Sequence[tuple[str, str]], input_steps: int = 0, target_steps: int = 0) -> PairBatch:
        """Raises DataError for a character that the model does not know."""
        inputs, input_lengths, targets, target_lengths = encode(pairs, input_steps, target_steps)
        shifted = np.concatenate([np.full((1, len(pairs)), END, np.int32), targets[:-1]])
        return cls(inputs, input_lengths, shifted, targets, target_lengths, np.asarray(True))


@dataclass(frozen=True)
class DrawnPairs:
    """Batches of pairs; the step's number seeds each."""

    pairs: Pairs
    batch: int

    def at(self, step: int) -> PairBatch:
        return self.of(self.pairs.draw(step, self.batch))

    def of(self, pairs: Sequence[tuple[str, str]]) -> PairBatch:
        return PairBatch.of(pairs, self.pairs.input_steps, self.pairs.target_steps)


@dataclass(frozen=True)
class Seq2SeqTask:
    """Generated pairs, and an encoder-decoder; see `Task`."""

    train: DrawnPairs
    held_out: Mapping[str, Sequence[tuple[str, str]]]  # pairs by kind: "dates", "reversals"
    model: Seq2SeqModel

    axes: ClassVar[Mapping[str, int]] = {
        "inputs": 1, "input_lengths": 0, "decoder_inputs": 1, "targets": 1, "target_lengths": 0,
    }  # fmt: skip
    item: ClassVar[str] = "examples"
    unit: ClassVar[str] = "nats a character"

    @classmethod
    def load(cls, config: Any) -> Seq2SeqTask:
        data = config.data
        drawn = {"first_year": data.first_year, "last_year": data.last_year, "longest": data.longest}
        shares = {"dates": 0.0, "reversals": 1.0}
        if data.reversals in (0, 1):
            shares = {name: share for name, share in shares.items() if share == data.reversals}
        held_out = {
            name: Pairs(**drawn, reversals=share, held_out=True).draw(0, data.validation)
            for name, share in shares.items()
        }
        train = DrawnPairs(Pairs(**drawn, reversals=data.reversals, seed=config.seed), data.batch)
        return cls(train, held_out, _model(config, {"characters": VOCABULARY.characters}))

    @property
    def items(self) -> int:
        return self.train.batch

    def validation(self) -> Sequence[PairBatch]:
        size = self.train.batch
        return [
            self.train.of(pairs[k : k + size]) for pairs in self.held_out.values() for k in range(0, len(pairs), size)
        ]

    def evaluate(self, params: Params, loss: float) -> dict[str, float]:
        """Returns the share of each kind of held-out pairs that greedy search gets right to the last character."""
        return {f"exact_match_{name}": self.exact_match(params, pairs) for name, pairs in self.held_out.items()}

    def exact_match(self, params: Params, pairs: Sequence[tuple[str, str]]) -> float:
        batch = self.train.of(pairs)
        steps = len(batch.targets)
        found = self.model.search(params, batch.inputs, batch.input_lengths, end=END, steps=steps, **GREEDY)
        right = np.asarray(found.tokens)[:, 0] == batch.targets.T  # both hold END from their end on
        return float(np.mean(right.all(axis=1)))

    def fingerprint(self) -> dict[str, Any]:
        pairs = [*self.train.pairs.draw(0, 1000), *(pair for kind in self.held_out.values() for pair in kind)]
        return {"characters": VOCABULARY.characters, "sha256": hashlib.sha256(repr(pairs).encode()).hexdigest()}


def _model(config: Any, kept: Mapping[str, Any]) -> Seq2SeqModel:
    if kept["characters"] != VOCABULARY.characters:
        raise DataError(
            f"the model knows the characters {kept['characters']!r}, not {VOCABULARY.characters!r}; train it anew"
        )
    if config.train.precision != "float32" and config.model.attention == "coverage":
        raise ConfigError(
            f'model.attention = "coverage" adds up weights over all steps: leave train.precision at "float32", not '
            f"{config.train.precision!r}, or choose another attention"
        )
    return seq2seq(config.model, len(VOCABULARY), Compute(config.gradient.source, config.train.precision))


def _write(trained: Trained, seed: int) -> str:
    """Returns the answers to the prompt with their probabilities, the best first; draws the attention if asked to."""
    settings, model = trained.config.sample, trained.model
    assert isinstance(model, Seq2SeqModel)
    asked = PairBatch.of([(settings.prompt, "")])
    found = model.search(
        trained.params,
        asked.inputs,
        asked.input_lengths,
        end=END,
        steps=max(trained.config.data.longest, len(settings.prompt), len("2026-11-20")) + 1,
        width=settings.beam,
        normalization=settings.normalization,
    )
    lengths, finished = np.asarray(found.lengths)[0], np.asarray(found.finished)[0]
    answers = [VOCABULARY.decode(tokens[: n - done]) for tokens, n, done in zip(found.tokens[0], lengths, finished)]
    if settings.attention is not None:
        of_best = PairBatch.of([(settings.prompt, answers[0])])
        weights = model.attention(trained.params, of_best)[: len(answers[0]), 0]
        draw_attention(Path(settings.attention), settings.prompt, answers[0], weights)
    shares = np.exp(np.asarray(found.log_probability)[0])
    width = max(map(len, answers))
    return "\n".join(f"{text:{width}}  {share:.4f}" for text, share in zip(answers, shares) if share > 0)


SEQ2SEQ = TaskKind(
    "seq2seq", Seq2SeqData, {"attention": Seq2SeqConfig}, Seq2SeqTask.load, _model, Seq2SeqSample, _write
)
