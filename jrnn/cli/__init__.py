"""The command line: one sub-command calls one function. A user's mistake is one line and exit status 2.

In: the arguments of a command. Out: printed text, files and an exit status. Read `parser.py` first.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Sequence
from types import FrameType


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    0: success; 1: a check failed; 2: a user's mistake; 70: an error that jrnn did not expect, to be reported; 130:
    interrupted; 141: the reader of its output is gone.
    """
    if argv is not None:
        return _run(argv)
    # The process is ours. Until the imports end, it has begun nothing; after the command, there is nothing left to stop.
    signal.signal(signal.SIGINT, _end_at_once)
    try:
        return _run(argv)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(argv: Sequence[str] | None) -> int:
    return int(importlib.import_module("jrnn.cli.commands").run(argv))


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os.write(2, b"jrnn: interrupted\n")
    os._exit(130)
