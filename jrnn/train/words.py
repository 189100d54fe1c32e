"""Text as words: how it is cut, and the words that a model knows."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

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
