"""The examples of the documentation run and print what they say."""

import doctest
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_recurrent_network():
    failed, attempted = doctest.testfile(str(DOCS / "recurrent_network.md"), module_relative=False)
    assert failed == 0 and attempted > 15
