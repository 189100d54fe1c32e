"""Loops are verified after every pass, errors inside of passes are raised, all that can leave a loop leaves it, and stacks
count as larger than a cache.

Tests that read what the cost model chooses use the fixture `judged`.
"""

from dataclasses import replace

import pytest
from eager import eager_passes

from jrnn.loops.costs import machines
from jrnn.loops.costs.estimates import Estimate
from jrnn.loops.ir import strict_passes
from jrnn.loops.kernels.native import library
from jrnn.loops.rules import residuals
from jrnn.loops.rules.residuals import NEAR
from jrnn.loops.strategies import chooser, chunks


@pytest.fixture(autouse=True)
def verified(monkeypatch):
    monkeypatch.setattr(residuals, "NEAR", 0)
    monkeypatch.setattr(machines, "this_processor", lambda: machines.CPU)  # the same plans on every processor
    with strict_passes(True), eager_passes(0):
        yield


@pytest.fixture
def judged(verified, monkeypatch):
    """Plans are chosen by what they cost, as they are for users whose installation has no kernel for CPUs."""
    monkeypatch.setattr(residuals, "NEAR", NEAR)
    monkeypatch.setattr(library, "loaded", lambda: library.Library(reason="a test has none"))
    with eager_passes(None):
        yield


@pytest.fixture
def in_chunks_always(monkeypatch):
    """Loops over small matrix states and of few steps run in chunks too, so that their tests are quick."""
    propose = chunks.propose
    free = Estimate(0.0, 0)
    monkeypatch.setattr(chunks, "may_pay", lambda *args: True)
    monkeypatch.setattr(chunks, "propose", lambda problem: [replace(c, estimate=free) for c in propose(problem)])
    chooser._differentiated.cache_clear()
    yield
    chooser._differentiated.cache_clear()
