"""What users run: programs with XLA's default flags, default options, and plans as the cost model chooses them.

All other tests compile with few optimizations. `programs.py` says what is compared; each group of programs is a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

import jrnn

HERE = Path(__file__).parent
# The same programs in each run here; others each week where CI runs them.
SEED = 10_000 * (date.today().isocalendar().week if os.environ.get("CI") else 60)
GROUPS = {
    "layers": (),
    "states": (),
    "random programs": (SEED, 30),
    "more random programs": (SEED + 30, 30),
    "random states": (SEED, 6),
    "small loops": (SEED, 4),
}


@pytest.mark.parametrize("group", GROUPS)
def test_results_are_those_of_jax(group):
    name = group.removeprefix("more ")
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and not k.startswith("JAX_")}
    environment["PYTHONPATH"] = str(Path(jrnn.__file__).parents[1])
    command = [sys.executable, str(HERE / "programs.py"), name, *map(str, GROUPS[group])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-3000:]}"
    assert json.loads(done.stdout.splitlines()[-1]) == {}, f"to see it again: {' '.join(command)}"
