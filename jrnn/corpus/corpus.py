"""The files of a corpus, and reading them.

corpus.json     the tokenizer's size and checksum, the type of the tokens, and the shards in their order
tokenizer.json  the tokenizer
00000.tokens    the tokens of a shard, little-endian, of 2 or 4 bytes each
00000.begins    where documents begin in the shard, little-endian, of 8 bytes each
00000.json      what the shard was made from

A file is mapped only while it is read, so that memory does not grow with the corpus.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from jrnn.errors import DataError

FORMAT = "jrnn corpus 1"
INDEX, TOKENIZER = "corpus.json", "tokenizer.json"
BEGINS = np.dtype("<i8")


def dtype_of(vocabulary: int) -> np.dtype:
    """Returns the type of tokens below `vocabulary`: 2 bytes if they suffice, else 4."""
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


@dataclass(frozen=True)
class Shard:
    """A part of a corpus in files of its own: how many tokens it has, and how many documents begin in it."""

    name: str
    tokens: int
    documents: int


@dataclass(frozen=True)
class Corpus:
    """Documents as one row of tokens, in files that are read piece by piece.

    Attributes:
        folder: where the files are.
        vocabulary: the number of tokens that the tokenizer knows.
        end: the token that ends each document; None if there is none.
        shards: the parts, in their order.
        sha256: the checksum of corpus.json, which has those of all shards.
    """

    folder: Path
    vocabulary: int
    end: int | None
    shards: tuple[Shard, ...]
    sha256: str

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> Corpus:
        """Opens a corpus that `tokenize` wrote.

        Raises:
            DataError: if there is no corpus, it is not finished, or a file is missing or has another size.
        """
        folder = Path(folder)
        path = folder / INDEX
        try:
            data = path.read_bytes()
        except OSError as e:
            why = e.strerror
            if isinstance(e, FileNotFoundError):
                why = "it is not finished; run the same `jrnn tokens` again" if any(folder.glob("*.json")) else why
            raise DataError(f"{path}: is not the index of a corpus: {why}") from None
        try:
            given = json.loads(data)
            if given["format"] != FORMAT:
                raise ValueError(f"its format is {given['format']!r:.80}, not {FORMAT!r}")
            shards = tuple(Shard(str(s["name"]), int(s["tokens"]), int(s["documents"])) for s in given["shards"])
            found = cls(folder, int(given["vocabulary"]), given["end"], shards, hashlib.sha256(data).hexdigest())
            if any(Path(s.name).name != s.name for s in shards):
                raise ValueError("the name of a shard is a path")
        except (ValueError, LookupError, TypeError, RecursionError) as e:
            raise DataError(f"{path}: is not the index of a corpus: {e}") from None
        for shard in shards:
            for file, size in found._files(shard):
                actual = file.stat().st_size if file.exists() else None
                if actual != size:
                    raise DataError(
                        f"{file}: has {actual} bytes; {INDEX} says {size}; run the same `jrnn tokens` again"
                        if actual is not None
                        else f"{file}: no such file; run the same `jrnn tokens` again"
                    )
        return found

    def _files(self, shard: Shard) -> list[tuple[Path, int]]:
        tokens, begins = self.folder / f"{shard.name}.tokens", self.folder / f"{shard.name}.begins"
        return [
            (tokens, shard.tokens * dtype_of(self.vocabulary).itemsize),
            (begins, shard.documents * BEGINS.itemsize),
        ]

    def __len__(self) -> int:
        """The number of tokens."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Returns the tokens from `start` to `stop`, int32 [stop - start]; those past the end are missing."""
        parts = [np.zeros(0, np.int32)]
        for shard, first, last in self._within(start, stop):
            view = np.memmap(self._files(shard)[0][0], dtype_of(self.vocabulary), "r", shape=shard.tokens)
            parts.append(view[first:last].astype(np.int32))
        return np.concatenate(parts)

    def begins(self, start: int, stop: int) -> np.ndarray:
        """Returns whether a document begins with each token from `start` to `stop`, bool [stop - start]."""
        found = np.zeros(stop - start, bool)
        at = 0  # in `found`
        for shard, first, last in self._within(start, stop):
            if shard.documents:
                view = np.memmap(self._files(shard)[1][0], BEGINS, "r", shape=shard.documents)
                low, high = np.searchsorted(view, [first, last])
                found[at + np.asarray(view[low:high]) - first] = True
            at += last - first
        return found

    def _within(self, start: int, stop: int) -> list[tuple[Shard, int, int]]:
        """Returns the shards that a range touches, each with the range in it."""
        found, before = [], 0
        for shard in self.shards:
            first, last = max(start - before, 0), min(stop - before, shard.tokens)
            if first < last:
                found.append((shard, first, last))
            before += shard.tokens
        return found

    def tokenizer(self) -> Any:
        """Returns the tokenizer, a `tokenizers.Tokenizer`; see `read_tokenizer`."""
        return read_tokenizer(self.folder / TOKENIZER)


def tokenizers_package() -> Any:
    """Returns the package `tokenizers`; raises DataError if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise DataError("tokens of a text need the extra 'text': pip install 'jrnn[text]'") from None
    return tokenizers


def parse_tokenizer(text: str, where: str) -> Any:
    """Returns the tokenizer of the text of a tokenizer.json; raises DataError if it is none."""
    package = tokenizers_package()
    try:
        return package.Tokenizer.from_str(text)
    except Exception as e:  # the package raises Exception itself
        raise DataError(f"{where}: is not a tokenizer of the package tokenizers: {e}") from None


def read_tokenizer(path: str | PathLike[str]) -> Any:
    """Returns the tokenizer of a file tokenizer.json; raises DataError if it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise DataError(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
    return parse_tokenizer(text, str(path))
