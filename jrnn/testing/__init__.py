"""Assertions about recurrent cells, for tests of your own, and hypothesis strategies for nets and lengths.

A cell is a step of JAX, `(carry, x) -> (carry, y)`, or with weights `(params, carry, x) -> (carry, y)`; a
`jrnn.cells.Cell`; or a whole `Layer`. Each assertion raises AssertionError with the difference that it found.
"""

from jrnn.testing.asserts import (
    assert_batch_invariant,
    assert_executors_agree,
    assert_gradients_agree,
    assert_padding_invariant,
)
from jrnn.testing.layers import Layer
from jrnn.testing.strategies import lengths, nets

__all__ = [
    "Layer",
    "assert_batch_invariant",
    "assert_executors_agree",
    "assert_gradients_agree",
    "assert_padding_invariant",
    "lengths",
    "nets",
]
