"""Caffe2's wire format: the only code that knows protobuf.

In: bytes or text of a stranger, within `Limits`. Out: records of `nets/ir.py`, and back. Read `codec.py` first.
"""

import types

from jrnn.nets.proto.codec import format_net as format_net
from jrnn.nets.proto.codec import read_net as read_net
from jrnn.nets.proto.codec import read_net_or_plan as read_net_or_plan
from jrnn.nets.proto.codec import read_plan as read_plan
from jrnn.nets.proto.codec import serialize_net as serialize_net
from jrnn.nets.proto.codec import serialize_plan as serialize_plan
from jrnn.nets.proto.codec import write_net as write_net
from jrnn.nets.proto.codec import write_plan as write_plan
from jrnn.nets.proto.messages import Limits as Limits
from jrnn.nets.proto.messages import message_class as message_class
from jrnn.nets.proto.messages import parse_binary as parse_binary
from jrnn.nets.proto.tensor_protos import blob_to_numpy as blob_to_numpy
from jrnn.nets.proto.tensor_protos import tensor_from_numpy as tensor_from_numpy
from jrnn.nets.proto.tensor_protos import tensor_to_numpy as tensor_to_numpy

__all__ = sorted(
    n for n, v in globals().items() if not n.startswith("_") and not isinstance(v, types.ModuleType)
)
