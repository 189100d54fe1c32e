"""The end of a process whose coordinator is lost: one line and exit status 2.

JAX's runtime ends such a process with `abort()`, from a thread of its own, as soon as the connection to the first process
breaks; its callback for this case cannot be used from Python. So the standard error of C++ passes through a pipe. A thread
forwards it, except for the report of a lost coordinator. A handler holds back `abort()` meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

from jrnn.cli.output import MISTAKE, SafeStream

FATAL = b"JAX distributed service detected fatal errors"
# Files of XLA that report it, before FATAL.
_COORDINATION = re.compile(rb"coordination_service|preemption_sync_manager")
_HELD = 5.0  # seconds for which such a report is held back, and in which the main thread may end the process itself
_keep: list[object] = []  # what C calls must not be freed


def end_in_one_line(command: str) -> None:
    """From now on, prints a line and ends the process with status 2 when the first process is lost.

    The main thread may do so before, if the loss interrupts a collective operation of its own.
    """
    out = os.dup(2)
    source, sink = os.pipe()
    os.dup2(sink, 2)
    os.close(sink)
    if isinstance(sys.stderr, SafeStream):  # Python's own messages pass by the pipe
        sys.stderr.stream = os.fdopen(os.dup(out), "w", buffering=1, errors="backslashreplace")
    is_lost = threading.Event()

    def forward() -> None:
        _forward(source, out, is_lost)
        time.sleep(_HELD)
        what = "the first process is lost; start all again with --resume"
        os.write(out, f"jrnn {command}: error: {what}\n".encode())
        os._exit(MISTAKE)

    threading.Thread(target=forward, daemon=True).start()
    _on_abort(lambda: is_lost.wait(1.0) and time.sleep(2 * _HELD))


def _forward(source: int, target: int, is_lost: threading.Event) -> None:
    """Copies bytes until they report a lost coordinator."""
    pending = b""
    since = 0.0
    while True:
        ready, _, _ = select.select([source], [], [], _HELD if pending else None)
        data = os.read(source, 1 << 16) if ready else b""
        since = since if pending else time.monotonic()
        pending += data
        if FATAL in pending:
            is_lost.set()
            return
        if not _COORDINATION.search(pending) or time.monotonic() - since >= _HELD:
            os.write(target, pending)
            pending = b""


def _on_abort(function: Callable[[], object]) -> None:
    """Calls a function when C calls `abort()`, which then goes on. Python's own handlers run in the main thread only."""
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: function() and None)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    _keep.append(handler)
