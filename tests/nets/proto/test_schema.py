"""The checked-in descriptor says what the .proto says, and lives in a pool of its own; an old name of a field is read."""

import json
import re
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

from jrnn.nets import proto
from jrnn.nets.ir import DeviceOption, Net, Op
from jrnn.nets.proto import format_net, message_class, read_net, serialize_net

FOLDER = Path(proto.__file__).parent
LINE = re.compile(
    r"(?P<kind>message|enum) (?P<name>\w+) \{"
    r"|(?P<label>optional|required|repeated) (?P<type>[\w.]+) (?P<field>\w+) = (?P<number>\d+)(?: \[(?P<option>[^]]+)\])?;"
    r"|(?P<value>\w+) = (?P<at>\d+);"
    r"|\}"
)


def declared(source):
    """What a .proto declares: {field: (number, label, type, packed, default)} and {enum value: number}, by full name."""
    fields, scope = {}, []
    for line in source.splitlines():
        line = line.split("//")[0].strip()
        if not line or line.startswith(("syntax", "package")):
            continue
        m = LINE.fullmatch(line)
        assert m, line
        if m["kind"]:
            scope.append(m["name"])
        elif m["field"]:
            option = dict([m["option"].split(" = ")]) if m["option"] else {}
            default = option.get("default", "").strip('"')
            said = (
                int(m["number"]),
                m["label"],
                m["type"].split(".")[-1],
                option.get("packed") == "true",
                default,
            )
            fields[".".join([*scope, m["field"]])] = said
        elif m["value"]:
            fields[".".join([*scope, m["value"]])] = int(m["at"])
        else:
            scope.pop()
    assert not scope
    return fields


def described(messages, enums, scope=()):
    """The same of a descriptor."""
    fields = {}
    for e in enums:
        fields.update({".".join([*scope, e.name, v.name]): v.number for v in e.value})
    for m in messages:
        inner = (*scope, m.name)
        for f in m.field:
            label = Field.Label.Name(f.label).removeprefix("LABEL_").lower()
            kind = (
                f.type_name.split(".")[-1] or Field.Type.Name(f.type).removeprefix("TYPE_").lower()
            )
            fields[".".join([*inner, f.name])] = (
                f.number,
                label,
                kind,
                f.options.packed,
                f.default_value,
            )
        fields.update(described(m.nested_type, m.enum_type, inner))
    return fields


def test_descriptor_is_made_from_the_proto():
    files = descriptor_pb2.FileDescriptorSet.FromString((FOLDER / "caffe2.desc").read_bytes()).file
    assert len(files) == 1 and files[0].package == "caffe2"
    want = declared((FOLDER / "caffe2.proto").read_text())
    assert described(files[0].message_type, files[0].enum_type) == want
    assert len(want) > 180


def test_numbers_that_caffe2_fixes():
    op = message_class("OperatorDef")(input=["x"], type="Relu", is_gradient_op=True, op_version=2)
    assert op.SerializeToString() == b'\x0a\x01x"\x04ReluH\x01`\x02'
    arg = message_class("Argument")(floats=[1.0, 2.0], ints=[3, 4])
    assert arg.SerializeToString() == b"\x2d\0\0\x80?\x2d\0\0\0@\x30\x03\x30\x04"  # not packed
    tensor = message_class("TensorProto")(int32_data=[1, 2])
    assert tensor.SerializeToString() == b"\x22\x02\x01\x02"  # packed
    model = message_class("ModelInfo")
    assert model().predictorType == "SINGLE_PREDICTOR"


def test_the_default_pool_is_left_alone():
    message_class("NetDef")
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("caffe2.NetDef")


def test_another_schema_of_the_same_name_does_no_harm():
    other = descriptor_pb2.FileDescriptorProto(name="caffe2.proto", package="caffe2")
    other.message_type.add(name="NetDef").field.add(
        name="other", number=1, label=1, type=Field.TYPE_INT32
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(other.SerializeToString())
    assert "other" not in message_class("NetDef").DESCRIPTOR.fields_by_name
    assert "other" in pool.FindMessageTypeByName("caffe2.NetDef").fields_by_name


def test_unknown_message_suggests():
    with pytest.raises(KeyError, match="did you mean 'PlanDef'"):
        message_class("PlanDeff")


def test_plans_and_meta_nets_are_in_the_schema():
    plan = message_class("PlanDef")(name="p")
    plan.execution_step.add(name="s", network=["n"]).substep.add(num_iter=3)
    assert message_class("PlanDef").FromString(plan.SerializeToString()) == plan
    meta = message_class("MetaNetDef")()
    meta.plans.add(key="TRAIN").value.CopyFrom(plan)
    assert message_class("MetaNetDef").FromString(meta.SerializeToString()) == meta


def test_text_from_before_device_id():
    """Old text has `cuda_gpu_id`. Strings and comments that hold this word stay as they are."""
    text = """name: "cuda_gpu_id: 3" # cuda_gpu_id: 4
        op { type: "Relu" input: 'a \\' cuda_gpu_id: 5' output: "y" device_option { device_type: 1 cuda_gpu_id: 2 } }
        device_option { device_type: 1 cuda_gpu_id : 1 }"""
    net = read_net(text)
    assert (net.name, net.ops[0].inputs) == ("cuda_gpu_id: 3", ("a ' cuda_gpu_id: 5",))
    assert (net.device_option, net.ops[0].device_option) == (DeviceOption(1, 1), DeviceOption(1, 2))
    assert read_net(format_net(net)) == read_net(serialize_net(net)) == net
    step = Net("step", (Op("Relu", ("x",), ("y",), device_option=DeviceOption(1, 2)),))
    old = format_net(step).replace("device_id", "cuda_gpu_id")
    outer = read_net(
        f'op {{ type: "RecurrentNetwork" arg {{ name: "step_net" s: {json.dumps(old)} }} }}'
    )
    assert outer.ops[0].arg("step_net") == step
    assert b"cuda_gpu_id" in serialize_net(outer)  # it is written back as it was
