"""NetDefs, as bytes, text or files, to frozen nets and back, without loss: `read_net(serialize_net(net)) == net`."""

import os
import re
import uuid
from pathlib import Path

from google.protobuf.message import EncodeError

from jrnn.errors import FormatError
from jrnn.ir import Net
from jrnn.proto.decode import Reader
from jrnn.proto.encode import to_message
from jrnn.proto.text import format_message
from jrnn.proto.wire import DEFAULT_LIMITS, Limits, check_size, parse_binary

LOOKS_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1f]")


def read_net(source: str | bytes | os.PathLike[str], *, limits: Limits = DEFAULT_LIMITS) -> Net:
    """Reads a net from a file, from bytes (binary or text), or from text.

    A str is a path where a file of that name exists; otherwise, text if it holds a line break, "{" or ":".

    Raises:
      FormatError: a file that cannot be read, damaged bytes, text that is no NetDef, or more than `limits` admit.

    >>> read_net('name: "tiny" op { type: "Relu" input: "x" output: "y" }').ops[0].outputs
    ('y',)
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _read_bytes(bytes(source), limits)
    if isinstance(source, str) and not os.path.exists(source) and (not source or re.search(r"[\n{:]", source)):
        return Reader(limits).text(source, 1)
    try:
        return _read_bytes(file_bytes(Path(source), limits), limits)
    except FormatError as e:
        raise e.at(str(source)[:200]) from None


def serialize_net(net: Net) -> bytes:
    """Returns the net as a binary NetDef: `read_net(serialize_net(net)) == net`.

    >>> serialize_net(Net(name="n"))
    b'\\n\\x01n'
    """
    try:
        return bytes(to_message(net).SerializePartialToString(deterministic=True))
    except (EncodeError, ValueError) as e:
        if isinstance(e, FormatError):
            raise
        raise FormatError(f"net {net.name!r} cannot be serialized: {e}") from None


def format_net(net: Net) -> str:
    """Returns the net as NetDef text: `read_net(format_net(net)) == net`.

    >>> format_net(Net(name="n", external_inputs=("x",)))
    'name: "n"\\nexternal_input: "x"\\n'
    """
    return format_message(to_message(net))


def write_net(net: Net, path: str | os.PathLike[str]) -> None:
    """Writes a net to a file, binary under `.pb` and text under `.pbtxt`, whole or not at all."""
    target = Path(path)
    if target.suffix == ".pb":
        data = serialize_net(net)
    elif target.suffix == ".pbtxt":
        data = format_net(net).encode()
    else:
        raise FormatError(f"{target}: the name of a net's file must end in .pb (binary) or .pbtxt (text)")
    write_whole(target, data)


def write_whole(target: Path, data: bytes) -> None:
    """Writes a file whole or not at all: under another name first, so that a failure leaves an older file as it was."""
    half = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with open(half, "xb") as f:
            f.write(data)
        os.replace(half, target)
    except OSError as e:
        raise FormatError(f"{target}: cannot be written: {e.strerror}") from None
    finally:
        half.unlink(missing_ok=True)


def file_bytes(path: Path, limits: Limits) -> bytes:
    """All of a file, once its size has been compared with the limit."""
    if not path.is_file():
        raise FormatError("is not a file" if path.exists() else "no such file")
    try:
        with open(path, "rb") as f:
            check_size(os.fstat(f.fileno()).st_size, limits.bytes, "file")
            return f.read()
    except OSError as e:
        raise FormatError(f"cannot be read: {e.strerror}") from None


def _read_bytes(data: bytes, limits: Limits) -> Net:
    check_size(len(data), limits.bytes, "message")
    reader = Reader(limits)
    if not data or LOOKS_BINARY.search(data):
        return reader.net(parse_binary(data, "NetDef", limits), 1)
    # All bytes are printable: almost surely text, but a message of one long name may look like it, even like a comment.
    net, failure = Net(), None
    try:
        net = reader.text(data, 1)
    except FormatError as e:
        failure = e
    if net == Net():
        try:
            net = reader.net(parse_binary(data, "NetDef", limits), 1)
        except FormatError:
            if failure:
                raise failure from None
    return net
