"""The examples of the documentation run and print what they say."""

import doctest
from pathlib import Path

import pytest
from pages import blocks_of, run_blocks

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize(
    "page, examples",
    [("recurrent_network.md", 15), ("plans.md", 13), ("conversion.md", 5), ("seq2seq.md", 8), ("scan.md", 30)],
)
def test_page(page, examples):
    failed, attempted = doctest.testfile(str(DOCS / page), module_relative=False)
    assert failed == 0 and attempted > examples


@pytest.mark.parametrize(
    "page, wanted",
    [
        ("checking.md", {"check"}),
        ("own_tasks.md", {"train", "runs", "check"}),
        ("tutorial.md", {"show", "run", "convert", "check", "train"}),
    ],
)
def test_commands_of_a_page(page, wanted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_blocks(page, blocks_of((DOCS / page).read_text(encoding="utf-8"))) == wanted


def test_a_task_of_ones_own_takes_50_lines():
    task = next(
        block for _, block in blocks_of((DOCS / "own_tasks.md").read_text(encoding="utf-8")) if "TaskKind(" in block
    )
    assert sum(bool(line.strip()) for line in task.splitlines()) <= 50
