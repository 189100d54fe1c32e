"""`jrnn convert`: from a factory to a folder of nets, and from nets to a Python file that runs without jrnn."""

from __future__ import annotations

import subprocess
import sys

import jax
import numpy as np
import pytest
from zoo import model

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
def test_from_a_factory_to_nets_to_python(here, capsys):
    assert main(["convert", "little_model.py:make", "out"]) == 0
    package = jrnn.convert.Package.load("out")
    assert [op.type for op in package.predict_net.ops] == ["FC", "Relu"]
    assert main(["convert", "out", "model.py"]) == 0
    code = (
        "import sys; sys.modules['jrnn'] = None\n"
        "import jax.numpy as jnp, model\n"
        "print(model.predict(model.load_weights(), {'x': jnp.ones((2, 3))})['output'].tolist())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=here, check=True
    )
    np.testing.assert_array_equal(eval(run.stdout), np.full((2, 4), 1.5))
    assert "wrote model.py" in capsys.readouterr().out


RUN_ALONE = """
import importlib, sys
sys.modules["jrnn"] = None
import jax, numpy as np
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    case = dict(np.load(name + "_case.npz"))
    inputs = {k[3:]: jax.numpy.asarray(v) for k, v in case.items() if k.startswith("in:")}
    found = jax.jit(module.predict)(module.load_weights(), inputs)
    for k, v in case.items():
        if k.startswith("out:"):
            np.testing.assert_allclose(found[k[4:]], v, rtol=0, atol=1e-5 * max(1, abs(v).max()), err_msg=name)
print("equal")
"""
ALONE = ["nn_lstm_lengths", "nnx_rnn_gru", "cell_lstm_with_attention", "cond_and_while"]


@pytest.mark.exhaustive
def test_written_files_run_where_there_is_no_jrnn(here):
    for name in ALONE:
        fn, args, params = model(name)
        package = jrnn.from_jax(fn, *args, params=params)
        package.save(name)
        assert main(["convert", name, f"{name}.py"]) == 0
        inputs = dict(zip(package.input_names, jax.tree.leaves(args), strict=True))
        outputs = jax.jit(package.to_jax())(inputs)
        np.savez(
            f"{name}_case.npz",
            **{f"in:{k}": v for k, v in inputs.items()},
            **{f"out:{k}": v for k, v in outputs.items()},
        )
    run = subprocess.run(
        [sys.executable, "-c", RUN_ALONE, *ALONE], capture_output=True, text=True, cwd=here
    )
    assert (run.stdout, run.stderr) == ("equal\n", "")


def test_mistakes_are_one_line(here, capsys):
    assert main(["convert", "little_model.py:made", "out"]) == 2
    assert "did you mean 'make'" in capsys.readouterr().err
    assert main(["convert", "out", "model.py"]) == 2
    assert "error: " in capsys.readouterr().err
