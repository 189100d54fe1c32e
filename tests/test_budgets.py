"""The budgets of lines, of each room and of the whole. A room that grows beyond its budget says why in CONTRIBUTING.md."""

import re

import pytest
from test_layering import FILES, PAGE, ROOMS, room

WHOLE = 66_860
LINES = {
    "errors": 170,
    "version": 10,
    "files": 800,
    "jaxprs": 2_180,
    "progress": 280,
    "loops": 15_680,
    "nn": 4_020,
    "nets/__init__": 10,
    "nets/memory": 100,
    "nets/ir": 250,
    "nets/execution_step": 70,
    "nets/registry": 310,
    "nets/gradient_maker": 170,
    "nets/proto": 1_330,
    "nets/graph": 2_060,
    "nets/builder": 330,
    "nets/schedule": 100,
    "nets/blobs": 70,
    "nets/lowering": 380,
    "nets/autodiff": 400,
    "nets/ops": 9_080,
    "nets/recurrent": 350,
    "nets/cells": 1_680,
    "nets/plans": 470,
    "corpus": 610,
    "models": 4_000,
    "interop": 700,
    "convert": 3_580,
    "onnx": 3_140,
    "testing": 3_160,
    "train": 6_090,
    "bench": 3_910,
    "cli": 1_340,
    "__main__": 10,
    "__init__": 170,
}
RAISED = re.compile(r"^- `([\w/]+)` \+([\d,]+): \S", re.MULTILINE)  # a line of CONTRIBUTING.md


@pytest.fixture(scope="module")
def lines():
    counts = dict.fromkeys(ROOMS, 0)
    for path in FILES:
        counts[room(path)] += len(path.read_text(encoding="utf-8").splitlines())
    return counts


@pytest.fixture(scope="module")
def raised():
    added = dict.fromkeys(ROOMS, 0)
    for name, more in RAISED.findall(PAGE.read_text(encoding="utf-8")):
        added[name] += int(more.replace(",", ""))
    return added


def test_each_room_is_within_its_budget(lines, raised):
    assert LINES.keys() == ROOMS.keys()
    over = {name: count for name, count in lines.items() if count > LINES[name] + raised[name]}
    assert not over, "delete, or say in CONTRIBUTING.md why the room grows: - `room` +LINES: reason"


def test_the_whole_is_within_its_budget(lines, raised):
    assert sum(lines.values()) <= WHOLE + sum(raised.values())
