"""Loops are verified after every pass, and errors inside of passes are raised."""

import pytest

from jrnn.loops.loop import strict_passes


@pytest.fixture(autouse=True)
def verified():
    with strict_passes(True):
        yield
