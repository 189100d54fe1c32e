"""Text as training data: characters, words, and streams of chunks."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrnn.errors import ConfigError, DataError
from jrnn.train import Config, load_run, train
from jrnn.train.text_streams import (
    Streams,
    TextConfig,
    TextData,
    Vocabulary,
    WordsConfig,
    WordVocabulary,
    cut,
    text_of,
)
from jrnn.train.toml_codec import decode


@given(st.text(min_size=1))
def test_encode_and_decode_are_inverse(text):
    vocabulary = Vocabulary.of(text)
    tokens = vocabulary.encode(text)
    assert tokens.dtype == np.int32
    assert vocabulary.decode(tokens) == text
    assert sorted(set(tokens.tolist())) == list(range(len(vocabulary)))


@pytest.mark.parametrize("text", ["abz", "ab ", "ab\U0001f600"])
def test_an_unknown_character_is_named(text):
    with pytest.raises(DataError, match="does not know the character " + repr(text[-1])):
        Vocabulary.of("abc").encode(text)


@given(
    length=st.integers(2, 200),
    batch=st.integers(1, 5),
    chunk=st.integers(1, 20),
    seed=st.integers(0, 9),
)
@settings(max_examples=60)
def test_chunks_follow_each_other(length, batch, chunk, seed):
    tokens = np.arange(length, dtype=np.int32)
    if length // batch < chunk + 1:
        with pytest.raises(
            DataError, match=f"{length} characters in {batch} streams make {length // batch} each"
        ):
            Streams.of(tokens, batch, chunk, seed)
        return
    streams = Streams.of(tokens, batch, chunk, seed)
    end = None
    for step in range(3 * streams.per_pass):
        tokens_in, targets, fresh, _ = streams.at(step)
        assert tokens_in.shape == targets.shape == (chunk, batch)
        np.testing.assert_array_equal(
            targets, tokens_in + 1
        )  # the next character of the same stream
        assert fresh == (step % streams.per_pass == 0)
        if not fresh:
            np.testing.assert_array_equal(tokens_in[0], end)
        np.testing.assert_array_equal(tokens_in[:, -1] - tokens_in[0, -1], np.arange(chunk))
        end = targets[-1]


def test_passes_cut_at_different_places_and_are_functions_of_the_seed():
    tokens = np.arange(1000, dtype=np.int32)

    def starts(seed):
        streams = Streams.of(tokens, 2, 50, seed)
        return [int(streams.at(k * streams.per_pass).tokens[0, 0]) for k in range(20)]

    assert starts(1) == starts(1) != starts(2)
    assert len(set(starts(1))) > 10
    assert starts(1)[0] == 0


def test_one_pass_reads_every_whole_chunk_once():
    streams = Streams.of(np.arange(41, dtype=np.int32), 2, 5)
    chunks = list(streams.one_pass())
    read = np.concatenate([c.tokens for c in chunks])
    np.testing.assert_array_equal(read[:, 0], np.arange(15))
    np.testing.assert_array_equal(read[:, 1], np.arange(20, 35))
    assert [bool(c.fresh) for c in chunks] == [True, False, False]


def test_python_brings_its_own_text():
    text = text_of(TextConfig())
    assert len(text) > 300_000
    assert "generator function" in text


def test_validation_is_the_end_of_the_text(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("a" * 100 + "b" * 100)
    data = TextData.load(TextConfig(path=str(path), batch=2, chunk=5, validation=0.5), 0)
    assert set(data.vocabulary.decode(data.train.streams.ravel())) == {"a"}
    assert set(data.vocabulary.decode(data.validation.streams.ravel())) == {"b"}
    assert data.vocabulary.characters == "ab"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, r"t\.txt: no such file; data\.path must name"),
        (b"caf\xe9 au lait", r"t\.txt: is not UTF-8: byte 3 is 0xe9; convert it"),
        (b"", r"t\.txt: the text is empty"),
        (
            b"a" * 50,
            r"t\.txt, training part: the text is too short: 45 characters in 32 streams make 1 each",
        ),
        (
            b"a" * 3000,
            r"t\.txt, validation part \(data\.validation = 0\.1\): .* data\.chunk = 64 needs at least 65",
        ),
    ],
)
def test_text_that_cannot_be_used(tmp_path, raw, message):
    path = tmp_path / "t.txt"
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(DataError, match=message):
        TextData.load(TextConfig(path=str(path)), 0)


def test_line_ends_are_one_character(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes(b"a\r\nb\n")
    assert text_of(TextConfig(path=str(path))) == "a\nb\n"
    with pytest.raises(DataError, match="is a folder, not a file"):
        text_of(TextConfig(path=str(tmp_path)))


def test_the_most_frequent_words_are_known():
    vocabulary = WordVocabulary.of(cut("b b a a c d d d <unk> <unk>"), 4)
    assert vocabulary.words == ("<unk>", "d", "a", "b")  # a and b are equally frequent
    np.testing.assert_array_equal(vocabulary.encode("a c <unk> d"), [2, 0, 0, 1])
    assert len(vocabulary) == 4


def test_text_of_words_reads_like_text():
    text = "A word-count isn't all.\nIs it (so)?"
    words = cut(text)
    assert words == ["A", "word-count", "isn't", "all", ".", "\n", "Is", "it", "(", "so", ")", "?"]
    vocabulary = WordVocabulary.of(words, 100)
    assert vocabulary.decode(vocabulary.encode(text)) == "A word-count isn't all.\nIs it ( so)?"


def test_words_of_the_validation_part_alone_are_unknown(tmp_path):
    (tmp_path / "t.txt").write_text("a b " * 50 + "a c " * 50)
    data = TextData.load(
        WordsConfig(path=str(tmp_path / "t.txt"), batch=2, chunk=3, validation=0.5), 0
    )
    assert data.vocabulary.words == ("<unk>", "a", "b")
    assert set(data.validation.streams.ravel().tolist()) == {0, 1}


@pytest.mark.exhaustive
def test_perplexity(text_file, quiet, tmp_path):
    tables = {
        "task": "words",
        "data": {"path": str(text_file), "batch": 4, "chunk": 5, "vocabulary": 12},
        "model": {"kind": "nn", "cell": "gru", "embedding": 3, "hidden": 4},
        "train": {"steps": 2},
        "sample": {"prompt": "the zebra", "length": 5},
    }
    result = train(decode(Config, tables, "words.toml"), tmp_path / "run", console=quiet)
    assert result.metrics == {"perplexity": pytest.approx(math.exp(result.validation_loss))}
    assert result.unit == "nats a word"
    assert load_run(tmp_path / "run").sample().startswith("the <unk>")


def test_at_least_two_words():
    with pytest.raises(ConfigError, match=r"data\.vocabulary must be at least 2, is 1"):
        decode(Config, {"task": "words", "data": {"vocabulary": 1}}, "c.toml")
