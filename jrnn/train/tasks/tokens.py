"""Language models of a corpus of tokens: rows in random order, with the state reset where a document begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from jrnn.errors import ConfigError, DataError
from jrnn.files import read_text
from jrnn.files.corpus import Corpus
from jrnn.files.corpus.corpus import TOKENIZER
from jrnn.files.reading import parse_tokenizer
from jrnn.train.models import PretrainedConfig, TokenNnConfig
from jrnn.train.models.interface import Model, Params
from jrnn.train.models.pretrained import PretrainedModel
from jrnn.train.tasks.language import SampleConfig, build_language_model, written
from jrnn.train.tasks.task import COMPANIONS, Axes, Kept, Metrics, TaskKind, Trained, kept_value
from jrnn.train.text_streams import TextChunk
from jrnn.train.toml_codec import Positive, Tables, check_bounds, require


@dataclass(frozen=True)
class TokensConfig:
    """A corpus that `jrnn tokens` wrote."""

    path: str | None = None  # the folder of the corpus, relative to the working directory
    validation: Positive = 16  # batches at the end of the corpus that are never trained on
    batch: Positive = 32  # rows read side by side
    chunk: Positive = 256  # tokens in a row

    def __post_init__(self):
        check_bounds("data", self)
        require(
            self.path is not None,
            "data.path must name the folder that `jrnn tokens TEXT... --out FOLDER` wrote",
            None,
        )


@dataclass(frozen=True)
class Rows:
    """The rows of a part of a corpus, in another random order in each pass, cut at other places.

    A batch is a function of the step's number: row k of a pass is found by a permutation that is computed and not stored,
    so a run that is resumed needs no saved position, and memory does not grow with the corpus.
    """

    corpus: Corpus
    start: int
    stop: int
    batch: int
    chunk: int
    seed: int

    @property
    def per_pass(self) -> int:
        """Batches in one pass: as many as fit after any offset."""
        return max((self.stop - self.start - self.chunk) // self.chunk // self.batch, 1)

    def at(self, step: int) -> TextChunk:
        number, index = divmod(step, self.per_pass)
        rows = self.per_pass * self.batch
        offset = 0
        if number:
            offset = int(np.random.default_rng((self.seed, number)).integers(self.chunk))
        offset = min(offset, self.stop - self.start - rows * self.chunk - 1)
        numbers = np.arange(index * self.batch, (index + 1) * self.batch)
        places = permuted(numbers, rows, (self.seed, number))
        return self.cut(self.start + offset + places * self.chunk)

    def in_order(self) -> list[TextChunk]:
        """Returns all batches in the order of the corpus, for validation."""
        rows = np.arange(self.per_pass * self.batch).reshape(self.per_pass, self.batch)
        return [self.cut(self.start + places * self.chunk) for places in rows]

    def cut(self, starts: np.ndarray) -> TextChunk:
        """Returns the rows that begin at the tokens `starts`, [B]."""
        rows = []  # of T + 1 tokens
        resets = []
        for start in starts.tolist():
            rows.append(self.corpus.tokens(start, start + self.chunk + 1))
            resets.append(self.corpus.begins(start, start + self.chunk))
        tokens = np.stack(rows, 1)
        return TextChunk(tokens[:-1], tokens[1:], np.asarray(True), np.stack(resets, 1))


def permuted(places: np.ndarray, size: int, seed: Any) -> np.ndarray:
    """Returns where a random permutation of 0 to size - 1 puts some of them, without computing the others.

    Four rounds of a Feistel cipher permute the numbers of an even number of bits; a number that is not below `size` is
    permuted again (Black and Rogaway, Ciphers with arbitrary finite domains, 2002).

    >>> permuted(np.arange(10), 10, 0).tolist()
    [8, 0, 3, 6, 1, 2, 9, 4, 7, 5]
    """
    half = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.default_rng(seed).integers(2**63, size=4, dtype=np.uint64)

    def rounds(numbers: np.ndarray) -> np.ndarray:
        low = numbers & mask
        high = numbers >> half
        for key in keys:
            # An odd factor, so that all bits of the sum count.
            mixed = (low ^ key) * np.uint64(0x9E3779B97F4A7C15)
            low, high = high ^ (mixed >> np.uint64(32)) & mask, low
        return (high << half) | low

    shuffled = rounds(np.asarray(places, np.uint64))
    while (outside := shuffled >= size).any():
        shuffled[outside] = rounds(shuffled[outside])
    return shuffled.astype(np.int64)


@dataclass(frozen=True)
class TokensTask:
    """Rows of a corpus; see `Task`."""

    train: Rows
    held_out: Rows
    model: Model

    axes: ClassVar[Axes] = {"tokens": 1, "targets": 1, "resets": 1}
    item: ClassVar[str] = "tokens"
    unit: ClassVar[str] = "nats a token"

    @property
    def items(self) -> int:
        return self.train.batch * self.train.chunk

    def validation(self) -> Sequence[TextChunk]:
        return self.held_out.in_order()

    def evaluate(self, params: Params, loss: float) -> Metrics:
        return {"perplexity": math.exp(min(loss, 700))}

    def fingerprint(self) -> Tables:
        """Has the tokenizer and, of a pretrained model, its config: a run can be sampled without corpus and model."""
        corpus = self.train.corpus
        tokenizer = read_text(corpus.folder / TOKENIZER, DataError)
        kept = {"sha256": corpus.sha256, "vocabulary": corpus.vocabulary, "tokenizer": tokenizer}
        if isinstance(self.model, PretrainedModel):
            kept |= {"pretrained": self.model.kept(), COMPANIONS: self.model.files(tokenizer)}
        return kept


def _load(config: Any) -> TokensTask:
    data = config.data
    corpus = Corpus.open(data.path)
    corpus.verify()
    border = len(corpus) - data.validation * data.batch * data.chunk - 1
    if border < data.batch * data.chunk + 1:
        raise DataError(
            f"{data.path}: has {len(corpus):,} tokens; data.validation = {data.validation} batches and one to train on, of "
            f"data.batch = {data.batch} rows of data.chunk = {data.chunk} tokens, need "
            f"{(data.validation + 1) * data.batch * data.chunk + 2:,}"
        )
    train = Rows(corpus, 0, border, data.batch, data.chunk, config.seed)
    held_out = replace(train, start=border, stop=len(corpus))
    return TokensTask(train, held_out, _build(config, corpus.vocabulary, None))


def _build(config: Any, vocabulary: int, kept: Kept | None) -> Model:
    if isinstance(config.model, PretrainedConfig):
        model = PretrainedModel.of(config.model, config.train.precision, kept)
        if vocabulary > model.vocabulary:
            raise ConfigError(
                f"{config.model.pretrained}: knows {model.vocabulary} tokens, and the corpus has a tokenizer of "
                f"{vocabulary}; make the corpus with the model's: jrnn tokens ... --tokenizer {config.model.pretrained}"
            )
        return model
    return build_language_model(config, vocabulary, resets=True)


def _write(trained: Trained, seed: int) -> str:
    tokenizer = parse_tokenizer(
        kept_value(trained.fingerprint, "tokenizer", str), "data.json of the run"
    )
    prompt = np.asarray(tokenizer.encode(trained.config.sample.prompt).ids, np.int32)
    return str(tokenizer.decode(written(trained, prompt, seed)))


def _model(config: Any, kept: Kept) -> Model:
    pretrained = kept_value(kept, "pretrained", dict) if "pretrained" in kept else None
    if pretrained is not None:
        kept_value(pretrained, "config", str)
        kept_value(pretrained, "types", dict)
        kept_value({COMPANIONS: {}, **kept}, COMPANIONS, dict[str, str])  # older versions kept none
    return _build(config, kept_value(kept, "vocabulary", int), pretrained)


MODELS = {"nn": TokenNnConfig, "pretrained": PretrainedConfig}
TOKENS = TaskKind("tokens", TokensConfig, MODELS, _load, _model, SampleConfig, _write)
