"""The readers under mutated files, in a process with limits: a fixed sample here, more by `python scripts/fuzz.py`."""

import importlib.util
from pathlib import Path

import pytest

from jrnn.errors import JrnnError

ROOT = Path(__file__).resolve().parents[3]
CORPUS = Path(__file__).with_name("corpus")
FINDINGS = sorted(p.relative_to(CORPUS).as_posix() for p in CORPUS.glob("*/*"))

PLANTED = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
import fuzz

def planted(data, calls=[]):
    calls.append(data)
    if len(calls) == 1: raise KeyError("planted")
    if len(calls) == 2: bytearray(10 * fuzz.MEMORY)
    if len(calls) == 3: planted_depth()
    if len(calls) == 4:
        while True: pass

def planted_depth(): planted_depth()

fuzz.SECONDS = 0.3
fuzz.READERS["tensor"] = planted
fuzz.main()
"""


@pytest.fixture
def fuzz(monkeypatch, tmp_path):
    """The script as a module; what it finds is kept out of the corpus."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "scripts" / "fuzz.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CORPUS", tmp_path / "corpus")
    monkeypatch.setattr(module, "TESTS", ROOT / "tests")
    return module


@pytest.mark.exhaustive
def test_a_fixed_sample(fuzz, capfd):
    assert fuzz.main(["--cases", "1200"]) == 0, capfd.readouterr().out
    assert "1200 cases in" in capfd.readouterr().out


@pytest.mark.parametrize("finding", FINDINGS)
def test_what_was_found_before(fuzz, finding):
    reader = fuzz.READERS[finding.split("/")[0]]
    try:
        reader((CORPUS / finding).read_bytes())
    except JrnnError as e:
        assert 0 < len(str(e)) < 4000


@pytest.mark.exhaustive
def test_the_watch_sees_what_goes_wrong(fuzz, monkeypatch, tmp_path, capfd):
    """Another error, a huge allocation, endless recursion, and a reader that does not end."""
    script = tmp_path / "planted.py"
    script.write_text(PLANTED)
    monkeypatch.setattr(fuzz, "SCRIPT", str(script))
    assert fuzz.main(["--cases", "4", "--reader", "tensor"]) == 1
    said = capfd.readouterr().out
    for wrong in (
        "KeyError",
        "MemoryError",
        "RecursionError",
        "ended the process (Profiling timer expired)",
    ):
        assert wrong in said
    assert "4 cases in" in said and "4 findings" in said
    assert len(list((tmp_path / "corpus" / "tensor").iterdir())) == 4


def test_cases_are_functions_of_the_seed(fuzz):
    first, again, other = (fuzz.Cases(seed, fuzz.READERS) for seed in (0, 0, 1))
    assert (
        [first(k) for k in range(30)]
        == [again(k) for k in range(30)]
        != [other(k) for k in range(30)]
    )
    assert {first(k)[0] for k in range(30)} == set(fuzz.READERS)
