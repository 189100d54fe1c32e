"""The command line: one sub-command calls one function. A user's mistake is one line and exit status 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from jrnn.cli.parser import make_parser
from jrnn.cli.training import INTERRUPTED
from jrnn.errors import JrnnError
from jrnn.loops import host_memory

PIPE_CLOSED = 141  # the shell's status of a command whose reader, such as `head`, has ended


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    0: success; 1: a check failed; 2: a user's mistake; 130: interrupted; 141: the reader of its output is gone.
    """
    args = make_parser().parse_args(argv)
    if argv is None:  # the process is ours
        host_memory.keep()
    try:
        status = args.function(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when Python ends
        return PIPE_CLOSED
    except JrnnError as e:
        if args.debug:
            raise
        print(f"jrnn {args.command}: error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
