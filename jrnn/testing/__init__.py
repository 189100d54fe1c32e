"""Assertions about recurrent cells, for tests of your own, and hypothesis strategies for nets and lengths.

A cell is a step of JAX, `(carry, x) -> (carry, y)`, or with weights `(params, carry, x) -> (carry, y)`; a
`jrnn.cells.Cell`; or a whole `Layer`. Each assertion raises AssertionError with the difference that it found.

`check_layer` checks a recurrent layer of any library, and `layer_tests` makes a pytest of it.
"""

from jrnn.testing.asserts import (
    assert_batch_invariant,
    assert_executors_agree,
    assert_gradients_agree,
    assert_padding_invariant,
)
from jrnn.testing.conformance import Finding, LayerReport, check_layer, layer_tests
from jrnn.testing.recurrent_layers import AdaptedLayer, recurrent_layer
from jrnn.testing.strategies import lengths, nets
from jrnn.testing.subjects import Layer

__all__ = [
    "AdaptedLayer",
    "Finding",
    "Layer",
    "LayerReport",
    "assert_batch_invariant",
    "assert_executors_agree",
    "assert_gradients_agree",
    "assert_padding_invariant",
    "check_layer",
    "layer_tests",
    "lengths",
    "nets",
    "recurrent_layer",
]
