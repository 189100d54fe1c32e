"""Caffe2's wire format: the only code that knows protobuf.

In: bytes or text of a stranger, within `Limits`. Out: records of `nets/ir.py`, and back. Read `codec.py` first.
"""

from jrnn.nets.proto.codec import (
    format_net,
    read_net,
    read_net_or_plan,
    read_plan,
    serialize_net,
    serialize_plan,
    write_net,
    write_plan,
)
from jrnn.nets.proto.messages import Limits, message_class, parse_binary
from jrnn.nets.proto.tensors import blob_to_numpy, tensor_from_numpy, tensor_to_numpy

__all__ = [
    "Limits",
    "blob_to_numpy",
    "format_net",
    "message_class",
    "parse_binary",
    "read_net",
    "read_net_or_plan",
    "read_plan",
    "serialize_net",
    "serialize_plan",
    "tensor_from_numpy",
    "tensor_to_numpy",
    "write_net",
    "write_plan",
]
