"""Assertions about recurrent cells, for tests of your own, and hypothesis strategies for nets and lengths.

In: a cell, a layer or a model. Out: an AssertionError or a report with the difference. Read `asserts.py` first.

A cell is a step of JAX, `(carry, x) -> (carry, y)`, or with weights `(params, carry, x) -> (carry, y)`; a
`jrnn.nets.cells.Cell`; or a whole `Layer`. Each assertion raises AssertionError with the difference that it found.

`check_layer` checks a recurrent layer of any library, `check_kernel` a kernel next to its step, and `check_model` a whole
language model; `layer_tests`, `kernel_tests` and `model_tests` make pytests of them.
"""

from jrnn.testing.asserts import (
    assert_batch_invariant,
    assert_executors_agree,
    assert_gradients_agree,
    assert_padding_invariant,
)
from jrnn.testing.conformance import (
    ConformanceReport,
    Finding,
    check_kernel,
    check_layer,
    check_model,
    kernel_tests,
    layer_tests,
    model_tests,
)
from jrnn.testing.kernels import Kernel, sequence_kernel
from jrnn.testing.language_models import AdaptedModel, language_model
from jrnn.testing.recurrent_layers import recurrent_layer
from jrnn.testing.strategies import lengths, nets
from jrnn.testing.subjects import Layer

__all__ = [
    "AdaptedModel",
    "ConformanceReport",
    "Finding",
    "Kernel",
    "Layer",
    "assert_batch_invariant",
    "assert_executors_agree",
    "assert_gradients_agree",
    "assert_padding_invariant",
    "check_kernel",
    "check_layer",
    "check_model",
    "kernel_tests",
    "language_model",
    "layer_tests",
    "lengths",
    "model_tests",
    "nets",
    "recurrent_layer",
    "sequence_kernel",
]
