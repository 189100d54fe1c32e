"""`jrnn convert`: from a factory to a folder of nets, and from nets to a Python file that runs without jrnn."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import jrnn
from jrnn.cli import main

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


def test_from_a_factory_to_nets_to_python(here, capsys):
    assert main(["convert", "little_model.py:make", "out"]) == 0
    package = jrnn.Package.load("out")
    assert [op.type for op in package.predict_net.ops] == ["FC", "Relu"]
    assert main(["convert", "out", "model.py", "--to", "py"]) == 0
    code = (
        "import sys; sys.modules['jrnn'] = None\n"
        "import jax.numpy as jnp, model\n"
        "print(model.predict(model.load_weights(), {'x': jnp.ones((2, 3))})['output'].tolist())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=here, check=True)
    np.testing.assert_array_equal(eval(run.stdout), np.full((2, 4), 1.5))
    assert "wrote model.py" in capsys.readouterr().out


def test_mistakes_are_one_line(here, capsys):
    assert main(["convert", "little_model.py:made", "out"]) == 2
    assert "did you mean 'make'" in capsys.readouterr().err
    assert main(["convert", "out", "model.py", "--to", "py"]) == 2
    assert "error: " in capsys.readouterr().err
