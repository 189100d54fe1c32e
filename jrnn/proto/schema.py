"""The message classes, built from `caffe2.desc` in a descriptor pool of our own.

The process's default pool stays untouched, so jrnn lives beside other packages that register a `caffe2` schema.
"""

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from jrnn.errors import near


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    files = descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("caffe2.desc").read_bytes()).file
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


@cache
def message_class(name: str) -> type[Message]:
    """The class of a message of Caffe2's schema, such as "NetDef", "PlanDef" or "BlobProto".

    >>> message_class("BlobProto")(name="w").name
    'w'
    """
    try:
        descriptor = _pool().FindMessageTypeByName(f"caffe2.{name}")
    except KeyError:
        known = _pool().FindFileByName("caffe2.proto").message_types_by_name
        raise KeyError(f"no message {name!r} in Caffe2's schema{near(name, known)}") from None
    made: type[Any] = message_factory.GetMessageClass(descriptor)
    return made
