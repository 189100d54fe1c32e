"""Every pass keeps what a net computes: on random nets of 200 operators with overwritten blobs and sub-nets."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic import feeds, outputs, random_net, run

from jrnn.errors import NetError
from jrnn.nets.graph import (
    append_net,
    clone_and_bind,
    extract_sub_net,
    fuse_copy_between_cpu_and_gpu,
    get_producer_map,
    get_ssa,
    get_sub_graph_external_input_output,
    live_ops,
    number_init_net,
    optimize_memory,
    remove_dead_end_ops,
    rename_op_input,
    rename_op_output,
    ssa_rewrite,
    undeclared_reads,
    verify_graph_equality,
)
from jrnn.nets.ir import Net


def over_nets(test):
    """The test over random nets; hypothesis draws their seeds, as nets of this size are too long to print."""

    @settings(max_examples=30)
    @given(st.integers(0, 10**9))
    def over_seeds(seed):
        test(random_net(seed))

    over_seeds.__doc__ = test.__doc__
    return over_seeds


@over_nets
def test_what_is_read_is_declared_or_told(net):
    told = {
        name: value
        for name, value in feeds(net).items()
        if name in (*net.external_inputs, *undeclared_reads(net))
    }
    assert outputs(net, told) == outputs(net, feeds(net))
    assert undeclared_reads(net) in ([], ["g"])


@over_nets
def test_live_operators_are_enough(net):
    part = replace(net, ops=tuple(net.ops[i] for i in live_ops(net, net.external_outputs)))
    assert outputs(part, feeds(net)) == outputs(net, feeds(net))


@over_nets
def test_removing_dead_ends(net):
    clean = remove_dead_end_ops(net)
    assert outputs(clean, feeds(net)) == outputs(net, feeds(net))
    assert len(clean.ops) < len(net.ops)
    assert remove_dead_end_ops(clean) == clean


@pytest.mark.exhaustive
@over_nets
def test_rewriting_versions(net):
    rewritten = ssa_rewrite(net)
    assert outputs(rewritten, feeds(net)) == outputs(net, feeds(net))
    assert ssa_rewrite(rewritten) == rewritten
    updated = {name for op in rewritten.ops if op.type in ("If", "Do") for name in op.outputs}
    written = [name for op in rewritten.ops for name in op.outputs if name not in updated]
    assert len(written) == len(set(written))


@pytest.mark.exhaustive
@over_nets
def test_numbering_every_version(net):
    numbered = ssa_rewrite(net, number_all=True)
    given_blobs = {f"{name}_0": value for name, value in feeds(net).items()}
    assert outputs(numbered, given_blobs) == outputs(net, feeds(net))
    assert numbered.external_inputs == ("x0_0", "x1_0", "w_0")


def test_an_init_net_follows_the_numbering():
    init = Net("init", (random_net(1, 1).ops[0],), (), ("b0",))
    assert set(number_init_net(init).external_outputs) == {"b0_0"}


@over_nets
def test_renaming_an_output(net):
    draw = random.Random(net.name)
    at = draw.randrange(len(net.ops))
    output = draw.randrange(len(net.ops[at].outputs))
    renamed = rename_op_output(net, at, output, "fresh")
    assert renamed.ops[at].outputs[output] == "fresh"
    assert outputs(
        renamed, {**feeds(net), "fresh": feeds(net).get(net.ops[at].outputs[output])}
    ) == outputs(net, feeds(net))


@over_nets
def test_renaming_an_input_with_the_init_net(net):
    draw = random.Random(net.name)
    init = random_net(draw.randrange(10**6), 20, nested=False)
    init = replace(
        init,
        external_outputs=tuple(
            n for n in ("b0", "b1", "b2") if any(n in op.outputs for op in init.ops)
        ),
    )
    joined = append_net(init, net)
    at = draw.choice([i for i, op in enumerate(net.ops) if op.inputs])
    k = draw.randrange(len(net.ops[at].inputs))
    renamed, new_init = rename_op_input(net, init, at, k, "fresh", from_producer=True)
    assert renamed.ops[at].inputs[k] == "fresh"
    given_blobs = {**feeds(net), "fresh": feeds(net).get(net.ops[at].inputs[k])}
    expected = run(joined, feeds(net))
    actual = run(append_net(new_init, renamed), given_blobs)
    assert [actual[n] for n in renamed.external_outputs] == [
        expected[n] for n in net.external_outputs
    ]


@over_nets
def test_cloning(net):
    cloned, remap = clone_and_bind(net, "clone", "c/", {"x0": "other"})
    given_blobs = {remap.get(name, name): value for name, value in feeds(net).items()}
    assert remap["x0"] == "other" and remap["w"] == "w"
    assert outputs(cloned, given_blobs) == outputs(net, feeds(net))
    both = append_net(net, cloned)
    assert outputs(both, {**feeds(net), **given_blobs})[:3] == outputs(net, feeds(net))


@over_nets
def test_appending(net):
    other = random_net(int(net.name[6:]) + 1)
    joined = append_net(net, other)
    after = run(other, run(net, feeds(net)))
    assert outputs(joined, feeds(net)) == [after[name] for name in joined.external_outputs]


@over_nets
def test_fusing_copies(net):
    fused = fuse_copy_between_cpu_and_gpu(net)
    assert outputs(fused, feeds(net)) == outputs(net, feeds(net))
    assert fuse_copy_between_cpu_and_gpu(fused) == fused


def test_fusing_copies_finds_some():
    nets = [random_net(seed) for seed in range(20)]
    assert sum(len(net.ops) - len(fuse_copy_between_cpu_and_gpu(net).ops) for net in nets) > 20


@pytest.mark.exhaustive
@over_nets
def test_reusing_memory(net):
    draw = random.Random(net.name)
    shapes = {f"b{i}": np.zeros([draw.randrange(1, 50)], np.float32) for i in range(40)}
    rewritten = ssa_rewrite(net)
    shapes.update(
        (o, shapes[o.split("_")[0]]) for op in rewritten.ops for o in op.outputs if o[0] == "b"
    )
    optimized, report = optimize_memory(rewritten, shapes)
    assert outputs(optimized, feeds(net)) == outputs(net, feeds(net))
    assert verify_graph_equality(optimized, net)
    assert report.saved_bytes > 0
    again, second = optimize_memory(optimized, shapes)
    assert again == optimized and second.saved_bytes == 0
    for op, old in zip(optimized.ops, rewritten.ops):
        assert set(op.inputs).isdisjoint(op.outputs) or not set(old.inputs).isdisjoint(old.outputs)


@pytest.mark.exhaustive
@over_nets
def test_extracting(net):
    draw = random.Random(net.name)
    env = run(net, feeds(net))
    names = sorted(name for name in env if name[0] in "bx")
    for _ in range(10):
        inputs, wanted = draw.sample(names, 2), draw.sample(names, 2)
        try:
            part = extract_sub_net(net, inputs, wanted)
        except NetError:
            continue
        given_blobs = {**feeds(net), **{name: env[name] for name in inputs}}
        told = {
            name: value
            for name, value in given_blobs.items()
            if name in (*part.external_inputs, *undeclared_reads(part))
        }
        assert outputs(part, told) == [env[name] for name in wanted]
        assert undeclared_reads(part) == []
    rewritten = ssa_rewrite(net)
    env = run(rewritten, feeds(net))
    inputs = draw.sample(sorted(name for name in env if name[0] == "b" and "_" in name), 2)
    part = extract_sub_net(rewritten, inputs, rewritten.external_outputs)
    given_blobs = {**feeds(net), **{name: env[name] for name in inputs}}
    assert outputs(part, given_blobs) == [env[name] for name in rewritten.external_outputs]


@over_nets
def test_the_ends_of_a_part(net):
    draw = random.Random(net.name)
    ops = sorted(draw.sample(range(len(net.ops)), 30))
    inputs, given_out = get_sub_graph_external_input_output(net, ops)
    ssa, versions = get_ssa(net)
    written = {blob for i in ops for blob in ssa[i][1]}
    used = {b for i in range(len(ssa)) if i not in ops for b in ssa[i][0]} | {
        (n, versions[n]) for n in net.external_outputs
    }
    assert {b for i in ops for b in ssa[i][0]} - written <= set(inputs)
    assert written & used <= set(given_out) <= written
    assert len(inputs) == len(set(inputs)) and len(given_out) == len(set(given_out))
    assert all(get_producer_map(ssa)[blob][0] in ops for blob in given_out)


@pytest.mark.exhaustive
@over_nets
def test_equality_sees_a_change(net):
    draw = random.Random(net.name)
    assert verify_graph_equality(net, ssa_rewrite(net))
    at = draw.choice(
        [i for i, op in enumerate(net.ops) if len(set(op.inputs)) > 1 and op.type in ("Add", "Mul")]
    )
    op = net.ops[at]
    swapped = (*net.ops[:at], replace(op, inputs=op.inputs[::-1]), *net.ops[at + 1 :])
    assert not verify_graph_equality(net, replace(net, ops=swapped))


@pytest.mark.parametrize("seed", range(3))
def test_the_toy_interpreter_tells_nets_apart(seed):
    net = random_net(seed)
    last = live_ops(net, net.external_outputs)[-1]
    changed = (*net.ops[:last], replace(net.ops[last], type="Other"), *net.ops[last + 1 :])
    assert outputs(replace(net, ops=changed), feeds(net)) != outputs(net, feeds(net))
