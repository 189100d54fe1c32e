"""Loops run as they do for users: each is planned by what it costs, and an error inside of a pass leaves it to JAX.

Most loops of tests are too small to gain from that. Tests of passes and strategies use the fixture `rewritten`: all that can
leave a loop leaves it, and loops are verified after every pass. Tests that read which plan is chosen use `without_kernel`.
"""

import pytest
from eager import eager_passes

from jrnn.jaxprs import interned
from jrnn.loops.affine.chunkwise.chunked import Chunkwise
from jrnn.loops.costs import machines
from jrnn.loops.costs.times import Estimate
from jrnn.loops.derivatives import residuals
from jrnn.loops.ir import strict_passes
from jrnn.loops.kernels.native import library
from jrnn.loops.strategies import plan_chunks


@pytest.fixture(autouse=True)
def same_processor(monkeypatch):
    """The same plans on every processor."""
    monkeypatch.setattr(machines, "this_processor", lambda: machines.CPU)


@pytest.fixture(autouse=True)
def own_jaxprs():
    """A test finds no equal jaxpr of an earlier one, whose plan may have been made with other constants."""
    interned.interned.cache_clear()
    interned.equals_of.cache_clear()


@pytest.fixture
def rewritten(request, monkeypatch):
    """Loops are verified after every pass, errors inside of passes are raised, all that can leave a loop leaves it, and
    stacks count as larger than a cache. In a module that asks for it, a test with `without_kernel` goes without it.
    """
    if "without_kernel" in request.fixturenames:
        yield
        return
    monkeypatch.setattr(residuals, "CACHE_SHARE", 0)
    with strict_passes(True), eager_passes(0):
        yield


@pytest.fixture
def without_kernel(monkeypatch):
    """As for users whose installation has no kernel for CPUs; errors inside of passes are raised."""
    monkeypatch.setattr(library, "loaded", lambda: library.Library(reason="a test has none"))
    with strict_passes(True):
        yield


@pytest.fixture
def in_chunks_always(monkeypatch):
    """Loops over small matrix states and of few steps run in chunks too, so that their tests are quick."""
    monkeypatch.setattr(plan_chunks, "chunks_may_pay", lambda *args: True)
    monkeypatch.setattr(Chunkwise, "estimate", lambda *args: Estimate(0.0, 0))
    plan_chunks.plan_to_differentiate.cache_clear()
    yield
    plan_chunks.plan_to_differentiate.cache_clear()
