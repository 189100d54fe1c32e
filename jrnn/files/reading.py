"""Opens files of strangers: a pipe or a device may block or never end, and a file may be larger than the memory."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from os import PathLike
from typing import Any, BinaryIO

from jrnn.errors import DataError, ErrorType, needs_extra

PathName = str | PathLike[str]

LARGEST = 1 << 26  # bytes of a file of text or JSON
_BLOCK = 1 << 24  # bytes of one call of the system, between which Ctrl-C is seen
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def open_file(path: PathName, error: ErrorType, most: int | None = LARGEST) -> BinaryIO:
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
    except (OSError, ValueError) as e:
        # ValueError: a zero byte, or a surrogate that stands for no byte
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


def kind_of(path: PathName) -> str:
    """Returns "a file", "a folder", "a pipe", "a socket" or "a device"; "" if nothing is there or it is unknown."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return ""
    return "a file" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a device")


def read_file(path: PathName, error: ErrorType, most: int | None = LARGEST) -> bytes:
    """Returns the bytes of a file; raises `error` as `open_file` does, and for a file that grows while it is read."""
    with open_file(path, error, most) as opened:
        return read_rest(opened, path, error, most)


def digest_of(path: PathName, error: ErrorType) -> str:
    """Returns the SHA-256 of a file of any size, in hexadecimal digits; raises `error` as `open_file` does."""
    digest = hashlib.sha256()
    with open_file(path, error, None) as opened:
        for block in blocks(opened, path, error):
            digest.update(block)
    return digest.hexdigest()


def blocks(opened: BinaryIO, path: PathName, error: ErrorType) -> Iterator[bytes]:
    """Yields what follows in an open file."""
    try:
        while block := opened.read(_BLOCK):
            yield block
    except OSError as e:
        raise error(f"{path}: cannot be read: {e.strerror}") from None


def read_rest(opened: BinaryIO, path: PathName, error: ErrorType, most: int | None) -> bytes:
    """Returns the rest of an open file; raises if it has more than `most` bytes."""
    read = []
    for block in blocks(opened, path, error):
        read.append(block)
        if most is not None and (most := most - len(block)) < 0:
            raise error(f"{path}: grows while it is read")
    return b"".join(read)


def read_text(
    path: PathName,
    error: ErrorType,
    most: int | None = LARGEST,
    missing: str = "",
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
            raise error(
                f"{path}: is UTF-16; convert it, as with: iconv -f utf-16 -t utf-8 {path}"
            ) from None
        raise error(
            f"{path}: is not UTF-8: byte {e.start} is 0x{e.object[e.start]:02x}; convert it, as with: "
            f"iconv -f latin1 -t utf-8 {path}"
        ) from None


# Limits of a container.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available() -> int:
    """Returns how many bytes of memory are free: of the machine, or of its largest accelerator if that has more."""
    import jax  # here: readers of nets know no JAX

    most = free()
    for device in jax.local_devices():
        if device.platform != "cpu":
            most = max(most, (device.memory_stats() or {}).get("bytes_limit", 0))
    return max(most, 0)


def free() -> int:
    """Returns how many bytes of the machine's memory are free, at most what a container may use."""
    bounds = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/proc/meminfo", *_LIMITS):
        try:
            text = read_text(path, DataError)
        except DataError:
            continue
        if path == "/proc/meminfo":
            for kib in re.findall(r"^MemAvailable:\s*(\d+)", text, re.M):
                bounds.append(int(kib) * 1024)
        elif text.strip().isdigit():
            bounds.append(int(text))
    return min(bounds)


def tokenizers_package() -> Any:
    """Returns the package `tokenizers`; raises DataError if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise DataError(needs_extra("a tokenizer", "text")) from None
    return tokenizers


def parse_tokenizer(text: str, where: str) -> Any:
    """Returns the tokenizer of the text of a tokenizer.json; raises DataError if it is none."""
    package = tokenizers_package()
    try:
        tokenizer = package.Tokenizer.from_str(text)
    except Exception as e:  # the package raises Exception itself
        raise DataError(f"{where}: is not a tokenizer of the package tokenizers: {e}") from None
    tokenizer.no_truncation()  # files have the lengths of some batch that was encoded last
    tokenizer.no_padding()
    return tokenizer


def read_tokenizer(path: PathName) -> Any:
    """Returns the tokenizer of a file tokenizer.json; raises DataError if it cannot be read."""
    return parse_tokenizer(read_text(path, DataError), str(path))
