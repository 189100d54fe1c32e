"""What the scripts of the shell share: which Python they choose, and what they say where there is none."""

import ast
import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def choose(tmp_path):
    """Runs find_python where 9.9 and 9.8 are supported, and each of these Pythons prints a version."""

    def choose(pythons, **environment):
        for name, version in pythons.items():
            program = tmp_path / (name if "/" in name else f"a folder/{name}")
            program.parent.mkdir(parents=True, exist_ok=True)
            program.write_text(f"#!/bin/sh\n{f'echo {version}' if version else 'exit 127'}\n")
            program.chmod(0o755)
        return subprocess.run(
            [
                "bash",
                "-c",
                'set -euo pipefail; source scripts/venv.sh; SUPPORTED="9.9 9.8"; find_python',
            ],
            cwd=ROOT,
            env={
                "PATH": f"{tmp_path / 'a folder'}:/usr/bin:/bin",
                "HOME": str(tmp_path),
                **environment,
            },
            capture_output=True,
            text=True,
        )

    return choose


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python9.8": "9.8", "python9.9": "9.9", "python3": "9.8"}, "python9.9"),
        (
            {"python9.8": "9.8", "python9.9": None},
            "python9.8",
        ),  # the newest does not run, or cannot make environments
        ({"python3": "9.9", "python9.8": "9.8"}, "python3"),
        ({"python3": "9.10", "python9.8": "9.8"}, "python9.8"),
    ],
)
def test_the_newest_python_that_works_is_chosen(choose, pythons, chosen):
    choice = choose(pythons)
    assert (choice.returncode, Path(choice.stdout.strip()).name) == (0, chosen)


def test_the_environment_that_trains_has_what_the_commands_of_the_readme_need():
    """`jrnn plot`, `jrnn export` to ONNX, the configuration digits, and texts of pretrained models."""
    script = (ROOT / "scripts" / "train.sh").read_text(encoding="utf-8")
    extras = re.search(r"^make_venv ([\w,]+)", script, re.M)[1].split(",")
    assert {"data", "onnx", "plot", "text"} <= set(extras)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras) <= project["optional-dependencies"].keys()


def test_a_release_of_jax_that_passed_is_noted_as_tested():
    with_tested = runpy.run_path(str(ROOT / "scripts" / "raise_jax.py"))["with_tested"]
    text = (ROOT / "jrnn" / "jaxprs" / "jax_internals" / "tracing.py").read_text("utf-8")
    assert "(0, 12): 0, (0, 99): 7}" in with_tested(text, 99, 7)
    assert "(0, 11): 5, (0, 12): 0}" in with_tested(text, 11, 5)
    assert with_tested(text, 11, 1) == text


def test_pythons_of_pyenv_are_found(choose, tmp_path):
    choice = choose({".pyenv/versions/9.9.1/bin/python9.9": "9.9", "python3": "9.8"})
    assert choice.stdout.strip() == f"{tmp_path}/.pyenv/versions/9.9.1/bin/python9.9"


def test_without_a_python_the_remedy_is_named(choose):
    choice = choose({"python3": "9.7"})
    assert (choice.returncode, choice.stdout) == (2, "")
    assert (
        "jrnn needs Python 9.9 or 9.8 with venv" in choice.stderr
        and "PYTHON=/path/to/python" in choice.stderr
    )


def test_the_python_that_is_asked_for_is_taken_or_refused(choose):
    pythons = {"python9.9": "9.9", "python9.8": "9.8", "old": "9.7"}
    assert choose(pythons, PYTHON="python9.8").stdout == "python9.8\n"
    refused = choose(pythons, PYTHON="old")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "PYTHON=old is not a Python of 9.9 or 9.8 with venv; it says: 9.7" in refused.stderr


def test_notebooks_hold_the_whole_programs_and_what_they_print(tmp_path, monkeypatch):
    make = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))
    for path in sorted((ROOT / "examples").glob("*.py")):
        cells = [cell for cell in make["cells_of"](path) if cell["cell_type"] == "code"]
        code = ast.parse("\n".join("".join(cell["source"]) for cell in cells))
        wanted = ast.parse(path.read_text(encoding="utf-8"))
        main = wanted.body[-1].body
        actual = [ast.dump(node) for node in code.body]
        assert actual[: len(wanted.body) - 2] == [ast.dump(node) for node in wanted.body[1:-1]]
        assert actual[-len(main) :] == [ast.dump(node) for node in main]
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    program = tmp_path / "small.py"
    body = "import sys\n\nX = 2\n\n\ndef f():\n    return X\n\n\n"
    program.write_text(
        f'"""Prints."""\n\n{body}if __name__ == "__main__":\n    print(f(), sys.argv)\n'
    )
    cells = make["notebook"](make["cells_of"](program))["cells"]
    assert [cell["source"] for cell in cells[:2]] == [
        ["# small\n", "\n", "Prints."],
        ["import sys\n", "\n", "X = 2"],
    ]
    make["run"](cells)
    assert cells[-1]["outputs"][0]["text"] == ["2 ['small.py']\n"]
    assert json.loads(json.dumps(cells)) == cells


# The tests on older JAX ------------------------------------------------------------------------------------------------

PYTHON = r"""#!/usr/bin/env bash
# In the place of a Python: makes environments that are copies of itself, and writes down which tests would run on which JAX.
here=$(cd "$(dirname "$0")" && pwd)
case "$*" in
*"-m venv "*) mkdir -p "${!#}/bin" && cp "$0" "${!#}/bin/python" && cp "$here/version" "${!#}/bin/version" ;;
*"-m pip install "*)
    minor=$(grep -o "jax==[0-9.]*[0-9]" <<<"$*" | head -n 1)
    if [ "$(cat "$here/version")" = 3.11 ] && [ "$minor" != jax==0.10 ]; then
        echo "ERROR: No matching distribution found for ${minor/==/ }" >&2
        exit 1
    fi
    echo "${minor#jax==}.7" >"$here/jax"
    ;;
*"-m pytest "*)
    echo "$(cat "$here/version") $(cat "$here/jax") $*" >>ran
    [ "$(cat "$here/jax")" != "${FAILS:-}" ]
    ;;
*'version("jax")'*) cat "$here/jax" ;;
*tomllib*) printf 'flax>=0.12\nnumpy>=2\n' ;;
*ElementTree*) echo 3 0 ;;
*"%d.%d"*) cat "$here/version" ;;
esac
"""


@pytest.fixture
def matrix(tmp_path):
    """Runs `matrix.sh --quick` in a folder with the scripts, on a machine with these Pythons; returns what ran, too."""

    def program(folder, name, version):
        folder.mkdir(parents=True)
        (folder / name).write_text(PYTHON)
        (folder / name).chmod(0o755)
        (folder / "version").write_text(version)

    def run(*versions, own="", **environment):
        (tmp_path / "scripts").mkdir()
        for name in ("matrix.sh", "venv.sh"):
            (tmp_path / "scripts" / name).write_text((ROOT / "scripts" / name).read_text())
        for version in versions:
            program(tmp_path / "programs" / version, f"python{version}", version)
        if own:
            program(tmp_path / ".venv" / "bin", "python", versions[0])
            (tmp_path / ".venv" / "bin" / "jax").write_text(own)
        path = ":".join(str(tmp_path / "programs" / version) for version in versions)
        done = subprocess.run(
            ["bash", "scripts/matrix.sh", "--quick"], cwd=tmp_path, capture_output=True, text=True,
            env={"PATH": f"{path}:/usr/bin:/bin", "HOME": str(tmp_path), **environment},
        )  # fmt: skip
        log = tmp_path / "ran"
        return done, log.read_text().splitlines() if log.exists() else []

    return run


def test_a_quick_matrix_has_the_newest_release_of_each_minor_but_that_of_the_whole_run(matrix):
    done, ran = matrix("3.13", "3.11", own="0.12.7")
    assert done.returncode == 0, done.stderr
    assert [line.split(" -m ")[0] for line in ran] == ["3.13 0.10.7", "3.13 0.11.7"]
    for part in (
        "as_users",
        "test_tiny.py",
        "test_primitive_rules.py",
        "loops/test_jax_names.py",
        "loops/test_matrix_states.py",
    ):
        assert (ROOT / "tests" / part).exists() and all(f"tests/{part}" in line for line in ran)
    assert "0.12.7" in done.stdout and "is tested whole in .venv" in done.stdout


def test_a_quick_matrix_fails_where_a_test_fails_and_says_what_a_python_lacks(matrix):
    done, ran = matrix("3.11", FAILS="0.10.7")
    assert done.returncode == 1 and [line.split(" -m ")[0] for line in ran] == ["3.11 0.10.7"]
    assert done.stdout.count("not made for this Python") == 2


def test_continuous_integration_runs_all_tests_and_those_on_older_jax(tmp_path):
    for folder in (".ci", "scripts"):
        (tmp_path / folder).mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    for name, status in (("test.sh", 1), ("matrix.sh", 0)):
        (tmp_path / "scripts" / name).write_text(f'echo "{name} $*"; exit {status}\n')
    (tmp_path / "chromium").write_text("#!/bin/sh\n")
    (tmp_path / "chromium").chmod(0o755)

    def run(*arguments):
        command, path = ["bash", ".ci/run", *arguments], {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        return subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True)

    whole, part = run(), run("-k", "scan")
    assert whole.stdout.splitlines() == ["test.sh ", "matrix.sh --quick"] and whole.returncode == 1
    assert part.stdout.splitlines() == ["test.sh -k scan"]
