"""Opens files of strangers: a pipe or a device may block or never end, and a file may be larger than the memory."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from jrnn.errors import JrnnError

LARGEST = 1 << 26  # bytes of a file of text or JSON
_BLOCK = 1 << 24  # bytes of one call of the system, between which Ctrl-C is seen
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def open_file(path: str | os.PathLike[str], error: type[JrnnError], most: int | None = LARGEST) -> BinaryIO:
    """Opens a regular file of at most `most` bytes to read it; None: of any size. Opening never waits.

    Raises:
        JrnnError: of type `error`, for a file that is missing, too large or not readable, and for a folder, pipe or device.
    """
    where = f"{path!s:.300}"
    try:
        opened = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except FileNotFoundError:
        raise error(f"{where}: no such file") from None
    except IsADirectoryError:
        raise error(f"{where}: is a folder, not a file") from None
    except (OSError, ValueError) as e:  # ValueError: a zero byte, or a surrogate that stands for no byte
        raise error(f"{where}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
    status = os.fstat(opened.fileno())
    if not stat.S_ISREG(status.st_mode):
        wrong = f"is {_KINDS.get(stat.S_IFMT(status.st_mode), 'a device')}, not a file"
    elif most is not None and status.st_size > most:
        wrong = f"has {status.st_size:,} bytes; at most {most:,} are read"
    else:
        return opened
    opened.close()
    raise error(f"{where}: {wrong}")


def kind_of(path: str | os.PathLike[str]) -> str:
    """Returns "a file", "a folder", "a pipe", "a socket" or "a device"; "" if nothing is there, or none can know."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return ""
    return "a file" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a device")


def read_file(path: str | os.PathLike[str], error: type[JrnnError], most: int | None = LARGEST) -> bytes:
    """Returns the bytes of a file; raises `error` as `open_file` does, and for a file that grows while it is read."""
    with open_file(path, error, most) as opened:
        return read_rest(opened, path, error, most)


def digest_of(path: str | os.PathLike[str], error: type[JrnnError]) -> str:
    """Returns the SHA-256 of a file of any size, in hexadecimal digits; raises `error` as `open_file` does."""
    digest = hashlib.sha256()
    with open_file(path, error, None) as opened:
        for block in blocks(opened, path, error):
            digest.update(block)
    return digest.hexdigest()


def blocks(opened: BinaryIO, path: str | os.PathLike[str], error: type[JrnnError]) -> Iterator[bytes]:
    """Yields what follows in an open file."""
    try:
        while block := opened.read(_BLOCK):
            yield block
    except OSError as e:
        raise error(f"{path}: cannot be read: {e.strerror}") from None


def read_rest(opened: BinaryIO, path: str | os.PathLike[str], error: type[JrnnError], most: int | None) -> bytes:
    """Returns what follows in an open file, at most so many bytes."""
    read = []
    for block in blocks(opened, path, error):
        read.append(block)
        if most is not None and (most := most - len(block)) < 0:
            raise error(f"{path}: grows while it is read")
    return b"".join(read)


def read_text(
    path: str | os.PathLike[str], error: type[JrnnError], most: int | None = LARGEST, missing: str = ""
) -> str:
    """Returns the text of a file without a byte order mark, and with "\\n" at the ends of lines.

    Raises:
        JrnnError: of type `error`, as `read_file`, and for a text that is not UTF-8; `missing` ends the message for no file.
    """
    if missing and not kind_of(path):
        raise error(f"{path!s:.300}: no such file{missing}")
    try:
        return read_file(path, error, most).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as e:
        if e.object.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise error(f"{path}: is UTF-16; convert it, as with: iconv -f utf-16 -t utf-8 {path}") from None
        raise error(
            f"{path}: is not UTF-8: byte {e.start} is 0x{e.object[e.start]:02x}; convert it, as with: "
            f"iconv -f latin1 -t utf-8 {path}"
        ) from None
