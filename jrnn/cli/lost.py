"""The end of a process whose coordinator is lost: one line and exit status 2.

JAX's runtime ends such a process with `abort()`, from a thread of its own, as soon as the connection to the first process
breaks; its callback for this case cannot be used from Python. So the standard error of C++ is kept in a file, and a handler
of `abort()` reads there whether the coordinator is lost. What else C++ wrote is printed when the process ends.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import signal
import sys
import tempfile
import time

from jrnn.cli.output import MISTAKE, SafeStream

FATAL = b"JAX distributed service detected fatal errors"
_COORDINATION = re.compile(rb"coordination_service|preemption_sync_manager")  # files of XLA that report it before
_HELD = 5.0  # seconds in which the main thread may end the process itself
_keep: list[object] = []  # what C calls must not be freed


def end_in_one_line(command: str) -> None:
    """From now on, prints a line and ends the process with status 2 when the first process is lost.

    The main thread may do so before, if the loss interrupts a collective operation of its own.
    """
    out, log = os.dup(2), tempfile.TemporaryFile()  # noqa: SIM115
    os.dup2(log.fileno(), 2)
    if isinstance(sys.stderr, SafeStream):  # Python's own messages pass by the file
        sys.stderr.stream = os.fdopen(os.dup(out), "w", buffering=1, errors="backslashreplace")

    def report(number: int = 0) -> None:
        text = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0)
        if FATAL in text:
            time.sleep(_HELD)
            os.write(out, f"jrnn {command}: error: the first process is lost; start all again with --resume\n".encode())
            os._exit(MISTAKE)
        if not _COORDINATION.search(text):
            os.write(out, text)

    # Python's own handlers run in the main thread only. After this one, `abort()` goes on.
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(report)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    _keep.append((log, handler))
    atexit.register(report)
