"""Golden data recorded from torch by scripts/record/torch_layers.py."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(__file__).parents[1] / "golden"


class Recording:
    """The arrays of one file, by the name `case|run|array`."""

    def __init__(self, file: str) -> None:
        with np.load(GOLDEN / file, allow_pickle=False) as stored:
            index = json.loads(str(stored["index"]))
            flat = {name: stored[name] for name in ("float32", "float64")}
        self.facts = index["facts"]
        self._arrays = {
            name: flat[dtype][start : start + int(np.prod(shape))].reshape(shape)
            for name, (dtype, start, shape) in index["arrays"].items()
        }

    def get(self, case: str, run: str) -> dict[str, np.ndarray]:
        """The arrays of one run of a case (`in`, `full` or `ragged`), by name."""
        prefix = f"{case}|{run}|"
        return {
            name.removeprefix(prefix): array
            for name, array in self._arrays.items()
            if name.startswith(prefix)
        }


@pytest.fixture(scope="session")
def recording():
    """`recording("torch_lstm.npz")` -> Recording; each file is read once."""
    return cache(Recording)
