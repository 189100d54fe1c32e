"""Loops are verified after every pass, errors inside of passes are raised, and all that can leave a loop leaves it.

Tests that read what the cost model chooses use the fixture `judged`.
"""

import pytest

from jrnn.loops.loop import eager_passes, strict_passes


@pytest.fixture(autouse=True)
def verified():
    with strict_passes(True), eager_passes(0):
        yield


@pytest.fixture
def judged(verified):
    """Plans are chosen by what they cost, as they are for users."""
    with eager_passes(None):
        yield
