"""All layers of `jrnn.nn`, compiled as users compile them, in a file of its own that runs next to the other programs."""

from __future__ import annotations

from programs import in_a_process


def test_results_are_those_of_jax():
    in_a_process("layers")
