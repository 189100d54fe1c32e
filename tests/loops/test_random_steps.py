"""A sample of random programs. Many more: `python tests/loops/random_steps.py --count 3000 --seed 0`."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
import random_steps
from random_steps import Program, difference, drawn, minimized

pytestmark = pytest.mark.usefixtures("rewritten")

ONE = Program(
    (), (("state", 0), ("sum", 1)), (("tanh", 0, 1), ("ordered_callback", 0, 0)), (("value", 0, 0),)
)


@pytest.mark.sample("8")
@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed):
    told = difference(drawn(seed), seed)
    assert told is None, f"{drawn(seed)}: {told}"


def broken(change):
    """A scan whose results are changed."""
    return lambda step, *args, **keywords: change(jax.lax.scan(step, *args, **keywords))


def scaled(out):
    return jax.tree.map(lambda leaf: leaf * (1 + 1e-7), out)


def raising(out):
    raise AssertionError("in a pass")


def widened(out):
    return jax.tree.map(lambda leaf: leaf.astype("float32"), out)


@pytest.mark.parametrize("change", [scaled, raising, widened])
def test_what_differs_is_found(change, monkeypatch):
    assert difference(ONE, 0) is None
    monkeypatch.setattr(random_steps, "scan", broken(change))
    assert difference(ONE, 0)


def test_a_second_call_of_a_callback_is_found(monkeypatch):
    monkeypatch.setattr(
        random_steps,
        "scan",
        lambda step, *a, **k: jax.lax.scan(lambda c, x: step(step(c, x)[0], x), *a, **k),
    )
    assert "told" in difference(replace(ONE, carries=(("fixed", 0),), outputs=()), 0)


@pytest.mark.exhaustive
def test_what_differs_is_made_smaller(monkeypatch):
    monkeypatch.setattr(random_steps, "scan", broken(scaled))
    small, told = minimized(ONE, 0)
    assert told and len(small.ingredients) < len(ONE.ingredients)
