"""Caffe2's wire format: the only code that knows protobuf."""

from .codec import format_net, read_net, serialize_net, write_net
from .schema import message_class
from .wire import Limits

__all__ = ["Limits", "format_net", "message_class", "read_net", "serialize_net", "write_net"]
