"""The README's code runs as printed, in one directory and in order; its scripts are there and are valid."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from jrnn.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands(block):
    """The command lines of a block, without comments and empty lines."""
    return [words for line in block.splitlines() if (words := shlex.split(line, comments=True))]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A directory with the repository's configs, where the blocks leave their files for the ones after them."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


def test_it_opens_with_the_two_commands():
    language, first = BLOCKS[0]
    assert language == "sh"
    assert [words[0] for words in commands(first)] == ["scripts/train.sh", "scripts/test.sh"]
    assert README.index(first) < 100


@pytest.mark.parametrize("script", ["scripts/train.sh", "scripts/test.sh", ".ci/run"])
def test_scripts_are_executable_and_valid(script):
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)


@pytest.mark.parametrize("number", [n for n, (language, _) in enumerate(BLOCKS) if language == "python"])
def test_python_blocks_run(number, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    exec(compile(BLOCKS[number][1], f"README.md, block {number}", "exec"), {"__name__": "readme"})


def test_commands_run(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    run = [words for language, block in BLOCKS[1:] if language == "sh" for words in commands(block)]
    assert {words[1] for words in run} >= {"train", "sample", "show", "run", "check", "ops"}
    for words in run:
        assert words[0] == "jrnn"
        assert main(words[1:]) == 0, words


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
