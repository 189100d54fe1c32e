"""A small text and a small configuration: a run of a second or two."""

import resource
from contextlib import contextmanager

import pytest
from forks import Forks
from rich.console import Console

from jrnn.train.config import Config
from jrnn.train.toml_codec import decode

WORDS = "the cat sat on a mat and the dog ran after it until the sun went down over the hill\n"


@pytest.fixture(scope="session")
def words():
    """A line of text."""
    return WORDS


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(WORDS * 30, encoding="utf-8")
    return path


@pytest.fixture
def small(text_file):
    """Tables of a small configuration; `make_config` decodes them."""
    return {
        "data": {"path": str(text_file), "batch": 4, "chunk": 8, "validation": 0.2},
        "model": {"embedding": 4, "hidden": 8},
        "optimizer": {"learning_rate": 0.02},
        "train": {"steps": 24, "steps_per_call": 4, "validate_every": 12, "checkpoint_every": 8},
        "sample": {"length": 12, "prompt": "the "},
    }


@pytest.fixture
def make_config(small):
    def make(**changes) -> Config:
        tables = {name: {**table} for name, table in small.items()}
        for name, change in changes.items():
            tables.setdefault(name, {}).update(change)
        return decode(Config, tables, "small.toml")

    return make


@pytest.fixture
def quiet():
    return Console(quiet=True)


@pytest.fixture
def a_full_disk():
    """A context in which no file can grow beyond so many bytes: a write fails as it does where the disk is full."""

    @contextmanager
    def full(room=0):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return full


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    server = Forks(tmp_path_factory.mktemp("forks"))
    yield server
    server.close()
