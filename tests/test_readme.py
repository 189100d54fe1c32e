"""The README's code runs as printed, in one directory and in order; its scripts are there and are valid."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from pages import blocks_of, commands, run_blocks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = blocks_of(README)


def test_it_says_what_it_does_and_shows_it_before_the_two_commands_and_before_nets():
    (language, first), (_, scan) = BLOCKS[:2]
    assert language == "sh"
    assert [words[0] for words in commands(first)] == ["scripts/train.sh", "scripts/test.sh"]
    order = (
        "`jrnn.scan`",
        "docs/when_not.md",
        "![",
        first,
        scan,
        "| you |",
        "## A scan",
        "## A Caffe2 net",
    )
    places = [README.index(part) for part in order]
    assert places == sorted(places) and len(README[: places[5]].splitlines()) < 30


@pytest.mark.parametrize(
    "script",
    ["scripts/train.sh", "scripts/test.sh", "scripts/docs.sh", "scripts/matrix.sh", ".ci/run"],
)
def test_scripts_are_executable_and_valid(script):
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)


@pytest.mark.exhaustive
def test_the_blocks_run(tmp_path, monkeypatch):
    """In the README's order, in one directory: blocks use what the ones before them left there."""
    monkeypatch.chdir(tmp_path)
    ran = run_blocks("README.md", BLOCKS[1:])
    assert ran >= {"train", "sample", "show", "run", "check", "ops"}


def test_it_is_short():
    assert len(README.splitlines()) < 120


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
