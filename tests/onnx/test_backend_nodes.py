"""ONNX's own backend node tests of the RNN family, If, Loop and Scan: all of them."""

import collections
import importlib
import pkgutil
import warnings

import numpy as np
import pytest
from onnx.backend.test.case import node as cases

import jrnn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the package's own
    for family in ("rnn", "gru", "lstm", "if", "loop", "scan"):  # each module registers its cases
        names = [name for _, name, _ in pkgutil.iter_modules(cases.__path__) if name.rstrip("_") == family]
        importlib.import_module(f"onnx.backend.test.case.node.{names[0]}")
CASES = {case.name: case for case in cases._NodeTestCases}


def test_all_cases_were_found():
    families = collections.Counter(name.removeprefix("test_").removeprefix("simple_")[:2] for name in CASES)
    least = {"rn": 4, "gr": 4, "ls": 4, "if": 3, "lo": 3, "sc": 2}  # onnx 1.19; 1.23 has 6, 6, 6, 3, 3, 4
    assert families.keys() == least.keys() and all(families[name] >= count for name, count in least.items()), families


@pytest.mark.parametrize("name", CASES)
def test_node(name):
    case = CASES[name]
    model = jrnn.from_onnx(case.model)
    for inputs, expected in case.data_sets:
        found = model({spec.name: value for spec, value in zip(model.inputs, inputs, strict=True)})
        assert len(found) == len(expected)
        for value, other in zip(found.values(), expected, strict=True):
            same(value, other, case.rtol)


def same(value, other, rtol):
    if isinstance(other, list):
        assert len(value) == len(other)
        for a, b in zip(value, other, strict=True):
            same(a, b, rtol)
        return
    assert value.shape == np.shape(other)
    np.testing.assert_allclose(np.asarray(value, np.float64), np.asarray(other, np.float64), rtol=rtol, atol=1e-6)
