"""Text as training data: its sources, its characters or words as numbers, and streams of chunks.

Shapes: B streams, T tokens in a chunk. A text is cut into B streams of equal length that are read side by side, T
tokens at a time, so that the state of a recurrent network can be carried from one chunk to the next.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np

from jrnn.errors import DataError
from jrnn.files import AtLeast, read_text
from jrnn.files.reading import free
from jrnn.train.toml_codec import Positive, check_bounds, imply_file, require


@dataclass(frozen=True)
class TextConfig:
    """The text: the documentation inside Python itself, or a UTF-8 file."""

    source: Literal["python-docs", "file"] = "python-docs"
    # the file, relative to the working directory; it implies source = "file"
    path: str | None = None
    validation: float = 0.1  # the share of the text, at its end, that is never trained on
    batch: Positive = 32  # streams read side by side
    # characters in a step of truncated backpropagation; the state is carried on
    chunk: Positive = 64

    def __post_init__(self):
        require(
            0 < self.validation < 1, "data.validation must lie between 0 and 1", self.validation
        )
        check_bounds("data", self)
        imply_file(self, "a UTF-8 text")


@dataclass(frozen=True)
class WordsConfig(TextConfig):
    """The text as words: `chunk` counts words."""

    # the most frequent words are known; all others are <unk>
    vocabulary: Annotated[int, AtLeast(2)] = 10_000


def text_of(data: TextConfig) -> str:
    """Returns the text that a configuration asks for.

    Raises:
        DataError: for a file that is missing, unreadable or not UTF-8, or a Python without its documentation.
    """
    if data.path is not None:
        return read_text(data.path, DataError, free(), "; data.path must name a UTF-8 text")
    try:
        from pydoc_data.topics import topics  # optional: some systems package Python without it
    except ImportError:
        raise DataError(
            "this Python comes without pydoc_data, the text of data.source = 'python-docs'; install the whole standard "
            "library, or train on a file with --set data.path=FILE"
        ) from None
    return "".join(map(topics.__getitem__, sorted(topics)))


@dataclass(frozen=True)
class Vocabulary:
    """The characters that a model knows; the index of each is its token.

    >>> v = Vocabulary.of("hello")
    >>> v.characters, v.encode("hole").tolist(), v.decode([1, 0])
    ('ehlo', [1, 3, 2, 0], 'he')
    """

    characters: str
    item: ClassVar[str] = "character"

    @classmethod
    def of(cls, text: str) -> Vocabulary:
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.characters)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {character: number for number, character in enumerate(self.characters)}

    def encode(self, text: str) -> np.ndarray:
        """Returns int32 [len(text)]; raises DataError for a character that is not known."""
        try:
            return np.fromiter(map(self._numbers.__getitem__, text), np.int32, len(text))
        except KeyError as e:
            raise DataError(
                f"the model does not know the character {e}: it is not in the training text"
            ) from None

    def decode(self, numbers) -> str:
        return "".join(self.characters[int(n)] for n in numbers)


UNKNOWN = "<unk>"
# A mark such as <unk>, a word with the apostrophes and hyphens in it, any other sign, or the end of a line.
_WORD = re.compile(r"<\w+>|\w+(?:['’-]\w+)*|[^\w\s]|\n")


def cut(text: str) -> list[str]:
    """Splits a text into words, signs, and ends of lines.

    >>> cut("Don't stop,\\n<unk>!")
    ["Don't", 'stop', ',', '\\n', '<unk>', '!']
    """
    return _WORD.findall(text)


@dataclass(frozen=True)
class WordVocabulary:
    """The words that a model knows; the index of each is its token, and token 0 stands for every other word.

    >>> v = WordVocabulary.of(cut("a b a c b a"), 3)
    >>> v.words, v.encode("c a b").tolist(), v.decode([1, 2, 0])
    (('<unk>', 'a', 'b'), [0, 1, 2], 'a b <unk>')
    """

    words: tuple[str, ...]
    item: ClassVar[str] = "word"

    @classmethod
    def of(cls, words: list[str], most: int) -> WordVocabulary:
        """Keeps the `most` - 1 most frequent words; ties are broken by the alphabet."""
        counts = Counter(words)
        del counts[UNKNOWN]
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls((UNKNOWN, *ranked[: most - 1]))

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def encode(self, text: str) -> np.ndarray:
        """Returns int32 [words of the text]."""
        return self.numbers(cut(text))

    def numbers(self, words: list[str]) -> np.ndarray:
        """Returns int32 [len(words)]."""
        return np.asarray([self._numbers.get(word, 0) for word in words], np.int32)

    def decode(self, numbers) -> str:
        """Joins words with spaces, but not around the ends of lines or before closing signs."""
        text = " ".join(self.words[int(n)] for n in numbers)
        return re.sub(r" ([.,;:!?)\]])", r"\1", re.sub(r" ?\n ?", "\n", text))


class TextChunk(NamedTuple):
    """One step's data: tokens and the next ones, int32 [T, B]; `fresh` says whether the state restarts.

    `resets` are bool [T, B], where documents begin; None where the state never restarts within a chunk.
    """

    tokens: np.ndarray
    targets: np.ndarray
    fresh: np.ndarray
    resets: np.ndarray | None = None


@dataclass(frozen=True)
class Streams:
    """B streams of an encoded text, read chunk by chunk.

    A chunk is a function of the step's number alone, so a run that is resumed at step k needs no saved position. Each pass
    over the text starts at another of T offsets, so that chunks are cut at other places.
    """

    streams: np.ndarray  # [B, length]
    chunk: int
    seed: int

    @classmethod
    def of(
        cls, tokens: np.ndarray, batch: int, chunk: int, seed: int = 0, item: str = "characters"
    ) -> Streams:
        """Raises DataError if the text is too short for one chunk and the next token in each stream."""
        length = len(tokens) // batch
        if length < chunk + 1:
            raise DataError(
                f"the text is too short: {len(tokens)} {item} in {batch} streams make {length} each, but data.chunk = "
                f"{chunk} needs at least {chunk + 1}; use a longer text, or a smaller data.batch or data.chunk"
            )
        return cls(tokens[: length * batch].reshape(batch, length), chunk, seed)

    @property
    def per_pass(self) -> int:
        """Chunks in one pass over the text: as many as fit after any offset."""
        return max((self.streams.shape[1] - self.chunk) // self.chunk, 1)

    def at(self, step: int) -> TextChunk:
        """Returns the data of a step, counted from 0 through all passes."""
        number, index = divmod(step, self.per_pass)
        offset = 0
        if number:
            offsets = min(self.chunk, self.streams.shape[1] - self.per_pass * self.chunk)
            offset = int(np.random.default_rng((self.seed, number)).integers(offsets))
        return self._cut(offset + index * self.chunk, index == 0)

    def one_pass(self) -> Iterator[TextChunk]:
        """Yields the chunks of one pass without an offset, for validation."""
        for index in range((self.streams.shape[1] - 1) // self.chunk):
            yield self._cut(index * self.chunk, index == 0)

    def _cut(self, start: int, fresh: bool) -> TextChunk:
        stop = start + self.chunk + 1
        window = np.ascontiguousarray(self.streams[:, start:stop].T)  # [T + 1, B]
        return TextChunk(window[:-1], window[1:], np.asarray(fresh))


@dataclass(frozen=True)
class TextData:
    """A text made ready: a vocabulary, streams of its first part to train on, and of its last part for validation."""

    vocabulary: Vocabulary | WordVocabulary
    train: Streams
    validation: Streams
    sha256: str

    @classmethod
    def load(cls, data: TextConfig, seed: int) -> TextData:
        """Reads a text as characters or, for a WordsConfig, as words; only the training part decides which are known.

        Raises:
            DataError: if the text cannot be read, or either part is too short.
        """
        text = text_of(data)
        where = data.path or data.source
        if not text:
            raise DataError(f"{where}: the text is empty")
        vocabulary: Vocabulary | WordVocabulary
        if isinstance(data, WordsConfig):
            words = cut(text)
            border = round(len(words) * (1 - data.validation))
            vocabulary = WordVocabulary.of(words[:border], data.vocabulary)
            tokens = vocabulary.numbers(words)
        else:
            vocabulary = Vocabulary.of(text)
            tokens = vocabulary.encode(text)
            border = round(len(tokens) * (1 - data.validation))
        item = f"{vocabulary.item}s"
        part = "training part"
        try:
            train = Streams.of(tokens[:border], data.batch, data.chunk, seed, item)
            part = f"validation part (data.validation = {data.validation})"
            validation = Streams.of(tokens[border:], data.batch, data.chunk, 0, item)
        except DataError as e:
            raise e.at(f"{where}, {part}") from None
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
        return cls(vocabulary, train, validation, digest.hexdigest())
