"""What the scripts of the shell share: which Python they choose, and what they say where there is none."""

import ast
import json
import runpy
import subprocess
import sys
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
            ["bash", "-c", 'set -euo pipefail; source scripts/venv.sh; SUPPORTED="9.9 9.8"; find_python'],
            cwd=ROOT,
            env={"PATH": f"{tmp_path / 'a folder'}:/usr/bin:/bin", "HOME": str(tmp_path), **environment},
            capture_output=True,
            text=True,
        )

    return choose


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python9.8": "9.8", "python9.9": "9.9", "python3": "9.8"}, "python9.9"),
        ({"python9.8": "9.8", "python9.9": None}, "python9.8"),  # the newest does not run, or cannot make environments
        ({"python3": "9.9", "python9.8": "9.8"}, "python3"),
        ({"python3": "9.10", "python9.8": "9.8"}, "python9.8"),
    ],
)
def test_the_newest_python_that_works_is_chosen(choose, pythons, chosen):
    choice = choose(pythons)
    assert (choice.returncode, Path(choice.stdout.strip()).name) == (0, chosen)


def test_pythons_of_pyenv_are_found(choose, tmp_path):
    choice = choose({".pyenv/versions/9.9.1/bin/python9.9": "9.9", "python3": "9.8"})
    assert choice.stdout.strip() == f"{tmp_path}/.pyenv/versions/9.9.1/bin/python9.9"


def test_without_a_python_the_remedy_is_named(choose):
    choice = choose({"python3": "9.7"})
    assert (choice.returncode, choice.stdout) == (2, "")
    assert "jrnn needs Python 9.9 or 9.8 with venv" in choice.stderr and "PYTHON=/path/to/python" in choice.stderr


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
    program.write_text(f'"""Prints."""\n\n{body}if __name__ == "__main__":\n    print(f(), sys.argv)\n')
    cells = make["notebook"](make["cells_of"](program))["cells"]
    assert [cell["source"] for cell in cells[:2]] == [["# small\n", "\n", "Prints."], ["import sys\n", "\n", "X = 2"]]
    make["run"](cells)
    assert cells[-1]["outputs"][0]["text"] == ["2 ['small.py']\n"]
    assert json.loads(json.dumps(cells)) == cells
