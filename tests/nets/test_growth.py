"""The work that a net needs grows with its size, not with the square of its size: twice the operators, twice the calls."""

import sys

import jax
import numpy as np
import pytest
from growth import NETS, STAGES

import jrnn
from jrnn.nets.graph import to_svg
from jrnn.nets.ir import Arg, Net, Op


def calls(work, argument):
    """How many functions are called, and how often a generator continues."""
    count = 0

    def see(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        work(argument)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.exhaustive(
    "chain-read",
    "chain-read text",
    "chain-infer_shapes",
    "chain-to_svg",
    "fan-read text",
    "fan-infer_shapes",
    "fan-add_gradients",
    "fan-to_svg",
    "shared-read text",
    "shared-infer_shapes",
    "shared-add_gradients",
    "shared-to_svg",
    "in place-read text",
    "in place-infer_shapes",
    "in place-add_gradients",
    "in place-to_svg",
)
@pytest.mark.parametrize("stage", [s for s in STAGES if s != "run"])
@pytest.mark.parametrize("kind", NETS)
def test_twice_the_operators_are_twice_the_work(stage, kind):
    work = STAGES[stage]
    small, large = (work.prepare(NETS[kind](n)) for n in (150, 300))
    work.run(small)  # fills caches
    jax.clear_caches()
    assert calls(work.run, large) < 2.5 * calls(work.run, small)


@pytest.mark.exhaustive("chain", "shared")
@pytest.mark.parametrize("kind", NETS)
def test_twice_the_operators_are_twice_the_picture(kind):
    small, large = (len(to_svg(NETS[kind](n))) for n in (150, 300))
    assert large < 2.5 * small


def test_text_in_text_in_text():
    """Backslashes of strings in strings double at each level; protobuf's time for a run of them is quadratic."""
    net = Net("z\\\\\x01\\u0041\\x4\n'\"é")
    for _ in range(14):
        net = Net("", (Op("Do", args=(Arg("step_net", net, "s"),)),))
    assert jrnn.read_net(jrnn.nets.format_net(net)) == net


def test_equal_calls_are_checked_once(monkeypatch):
    """An operator's results are bounded by tracing it, which is slower than running it."""
    traced = []
    real = jrnn.nets.lowering.check_call
    monkeypatch.setattr(
        jrnn.nets.lowering, "check_call", lambda *args: traced.append(args) or real(*args)
    )
    jrnn.run_net(NETS["chain"](50), {"x": np.ones(4, np.float32), "w": np.ones(4, np.float32)})
    assert len(traced) == 1
