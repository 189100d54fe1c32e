"""The examples of docs/nn.md run and print what they say."""

import doctest
from pathlib import Path


def test_the_examples_of_the_page():
    page = Path(__file__).parents[2] / "docs" / "nn.md"
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert failed == 0 and attempted > 20
