"""What users run: programs with XLA's default flags, default options, and plans as the cost model chooses them.

All other tests compile with few optimizations. `programs.py` says what is compared; each group of programs is a process.
"""

from __future__ import annotations

import os
from datetime import date

import pytest
from programs import in_a_process

# The same programs in each run here; others each week where CI runs them.
SEED = 10_000 * (date.today().isocalendar().week if os.environ.get("CI") else 60)
GROUPS = {
    "states": (),
    "random programs": (SEED, 30),
    "more random programs": (SEED + 30, 30),
    "random states": (SEED, 6),
    "small loops": (SEED, 4),
}


@pytest.mark.parametrize("group", GROUPS)
def test_results_are_those_of_jax(group):
    in_a_process(group.removeprefix("more "), *GROUPS[group])
