"""`jrnn convert`: from a factory to a folder of nets."""

from __future__ import annotations

import pytest

import jrnn
from jrnn.cli import main

pytestmark = pytest.mark.usefixtures("little_compilation")

FACTORY = """
import jax
import jax.numpy as jnp

def make():
    params = {"w": jnp.full((4, 3), 0.5), "b": jnp.zeros(4)}
    return lambda p, x: jax.nn.relu(x @ p["w"].T + p["b"]), (jnp.ones((2, 3)),), params
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "little_model.py").write_text(FACTORY)
    return tmp_path


@pytest.mark.exhaustive
def test_from_a_factory_to_nets(here):
    assert main(["convert", "little_model.py:make", "out"]) == 0
    package = jrnn.convert.Package.load("out")
    assert [op.type for op in package.predict_net.ops] == ["FC", "Relu"]


def test_mistakes_are_one_line(here, capsys):
    assert main(["convert", "little_model.py:made", "out"]) == 2
    assert "did you mean 'make'" in capsys.readouterr().err
    assert main(["convert", "out", "model.py"]) == 2
    assert "model.py: nets are not written as Python; jax.export.export" in capsys.readouterr().err
