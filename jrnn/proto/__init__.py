"""Caffe2's wire format: the only code that knows protobuf."""

from .codec import format_net, read_net, serialize_net, write_net
from .plans import read_net_or_plan, read_plan, serialize_plan, write_plan
from .schema import message_class
from .tensors import blob_from_numpy, blob_to_numpy, tensor_from_numpy, tensor_to_numpy
from .wire import Limits, parse_binary

__all__ = [
    "Limits",
    "blob_from_numpy",
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
