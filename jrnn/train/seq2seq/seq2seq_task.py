"""Sequence to sequence: dates in any spelling to ISO 8601, and strings to their reverse.

Shapes: N examples, S steps of the longest input, T steps of the longest target and its end.
"""

from __future__ import annotations

import hashlib
import itertools
import string
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np

from jrnn.errors import ConfigError, DataError, UsageError
from jrnn.files import AtLeast
from jrnn.files.writing import picture
from jrnn.train.models.interface import Compute, Params
from jrnn.train.seq2seq.encoder_decoder import Seq2SeqConfig, Seq2SeqModel, seq2seq
from jrnn.train.tasks.task import Axes, Kept, Metrics, Task, TaskKind, Trained, kept_value
from jrnn.train.text_streams import Vocabulary
from jrnn.train.toml_codec import NonNegative, Positive, Tables, check_bounds, require

Pair = tuple[str, str]  # an input and its target
END = 0  # the token that ends a target; the decoder also starts from it
REVERSE = "<"  # begins an input that is a string to reverse; other inputs are dates
ALPHABET = string.ascii_letters + string.digits + " ,./-"
VOCABULARY = Vocabulary.of("\n" + REVERSE + ALPHABET)
ONE_IN = 10  # one target in ten is held out from training
CELL = 0.13  # inches of a character in a picture of attention
FEWEST = 16  # characters of an input that such a picture has room for, so that the scale fits

MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ROMAN = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII")

# d, m: numbers without leading zeros; dd, mm: two digits. With slashes the month comes first, with dots the day.
SPELLINGS = (
    "{d} {mon} {y}", "{dd} {mon} {y}", "{d} {month} {y}", "{d} {mon}. {y}", "{d}-{mon}-{y}", "{d}{mon}{y}",
    "{nth} {month} {y}", "{nth} {mon} {y}", "{nth} of {month} {y}", "{nth} of {month}, {y}",
    "{mon} {d}, {y}", "{month} {d}, {y}", "{month} {d} {y}", "{month} {nth}, {y}", "{month} the {nth}, {y}",
    "{wd} {d} {mon} {y}", "{wd}, {d} {month} {y}", "{wd}, {mon} {d}, {y}", "{weekday} {d} {month} {y}",
    "{weekday}, {month} {d}, {y}", "{weekday}, {nth} {month} {y}",
    "{y} {month} {d}", "{y} {mon} {dd}", "{y}, {month} {d}", "{d} {roman} {y}", "{d}.{roman}.{y}",
    "{y}-{mm}-{dd}", "{y}/{mm}/{dd}", "{y}.{mm}.{dd}", "{y} {mm} {dd}", "{y}{mm}{dd}",
    "{dd}.{mm}.{y}", "{d}.{m}.{y}", "{d}. {m}. {y}", "{mm}/{dd}/{y}", "{m}/{d}/{y}",
)  # fmt: skip
CASES = (str, str, str.lower, str.upper)


def spell(day: date, spelling: str) -> str:
    """Returns a date in one of SPELLINGS.

    >>> spell(date(2026, 11, 20), "{weekday}, {nth} of {month} {y}")
    'Friday, 20th of November 2026'
    """
    d = day.day
    m = day.month
    weekday = WEEKDAYS[day.weekday()]
    month = MONTHS[day.month - 1]
    end = {1: "st", 2: "nd", 3: "rd"}.get(0 if d in (11, 12, 13) else d % 10, "th")
    return spelling.format(
        y=day.year, m=m, d=d, mm=f"{m:02}", dd=f"{d:02}", nth=f"{d}{end}", month=month, mon=month[:3],
        weekday=weekday, wd=weekday[:3], roman=ROMAN[m - 1],
    )  # fmt: skip


def is_held_out(target: str) -> bool:
    """Returns whether a target is held out from training, which its checksum decides, for every seed.

    >>> [day for day in range(1, 31) if is_held_out(f"2026-11-{day:02}")]
    [4, 13, 18]
    """
    return zlib.crc32(target.encode()) % ONE_IN == 0


class PairBatch(NamedTuple):
    """Pairs as tokens, int32: inputs [S, N] and targets [T, N], padded with END, and the lengths [N] of both.

    The length of a target includes its end. The decoder reads END, then the targets except the last.
    """

    inputs: Any
    input_lengths: Any
    decoder_inputs: Any
    targets: Any
    target_lengths: Any
    fresh: Any


def encode(pairs: Sequence[Pair], input_steps: int = 0, target_steps: int = 0) -> PairBatch:
    """Returns pairs as tokens, in arrays of at least `input_steps` and `target_steps` steps.

    Raises:
        DataError: for a character that is not in VOCABULARY, or ends targets.

    >>> encode([("<ab", "ba"), ("<c", "c")]).targets.T.tolist()
    [[44, 43, 0], [45, 0, 0]]
    """
    end = VOCABULARY.characters[END]
    for text in itertools.chain.from_iterable(pairs):
        if end in text:
            raise DataError(
                f"{text!r} holds the character {end!r}, which ends a sequence; leave it out"
            )
    sources = [source for source, _ in pairs]
    ended = [target + end for _, target in pairs]
    inputs, input_lengths = _padded(sources, input_steps)
    targets, target_lengths = _padded(ended, target_steps)
    shifted = np.concatenate([np.full((1, len(pairs)), END, np.int32), targets[:-1]])
    return PairBatch(inputs, input_lengths, shifted, targets, target_lengths, np.asarray(True))


def _padded(strings: Sequence[str], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns strings as columns of tokens [T, N], T at least `steps`, and their lengths [N]."""
    lengths = np.array(list(map(len, strings)), np.int32)
    numbers = np.full((len(strings), max(steps, lengths.max(initial=0))), END, np.int32)
    numbers[np.arange(numbers.shape[1]) < lengths[:, None]] = VOCABULARY.encode("".join(strings))
    return np.ascontiguousarray(numbers.T), lengths


@dataclass(frozen=True)
class Seq2SeqData:
    """New pairs for every step; one target in ten is held out from training."""

    batch: Positive = 64  # examples in a step
    reversals: float = 0.25  # the share of strings to reverse; the rest are dates
    longest: Positive = 10  # characters of a string to reverse
    first_year: Annotated[int, AtLeast(1000)] = 1900  # of the dates
    last_year: int = 2099  # of the dates
    validation: Positive = 1024  # held-out pairs of each kind

    def __post_init__(self):
        check_bounds("data", self)
        require(0 <= self.reversals <= 1, "data.reversals must lie between 0 and 1", self.reversals)
        require(self.last_year <= 9999, "data.last_year must be at most 9999", self.last_year)
        require(
            self.first_year <= self.last_year,
            "data.first_year must not be after data.last_year",
            self.first_year,
        )


@dataclass(frozen=True)
class Pairs(Seq2SeqData):
    """Random pairs of an input and its target: a batch is a function of the seed and its number alone.

    Attributes:
        seed: of the random draws.
        held_out: draw only pairs whose target is held out, or only others.

    >>> Pairs(reversals=0.5, seed=1).draw(0, 3)
    [('August 25, 2064', '2064-08-25'), ('03.10.2089', '2089-10-03'), ('<RKfb5', '5bfKR')]
    """

    seed: int = 0
    held_out: bool = False

    def draw(self, number: int, count: int) -> list[Pair]:
        """Returns `count` pairs (input, target)."""
        rng = np.random.default_rng((self.seed, number, self.held_out))
        reverse = rng.random(count) < self.reversals
        days = rng.integers(len(self._days), size=count)
        spellings = rng.integers(len(SPELLINGS), size=count)
        cases = rng.integers(len(CASES), size=count)
        pairs = []
        for is_reversed, day, spelling, case in zip(reverse, days, spellings, cases):
            if is_reversed:
                pairs.append(self._string(rng))
                continue
            date_ = self._days[day]
            pairs.append((CASES[case](spell(date_, SPELLINGS[spelling])), date_.isoformat()))
        return pairs

    def at(self, step: int) -> PairBatch:
        return self.of(self.draw(step, self.batch))

    def of(self, pairs: Sequence[Pair]) -> PairBatch:
        return encode(pairs, self.input_steps, self.target_steps)

    @property
    def input_steps(self) -> int:
        """S, the greatest length of any input."""
        return max(_LONGEST_DATE, len(REVERSE) + self.longest)

    @property
    def target_steps(self) -> int:
        """T, the greatest length of any target with its end."""
        return max(len("2026-11-20"), self.longest) + 1

    @cached_property
    def _days(self) -> list[date]:
        first = date(self.first_year, 1, 1).toordinal()
        end = date(self.last_year + 1, 1, 1).toordinal()
        days = map(date.fromordinal, range(first, end))
        return [day for day in days if is_held_out(day.isoformat()) == self.held_out]

    def _string(self, rng: np.random.Generator) -> Pair:
        while True:
            length = rng.integers(1, self.longest + 1)
            letters = rng.integers(len(ALPHABET), size=length)
            text = "".join(map(ALPHABET.__getitem__, letters))
            if is_held_out(text[::-1]) == self.held_out:
                return REVERSE + text, text[::-1]


def _longest_date() -> int:
    """Returns the greatest length of a date: eight days have every weekday, and numbers of two digits."""
    longest = 0
    for month, day, spelling in itertools.product(range(1, 13), range(20, 28), SPELLINGS):
        longest = max(longest, len(spell(date(2000, month, day), spelling)))
    return longest


_LONGEST_DATE = _longest_date()


GREEDY = {"width": 1, "normalization": 0.0}


@dataclass(frozen=True)
class Seq2SeqSample:
    """A prompt, and how its answers are searched."""

    prompt: str = "18 Nov 2026"  # what is read
    beam: Positive = 4  # the width of the beam search, which is also the number of answers
    normalization: NonNegative = 1.0  # see `beam_search`
    # a file for a picture of what the best answer attended to: .png, .svg or .pdf
    attention: str | None = None

    def __post_init__(self):
        require(self.prompt != "", "sample.prompt must hold at least one character", self.prompt)
        check_bounds("sample", self)


@dataclass(frozen=True)
class Seq2SeqTask(Task):
    """Generated pairs, and an encoder-decoder; see `Task`."""

    train: Pairs
    held_out: Mapping[str, Sequence[Pair]]  # pairs by kind: "dates", "reversals"
    model: Seq2SeqModel

    axes: ClassVar[Axes] = {
        "inputs": 1, "input_lengths": 0, "decoder_inputs": 1, "targets": 1, "target_lengths": 0,
    }  # fmt: skip
    unit: ClassVar[str] = "nats a character"

    @classmethod
    def load(cls, config: Any) -> Seq2SeqTask:
        train = Pairs(**vars(config.data), seed=config.seed)
        held_out = {}
        for name, share in (("dates", 0.0), ("reversals", 1.0)):
            if train.reversals != 1 - share:  # the run has pairs of this kind
                drawn_from = replace(train, reversals=share, seed=0, held_out=True)
                held_out[name] = drawn_from.draw(0, train.validation)
        return cls(train, held_out, _model(config, {"characters": VOCABULARY.characters}))

    def validation(self) -> Sequence[PairBatch]:
        size = self.train.batch
        batches = []
        for pairs in self.held_out.values():
            for k in range(0, len(pairs), size):
                batches.append(self.train.of(pairs[k : k + size]))
        return batches

    def evaluate(self, params: Params, loss: float) -> Metrics:
        """Returns the share of each kind of held-out pairs that greedy search gets right to the last character."""
        shares = {}
        for name, pairs in self.held_out.items():
            shares[f"exact_match_{name}"] = self.exact_match(params, pairs)
        return shares

    def exact_match(self, params: Params, pairs: Sequence[Pair]) -> float:
        batch = self.train.of(pairs)
        steps = len(batch.targets)
        best = self.model.search(
            params, batch.inputs, batch.input_lengths, end=END, steps=steps, **GREEDY
        )
        right = np.asarray(best.tokens)[:, 0] == batch.targets.T  # both hold END from their end on
        return float(np.mean(right.all(axis=1)))

    def fingerprint(self) -> Tables:
        pairs = self.train.draw(0, 1000)
        for of_a_kind in self.held_out.values():
            pairs += of_a_kind
        return {
            "characters": VOCABULARY.characters,
            "sha256": hashlib.sha256(repr(pairs).encode()).hexdigest(),
        }


def _model(config: Any, kept: Kept) -> Seq2SeqModel:
    known = kept_value(kept, "characters", str)
    if known != VOCABULARY.characters:
        raise DataError(
            f"the model knows the characters {known!r}, not {VOCABULARY.characters!r}; train a new model"
        )
    if config.train.precision != "float32" and config.model.attention == "coverage":
        raise ConfigError(
            f'model.attention = "coverage" adds up weights over all steps: leave train.precision at "float32", not '
            f"{config.train.precision!r}, or choose another attention"
        )
    return seq2seq(
        config.model, len(VOCABULARY), Compute(config.gradient.source, config.train.precision)
    )


def _write(trained: Trained, seed: int) -> str:
    """Returns the answers to the prompt with their probabilities, the best first; draws the attention if asked to."""
    settings = trained.config.sample
    model = trained.model
    assert isinstance(model, Seq2SeqModel)
    asked = encode([(settings.prompt, "")])
    best = model.search(
        trained.params,
        asked.inputs,
        asked.input_lengths,
        end=END,
        steps=max(trained.config.data.longest, len(settings.prompt), len("2026-11-20")) + 1,
        width=settings.beam,
        normalization=settings.normalization,
    )
    lengths = np.asarray(best.lengths)[0]
    finished = np.asarray(best.finished)[0]
    answers = []
    for tokens, length, is_finished in zip(best.tokens[0], lengths, finished):
        answers.append(VOCABULARY.decode(tokens[: length - is_finished]))
    if settings.attention is not None:
        of_best = encode([(settings.prompt, answers[0])])
        weights = model.attention(trained.params, of_best)[: len(answers[0]), 0]
        draw_attention(Path(settings.attention), settings.prompt, answers[0], weights)
    shares = np.exp(np.asarray(best.log_probability)[0])
    width = max(map(len, answers))
    lines = []
    for text, share in zip(answers, shares):
        if share > 0:
            lines.append(f"{text:{width}}  {share:.4f}")
    return "\n".join(lines)


SEQ2SEQ = TaskKind(
    "seq2seq",
    Seq2SeqData,
    {"attention": Seq2SeqConfig},
    Seq2SeqTask.load,
    _model,
    Seq2SeqSample,
    _write,
)


def draw_attention(path: Path, source: str, target: str, weights: np.ndarray) -> None:
    """Draws the weights [T, S] with which the T characters of `target` attend to the S of `source`.

    Raises:
        UsageError: there is nothing to draw; or see `picture`.
    """
    if not target:
        raise UsageError(f"{path}: the answer is empty, so there is no attention to draw")
    assert weights.shape == (len(target), len(source)), weights.shape
    # As a phone shows it.
    width = max(len(source), FEWEST) * CELL + 0.5
    height = max(len(target), FEWEST // 2) * CELL + 1.1
    with picture(path, (width, height)) as figure:
        axes = figure.add_subplot()
        image = axes.imshow(
            weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal", interpolation="nearest"
        )
        font = {"family": "monospace", "fontsize": 8}
        axes.set_xticks(range(len(source)), source.replace(" ", "␣"), **font)
        axes.set_yticks(range(len(target)), target.replace(" ", "␣"), **font)
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.tick_params(length=0, pad=2)
        axes.set(xlabel="input", ylabel="output")
        bar = figure.colorbar(image, ax=axes, location="bottom", aspect=40, label="weight")
        bar.outline.set_visible(False)
