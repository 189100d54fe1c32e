"""Files that are written completely or not at all, and what is no file to read."""

import contextlib
import os
import stat
import uuid
from pathlib import Path

from jrnn.errors import JrnnError

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def no_file(path: Path) -> str:
    """Says that what is there is no file, because reading it may never end; "" for a file. OSError as of `os.stat`."""
    mode = path.stat().st_mode
    return "" if stat.S_ISREG(mode) else f"is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, not a file"


def write_whole(target: Path, data: bytes, error: type[JrnnError]) -> None:
    """Writes a file under another name first: a failure keeps the old file, and a reader finds the old one or the new one.

    A device or a pipe, such as /dev/stdout, is written to; a link stays, and the file that it names is written.

    Raises:
        JrnnError: of type `error`, if the file cannot be written.
    """
    half = Path()
    try:
        target = target.resolve()
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_bytes(data)
            return
        half = target.with_name(f".{uuid.uuid4().hex}.part")
        with open(half, "xb") as f:
            f.write(data)
        os.replace(half, target)
    except (OSError, ValueError) as e:  # ValueError: a zero byte in the name
        raise error(f"{target}: cannot be written: {getattr(e, 'strerror', None) or e}") from None
    finally:
        with contextlib.suppress(OSError, ValueError):
            half.unlink()
