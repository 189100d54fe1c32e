"""A sample of random compositions of matrix states in chunks. More: `python tests/loops/random_compositions.py`."""

from __future__ import annotations

import pytest
import random_compositions
from random_compositions import fault

from jrnn.loops.affine.chunkwise.chunked import Chunkwise
from jrnn.loops.strategies import plan_chunks

pytestmark = pytest.mark.usefixtures("rewritten")


@pytest.mark.sample("0")
@pytest.mark.parametrize("start", range(0, 3000, 60))
def test_results_and_gradients_are_those_of_the_loop(start, monkeypatch):
    # They are set again after the test.
    monkeypatch.setattr(plan_chunks, "chunks_may_pay", plan_chunks.chunks_may_pay)
    monkeypatch.setattr(Chunkwise, "estimate", Chunkwise.estimate)
    random_compositions.often_in_chunks()
    if start == 0:
        assert [fault(seed, True) for seed in (1, 2, 7, 17, 71004)] == [
            (None, True)
        ] * 5  # all run in chunks
    else:
        assert [what for seed in range(start, start + 60) if (what := fault(seed, True)[0])] == []
