"""Describes what wrong resets of a layer do. This distinguishes faults with the same smallest counterexample.

Shapes: T time, N batch.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jrnn.testing.invariance import differs, results_differ, run_layer, state_rows
from jrnn.testing.subjects import Layer, Outputs, PyTree


def _begins(layer: Layer, at: int | None, anew: PyTree) -> Outputs:
    """The results of sequence 0 if a new sequence begins before step `at` in the states `anew`; None: nowhere."""
    first = None if layer.bidirectional else layer.state
    row = slice(0, 1)
    before = layer.x[:at, row]
    after = layer.x[len(before) :, row]
    parts = []
    last = state_rows(layer, anew if at == 0 else first, row)
    if len(before):
        y, last = run_layer(layer, before, last)
        parts.append(y)
    if at is not None:
        last = state_rows(layer, anew, row)
    if len(after):
        y, last = run_layer(layer, after, last)
        parts.append(y)
    return np.concatenate(parts), None if layer.bidirectional else last


def states_anew(layer: Layer, reset_to: str) -> Any:
    """The states that a reset puts a layer back to; None for its own."""
    first = None if layer.bidirectional else layer.state
    states = {"initial": first, "own": None}
    return states[reset_to] if reset_to in states else jax.tree.map(np.zeros_like, first)


def _effect_of_reset(layer: Layer, t: int, tolerance: float) -> str:
    """What a reset of sequence 0 before step t does, in words."""
    steps, batch = layer.size
    flags = np.zeros((steps, batch), bool)
    flags[t, 0] = True
    first = None if layer.bidirectional else layer.state
    y, last = run_layer(layer, layer.x, first, resets=flags)
    row = slice(0, 1)
    computed = y[:, row], None if layer.bidirectional else state_rows(layer, last, row)
    plain, _ = run_layer(layer, layer.x, first)
    if differs("y", y[:, 1:], plain[:, 1:], tolerance):
        return "changes other sequences"
    places = [t, None, *(at for at in range(steps + 1) if at != t)]
    for reset_to in dict.fromkeys((layer.reset_to, "zeros", "initial")):
        anew = states_anew(layer, reset_to)
        where = "" if reset_to == layer.reset_to else f" and begins in the states {reset_to!r}"
        for at in places:
            if at == steps and anew is None:
                continue  # the last state would be the layer's own first one, which is not known
            if results_differ(computed, _begins(layer, at, anew), tolerance) is None:
                effects = {None: "is ignored", steps: "acts after the last step"}
                effects[t] = "acts there" if where else "is right"
                return effects.get(at, f"acts before step {at}") + where
    return "is neither ignored nor a beginning at any step"


def effects_of_resets(layer: Layer, tolerance: float) -> str:
    """What resets before the first step, one between and the last do: in this most faults differ."""
    steps = layer.size[0]
    effects = []
    for t in sorted({0, steps // 2, steps - 1}):
        effects.append(f"before step {t} {_effect_of_reset(layer, t, tolerance)}")
    return f"of the whole layer, a reset {'; '.join(effects)}"
