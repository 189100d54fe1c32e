"""`jrnn doctor` and the version: what is there, and what is missing."""

import importlib.metadata
import io
import re
import tomllib
from pathlib import Path

import pytest

import jrnn
from jrnn.cli import doctor, main


def test_the_version_is_one():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version", "readme"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "jrnn.version.__version__"
    }
    assert re.fullmatch(r"\d+\.\d+\.\d+", jrnn.__version__)


def test_the_command_says_its_version(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--version"])
    assert (e.value.code, capsys.readouterr().out) == (0, f"jrnn {jrnn.__version__}\n")


def test_a_faulty_release_is_named(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda name: "0.11.1")
    doctor.examine()
    out = capsys.readouterr().out
    assert "jaxlib 0.11.1: a loop that stacks" in out and "pip install 'jaxlib!=0.11.1'" in out
    monkeypatch.setattr(doctor, "version_of", lambda name: "0.11.2")
    doctor.examine()
    assert "faulty" not in capsys.readouterr().out


def test_what_is_there(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"jrnn {jrnn.__version__}\n")
    for line in (
        "cpu:0",
        "a loop compiles and runs in",
        f"  jax               {importlib.metadata.version('jax')}",
    ):
        assert line in out
    assert re.search(
        r"kernel for CPUs \(executor 'native'\)\n  (it uses .*base, the first|it was not built)",
        out,
    )
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    named = {p.name for p in doctor.packages() if not p.extra}
    assert named == {line.partition(">=")[0] for line in project["dependencies"]}
    assert {p.extra for p in doctor.packages()} == {"", *project["optional-dependencies"]} - set(
        doctor.FOR_CONTRIBUTORS
    )
    assert {p.extra for p in doctor.packages()} == {"", *doctor.USES}


def test_what_is_missing_or_too_old(monkeypatch):
    version = importlib.metadata.version
    changed = {"optax": "0.1.9", "matplotlib": None}

    def changed_version(name):
        if name not in changed:
            return version(name)
        if changed[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return changed[name]

    monkeypatch.setattr(importlib.metadata, "version", changed_version)
    out = io.StringIO()
    assert not doctor.examine(out)
    assert "  optax: jrnn needs it: pip install 'optax>=0.2.5'\n" in out.getvalue()
    assert "  plot: for pictures: pip install 'jrnn[plot]'\n" in out.getvalue()
    changed["optax"] = "1.0"
    assert doctor.examine(io.StringIO())  # an extra may be absent


def test_an_installation_without_the_source_tree_says_what_it_asks_for(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "HERE", tmp_path / "jrnn")
    lines = [
        "numpy<3,>=2",
        'onnx>=1.19; extra == "onnx"',
        'jrnn[test]; extra == "dev"',
        'ruff; extra == "dev"',
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    assert [(p.name, p.wanted, p.extra) for p in doctor.packages()] == [
        ("numpy", "2", ""),
        ("onnx", "1.19", "onnx"),
    ]
