"""Nets to bytes and text and back, without loss."""

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrnn.errors import FormatError
from jrnn.nets.ir import Arg, DeviceOption, Message, Net, Numbers, Op
from jrnn.nets.proto import (
    format_net,
    message_class,
    read_net,
    read_net_or_plan,
    serialize_net,
    tensor_from_numpy,
    write_net,
)

NetDef = message_class("NetDef")
UNKNOWN = b"\xf8\x3f\x05"  # field 1023, a varint


def message(text_or_bytes):
    return NetDef.FromString(text_or_bytes)


# ---- What Caffe2 wrote ----


@pytest.mark.parametrize("name", ["lstm", "lstm_text_steps", "devices"])
def test_caffe2_bytes_survive_to_the_bit(golden, name):
    data = (golden / f"{name}.pb").read_bytes()
    net = read_net(golden / f"{name}.pb")
    assert serialize_net(net) == data
    assert read_net(data) == net


@pytest.mark.parametrize("name", ["lstm", "lstm_text_steps", "devices"])
def test_caffe2_text_says_the_same_net(golden, name):
    net = read_net(golden / f"{name}.pb")
    assert read_net(golden / f"{name}.pbtxt") == net
    assert read_net(format_net(net)) == net


def test_step_nets_of_both_wire_forms_are_equal_nets(golden):
    new, old = read_net(golden / "lstm.pb"), read_net(golden / "lstm_text_steps.pb")
    nested = [
        (a, b)
        for x, y in zip(new.ops, old.ops)
        for a, b in zip(x.args, y.args)
        if isinstance(a.value, Net)
    ]
    assert [a.name for a, _ in nested] == ["step_net", "backward_step_net"] * 2
    for a, b in nested:
        assert (a.kind, b.kind) == ("n", "s")
        assert a.value == b.value and len(a.value.ops) > 3


def test_lstm_is_what_was_recorded(golden):
    net = read_net(golden / "lstm.pb")
    rnn = next(op for op in net.ops if op.type == "RecurrentNetwork")
    assert rnn.arg("enable_rnn_executor") == 1
    assert rnn.arg("timestep") == b"timestep"
    assert (
        rnn.arg("alias_offset") == (1, -1) * 4
    )  # the whole and the last output of two states in each of two layers
    assert rnn.arg("recompute_blobs_on_backward") == ()  # an argument with a name and nothing else
    gradient = next(op for op in net.ops if op.type == "RecurrentNetworkGradient")
    assert gradient.is_gradient and not rnn.is_gradient


def test_every_field_of_the_devices_net(golden):
    net = read_net(golden / "devices.pb")
    assert (net.name, net.type, net.device_option) == ("devices", "dag", DeviceOption(1, 1))
    fc, everything = net.ops
    assert fc.engine == "CUDNN"
    assert fc.device_option == DeviceOption(0, 0, None, "worker:0", 1)
    assert everything.device_option == DeviceOption(random_seed=7)
    assert everything.control_inputs == ("x",)
    kinds = {a.name: (a.kind, a.value) for a in everything.args}
    unnamed = b"\x1a\x00"  # Caffe2 sets every operator's name, be it empty
    inner = Net("inner", (Op("Relu", ("a",), ("b",), extra=unnamed),), ("a",))
    assert kinds.pop("t")[1].type == "TensorProto"
    assert kinds == {
        "f": ("f", 0.0),
        "i": ("i", 0),
        "s": ("s", b"text"),
        "raw": ("s", b"\x00\xff"),
        "n": ("n", inner),
        "floats": ("floats", (0.5, float("inf"))),
        "ints": ("ints", (-1, 2**62)),
        "strings": ("strings", (b"a", b"\xfe")),
        "nets": ("nets", (inner, Net())),
        "nothing": ("", ()),
    }


# ---- Presence and unknown fields ----


def test_fields_set_to_their_default_stay_set():
    m = NetDef(name="", type="", num_workers=0)
    m.device_option.device_type = 0
    op = m.op.add(name="", type="", engine="", is_gradient_op=False, op_version=0, debug_info="")
    op.device_option.SetInParent()
    op.arg.add(name="", i=0)
    op.arg.add(name="e", s=b"")
    op.arg.add().n.SetInParent()
    net = read_net(m.SerializeToString())
    assert message(serialize_net(net)) == m
    assert net.device_option == DeviceOption(device_type=0)
    assert net.ops[0].device_option == DeviceOption()
    assert read_net(format_net(net)) == net
    named = replace(net, name="now", ops=(replace(net.ops[0], type="Relu", is_gradient=True),))
    assert (
        message(serialize_net(named)).name,
        message(serialize_net(named)).op[0].is_gradient_op,
    ) == ("now", True)


def test_an_argument_with_two_values_keeps_both_and_shows_the_first_present():
    m = NetDef()
    m.op.add().arg.add(name="a", i=0, s=b"x", ints=[1, 2]).n.name = "inner"
    m.op.add().arg.add(name="b", ints=[1], floats=[2.0])
    net = read_net(m.SerializeToString())
    assert [(o.args[0].kind, o.args[0].value) for o in net.ops] == [("i", 0), ("floats", (2.0,))]
    assert message(serialize_net(net)) == m


def with_unknown_fields():
    """A message with fields at every level that the schema lacks, a group and an enum value of the future among them."""
    m = NetDef(name="n")
    op = m.op.add(type="X")
    arg = op.arg.add(name="a")
    arg.n.name = "inner"
    arg.n.op.add(type="Y").arg.add(name="t").t.dims.extend([1])
    m.partition_info.add(name="p")
    op.device_option.device_id = 1
    innermost = arg.n.op[0].arg[0].t
    group = b"\xfb\x3f\x08\x01\xfc\x3f"  # field 1023, a group with one field
    future = b"\x10\x63"  # data_type 99
    for part, data in (
        (m, UNKNOWN),
        (op, group),
        (arg, UNKNOWN),
        (arg.n, UNKNOWN * 2),
        (innermost, future),
        (op.device_option, UNKNOWN),
        (m.partition_info[0], UNKNOWN),
    ):
        part.MergeFromString(data)
    return m


def test_unknown_fields_survive_at_every_level_in_binary():
    m = with_unknown_fields()
    net = read_net(m.SerializeToString())
    assert message(serialize_net(net)) == m
    assert len(serialize_net(net)) == m.ByteSize()


def test_unknown_fields_survive_at_every_level_in_text():
    net = read_net(with_unknown_fields().SerializeToString())
    text = format_net(net)
    assert text.startswith("# unknown fields of .: f83f05\n# unknown fields of .op[0]: ")
    assert read_net(text) == net


@pytest.mark.parametrize(
    "head",
    ["# unknown fields of .op[3]: f83f05", "# unknown fields of .name: f83f05", "# unknown fields of .: 0a0178",
     "# unknown fields of .: f83f0", "# unknown fields of .: ff"],
)  # fmt: skip
def test_a_comment_of_unknown_fields_that_cannot_be_meant_is_refused(head):
    with pytest.raises(FormatError, match="comment of unknown fields"):
        read_net(f'{head}\nname: "n"')


# ---- Step nets as text ----


def net_with_text(text, name="step_net"):
    m = NetDef(name="n")
    m.op.add(type="RecurrentNetwork").arg.add(name=name, s=text)
    return m


def test_text_that_jrnn_words_otherwise_goes_back_as_it_came():
    m = net_with_text(b'# by hand\nname: "s" op { type: "Relu", input: ["x"] output: "y" }')
    net = read_net(m.SerializeToString())
    assert net.ops[0].arg("step_net") == Net("s", (Op("Relu", ("x",), ("y",)),))
    assert message(serialize_net(net)) == m
    assert read_net(format_net(net)) == net


def test_text_of_a_changed_step_net_is_written_anew():
    net = read_net(net_with_text(b'name : "old"').SerializeToString())
    changed = replace(net, ops=(net.ops[0].map_sub_nets(lambda n: replace(n, name="new")),))
    assert message(serialize_net(changed)).op[0].arg[0].s == b'name: "new"\n'


@pytest.mark.parametrize("text", [b"", b"# nothing"])
def test_step_nets_without_content(text):
    m = net_with_text(text, "backward_step_net")
    net = read_net(m.SerializeToString())
    assert net.ops[0].arg("backward_step_net") == (Net() if text else b"")
    assert message(serialize_net(net)) == m


def test_text_in_other_arguments_is_a_string():
    net = read_net(net_with_text(b'name: "s"', "note").SerializeToString())
    assert net.ops[0].arg("note") == b'name: "s"'


def test_step_nets_nest_as_text():
    inner = Net("c", (Op("Relu", ("x",), ("y",), extra=UNKNOWN),), extra=UNKNOWN)
    for name in ("b", "a"):
        inner = Net(name, (Op("RecurrentNetwork", args=(Arg("step_net", inner, "s"),)),))
    assert read_net(serialize_net(inner)) == inner
    assert read_net(format_net(inner)) == inner


def test_a_step_net_that_is_no_text_says_where():
    with pytest.raises(
        FormatError, match=r"op #0 RecurrentNetwork .* in net 'n': argument 'step_net': .*line 1:6"
    ):
        read_net(net_with_text(b"name { }").SerializeToString())
    with pytest.raises(
        FormatError, match=r"argument 'step_net': text is not UTF-8: byte 1 is 0xff"
    ):
        read_net(net_with_text(b"n\xff").SerializeToString())


# ---- Nets of every shape ----

names = st.text(st.characters(codec="utf-8"), max_size=6)
int64 = st.integers(-(2**63), 2**63 - 1)
float32 = st.floats(width=32, allow_nan=False)
tensors = st.just(tensor_from_numpy(np.arange(3, dtype=np.float32), "t"))
devices = st.none() | st.builds(
    DeviceOption,
    device_type=st.none() | st.integers(0, 10),
    device_id=st.none() | st.integers(-1, 3),
    random_seed=st.none() | st.integers(0, 2**32 - 1),
    node_name=st.none() | names,
    numa_node_id=st.none() | st.integers(-1, 3),
    extra_info=st.lists(names, max_size=2).map(tuple),
)


def listed(items, **size):
    return st.lists(items, max_size=3, **size).map(tuple)


def nets_of(inner):
    values = st.one_of(
        st.tuples(st.just("f"), float32),
        st.tuples(st.just("i"), int64),
        st.tuples(st.just("s"), st.binary(max_size=5)),
        st.tuples(st.just("t"), tensors),
        st.tuples(
            st.just("floats"), listed(float32, min_size=1).map(lambda v: Numbers(v, np.float32))
        ),
        st.tuples(st.just("ints"), listed(int64, min_size=1).map(lambda v: Numbers(v, np.int64))),
        st.tuples(st.just("strings"), listed(st.binary(max_size=5), min_size=1)),
        st.tuples(st.just("tensors"), listed(tensors, min_size=1)),
        st.tuples(st.just(""), st.just(())),
        st.tuples(st.just("n"), inner),
        st.tuples(st.just("nets"), listed(inner, min_size=1)),
    )
    args = st.builds(
        lambda name, v, extra: Arg(name, v[1], v[0], extra),
        names,
        values,
        st.sampled_from([b"", UNKNOWN]),
    )
    steps = st.builds(lambda n: Arg("step_net", n, "s"), inner.filter(lambda n: n != Net()))
    ops = st.builds(
        Op, names, listed(names), listed(names), listed(args | steps), names, names, devices, listed(names), st.booleans(),
        st.sampled_from([b"", UNKNOWN]),
    )  # fmt: skip
    return st.builds(
        Net, names, listed(ops), listed(names), listed(names), names, listed(args), devices
    )


@settings(max_examples=60)
@given(st.recursive(st.just(Net()), nets_of, max_leaves=3))
def test_reading_undoes_writing(net):
    assert read_net(serialize_net(net)) == net
    assert read_net(format_net(net)) == net


def test_a_million_numbers_are_read_at_once():
    values = np.random.default_rng(0).standard_normal(1_000_000).astype(np.float32)
    net = Net("init", (Op.of("GivenTensorFill", (), ("w",), shape=[1000, 1000], values=values),))
    data = serialize_net(net)
    start = os.times().user
    read = read_net(data)
    assert os.times().user - start < 1.0
    np.testing.assert_array_equal(np.asarray(read.ops[0].arg("values")), values)


# ---- Values that no field can hold ----


@pytest.mark.parametrize(
    "arg, rule",
    [
        (Arg("a", 2**63, "i"), "an? int does not fit field 'i'"),
        (Arg("a", 0.5, "i"), "a float does not fit field 'i'"),
        (Arg("a", (1,), ""), "a tuple does not fit field ''"),
        (Arg("a", 1, "q"), "a int does not fit field 'q'"),
        (Arg("a", (b"x",), "ints"), "a tuple does not fit field 'ints'"),
        (Arg("a", Net("n"), "s"), "hold a net as text: step_net and backward_step_net"),
        (Arg("step_net", Net(), "s"), "an empty net cannot be written as text"),
        (Arg("a", Message("NetDef", b""), "t"), "there is a NetDef, but it must be a TensorProto"),
        (Arg("a", Message("TensorProto", b"\x08"), "t"), "fields of a TensorProto are damaged"),
    ],
)
def test_arguments_that_no_field_can_hold(arg, rule):
    net = Net("n", (Op("Relu", ("x",), ("y",)), Op("X", (), ("z",), (arg,))))
    with pytest.raises(
        FormatError, match=rf"op #1 X -> 'z' in net 'n': argument '{arg.name}': .*{rule}"
    ):
        serialize_net(net)


def test_names_that_are_not_unicode():
    with pytest.raises(FormatError, match="op #0 Relu"):
        serialize_net(Net("n", (Op("Relu", ("\udc80",)),)))


def test_nets_too_deep_to_be_read_are_not_written():
    def nested(n):
        net = Net("bottom")
        for _ in range(n - 1):
            net = Net("", (Op("Do", args=(Arg("net", net, "n"),)),))
        return net

    assert read_net(serialize_net(nested(16))) == nested(16)
    for write in (serialize_net, format_net):
        with pytest.raises(FormatError, match="deeper than the limit of 16"):
            write(nested(17))


# ---- Files ----


def test_files_binary_and_text(tmp_path, golden):
    net = read_net(golden / "lstm.pb")
    for name in ("net.pb", "net.pbtxt"):
        write_net(net, tmp_path / name)
        assert read_net(tmp_path / name) == net
        assert read_net(str(tmp_path / name)) == net
        assert read_net((tmp_path / name).read_bytes()) == net
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.pb", "net.pbtxt"]
    assert (tmp_path / "net.pbtxt").read_text().startswith('name: "lstm_train"\n')


def test_a_failed_write_leaves_the_older_file(tmp_path):
    write_net(Net("old"), tmp_path / "n.pb")
    with pytest.raises(FormatError):
        write_net(Net("new", (Op("\udc80"),)), tmp_path / "n.pb")
    assert read_net(tmp_path / "n.pb").name == "old"
    (tmp_path / "taken.pb").mkdir()
    with pytest.raises(FormatError, match=r"taken\.pb: cannot be written"):
        write_net(Net("new"), tmp_path / "taken.pb")
    with pytest.raises(FormatError, match="cannot be written: No such file"):
        write_net(Net("new"), tmp_path / "missing" / "n.pb")
    with pytest.raises(FormatError, match=r"must end in \.pb \(binary\) or \.pbtxt"):
        write_net(Net("new"), tmp_path / "n.txt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["n.pb", "taken.pb"]


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FormatError, match=r"missing\.pb: no such file"):
        read_net(tmp_path / "missing.pb")
    with pytest.raises(FormatError, match="nothing: no such file"):
        read_net("nothing")
    with pytest.raises(FormatError, match="is a folder, not a file"):
        read_net(tmp_path)
    (tmp_path / "bad.pb").write_bytes(b"\x0a\xff\x01x")
    with pytest.raises(
        FormatError, match=r"bad\.pb: not a NetDef: .*name at byte 0 needs 255 bytes, 1 remain"
    ):
        read_net(str(tmp_path / "bad.pb"))


@pytest.mark.parametrize(
    "size", [33, 35, 110]
)  # a length of 35 is "#", which opens a comment in text
def test_a_printable_binary_net_is_told_from_text(size):
    net = Net("a" * size)
    data = serialize_net(net)
    assert data.isascii() and data.startswith(b"\n" + bytes([size]) + b"a")
    assert read_net(data) == net


def test_nothing_is_an_empty_net():
    for nothing in ("", b"", b"\n", b"# only a comment\n"):
        assert read_net(nothing) == Net()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('op { type: "Relu" inptu: "x" }', "no field named \"inptu\"; did you mean 'input'"),
        ('op { type: "Relu" input: "x"\nexternal_input: "x"', "is a brace } missing before it"),
        (
            'network { name: "n" } excution_step { name: "s" }',
            "not a PlanDef as text.*did you mean 'execution_step'",
        ),
    ],
    ids=["a field", "a brace", "a plan"],
)
def test_a_mistake_in_a_text_names_its_cause(text, cause, tmp_path):
    (tmp_path / "typo.pbtxt").write_text(text)
    with pytest.raises(FormatError, match=cause):
        read_net_or_plan(tmp_path / "typo.pbtxt")
