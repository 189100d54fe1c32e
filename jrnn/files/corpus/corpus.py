"""The files of a corpus, and reading them.

corpus.json     the tokenizer's size and checksum, the type of the tokens, and the shards in their order
tokenizer.json  the tokenizer
00000.tokens    the tokens of a shard, little-endian, of 2 or 4 bytes each
00000.begins    where documents begin in the shard, little-endian, of 8 bytes each
00000.json      what the shard was made from

A file is open only while a piece of it is read, so that memory does not grow with the corpus.
"""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np

from jrnn.errors import DataError
from jrnn.files import AtLeast, blocks, kind_of, open_file, parse_json, read_file, record
from jrnn.files.reading import PathName, read_tokenizer

FORMAT = "jrnn corpus 1"
AGAIN = "run the same `jrnn tokens` again"
INDEX = "corpus.json"
TOKENIZER = "tokenizer.json"
BEGINS = np.dtype("<i8")


def dtype_of(vocabulary: int) -> np.dtype:
    """Returns the type of tokens below `vocabulary`: 2 bytes if they suffice, else 4."""
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


@dataclass(frozen=True)
class Shard:
    """A part of a corpus in files of its own: how many tokens it has, how many documents begin in it, and a checksum."""

    name: str
    tokens: Annotated[int, AtLeast(0, 2**48)]
    documents: Annotated[int, AtLeast(0, 2**48)]
    sha256: str


@dataclass(frozen=True)
class _Index:
    """The contents of corpus.json."""

    format: Literal["jrnn corpus 1"]
    vocabulary: Annotated[int, AtLeast(2, 2**31 - 1)]
    end: Annotated[int, AtLeast(0, 2**31 - 1)] | None
    shards: list[Shard]


@dataclass(frozen=True)
class Corpus:
    """Documents as one row of tokens, in files that are read piece by piece.

    Attributes:
        folder: where the files are.
        vocabulary: the number of tokens that the tokenizer knows.
        end: the token that ends each document; None if there is none.
        shards: the parts, in their order.
        sha256: the checksum of corpus.json, which holds the checksums of all shards.
    """

    folder: Path
    vocabulary: int
    end: int | None
    shards: tuple[Shard, ...]
    sha256: str

    @classmethod
    def open(cls, folder: PathName) -> Corpus:
        """Opens a corpus that `tokenize` wrote.

        Raises:
            DataError: if there is no corpus, it is not finished, its index is damaged, or a file is missing or has another
                size. The contents of the files are checked by `verify`, and as they are read.
        """
        folder = Path(folder)
        path = folder / INDEX
        if not kind_of(path) and kind_of(folder) == "a folder" and any(folder.glob("*.json")):
            raise DataError(f"{path}: no such file: the corpus is not finished; {AGAIN}")
        data = read_file(path, DataError)
        index = record(_Index, parse_json(data, str(path), DataError), str(path), DataError)
        names = [shard.name for shard in index.shards]
        are_numbers = all(re.fullmatch("[0-9]{5,18}", name) for name in names)
        if not names or len(set(names)) < len(names) or not are_numbers:
            raise DataError(
                f"{path}: shards must have different names of digits, and there must be one"
            )
        if index.end is not None and index.end >= index.vocabulary:
            raise DataError(
                f"{path}: end must be less than the vocabulary of {index.vocabulary}, is {index.end}"
            )
        corpus = cls(
            folder=folder,
            vocabulary=index.vocabulary,
            end=index.end,
            shards=tuple(index.shards),
            sha256=hashlib.sha256(data).hexdigest(),
        )
        for shard in corpus.shards:
            for kind in ("tokens", "begins"):
                corpus._opened(shard, kind).close()
        return corpus

    def verify(self) -> None:
        """Reads all files, and compares them with their checksums.

        Raises:
            DataError: if a file is not what `tokenize` wrote, a token is not of the vocabulary, or documents do not begin
                one after another within their shard.
        """
        for shard in self.shards:
            digest = hashlib.sha256()
            last = -1
            for kind, dtype in (("tokens", self._type), ("begins", BEGINS)):
                with self._opened(shard, kind) as file:
                    for block in blocks(file, file.name, DataError):
                        digest.update(block)
                        numbers = np.frombuffer(block, dtype, len(block) // dtype.itemsize)
                        if kind == "tokens":
                            self._check_tokens(numbers, file.name)
                        elif len(numbers):
                            self._check_begins(numbers, last, shard.tokens, file.name)
                            last = int(numbers[-1])
            if digest.hexdigest() != shard.sha256:
                raise DataError(
                    f"{self.folder}: shard {shard.name} is not what was written; {AGAIN}"
                )

    @property
    def _type(self) -> np.dtype:
        return dtype_of(self.vocabulary)

    def _opened(self, shard: Shard, kind: str) -> BinaryIO:
        file = open_file(self.folder / f"{shard.name}.{kind}", DataError, None)
        size = shard.documents * BEGINS.itemsize
        if kind == "tokens":
            size = shard.tokens * self._type.itemsize
        if (actual := os.fstat(file.fileno()).st_size) != size:
            file.close()
            raise DataError(f"{file.name}: has {actual} bytes; {INDEX} says {size}; {AGAIN}")
        return file

    def _check_tokens(self, tokens: np.ndarray, where: str) -> None:
        if len(tokens) and (most := tokens.max()) >= self.vocabulary:
            raise DataError(
                f"{where}: is damaged: it has the token {most}, and the vocabulary {self.vocabulary}; {AGAIN}"
            )

    def _check_begins(self, begins: np.ndarray, after: int, before: int, where: str) -> None:
        if len(begins) and (
            begins[0] <= after or begins[-1] >= before or (begins[1:] <= begins[:-1]).any()
        ):
            raise DataError(
                f"{where}: is damaged: documents do not begin one after another within the shard; {AGAIN}"
            )

    def __len__(self) -> int:
        """The number of tokens."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Returns the tokens from `start` to `stop`, int32 [stop - start]; those past the end are missing.

        Raises:
            DataError: if `start` is below 0 or above `stop`; if a file is gone or was cut off since the corpus was opened,
                or has tokens that cannot be.
        """
        parts = [np.zeros(0, np.int32)]
        for shard, first, last in self._within(start, stop):
            with self._opened(shard, "tokens") as file:
                numbers = _numbers(file, self._type, first, last)
                self._check_tokens(numbers, file.name)
            parts.append(numbers.astype(np.int32))
        return np.concatenate(parts)

    def begins(self, start: int, stop: int) -> np.ndarray:
        """Returns whether a document begins with each token from `start` to `stop`, bool [stop - start]; see `tokens`."""
        parts = [np.zeros(0, bool)]
        for shard, first, last in self._within(start, stop):
            with self._opened(shard, "begins") as file:
                count = shard.documents
                begin = partial(_begin, file, shard)
                for k in (0, count - 1) if count else ():
                    begin(k)  # the others lie between them, if they are in order
                low = bisect_left(range(count), first, key=begin)
                high = bisect_left(
                    range(count), last, low, min(low + last - first, count), key=begin
                )
                begins = _numbers(file, BEGINS, low, high)
                self._check_begins(begins, first - 1, last, file.name)
            opens = np.zeros(last - first, bool)
            opens[begins - first] = True
            parts.append(opens)
        return np.concatenate(parts)

    def _within(self, start: int, stop: int) -> list[tuple[Shard, int, int]]:
        """Returns the shards that a range touches, each with the range in it."""
        if not 0 <= start <= stop:
            raise DataError(
                f"{self.folder}: tokens are read from 0 on and forward, not from {start} to {stop}"
            )
        parts = []
        before = 0
        for shard in self.shards:
            first = max(start - before, 0)
            last = min(stop - before, shard.tokens)
            if first < last:
                parts.append((shard, first, last))
            before += shard.tokens
        return parts

    def tokenizer(self) -> Any:
        """Returns the tokenizer, a `tokenizers.Tokenizer`; see `read_tokenizer`."""
        return read_tokenizer(self.folder / TOKENIZER)


def _begin(file: BinaryIO, shard: Shard, k: int) -> int:
    """Returns where document k of a shard begins; raises DataError for a place outside of the shard."""
    begin = int(_numbers(file, BEGINS, k, k + 1)[0])
    if not 0 <= begin < shard.tokens:
        raise DataError(
            f"{file.name}: is damaged: document {k} begins with token {begin}, and the shard has {shard.tokens}; {AGAIN}"
        )
    return begin


def _numbers(file: BinaryIO, dtype: np.dtype, first: int, last: int) -> np.ndarray:
    """Returns numbers of an open file; raises DataError if it ends before."""
    size = (last - first) * dtype.itemsize
    data = os.pread(file.fileno(), size, first * dtype.itemsize)
    if len(data) < size:
        raise DataError(f"{file.name}: was cut off while it was read; {AGAIN}")
    return np.frombuffer(data, dtype)
