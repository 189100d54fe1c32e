"""Plans: what the real Caffe2 recorded, the builder's loops and branches, limits, and what is refused."""

import pathlib
from dataclasses import replace

import jax
import numpy as np
import pytest
from build_plans import (
    Do,
    DoParallel,
    DoUntil,
    DoWhile,
    For,
    If,
    IfNot,
    Switch,
    SwitchNot,
    Until,
    While,
    execution_step,
    make_plan,
)

from jrnn import Net
from jrnn.errors import FormatError, NetError, OpError, PlanError
from jrnn.nets import Op
from jrnn.nets.plans import ExecutionStep, Plan, run_plan
from jrnn.nets.proto import (
    read_net_or_plan,
    read_plan,
    serialize_net,
    serialize_plan,
    write_net,
    write_plan,
)

GOLDEN = np.load(pathlib.Path(__file__).parents[2] / "golden" / "plans.npz")
NAMES = [k.removesuffix("|plan") for k in GOLDEN.files if k.endswith("|plan")]


@pytest.mark.parametrize("name", NAMES)
def test_recorded_plan(name):
    plan = read_plan(GOLDEN[name + "|plan"].tobytes())
    got = run_plan(plan, max_iterations=100)
    want = {k.split("|")[2]: GOLDEN[k] for k in GOLDEN.files if k.startswith(name + "|out|")}
    assert len(want) >= 4
    for blob, value in want.items():
        assert np.asarray(got[blob]).dtype == value.dtype and np.array_equal(got[blob], value), blob


@pytest.mark.parametrize("name", NAMES)
def test_recorded_plan_survives_writing(name, tmp_path):
    plan = read_plan(GOLDEN[name + "|plan"].tobytes())
    assert read_plan(serialize_plan(plan)) == plan
    for file in (tmp_path / "p.pb", tmp_path / "p.pbtxt"):
        write_plan(plan, file)
        assert read_plan(file) == read_net_or_plan(file) == plan


COUNT = Net("count", (Op.of("Add", ["i", "one"], ["i"]),), ("i", "one"))
RAN = Net("ran", (Op.of("Add", ["ran", "one"], ["ran"]),), ("ran", "one"))
BELOW = Net("is_below", (Op.of("LT", ["i", "five"], ["below"]),), ("i", "five"), ("below",))
START = {"i": 0, "ran": 0, "one": 1, "five": 5, "yes": np.array([True]), "no": np.array([False])}


def counts(*parts, **blobs):
    """How far the two counting nets came."""
    state = run_plan(make_plan("p", *parts), {**START, **blobs}, max_iterations=50)
    return int(state["i"]), int(state["ran"])


def clears(name, blob):
    return Net(name, (Op.of("ConstantFill", [], [blob], shape=[1], value=False, dtype=5),))


def test_for():
    assert counts(For("f", COUNT, 3)) == (3, 0)
    assert counts(For("f", [COUNT, RAN], 0)) == (0, 0)
    assert counts(For("f", [For("g", COUNT, 2), RAN], 3)) == (6, 3)
    assert counts(For("f", [COUNT, COUNT], 2)) == (4, 0)


def test_while_and_until_ask_before_the_body():
    assert counts(While("w", BELOW, COUNT)) == (5, 0)
    assert counts(While("w", BELOW, [COUNT, RAN]), i=9) == (9, 0)
    assert counts(While("w", "no", COUNT)) == (0, 0)
    assert counts(While("w", "yes", [COUNT, clears("end", "yes"), RAN])) == (1, 1)
    above = replace(BELOW, ops=(Op.of("GE", ["i", "five"], ["below"]),))
    assert counts(Until("u", above, COUNT)) == (5, 0)
    assert counts(Until("u", "yes", COUNT)) == (0, 0)


def test_do_while_and_do_until_ask_after_the_body():
    assert counts(DoWhile("w", BELOW, COUNT), i=9) == (10, 0)
    assert counts(DoWhile("w", BELOW, [COUNT, RAN])) == (5, 5)
    assert counts(DoUntil("u", "yes", [COUNT, RAN])) == (1, 1)
    twice = DoWhile("w", BELOW, COUNT)
    assert counts(twice, twice) == (
        6,
        0,
    )  # what the first run left in the stop blob does not end the second


@pytest.mark.parametrize("flag", ["yes", "no"])
def test_branches(flag):
    holds = flag == "yes"
    taken, other = ((1, 0), (0, 1)) if holds else ((0, 1), (1, 0))
    assert counts(If("c", flag, COUNT, RAN)) == taken
    assert counts(IfNot("c", flag, COUNT, RAN)) == other
    assert counts(If("c", flag, COUNT)) == (int(holds), 0)
    assert counts(IfNot("c", flag, COUNT)) == (int(not holds), 0)
    flips = Net("flip", (Op.of("Not", [flag], [flag]),), (flag,))
    assert (
        counts(If("c", flag, [flips, COUNT], [flips, RAN])) == taken
    )  # the bodies may overwrite the condition
    assert counts(If("c", BELOW, COUNT, RAN), i=5) == (5, 1)


def test_switches_take_every_case_that_holds():
    cases = (("yes", COUNT), ("no", RAN), (BELOW, For("f", COUNT, 3)))
    assert counts(Switch("s", *cases)) == (4, 0)
    assert counts(SwitchNot("s", *cases)) == (0, 1)


def test_do():
    assert counts(Do("d", COUNT, RAN, COUNT), DoParallel("p", COUNT, RAN)) == (3, 2)


def test_each_run_of_a_net_draws_new_numbers():
    draw = Net(
        "draw",
        (Op.of("GaussianFill", [], ["x"], shape=[3]), Op.of("Add", ["sum", "x"], ["sum"])),
        ("sum",),
    )
    plan = make_plan("p", execution_step("s", draw, num_iter=2))
    one, again, other = (
        run_plan(plan, {"sum": np.zeros(3, np.float32)}, key=jax.random.key(k)) for k in (0, 0, 1)
    )
    assert np.array_equal(one["sum"], again["sum"]) and not np.array_equal(one["sum"], other["sum"])
    assert not np.allclose(one["sum"], 2 * one["x"])


def test_an_endless_loop_ends_in_an_error():
    with pytest.raises(
        PlanError,
        match=r"step 'w/loop': runs on after 50 rounds; its stop blob 'w/stop' is still False",
    ):
        counts(While("w", "yes", COUNT))
    with pytest.raises(PlanError, match="step 's': runs on after 50 rounds; raise max_iterations"):
        counts(execution_step("s", COUNT, num_iter=2**60))
    body = Net("body", (Op.of("Copy", ["yes"], ["yes"]),), ("yes",))
    net = Net("inside", (Op.of("While", ["yes"], ["yes"], loop_net=body),), ("yes",))
    with pytest.raises(OpError, match="50"):
        counts(net)


REFUSED = {
    "runs net 'cuont', which the plan lacks; did you mean 'count'": ExecutionStep(
        "s", networks=("cuont",)
    ),
    "has both nets and substeps": ExecutionStep("s", (ExecutionStep("t"),), ("count",)),
    "only_once needs a should_stop_blob": ExecutionStep("s", networks=("count",), only_once=True),
    "has num_iter and a should_stop_blob": ExecutionStep(
        "s", networks=("count",), num_iter=2, should_stop_blob="yes"
    ),
    "stop blob 'yse' is neither given nor written": ExecutionStep(
        "s", networks=("count",), should_stop_blob="yse"
    ),
    "would never end": ExecutionStep("s", should_stop_blob="no"),
    "must hold one bool; it holds int64 []": ExecutionStep(
        "s", networks=("count",), should_stop_blob="i"
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    plan = Plan("p", (COUNT,), (ExecutionStep("outer", (REFUSED[message],)),))
    with pytest.raises(PlanError) as e:
        run_plan(plan, START)
    assert str(e.value).startswith("step 's': ") and message in str(e.value)


def test_two_nets_of_one_name():
    with pytest.raises(PlanError, match="two nets are named 'count'"):
        run_plan(Plan("p", (COUNT, COUNT)))
    with pytest.raises(PlanError, match="two different nets are named 'count'"):
        make_plan("p", COUNT, replace(RAN, name="count"))
    with pytest.raises(PlanError, match="net 'count' is a condition"):
        While("w", COUNT, COUNT)
    with pytest.raises(PlanError, match="without a name"):
        make_plan("p", Net())


def test_an_error_inside_names_the_step():
    with pytest.raises(
        NetError, match=r"step 'count': op #0 Add -> 'i' in net 'count': reads blob 'one'"
    ):
        run_plan(make_plan("p", COUNT), {"i": 0})


def test_files_that_hold_a_net_or_a_plan_are_told_apart(tmp_path):
    for name in ("n.pb", "n.pbtxt"):
        write_net(COUNT, tmp_path / name)
        assert read_net_or_plan(tmp_path / name) == COUNT
    (tmp_path / "broken.pb").write_bytes(serialize_net(COUNT)[:-3])
    with pytest.raises(FormatError, match="not a NetDef"):
        read_net_or_plan(tmp_path / "broken.pb")


def test_damaged_plans_end_in_a_format_error():
    data = GOLDEN["nested|plan"].tobytes()
    refused = 0
    for cut in range(1, len(data)):
        changed = bytearray(data)
        changed[cut] ^= 0xFF
        for damaged in (bytes(changed), data[:cut]):
            try:
                read_plan(damaged)
            except FormatError:
                refused += 1
    assert refused > len(data)
