"""The examples of docs/onnx.md run and print what they say, and importing jrnn does not import onnx."""

import doctest
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_page():
    failed, attempted = doctest.testfile(str(DOCS / "onnx.md"), module_relative=False)
    assert failed == 0 and attempted > 20


def test_onnx_loads_when_it_is_asked_for():
    code = "import sys, jrnn; assert not {'onnx', 'onnxruntime'} & set(sys.modules); jrnn.from_onnx"
    subprocess.run([sys.executable, "-c", code], check=True)
    hidden = "import sys; sys.modules['onnx'] = None; import jrnn; jrnn.to_onnx"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert "jrnn.to_onnx needs the extra 'onnx': pip install 'jrnn[onnx]'" in done.stderr
