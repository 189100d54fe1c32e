"""Text files to a corpus: `tokenize`, which `jrnn tokens` calls.

A text is read in pieces of 32 MiB. A piece makes a shard, which is written whole, so that a call that was stopped goes on
with the first piece that has no shard.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jrnn.errors import DataError
from jrnn.files import kind_of, read_file, read_json, record, write_whole
from jrnn.files.corpus.corpus import (
    BEGINS,
    FORMAT,
    INDEX,
    TOKENIZER,
    Corpus,
    Shard,
    dtype_of,
)
from jrnn.files.corpus.pieces import Documents, Piece, pieces_of
from jrnn.files.reading import PathName, read_tokenizer, tokenizers_package

# Tokens that end a document, in the order in which they are looked for.
ENDS = ("<|endoftext|>", "</s>", "<eos>", "[SEP]")
PART = 1 << 17  # characters that are encoded as one; a longer document is cut at ends of lines
BATCH = 1 << 20  # characters that are encoded in one call, on all cores
# The trainer allocates room for all tokens, and aborts the process if there is none.
LARGEST_VOCABULARY = 10_000_000
SAMPLE = 100_000_000  # bytes of text that a new tokenizer learns from


@dataclass(frozen=True)
class _Written:
    """What the JSON file of a shard holds: what it was made from, and its entry in the index."""

    record: dict[str, Any]
    shard: Shard


def tokenize(
    texts: Sequence[PathName],
    out: PathName,
    *,
    tokenizer: PathName | None = None,
    vocabulary: int = 8_192,
    separator: str | None = None,
    field: str = "text",
    end: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Corpus:
    """Writes text files as a corpus of tokens, in memory that does not depend on their size, on all cores.

    A file is one document; with a separator, it has several. A file whose name ends in .jsonl has one a line. A document of
    more than 131,072 characters is encoded in parts, which end with a line. After a call that was stopped, the same call
    goes on where that one was.

    Args:
        texts: UTF-8 files.
        out: the folder of the corpus.
        tokenizer: a tokenizer.json of the package tokenizers, or the folder of a model that has one. None: a byte-level
            tokenizer of byte pairs is trained on the texts, on pieces of 100 MB in all.
        vocabulary: the number of tokens of a new tokenizer, at least 257.
        separator: what stands between the documents of a text, as `"<|endoftext|>"`.
        field: the key of the text in an object of a .jsonl file.
        end: the token that ends each document. None: the first of `<|endoftext|>`, `</s>`, `<eos>` and `[SEP]` that the
            tokenizer knows.
        say: called with a line of progress after each piece.

    Returns:
        The corpus; see `Corpus` for an example.

    Raises:
        DataError: if a text cannot be read or is empty, the tokenizer cannot be used, or the folder holds another corpus.
    """
    documents = Documents(separator, field)
    out = Path(out)
    if not texts:
        raise DataError("tokens need at least one text")
    try:
        if separator is not None and not separator.encode():
            raise DataError("the separator of documents must not be empty")
    except UnicodeEncodeError:
        raise DataError(f"the separator of documents {separator!r} is not UTF-8") from None
    pieces: list[Piece] = []
    for path in texts:
        pieces += pieces_of(str(path), documents)
    total = sum(piece.stop - piece.start for piece in pieces)
    if not total:
        raise DataError(f"{', '.join(map(str, texts[:3]))}: there is no text")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise DataError(f"{out}: cannot hold a corpus: {e.strerror}") from None
    known = _tokenizer(out, tokenizer, vocabulary, pieces, documents, say)
    size = max(known.get_vocab().values(), default=0) + 1  # numbers may be left out
    end_token = _end_token(known, end)
    if size < 2:
        raise DataError("the tokenizer knows fewer than 2 tokens")
    rules = {"tokenizer": _sha256(known.to_str().encode()), "end": end_token, **asdict(documents)}
    if tokenizer is None:
        rules["vocabulary"] = vocabulary
    shards: list[Shard] = []
    tokens = 0
    done = 0
    for k, piece in enumerate(pieces):
        name = f"{k:05}"
        made_from = {**piece.record(), **rules}
        dtype = dtype_of(size)
        shard = _already_written(out, name, made_from, dtype)
        if shard is None:
            shard = _write_shard(out, name, made_from, piece, documents, known, dtype, end_token)
        shards.append(shard)
        tokens += shard.tokens
        done += piece.stop - piece.start
        say(f"{done / total:.0%}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {tokens:,} tokens")
    index = {
        "format": FORMAT,
        "vocabulary": size,
        "end": end_token,
        "shards": list(map(asdict, shards)),
    }
    write_whole(out / INDEX, (json.dumps(index, indent=1) + "\n").encode(), DataError)
    return Corpus.open(out)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _tokenizer(
    out: Path,
    given: Any,
    vocabulary: int,
    pieces: list[Piece],
    documents: Documents,
    say: Callable[[str], None],
) -> Any:
    """Returns the tokenizer that the folder has or that is given, which is copied to the folder, or a new one."""
    path = out / TOKENIZER
    if given is not None:
        source = Path(given) / TOKENIZER if kind_of(given) == "a folder" else Path(given)
        tokenizer = read_tokenizer(source)
        if kind_of(path) and read_tokenizer(path).to_str() != tokenizer.to_str():
            raise DataError(f"{out}: holds a corpus of another tokenizer; give another --out")
    elif kind_of(path):
        return read_tokenizer(path)
    else:
        say(f"training a tokenizer of {vocabulary:,} tokens")
        tokenizer = train_tokenizer(_sample(pieces, documents), vocabulary)
    write_whole(path, tokenizer.to_str().encode(), DataError)
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Returns a byte-level tokenizer of byte pairs, which can encode any text; <|endoftext|> is token 0.

    Raises:
        DataError: if the vocabulary is smaller than 257: all bytes, and the end of a text.
    """
    if not 257 <= vocabulary <= LARGEST_VOCABULARY:
        raise DataError(
            f"a vocabulary of bytes has at least 257 tokens and at most {LARGEST_VOCABULARY:,}, is {vocabulary}"
        )
    package = tokenizers_package()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[ENDS[0]],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _sample(pieces: list[Piece], documents: Documents) -> Iterator[str]:
    """Yields texts to learn from, of pieces that are spread evenly."""
    count = max(round(SAMPLE / max(piece.stop - piece.start for piece in pieces)), 1)
    for k in np.unique(np.linspace(0, len(pieces) - 1, count).round().astype(int)):
        for text, _, _ in documents.of(pieces[k]):
            yield from _parts(text)


def _end_token(known: Any, end: str | None) -> int | None:
    if end is not None:
        if (number := known.token_to_id(end)) is None:
            raise DataError(f"the tokenizer has no token {end!r}")
        return int(number)
    for token in ENDS:
        if (number := known.token_to_id(token)) is not None:
            return int(number)
    return None


def _already_written(
    out: Path, name: str, made_from: dict[str, Any], dtype: np.dtype
) -> Shard | None:
    """Returns a shard that an earlier call has written from the same piece; None if there is none, or it is damaged."""
    path = out / f"{name}.json"
    try:
        written = record(_Written, read_json(path, DataError), str(path), DataError)
    except DataError:
        return None
    before = written.record
    shard = written.shard
    for key, value in made_from.items():
        if before.get(key) != value:
            raise DataError(
                f"{out}: holds another corpus: {key} of shard {name} was {before.get(key)!r:.100} and is {value!r:.100}; "
                "give another --out"
            )
    try:
        data = read_file(out / f"{name}.tokens", DataError, None)
        data += read_file(out / f"{name}.begins", DataError, None)
    except DataError:
        return None
    size = shard.tokens * dtype.itemsize + shard.documents * BEGINS.itemsize
    return shard if len(data) == size and _sha256(data) == shard.sha256 else None


def _write_shard(
    out: Path,
    name: str,
    made_from: dict[str, Any],
    piece: Piece,
    documents: Documents,
    known: Any,
    dtype: np.dtype,
    end: int | None,
) -> Shard:
    tokens = []
    begins = []
    count = 0
    for numbers, opens, closes in _encoded(known, documents.of(piece)):
        if opens:
            begins.append(count)
        if closes and end is not None:
            numbers = [*numbers, end]
        tokens.append(np.asarray(numbers, dtype))
        count += len(numbers)
    data = np.concatenate([np.zeros(0, dtype), *tokens]).tobytes()
    starts = np.asarray(begins, BEGINS)
    starts = starts[starts < count]  # an empty document at the end, where no token ends documents
    write_whole(out / f"{name}.tokens", data, DataError)
    write_whole(out / f"{name}.begins", starts.tobytes(), DataError)
    shard = Shard(name, count, len(starts), _sha256(data + starts.tobytes()))
    written = json.dumps(asdict(_Written(made_from, shard)))
    write_whole(out / f"{name}.json", written.encode(), DataError)
    return shard


def _encoded(
    known: Any, texts: Iterable[tuple[str, bool, bool]]
) -> Iterator[tuple[list[int], bool, bool]]:
    """Yields the tokens of each part, with whether it begins a document and whether it ends one."""
    batch: list[tuple[str, bool, bool]] = []

    def encode() -> Iterator[tuple[list[int], bool, bool]]:
        texts = [text for text, _, _ in batch]
        encodings = known.encode_batch_fast(texts, add_special_tokens=False)
        for encoding, (_, opens, closes) in zip(encodings, batch):
            yield encoding.ids, opens, closes

    room = BATCH
    for text, opens, closes in texts:
        if not text and opens and closes:
            continue  # an empty document
        parts = list(_parts(text))
        for k, part in enumerate(parts):
            batch.append((part, opens and k == 0, closes and k + 1 == len(parts)))
            room -= len(part)
            if room <= 0:
                yield from encode()
                batch = []
                room = BATCH
    yield from encode()


def _parts(text: str) -> Iterator[str]:
    """Yields a text in parts of at most PART characters, cut after ends of lines where there are some; "" as it is."""
    start = 0
    while len(text) - start > PART:
        stop = text.rfind("\n", start, start + PART) + 1 or start + PART
        yield text[start:stop]
        start = stop
    yield text[start:]
