"""Files that are written completely or not at all."""

import os
import uuid
from pathlib import Path

from jrnn.errors import JrnnError


def write_whole(target: Path, data: bytes, error: type[JrnnError]) -> None:
    """Writes a file under another name first: a failure keeps the old file, and a reader finds the old one or the new one.

    Raises:
        JrnnError: of type `error`, if the file cannot be written.
    """
    half = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with open(half, "xb") as f:
            f.write(data)
        os.replace(half, target)
    except OSError as e:
        raise error(f"{target}: cannot be written: {e.strerror}") from None
    finally:
        half.unlink(missing_ok=True)
