"""The examples of the documentation run and print what they say."""

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page, examples", [("recurrent_network.md", 15), ("plans.md", 12), ("conversion.md", 5)])
def test_page(page, examples):
    failed, attempted = doctest.testfile(str(DOCS / page), module_relative=False)
    assert failed == 0 and attempted > examples
