"""Any bytes end in a net or in a FormatError that says where, soon, and without much memory."""

import random
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jrnn
from jrnn.errors import FormatError, JrnnError
from jrnn.nets import proto
from jrnn.nets.ir import Arg, Net, Op
from jrnn.nets.proto import (
    Limits,
    message_class,
    parse_binary,
    read_net,
    serialize_net,
    tensor_to_numpy,
)

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "proto"
SEEDS = {p.name: p.read_bytes() for p in sorted(GOLDEN.glob("*.pb*"))}
ARG, INTS, FLOATS, NET, TENSOR, OP = 0x2A, 0x30, 0x2D, 0x42, 0x52, 0x12


def field(tag, data):
    """A length-delimited field."""
    size, head = len(data), [tag]
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes([*head, size]) + data


def nested(depth, data=b"\x0a\x01z"):
    for _ in range(depth - 1):
        data = field(OP, field(ARG, b"\x0a\x01a" + field(NET, data)))
    return data


def refused(data, rule, limits=None):
    with pytest.raises(FormatError, match=rule) as e:
        read_net(data) if limits is None else read_net(data, limits=limits)
    assert len(str(e.value)) < 2000


def mutated(data, seed):
    """The data with a few bytes changed, cut out, repeated or moved."""
    rng = random.Random(seed)
    data = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at, size = rng.randrange(len(data) + 1), rng.choice([1, 2, 16, 300])
        piece = bytes(data[at : at + size])
        change = rng.randrange(5)
        if change == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif change == 1 and at < len(data):
            data[at] = rng.choice([0, 1, 0x0A, 0x12, 0x2A, 0x7F, 0x80, 0xFF])
        elif change == 2:
            del data[at : at + size]
        elif change == 3:
            data[at:at] = piece * rng.randint(1, 4)
        else:
            del data[rng.randrange(len(data) + 1) :]
    return bytes(data)


@settings(max_examples=250)
@given(st.sampled_from(sorted(SEEDS)), st.integers(0, 2**32))
def test_damaged_files_of_caffe2(name, seed):
    data = SEEDS[name]
    if len(data) > 4000:  # text is slow to read, and as rich in a piece
        start = random.Random(seed).randrange(len(data) - 4000) if name.endswith(".pbtxt") else 0
        data = data[start : start + 4000] if name.endswith(".pbtxt") else data
    try:
        net = read_net(mutated(data, seed))
    except JrnnError as e:
        assert str(e)
    else:
        assert isinstance(net, Net)
        assert read_net(serialize_net(net)) == net or "nan" in repr(net)


@pytest.mark.exhaustive
@settings(max_examples=300)
@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_random_bytes(data):
    for read in (read_net, tensor_to_numpy):
        try:
            read(data)
        except FormatError as e:
            assert str(e)


@pytest.mark.parametrize("cut", [1, 100, 5000, 15000])
def test_truncated_nets_say_in_which_field(cut):
    refused(SEEDS["lstm.pb"][:-cut], r"not a NetDef: (op\[\d+\]\S*|message): truncated")


@pytest.mark.parametrize(
    "data, rule",
    [
        (b"\x00\x01", "no field can begin at byte 0"),
        (b"\x0f\x01", "no field can begin at byte 0"),
        (field(OP, b"\x22\x05Relu"), r"op\[0\]: truncated: type at byte 2 needs 5 bytes, 4 remain"),
        (
            field(OP, field(ARG, b"\x18" + b"\xff" * 11)),
            r"op\[0\]\.arg\[0\]: a number at byte 5 does not end",
        ),
        (field(OP, field(ARG, b"\x2d\0\0\0\0\x2d\0\0")), r"op\[0\]\.arg\[0\]: truncated"),
        (b"\xfb\x3f\x08\x01", "a group of field 1023 does not end"),
        (b"\xfc\x3f\x00", "a group ends at byte 0 that did not begin"),
        (b"\x0a\x02x\xff", r"net '': name is not UTF-8: b'x\\xff'"),
        (
            b"\x0a\x01n" + field(OP, b"\x22\x01X\x12\x01y\x0a\x01\xff"),
            r"op #0 X -> 'y' in net 'n': input is not UTF-8",
        ),
        (field(OP, b"\x22\x01X\x52\x01\xff"), r"op #0 X .*: debug_info is not UTF-8"),
        (b"\x0a\x01n" + field(0x4A, b"\x0a\x01\xff"), "net 'n': name is not UTF-8"),
        (
            field(OP, field(ARG, b"\x0a\x01a" + field(TENSOR, b"\x3a\x01\xff"))),
            "argument 'a': name is not UTF-8",
        ),
        (b"\x2a\x03\x22\x01\xff", "net '': node_name is not UTF-8"),
        (b"name: 3", "not a NetDef as text: line 1:7"),
        (b"name: 'x' nmae: 'y'", "no field named .*nmae"),
        (b'name: "\xff"', "text is not UTF-8: byte 7 is 0xff"),
        ('name: "\\377"', "not a NetDef as text"),
        ("num_workers: 99999999999", "not a NetDef as text"),
        ("a b\n" * 3, "not a NetDef as text: line 1"),
        ("name: '" + "x" * 100_000, "not a NetDef as text: line 1"),
        ("x" * 5000, "cannot be read"),
        ("a\0b", "cannot be read|no such file"),
    ],
)
def test_damage_is_located(data, rule):
    refused(data, rule)


def test_depth():
    assert read_net(nested(16)).ops
    refused(nested(17), "deeper than the limit of 16")
    refused(nested(33), "deeper than the limit of 16")
    refused(nested(36), "nested deeper than 100 messages")
    refused(nested(5000), "nested deeper than 100 messages")
    refused(b"\xfb\x3f" * 5000 + b"\x00", "groups nested deeper than 100")
    refused("op { arg { n { " * 20 + "} } } " * 20, "deeper than the limit of 16")
    refused("op{arg{n{" * 20000, "nested too deeply")
    refused(
        nested(3), "op #0 .*: argument 'a': op #0 .*: argument 'a': .* limit of 2", Limits(depth=2)
    )


def test_depth_counts_nets_through_text():
    net = Net("z")
    for _ in range(3):
        net = Net("", (Op("Do", args=(Arg("step_net", net, "s"),)),))
    data = serialize_net(net)
    assert read_net(data, limits=Limits(depth=4)) == net
    refused(data, "deeper than the limit of 3", Limits(depth=3))


@pytest.mark.parametrize(
    "data, limits, rule",
    [
        (b"\x12\x00" * 50, Limits(messages=20), r"op\[20\]: more than the limit of 20 messages"),
        (field(OP, b"\x2a\x00" * 50), Limits(messages=20), r"op\[0\]\.arg\[19\]: more than the limit of 20 messages"),
        (b"\x4a\x00" * 50, Limits(messages=20), r"partition_info\[20\]: more than the limit of 20 messages"),
        (field(OP, b"\x0a\x00" * 50), Limits(strings=20), r"op\[0\]: more than the limit of 20 strings"),
        (field(OP, field(ARG, b"\x30\x01" * 50)), Limits(numbers=20), r"op\[0\]\.arg\[0\]: .* 20 numbers"),
        (field(OP, field(ARG, b"\x2d\0\0\0\0" * 50)), Limits(numbers=20), r"op\[0\]\.arg\[0\]: .* 20 numbers"),
        (field(OP, field(ARG, field(INTS + 2, b"\x01" * 50))), Limits(numbers=20), r"op\[0\]\.arg\[0\]: .* 20 numbers"),
        (field(OP, field(ARG, field(TENSOR, field(0x22, b"\x01" * 50)))), Limits(numbers=20), r"t\[0\]: .* 20 numbers"),
        (b"\x0a\x01n" * 40, Limits(bytes=100), "message of 120 bytes is larger than the limit of 100"),
        ("op {}\n" * 30, Limits(messages=20), "text holds more than the limit of 20 messages"),
        ('name: "n"', Limits(text_bytes=8), "text is longer than the limit of 8 bytes"),
        (b"\x0a\x01n" + 5 * field(OP, field(ARG, b"\x0a\x08step_net\x22\x09name: 'x'")), Limits(text_bytes=40),
         "op #4 .*argument 'step_net': text is longer than the limit of 40 bytes in all"),
    ],
)  # fmt: skip
def test_counts(data, limits, rule):
    read_net(data)
    refused(data, rule, limits)


def test_counts_are_exact():
    """The walk counts as a parse does: at the very count a net is read, one less refuses it."""
    data = SEEDS["lstm.pb"]
    counts = {"messages": 0, "strings": 0, "numbers": 0}

    def count(m):
        for f, value in m.ListFields():
            values = (
                value
                if hasattr(value, "__len__") and not isinstance(value, (str, bytes))
                else [value]
            )
            kind = (
                "messages"
                if f.message_type
                else "strings"
                if isinstance(values[0], (str, bytes))
                else None
            )
            if f.type == f.TYPE_STRING or f.type == f.TYPE_BYTES or f.message_type:
                counts[kind] += len(values)
            else:
                counts["numbers"] += len(values)
            for v in values if f.message_type else ():
                count(v)

    count(message_class("NetDef").FromString(data))
    for kind, exact in counts.items():
        assert exact > 20
        read_net(data, limits=Limits(**{kind: exact}))
        refused(data, f"limit of {exact - 1} {kind}", Limits(**{kind: exact - 1}))


def test_a_long_run_of_numbers_is_counted_in_pieces():
    values = (
        b"".join(b"\x30" + bytes([i & 127 | 128, i >> 7 | 128, 1]) for i in range(1 << 14)) * 20
    )
    data = field(OP, field(ARG, values))
    read_net(data, limits=Limits(numbers=20 << 14))
    refused(data, "numbers", Limits(numbers=(20 << 14) - 1))
    refused(data[:-1], "truncated", Limits(numbers=20 << 14))


def test_bombs_are_refused_before_anything_is_allocated():
    bombs = [
        (b"\x12\x00" * 20_000_000, "1000 messages"),
        (b"\x4a\x00" * 20_000_000, "1000 messages"),
        (field(OP, b"\x0a\x00" * 20_000_000), "1000 strings"),
        (field(OP, field(ARG, b"\x30\x01" * 20_000_000)), "1000 numbers"),
        (field(OP, field(ARG, field(TENSOR, field(TENSOR, b"\x01" * 40_000_000)))), "1000 numbers"),
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB
    for data, rule in bombs:
        refused(data, rule, Limits(messages=1000, strings=1000, numbers=1000))
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    )  # a parse takes gigabytes


def test_the_default_limits():
    assert Limits() == Limits(16, 2**31 - 1, 2**25, 2**20, 2**22, 2**27)
    refused("op{}" * 1_100_000, "1048576 messages")


def test_huge_files_are_not_read(tmp_path):
    with open(tmp_path / "huge.pb", "wb") as f:
        f.truncate(2**31)  # takes no room on disk
    with pytest.raises(
        FormatError, match=r"huge\.pb: has 2,147,483,648 bytes; at most 2,147,483,647 are read"
    ):
        read_net(tmp_path / "huge.pb")


@pytest.mark.parametrize(
    "byte, rule",
    [(b"\0", "begins with 65536 zero bytes"), (b"0", "text of 40000000 bytes is longer")],
)
@pytest.mark.parametrize(
    "read", [jrnn.read_net, proto.read_plan, proto.read_net_or_plan, jrnn.from_onnx]
)
def test_large_files_that_are_no_model_are_refused_by_their_first_bytes(tmp_path, byte, rule, read):
    with open(tmp_path / "large.pb", "wb") as f:
        f.write(byte * 70_000)
        f.truncate(40_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError, match=rule):
        read(tmp_path / "large.pb")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_tags_longer_than_they_need_be():
    """A varint may be padded with zeros; a walk that looked for the short form would stand still."""
    data = field(OP, field(ARG, b"\xb0\x00\x01" * 30 + b"\xad\x80\x00\0\0\0\0" * 30))
    assert read_net(data, limits=Limits(numbers=100)).ops[0].args[0].kind == "floats"
    refused(data, "limit of 59 numbers", Limits(numbers=59))
    refused(data + b"\x08", "truncated at byte")


def test_a_message_that_says_it_is_huge():
    refused(b"\x0a\xff\xff\xff\xff\x07x", "name at byte 0 needs 2147483647 bytes, 1 remain")
    with pytest.raises(FormatError, match="need 1152921504606846976 elements"):
        tensor_to_numpy(b"\x08\x80\x80\x80\x80\x80\x80\x80\x80\x10")


def test_any_message_of_the_schema_can_be_parsed_under_limits():
    plan = message_class("PlanDef")(name="p")
    plan.network.add(name="n").op.add(type="Relu")
    assert parse_binary(plan.SerializeToString(), "PlanDef") == plan
    with pytest.raises(FormatError, match=r"not a PlanDef: network\[0\]: truncated"):
        parse_binary(plan.SerializeToString()[:3] + field(OP, b"\x0a\x05"), "PlanDef")


@pytest.mark.parametrize(
    "read", [jrnn.read_net, jrnn.convert.load_package, proto.read_plan, proto.read_net_or_plan]
)
def test_an_onnx_model_is_said_to_be_one(read, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x08\x02\x12\x07pytorch\x1a\x030.3:\x02\n\x00")  # as PyTorch wrote them
    with pytest.raises(
        FormatError,
        match="model.onnx: is an ONNX model, not a Caffe2 net; read it with jrnn.from_onnx",
    ):
        read(path)
