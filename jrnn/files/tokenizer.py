"""Files tokenizer.json, which the package `tokenizers` (the extra `text`) reads."""

from __future__ import annotations

from os import PathLike
from typing import Any

from jrnn.errors import DataError, needs_extra
from jrnn.files.reading import read_text


def tokenizers_package() -> Any:
    """Returns the package `tokenizers`; raises DataError if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise DataError(needs_extra("a tokenizer", "text")) from None
    return tokenizers


def parse_tokenizer(text: str, where: str) -> Any:
    """Returns the tokenizer of the text of a tokenizer.json; raises DataError if it is none."""
    package = tokenizers_package()
    try:
        tokenizer = package.Tokenizer.from_str(text)
    except Exception as e:  # the package raises Exception itself
        raise DataError(f"{where}: is not a tokenizer of the package tokenizers: {e}") from None
    tokenizer.no_truncation()  # files have the lengths of some batch that was encoded last
    tokenizer.no_padding()
    return tokenizer


def read_tokenizer(path: str | PathLike[str]) -> Any:
    """Returns the tokenizer of a file tokenizer.json; raises DataError if it cannot be read."""
    return parse_tokenizer(read_text(path, DataError), str(path))
