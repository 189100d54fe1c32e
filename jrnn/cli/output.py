"""The standard output and error of the commands: no file that a command reads can control the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from jrnn.errors import UsageError, printable
from jrnn.files import write_whole

# Exit statuses.
MISTAKE = 2
BUG = 70  # an error that jrnn did not expect (EX_SOFTWARE of BSD's sysexits.h)
INTERRUPTED = 130  # the shell's status of a command that Ctrl-C ended
PIPE_CLOSED = 141  # the shell's status of a command whose reader, such as `head`, has ended


class SafeStream:
    """A text stream that writes escapes in place of control characters, and of characters that its encoding lacks."""

    def __init__(self, stream: Any, name: str):
        self.stream = stream
        self._name = name
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        if self.stream is None:
            raise OutputError(f"{self._name} is closed")
        with self._reporting():
            self.stream.write(printable(text, lines=True))
        return len(text)

    def flush(self) -> None:
        with self._reporting():
            if self.stream is not None:
                self.stream.flush()

    def fileno(self) -> int:
        return int(self.stream.fileno())

    def isatty(self) -> bool:
        return self.stream is not None and self.stream.isatty()

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as e:
            raise OutputError(f"{self._name} cannot be written: {e.strerror or e}") from None

    def abandon(self) -> None:
        """Lets the flush at the end of Python succeed, although nothing can be written."""
        with contextlib.suppress(AttributeError, OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def write_json(path: str, values: Any) -> None:
    """Writes what `--json` asks for to a file, or to the standard output if the path is "-"."""
    text = json.dumps(values, indent=1, allow_nan=False)
    if path == "-":
        print(text)
    else:
        write_whole(Path(path), f"{text}\n".encode(), UsageError)


def say_written(*paths: str | Path | None) -> None:
    """Names the files that a command wrote, last."""
    for path in paths:
        if path is not None and str(path) != "-":
            print(printable(f"wrote {path}"))


class OutputError(Exception):
    """The output of a command cannot be written."""


@contextlib.contextmanager
def safe_output() -> Iterator[SafeStream]:
    """Within a `with` block, `print` and warnings write safely. Gives the standard output."""
    out = SafeStream(sys.stdout, "the standard output")
    err = SafeStream(sys.stderr, "the standard error")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):  # type: ignore[type-var]
        yield out


def terminal(file: Any = None, **options: Any) -> Console:
    """A console that writes colors and progress bars to a file, by default the standard output, all of it `printable`."""
    file = file or sys.stdout
    return Console(file=getattr(file, "stream", file), **options)
