"""Text as training data: where it comes from, its characters or words as numbers, and streams of chunks.

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
from typing import Any, Literal, NamedTuple

import numpy as np

from jrnn.errors import ConfigError, DataError
from jrnn.train.toml_codec import read_utf8, require


@dataclass(frozen=True)
class TextConfig:
    """The text: the documentation inside Python itself, or a UTF-8 file."""

    source: Literal["python-docs", "file"] = "python-docs"
    path: str | None = None  # the file's path, from the working directory; giving one means source = "file"
    validation: float = 0.1  # the share of the text, at its end, that is never trained on
    batch: int = 32  # streams read side by side
    chunk: int = 64  # characters between truncations of backpropagation; the state is carried on

    def __post_init__(self):
        require(0 < self.validation < 1, "data.validation must lie between 0 and 1", self.validation)
        require(self.batch >= 1, "data.batch must be at least 1", self.batch)
        require(self.chunk >= 1, "data.chunk must be at least 1", self.chunk)
        if self.path is not None:
            object.__setattr__(self, "source", "file")
        elif self.source == "file":
            raise ConfigError('data.source = "file" needs data.path, the path of a UTF-8 text')


@dataclass(frozen=True)
class WordsConfig(TextConfig):
    """The text, as of characters, but `chunk` counts words."""

    vocabulary: int = 10_000  # words that are told apart, the most frequent ones; all others are <unk>

    def __post_init__(self):
        super().__post_init__()
        require(self.vocabulary >= 2, "data.vocabulary must be at least 2", self.vocabulary)


def read_text(data: TextConfig) -> str:
    """The text that a configuration asks for.

    Raises:
        DataError: for a file that is missing, unreadable or not UTF-8, or a Python without its documentation.
    """
    if data.source == "python-docs":
        return _python_docs()
    assert data.path is not None
    return read_utf8(data.path, DataError, "; data.path must name a UTF-8 text")


def _python_docs() -> str:
    try:
        from pydoc_data.topics import topics  # optional: some systems package Python without it
    except ImportError:
        raise DataError(
            "this Python comes without pydoc_data, the text of data.source = 'python-docs'; install the whole standard "
            "library, or train on a file with --set data.path=FILE"
        ) from None
    return "".join(topics[name] for name in sorted(topics))


@dataclass(frozen=True)
class Vocabulary:
    """The characters that a model knows, in the order of their numbers.

    >>> v = Vocabulary.of("hello")
    >>> v.characters, v.encode("hole").tolist(), v.decode([1, 0])
    ('ehlo', [1, 3, 2, 0], 'he')
    """

    characters: str

    @classmethod
    def of(cls, text: str) -> Vocabulary:
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """[len(text)] int32; DataError where a character is not known."""
        known = np.frombuffer(self.characters.encode("utf-32-le", "surrogatepass"), np.uint32)
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        places = np.minimum(np.searchsorted(known, codes), len(known) - 1)
        unknown = np.flatnonzero(known[places] != codes)
        if unknown.size:
            raise DataError(
                f"the model does not know the character {text[unknown[0]]!r}: it is not in the training text"
            )
        return places.astype(np.int32)

    def decode(self, numbers) -> str:
        return "".join(self.characters[int(n)] for n in numbers)


UNKNOWN = "<unk>"
# A mark such as <unk>, a word with the apostrophes and hyphens in it, any other sign, the end of a line.
_WORD = re.compile(r"<\w+>|\w+(?:['’-]\w+)*|[^\w\s]|\n")


def cut(text: str) -> list[str]:
    """The words of a text: words, signs, and ends of lines.

    >>> cut("Don't stop,\\n<unk>!")
    ["Don't", 'stop', ',', '\\n', '<unk>', '!']
    """
    return _WORD.findall(text)


@dataclass(frozen=True)
class WordVocabulary:
    """The words that a model knows, in the order of their numbers; number 0 stands for every other one.

    >>> v = WordVocabulary.of(cut("a b a c b a"), 3)
    >>> v.words, v.encode("c a b").tolist(), v.decode([1, 2, 0])
    (('<unk>', 'a', 'b'), [0, 1, 2], 'a b <unk>')
    """

    words: tuple[str, ...]

    @classmethod
    def of(cls, words: list[str], most: int) -> WordVocabulary:
        """The `most` - 1 most frequent words; of equally frequent ones, those that come first in the alphabet."""
        counts = Counter(word for word in words if word != UNKNOWN)
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls((UNKNOWN, *ranked[: most - 1]))

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def encode(self, text: str) -> np.ndarray:
        """[words of the text] int32."""
        return self.numbers(cut(text))

    def numbers(self, words: list[str]) -> np.ndarray:
        """[len(words)] int32."""
        return np.asarray([self._numbers.get(word, 0) for word in words], np.int32)

    def decode(self, numbers) -> str:
        """Words with spaces between them, but none around the ends of lines, or before signs that close."""
        text = " ".join(self.words[int(n)] for n in numbers)
        return re.sub(r" ([.,;:!?)\]])", r"\1", re.sub(r" ?\n ?", "\n", text))


class Chunk(NamedTuple):
    """One step's data: characters and the ones that follow, [T, B] int32; `fresh` where the state starts anew."""

    tokens: np.ndarray
    targets: np.ndarray
    fresh: np.ndarray


@dataclass(frozen=True)
class Streams:
    """B streams of an encoded text, chunk by chunk; a chunk is a function of the step's number alone.

    So nothing about the reading needs to be saved: a run that is resumed at step k reads what the uninterrupted one does.
    Each pass over the text starts at another of T offsets, so that chunks are cut at other places.
    """

    streams: np.ndarray  # [B, length]
    chunk: int
    seed: int

    @classmethod
    def of(cls, tokens: np.ndarray, batch: int, chunk: int, seed: int = 0, item: str = "characters") -> Streams:
        """Raises DataError where the text is too short for one chunk and its next character in each stream."""
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

    def at(self, step: int) -> Chunk:
        """The data of step `step`, counted from 0 through all passes."""
        number, index = divmod(step, self.per_pass)
        offset = 0
        if number:
            offsets = min(self.chunk, self.streams.shape[1] - self.per_pass * self.chunk)
            offset = int(np.random.default_rng((self.seed, number)).integers(offsets))
        return self._cut(offset + index * self.chunk, index == 0)

    def one_pass(self) -> Iterator[Chunk]:
        """The chunks of one pass without an offset, for validation."""
        for index in range((self.streams.shape[1] - 1) // self.chunk):
            yield self._cut(index * self.chunk, index == 0)

    def _cut(self, start: int, fresh: bool) -> Chunk:
        window = np.ascontiguousarray(self.streams[:, start : start + self.chunk + 1].T)  # [T + 1, B]
        return Chunk(window[:-1], window[1:], np.asarray(fresh))


@dataclass(frozen=True)
class TextData:
    """A text made ready: a vocabulary, streams of its first part, and of its last for validation."""

    vocabulary: Vocabulary | WordVocabulary
    train: Streams
    validation: Streams
    sha256: str

    @classmethod
    def load(cls, data: TextConfig, seed: int) -> TextData:
        """As characters, of which all are known. DataError where the text cannot be read, or either part is too short."""
        text = _not_empty(data)
        vocabulary = Vocabulary.of(text)
        return cls._of(data, seed, text, vocabulary, vocabulary.encode(text), "characters")

    @classmethod
    def load_words(cls, data: WordsConfig, seed: int) -> TextData:
        """As words, of which the most frequent ones of the first part are known. DataError as with `load`."""
        text = _not_empty(data)
        words = cut(text)
        vocabulary = WordVocabulary.of(words[: _border(data, len(words))], data.vocabulary)
        return cls._of(data, seed, text, vocabulary, vocabulary.numbers(words), "words")

    @classmethod
    def _of(cls, data: TextConfig, seed: int, text: str, vocabulary: Any, tokens: np.ndarray, item: str) -> TextData:
        border = _border(data, len(tokens))
        try:
            train = Streams.of(tokens[:border], data.batch, data.chunk, seed, item)
        except DataError as e:
            raise e.at(f"{data.path or data.source}, training part") from None
        try:
            validation = Streams.of(tokens[border:], data.batch, data.chunk, item=item)
        except DataError as e:
            raise e.at(f"{data.path or data.source}, validation part (data.validation = {data.validation})") from None
        return cls(vocabulary, train, validation, hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())


def _not_empty(data: TextConfig) -> str:
    text = read_text(data)
    if not text:
        raise DataError(f"{data.path or data.source}: the text is empty")
    return text


def _border(data: TextConfig, count: int) -> int:
    """How many of so many tokens are trained on."""
    return round(count * (1 - data.validation))
