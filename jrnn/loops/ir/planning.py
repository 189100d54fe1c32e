"""The budget of planning a loop. A loop that takes more is left to `jax.lax.scan`, and one that takes long is reported.

The budget is a number of questions about equations (`jaxprs/work.py`), about ten times what the steps
of all tests ask. So a pass that takes exponential time on some step ends, and a program has the same
plans on a slow machine. The clock decides about the warning alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jrnn import jaxprs
from jrnn.jaxprs import work
from jrnn.loops.ir import observers

MOST_PER_EQUATION = 1000  # a loop without matrix states takes 25 to 45, one with them up to 120
MOST_OF_SMALL_LOOPS = 500_000
SLOW_SECONDS = 10.0

clock = time.monotonic


@contextmanager
def budget(jaxpr: Any) -> Iterator[None]:
    """Bounds the planning of a loop in this context; `work.TooMuchWork` is raised at its end.

    Args:
        jaxpr: the step, closed or not.
    """
    equations = sum(1 for _ in jaxprs.all_equations(jaxprs.jaxpr_of(jaxpr)))
    limit = max(MOST_OF_SMALL_LOOPS, MOST_PER_EQUATION * equations)
    start = clock()
    is_reported = False

    def report_if_slow() -> None:
        nonlocal is_reported
        if not is_reported and clock() - start > SLOW_SECONDS:
            is_reported = True
            observers.LOG.warning(
                "%s: this loop of %d equations a step is still being planned after %d s; "
                "`with jrnn.plain_scans():` leaves loops to jax.lax.scan",
                observers.place_text(observers.current_place()),
                equations,
                SLOW_SECONDS,
            )

    with work.metered(limit, report_if_slow):
        yield
