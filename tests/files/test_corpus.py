"""Texts become tokens, document by document; a stopped call continues; damaged and foreign files raise errors."""

import json
import os
import sys

import numpy as np
import pytest

from jrnn.cli import main
from jrnn.errors import DataError
from jrnn.files.corpus import Corpus, tokenize
from jrnn.files.corpus import pieces as pieces_module
from jrnn.files.corpus.corpus import dtype_of

tokenize_module = sys.modules["jrnn.files.corpus.tokenize"]  # the function has the same name
VOCABULARY = 270


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(
        "".join(f"the cat number {k} sat on the mat\n" for k in range(40)), encoding="utf-8"
    )
    return path


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces_module, "PIECE", 200)


def documents_of(corpus):
    """The texts of a corpus, as its tokens and its begins say."""
    tokens, known = corpus.tokens(0, len(corpus)), corpus.tokenizer()
    starts = corpus.begins(0, len(corpus)).nonzero()[0]
    return [known.decode(part.tolist()) for part in np.split(tokens, starts[1:])]


def test_documents_of_several_files(tmp_path, text):
    lines = tmp_path / "more.jsonl"
    lines.write_text('{"text": "one\\ntwo"}\n\n{"text": "élan \\ud83d\\ude00"}\n', encoding="utf-8")
    corpus = tokenize([text, lines], tmp_path / "out", vocabulary=VOCABULARY)
    assert documents_of(corpus) == [text.read_text(encoding="utf-8"), "one\ntwo", "élan 😀"]
    ends = np.append(corpus.begins(0, len(corpus)).nonzero()[0][1:], len(corpus)) - 1
    assert (corpus.tokens(0, len(corpus))[ends] == corpus.end).all() and corpus.documents == 3


def test_documents_between_separators(tmp_path, small_pieces):
    path = tmp_path / "text.txt"
    texts = [f"document {k}\n" * (k + 1) for k in range(12)]
    path.write_text(
        "<doc>".join(["", *texts]), encoding="utf-8"
    )  # an empty one in front, which is left out
    corpus = tokenize([path], tmp_path / "out", vocabulary=VOCABULARY, separator="<doc>")
    assert len(corpus.shards) > 2 and documents_of(corpus) == texts


def test_a_document_in_several_pieces_begins_once(tmp_path, text, small_pieces):
    corpus = tokenize([text], tmp_path / "out", vocabulary=VOCABULARY)
    assert len(corpus.shards) > 3 and documents_of(corpus) == [text.read_text(encoding="utf-8")]
    assert (corpus.tokens(0, len(corpus)) == corpus.end).sum() == 1


def test_a_long_document_is_encoded_in_lines(tmp_path, text, monkeypatch):
    whole = tokenize([text], tmp_path / "whole", vocabulary=VOCABULARY)
    monkeypatch.setattr(tokenize_module, "PART", 100)
    monkeypatch.setattr(tokenize_module, "BATCH", 300)
    parts = tokenize([text], tmp_path / "parts", tokenizer=tmp_path / "whole" / "tokenizer.json")
    np.testing.assert_array_equal(parts.tokens(0, len(parts)), whole.tokens(0, len(whole)))


def test_a_text_without_lines_is_cut_between_characters(tmp_path, small_pieces, monkeypatch):
    monkeypatch.setattr(pieces_module, "LONGEST", 50)
    monkeypatch.setattr(pieces_module, "BLOCK", 50)
    path = tmp_path / "text.txt"
    path.write_text("x" + "é😀" * 200, encoding="utf-8")
    corpus = tokenize([path], tmp_path / "out", vocabulary=VOCABULARY)
    assert len(corpus.shards) > 3 and documents_of(corpus) == ["x" + "é😀" * 200]


def test_a_range_of_tokens_across_shards(tmp_path, text, small_pieces):
    corpus = tokenize([text, text], tmp_path / "out", vocabulary=VOCABULARY)
    everything, begins = corpus.tokens(0, len(corpus)), corpus.begins(0, len(corpus))
    assert everything.dtype == np.int32
    border = corpus.shards[0].tokens
    for start, stop in (
        (border - 3, border + 3),
        (1, len(corpus) - 1),
        (len(corpus) - 2, len(corpus)),
    ):
        np.testing.assert_array_equal(corpus.tokens(start, stop), everything[start:stop])
        np.testing.assert_array_equal(corpus.begins(start, stop), begins[start:stop])


def test_a_call_that_was_stopped_goes_on(tmp_path, text, small_pieces):
    def stop(line):
        if not line.startswith("training"):
            seen.append(line)
        if len(seen) == 3:
            raise KeyboardInterrupt

    seen, options = [], {"vocabulary": VOCABULARY}
    with pytest.raises(KeyboardInterrupt):
        tokenize([text], tmp_path / "out", **options, say=stop)
    with pytest.raises(DataError, match="not finished; run the same `jrnn tokens` again"):
        Corpus.open(tmp_path / "out")
    os.utime(tmp_path / "out" / "00002.tokens", ns=(0, 0))
    (tmp_path / "out" / "00001.tokens").write_bytes(b"half")
    continued = tokenize([text], tmp_path / "out", **options)
    assert (tmp_path / "out" / "00002.tokens").stat().st_mtime_ns == 0  # not written again
    whole = tokenize([text], tmp_path / "whole", **options)
    assert continued.sha256 == whole.sha256 and documents_of(continued) == documents_of(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out, text: text.write_text("another text"), "stop of shard 00000"),
        (lambda out, text: {"vocabulary": 300}, "vocabulary of shard 00000 was 270 and is 300"),
        (lambda out, text: {"separator": "cat"}, "separator of shard 00000"),
    ],
)
def test_another_corpus_is_not_overwritten(tmp_path, text, change, message):
    tokenize([text], tmp_path / "out", vocabulary=VOCABULARY)
    changes = change(tmp_path / "out", text)
    options = changes if isinstance(changes, dict) else {}
    with pytest.raises(DataError, match=message):
        tokenize([text], tmp_path / "out", **{"vocabulary": VOCABULARY, **options})


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"caf\xe9 au lait", "is not UTF-8: byte 3 is 0xe9"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"txt": "b"}\n',
            "the line at byte 14 must be a JSON object whose 'text' is a string",
        ),
        ("a.jsonl", b"[" * 100_000, "must be a JSON object"),
        ("a.txt", b"", "there is no text"),
    ],
)
def test_a_text_that_cannot_be_used(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        tokenize([tmp_path / name], tmp_path / "out")


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for name, message in (("fifo", "is a pipe, not a file"), ("nothing", "no such file")):
        with pytest.raises(DataError, match=message):
            tokenize([tmp_path / name], tmp_path / "out")


def test_tokenizers_that_cannot_be_used(tmp_path, text):
    (tmp_path / "t.json").write_text("{}")
    for options, message in (
        ({"tokenizer": tmp_path / "t.json"}, "is not a tokenizer"),
        ({"tokenizer": tmp_path / "nothing.json"}, "no such file"),
        ({"vocabulary": 100}, "at least 257 tokens and at most 10,000,000, is 100"),
        ({"end": "<stop>"}, "has no token '<stop>'"),
    ):
        with pytest.raises(DataError, match=message):
            tokenize([text], tmp_path / "out", **options)


def test_damaged_files(tmp_path, text):
    out = tmp_path / "out"
    tokenize([text], out, vocabulary=VOCABULARY)
    index = (out / "corpus.json").read_text()
    (shard,) = json.loads(index)["shards"]
    (out / "00000.tokens").write_bytes((out / "00000.tokens").read_bytes()[:-2])
    with pytest.raises(DataError, match=r"00000\.tokens: has \d+ bytes; corpus\.json says"):
        Corpus.open(out)
    for change, message in (
        ({"format": "x"}, "format must be 'jrnn corpus 1', is 'x'"),
        ({"shards": [shard | {"name": "../a"}]}, "shards must have different names of digits"),
        ({"shards": [shard, shard]}, "shards must have different names of digits"),
        ({"shards": []}, "and there must be one"),
        ({"shards": 3}, "shards must be a list, is 3"),
        ({"shards": [shard | {"tokens": -1}]}, r"shards\[0\]: tokens must be at least 0, is -1"),
        ({"vocabulary": 1}, "vocabulary must be at least 2, is 1"),
        ({"end": 300}, "end must be less than the vocabulary of 270, is 300"),
    ):
        (out / "corpus.json").write_text(json.dumps(json.loads(index) | change))
        with pytest.raises(DataError, match=message):
            Corpus.open(out)


def test_types_of_tokens():
    assert [dtype_of(n).itemsize for n in (2**16, 2**16 + 1)] == [2, 4]


def test_the_command(tmp_path, text, capsys):
    out = tmp_path / "out"
    assert main(["tokens", str(text), "--out", str(out), "--vocabulary", str(VOCABULARY)]) == 0
    corpus = Corpus.open(out)
    assert capsys.readouterr().out.endswith(
        f"wrote {out}: {len(corpus):,} tokens of {corpus.vocabulary} kinds in 1 documents\n"
    )
    assert main(["tokens", str(tmp_path / "nothing"), "--out", str(out)]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_corpus_is_verified(tmp_path, text, small_pieces):
    """A bit of any file, a vocabulary that is too small, and documents out of order, with sizes that agree."""
    out = tmp_path / "out"
    corpus = tokenize([text], out, vocabulary=VOCABULARY, separator="the")
    corpus.verify()
    for name in ("00000.tokens", "00001.begins"):
        data = (out / name).read_bytes()
        (out / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(DataError, match="is not what was written|is damaged"):
            Corpus.open(out).verify()
        (out / name).write_bytes(data)
    tokens = (out / "00000.tokens").read_bytes()
    (out / "00000.tokens").write_bytes(b"\xff\xff" + tokens[2:])
    with pytest.raises(DataError, match="it has the token 65535, and the vocabulary 270"):
        corpus.tokens(0, 3)


@pytest.mark.parametrize("place", [0, 2, -1])
@pytest.mark.parametrize("begin", [-1, -(2**62), "the end", 2**62])
def test_documents_that_begin_outside_of_their_shard(tmp_path, text, place, begin):
    """Reading any part names the document and its place, and tokenizing again restores the corpus."""
    out, options = tmp_path / "out", {"vocabulary": VOCABULARY, "separator": "the"}
    corpus = tokenize([text], out, **options)
    whole = corpus.begins(0, len(corpus))
    begins = np.fromfile(out / "00000.begins", "<i8")
    begins[place] = begin = len(corpus) if begin == "the end" else begin
    begins.tofile(out / "00000.begins")
    ends = ((0, 1), (len(corpus) - 1, len(corpus))) if place in (0, -1) else ()
    outside = f"document \\d+ begins with token {begin}, and the shard has {len(corpus)}"
    for start, stop in ((0, len(corpus)), *ends):
        with pytest.raises(
            DataError,
            match=f"00000.begins: is damaged: ({outside}|documents do not begin).*; run the same",
        ):
            corpus.begins(start, stop)
    with pytest.raises(
        DataError, match="one after another within the shard; run the same `jrnn tokens` again"
    ):
        corpus.verify()
    np.testing.assert_array_equal(tokenize([text], out, **options).begins(0, len(corpus)), whole)


def test_ranges_outside_of_a_corpus(tmp_path, text):
    """What is past the end is missing; before the start and backward there is nothing."""
    corpus = tokenize([text], tmp_path / "out", vocabulary=VOCABULARY)
    n = len(corpus)
    for read in (corpus.tokens, corpus.begins):
        np.testing.assert_array_equal(read(n - 2, n + 5), read(n - 2, n))
        assert read(n + 1, n + 3).shape == read(3, 3).shape == (0,)
        for start, stop in ((-1, 3), (-5, -2), (4, 3)):
            with pytest.raises(
                DataError,
                match=rf"out: tokens are read from 0 on and forward, not from {start} to {stop}",
            ):
                read(start, stop)


def test_files_that_go_during_a_run_are_named(tmp_path, text):
    corpus = tokenize([text], tmp_path / "out", vocabulary=VOCABULARY)
    os.truncate(tmp_path / "out" / "00000.tokens", 10)
    with pytest.raises(DataError, match=r"00000\.tokens: has 10 bytes"):
        corpus.tokens(0, 3)
    (tmp_path / "out" / "00000.begins").unlink()
    with pytest.raises(DataError, match=r"00000\.begins: no such file"):
        corpus.begins(0, 3)
