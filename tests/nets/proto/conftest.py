from pathlib import Path

import pytest

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "proto"


@pytest.fixture
def golden():
    """The folder of bytes that Caffe2 itself wrote (scripts/record/caffe2_protos.py)."""
    return GOLDEN
