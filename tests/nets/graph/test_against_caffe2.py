"""The graph functions against what Caffe2's own answer, recorded by scripts/record/caffe2_graph.py."""

import base64
import json
from pathlib import Path

import pytest

from jrnn.nets.graph import (
    append_net,
    clone_and_bind,
    extract_sub_net,
    get_external_blob_names,
    get_op_ids_in_path,
    get_output_producers,
    get_ssa,
    get_undefined_blobs,
    ssa_rewrite,
    verify_graph_equality,
)
from jrnn.nets.ir import DeviceOption
from jrnn.nets.proto import read_net

ANSWERS = json.loads((Path(__file__).parents[2] / "golden" / "graph" / "caffe2.json").read_text())
by_net = pytest.mark.parametrize("name", ANSWERS)


def net_of(text):
    return read_net(base64.b64decode(text))


def answers_with(key):
    return [pytest.param(answers, id=name) for name, answers in ANSWERS.items() if key in answers]


def blobs(pairs):
    return [tuple(pair) for pair in pairs]


def wiring(net):
    """What a net computes from what, without the names and arguments of its operators."""
    return [
        (op.type, op.inputs, op.outputs, [(n, wiring(sub)) for n, sub in op.sub_nets()])
        for op in net.ops
    ]


@by_net
def test_versions(name):
    answers = ANSWERS[name]
    net = net_of(answers["net"])
    ssa, versions = get_ssa(net)
    assert ssa == [(blobs(read), blobs(written)) for read, written in answers["ssa"]]
    assert versions == answers["versions"]
    assert sorted(get_undefined_blobs(ssa)) == answers["undefined"]
    assert get_output_producers(ssa) == {(n, version): i for n, version, i in answers["producers"]}


@by_net
def test_paths(name):
    answers = ANSWERS[name]
    ssa, versions = get_ssa(net_of(answers["net"]))
    assert len(answers["paths"]) == 3
    for path in answers["paths"]:
        assert get_op_ids_in_path(ssa, versions, path["inputs"], path["outputs"]) == path["ops"]


@by_net
def test_external_blobs(name):
    net, asked = net_of(ANSWERS[name]["net"]), ANSWERS[name]["external"]
    inputs, outputs = get_external_blob_names(net, asked["scope"])
    assert (sorted(inputs), sorted(outputs)) == (asked["inputs"], asked["outputs"])


@pytest.mark.parametrize("answers", [p for p in answers_with("ssa_rewrite") if p.id != "branch"])
def test_rewriting(answers):
    net, expected = net_of(answers["net"]), net_of(answers["ssa_rewrite"])
    rewritten = ssa_rewrite(net)
    assert [(op.type, op.inputs, op.outputs) for op in rewritten.ops] == [
        (op.type, op.inputs, op.outputs) for op in expected.ops
    ]
    assert rewritten.external_outputs == expected.external_outputs
    assert rewritten.external_inputs == expected.external_inputs


def test_rewriting_keeps_one_name_over_a_branch():
    """Caffe2 renames the outputs of an If but not the branches that write them."""
    net = net_of(ANSWERS["branch"]["net"])
    assert "out_1" in net_of(ANSWERS["branch"]["ssa_rewrite"]).ops[0].outputs
    assert ssa_rewrite(net) == net


@pytest.mark.parametrize("answers", answers_with("clone"))
def test_clones(answers):
    given = {"input": "other", "a": "z"}
    cloned, remap = clone_and_bind(net_of(answers["net"]), "clone", "c/", given)
    expected = net_of(answers["clone"]["net"])
    assert {n: remap[n] for n in answers["clone"]["remap"] if n in remap} == {
        n: new for n, new in answers["clone"]["remap"].items() if n in remap
    }
    assert set(answers["clone"]["remap"]) - set(remap) <= set(given)
    assert [(op.type, op.inputs, op.outputs) for op in cloned.ops] == [
        (op.type, op.inputs, op.outputs) for op in expected.ops
    ]
    assert (
        cloned.external_inputs == expected.external_inputs
        and cloned.external_outputs == expected.external_outputs
    )
    assert cloned.name == expected.name == "clone"


@pytest.mark.parametrize("answers", answers_with("equality"))
def test_equality(answers):
    net = net_of(answers["net"])
    assert answers["equality"]["memonger_changed"]
    assert [
        verify_graph_equality(net, net_of(other)) for _, other in answers["equality"]["pairs"]
    ] == [
        True,
        False,
        False,
    ]
    assert [equal for equal, _ in answers["equality"]["pairs"]] == [True, False, False]


@pytest.mark.parametrize("answers", answers_with("partial"))
def test_parts(answers):
    net = net_of(answers["net"])
    for asked in answers["partial"]:
        part = extract_sub_net(net, asked["inputs"], asked["outputs"])
        assert [[op.type, list(op.inputs), list(op.outputs)] for op in part.ops] == asked["ops"]
        assert sorted(part.external_inputs) == asked["external_inputs"]


@pytest.mark.parametrize("answers", answers_with("append"))
def test_appending(answers):
    asked = answers["append"]
    joined = append_net(
        net_of(asked["first"]), net_of(asked["second"]), DeviceOption(device_type=1, device_id=1)
    )
    assert joined == net_of(asked["net"])
