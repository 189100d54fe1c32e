"""Words: cut, counted and numbered; and a short training of a model of them."""

import math

import numpy as np
import pytest

from jrnn.errors import ConfigError
from jrnn.train import Config, sample_run, train
from jrnn.train.text import TextData, WordsConfig, WordVocabulary, cut
from jrnn.train.toml_codec import decode


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
    data = TextData.load(WordsConfig(path=str(tmp_path / "t.txt"), batch=2, chunk=3, validation=0.5), 0)
    assert data.vocabulary.words == ("<unk>", "a", "b")
    assert set(data.validation.streams.ravel().tolist()) == {0, 1}


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
    assert sample_run(tmp_path / "run").startswith("the <unk>")


def test_at_least_two_words():
    with pytest.raises(ConfigError, match=r"data\.vocabulary must be at least 2, is 1"):
        decode(Config, {"task": "words", "data": {"vocabulary": 1}}, "c.toml")
