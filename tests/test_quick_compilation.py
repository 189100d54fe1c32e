"""The flags that make tests compile quickly: jaxlib is asked for them, once."""

import json
import os

import pytest
import quick_compilation

KNOWN, UNKNOWN = "--xla_backend_optimization_level=0", "--xla_no_such_flag=true"


@pytest.fixture
def asked(monkeypatch):
    """What jaxlib is asked, where it knows one flag of two."""
    asked = []
    monkeypatch.setattr(quick_compilation, "WANTED", (KNOWN, UNKNOWN))
    monkeypatch.setattr(quick_compilation, "accepts", lambda flags: asked.append(list(flags)) or list(flags) == [KNOWN])
    return asked


def test_a_program_tells_which_flags_there_are():
    assert quick_compilation.accepts([KNOWN])
    assert not quick_compilation.accepts([UNKNOWN])


def test_the_tests_run_with_what_there_is():
    assert set(quick_compilation.flags()) <= set(os.environ["XLA_FLAGS"].split())


def test_each_jaxlib_is_asked_once(asked, tmp_path, monkeypatch):
    cache = tmp_path / "new" / "flags.json"
    assert quick_compilation.flags(cache) == quick_compilation.flags(cache) == [KNOWN]
    assert asked == [[KNOWN, UNKNOWN], [KNOWN], [UNKNOWN]]
    monkeypatch.setattr(quick_compilation, "version", lambda name: "99.0")
    assert quick_compilation.flags(cache) == [KNOWN]
    assert len(asked) == 6 and len(json.loads(cache.read_text())) == 2


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_damaged_cache_is_written_again(asked, tmp_path, content):
    cache = tmp_path / "flags.json"
    cache.write_text(content)
    assert quick_compilation.flags(cache) == quick_compilation.flags(cache) == [KNOWN]
    assert len(asked) == 3


def test_without_a_place_for_the_answer_jaxlib_is_asked_again(asked, tmp_path):
    (tmp_path / "file").touch()
    for _ in range(2):
        assert quick_compilation.flags(tmp_path / "file" / "flags.json") == [KNOWN]
    assert len(asked) == 6
