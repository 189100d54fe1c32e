"""Texts in pieces of bounded size, and the documents of a piece."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from jrnn.errors import DataError
from jrnn.files import checked, open_file, parse_json

PIECE = 1 << 25  # bytes; a piece ends with the document, or the line, that is under way there
LONGEST = 1 << 26  # bytes that a piece may grow by until its last document ends
BLOCK = 1 << 20


@dataclass(frozen=True)
class Piece:
    """A range of bytes of a text file.

    Attributes:
        path: the file.
        start, stop: the range.
        size, modified: of the whole file, in bytes and nanoseconds, to detect changes.
    """

    path: str
    start: int
    stop: int
    size: int
    modified: int

    def read(self) -> bytes:
        with open_file(self.path, DataError, None) as f:
            f.seek(self.start)
            return f.read(self.stop - self.start)

    def record(self) -> dict[str, Any]:
        """Returns what says whether a shard was made from this piece, as plain JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Documents:
    """How a text file is divided into documents.

    A file whose name ends in .jsonl has an object a line, and `field` is the key of the text in it. Of another file, text
    between separators is a document; without a separator the whole file is one.
    """

    separator: str | None
    field: str

    def mark(self, path: str) -> bytes:
        """Returns the bytes that a piece may end with."""
        return b"\n" if self.separator is None or _is_json(path) else self.separator.encode()

    def of(self, piece: Piece) -> Iterator[tuple[str, bool, bool]]:
        """Yields the texts of a piece, each with whether it begins a document, and whether it ends one.

        Raises:
            DataError: if a text is not UTF-8, or a line is not an object with the text.
        """
        data = piece.read()
        if _is_json(piece.path):
            yield from self._objects(piece, data)
            return
        try:
            text = data.decode("utf-8-sig" if not piece.start else "utf-8")
        except UnicodeDecodeError as e:
            at = piece.start + e.start
            raise DataError(
                f"{piece.path}: is not UTF-8: byte {at} is 0x{data[e.start]:02x}"
            ) from None
        if self.separator is None:
            yield text, piece.start == 0, piece.stop == piece.size
            return
        for document in text.split(self.separator):
            yield document, True, True

    def _objects(self, piece: Piece, data: bytes) -> Iterator[tuple[str, bool, bool]]:
        at = piece.start
        for line in data.splitlines(keepends=True):
            if line.strip():
                try:
                    text = checked(str, parse_json(line, "", DataError)[self.field], "", DataError)
                except (DataError, LookupError, TypeError):
                    raise DataError(
                        f"{piece.path}: the line at byte {at} must be a JSON object whose {self.field!r} is a string; it "
                        f"begins with {line[:40]!r}; --field names another key"
                    ) from None
                yield text, True, True
            at += len(line)


def _is_json(path: str) -> bool:
    return path.endswith(".jsonl")


def pieces_of(path: str, documents: Documents) -> Iterator[Piece]:
    """Yields the pieces of a text file; an empty file has none.

    Raises:
        DataError: if the file cannot be read, or a document is too long.
    """
    mark = documents.mark(path)
    try:
        with open_file(path, DataError, None) as f:
            stat = os.fstat(f.fileno())
            start = 0
            while start < stat.st_size:
                stop = _end(f, path, start + PIECE, stat.st_size, mark, documents.separator is None)
                yield Piece(path, start, stop, stat.st_size, stat.st_mtime_ns)
                start = stop
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {e.strerror}") from None


def _end(f: Any, path: str, at: int, size: int, mark: bytes, anywhere: bool) -> int:
    """Returns the first end of a mark at `at` or later; without one, a text that may be cut anywhere is."""
    if at >= size:
        return size
    f.seek(at - len(mark))
    searched = b""
    while len(searched) < LONGEST and (block := f.read(BLOCK)):
        joined = searched + block
        place = joined.find(mark, max(len(searched) - len(mark) + 1, 0))
        if place >= 0:
            return int(at + place)
        searched = joined
    if at + len(searched) >= size:
        return size
    if anywhere and not _is_json(path):
        f.seek(at)
        # Where a character begins.
        return at + next(k for k, byte in enumerate(f.read(4)) if byte & 0xC0 != 0x80)
    raise DataError(
        f"{path}: the document at byte {at} does not end within {LONGEST >> 20} MiB; a document must be shorter"
    )
