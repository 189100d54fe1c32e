"""The wheel works outside of the source tree: installed into an environment of its own, which borrows the dependencies."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from jrnn.train.config import config_names

ROOT = Path(__file__).parents[1]
TRAINING = [
    "train.steps=1",
    "train.steps_per_call=1",
    "model.hidden=2",
    "data.batch=2",
    "data.chunk=4",
    "sample.length=2",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("jrnn", "configs", "scripts/packaging"):
        shutil.copytree(
            ROOT / name,
            source / name,
            ignore=shutil.ignore_patterns("__pycache__", "libjrnn_loops.*"),
        )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(source),
    ]
    without_kernel = {
        **os.environ,
        "JRNN_BUILD_KERNEL": "0",
    }  # compiling it takes longer than all else here
    subprocess.run(pip, check=True, cwd=folder, env=without_kernel)
    (path,) = folder.glob("jrnn-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs the command `jrnn` of a fresh environment in an empty folder."""
    folder = tmp_path_factory.mktemp("installed elsewhere")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    python = folder / "env" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(pip, env=environment, check=True)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*words):
        program = folder / "env" / "bin" / "jrnn"
        ran = subprocess.run(
            [program, *words], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    code = "import importlib.util; print(importlib.util.find_spec('jrnn').origin)"
    process = subprocess.run(
        [python, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert Path(process.stdout.strip()) == packages / "jrnn" / "__init__.py"
    run.folder = folder
    return run


@pytest.mark.exhaustive
def test_the_wheel_holds_what_is_not_python(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"jrnn/configs/{name}.toml" for name in config_names()} <= set(names)
    assert {"jrnn/py.typed", "jrnn/nets/proto/caffe2.desc", "jrnn/configs/data/demand.csv"} <= set(
        names
    )
    assert not [name for name in names if not name.startswith("jrnn")]


@pytest.mark.exhaustive
def test_a_config_trains_by_name(installed):
    assert "1 steps, validation loss" in installed(
        "train", "char_lstm", *(f"--set={change}" for change in TRAINING)
    )
    assert (installed.folder / "runs" / "char_lstm" / "config.toml").exists()


def test_the_operators_are_listed(installed):
    assert "LSTMUnit(" in installed("ops", "lstm")


def test_cells_are_measured(installed):
    chosen = [
        "--cells",
        "min_gru",
        "--modes",
        "forward",
        "--sizes",
        "2x1x3x4",
        "--peers",
        "jrnn",
        "--turns",
        "1",
    ]
    assert "2x1x3x4" in installed("bench", *chosen)
