"""What makes tests compile quickly: flags, which jaxlib is asked for once, and compiled programs that are kept."""

import json
import os
from pathlib import Path

import jax
import pytest
import quick_compilation

KNOWN, UNKNOWN = "--xla_backend_optimization_level=0", "--xla_no_such_flag=true"


@pytest.fixture
def asked(monkeypatch):
    """What jaxlib is asked, where it knows one flag of two."""
    asked = []
    monkeypatch.setattr(quick_compilation, "WANTED", (KNOWN, UNKNOWN))
    monkeypatch.setattr(
        quick_compilation,
        "accepts",
        lambda flags: asked.append(list(flags)) or list(flags) == [KNOWN],
    )
    return asked


@pytest.mark.exhaustive
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


def test_compiled_programs_are_kept_in_a_folder_of_the_machine(tmp_path, monkeypatch):
    folder = Path(quick_compilation.kept(tmp_path)["JAX_COMPILATION_CACHE_DIR"])
    assert folder.parent == tmp_path and folder.is_dir()
    (folder / "program").write_bytes(bytes(100))
    monkeypatch.setattr(quick_compilation, "LIMIT", 100)
    assert quick_compilation.kept(tmp_path) and (folder / "program").exists()
    monkeypatch.setattr(quick_compilation, "LIMIT", 99)
    assert quick_compilation.kept(tmp_path) and not (folder / "program").exists()


def test_without_a_place_for_them_programs_are_not_kept(tmp_path):
    (tmp_path / "file").touch()
    assert quick_compilation.kept(tmp_path / "file" / "compiled") == {}


def test_what_is_compiled_is_kept():
    """By the tests' own settings: a program that no test has compiled before leaves a file."""
    folder = jax.config.jax_compilation_cache_dir
    assert folder == quick_compilation.kept().get("JAX_COMPILATION_CACHE_DIR")
    if folder is not None:  # the clone can be written
        before = set(Path(folder).iterdir())
        jax.jit(lambda x: x * float.fromhex(os.urandom(4).hex()))(1.0)
        assert set(Path(folder).iterdir()) - before
