"""Runs one command: the one place where exceptions become one line and an exit status."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import jax

from jrnn.cli.output import BUG, INTERRUPTED, MISTAKE, PIPE_CLOSED, OutputError, safe_output
from jrnn.cli.parser import make_parser
from jrnn.convert.named import described, is_own
from jrnn.errors import JrnnError
from jrnn.loops import host


def run(argv: Sequence[str] | None) -> int:
    """Runs a command line, by default the process's own; see `jrnn.cli.main`."""
    interrupts: list[int] = []
    if argv is None:  # the process is ours
        host.retain_memory()

        def interrupt(number: int, frame: FrameType | None) -> None:
            interrupts.append(number)
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupt)
        sys.unraisablehook = _repeat_interrupt
    with safe_output() as out, _imports_said(), warnings.catch_warnings():
        warnings.showwarning = lambda message, *where: _note(f"warning: {message}")
        status = _run(argv, interrupts)
        try:
            out.flush()
        except (OutputError, BrokenPipeError):
            out.abandon()
    if argv is None and (status == INTERRUPTED or (status and jax.distributed.is_initialized())):
        # JAX would wait for a thread or, until it aborts, for processes that are lost.
        os._exit(status)
    return status


@contextlib.contextmanager
def _imports_said() -> Iterator[None]:
    """Prints which modules that a configuration or the command line names are run, before they are."""
    logger = logging.getLogger("jrnn.imports")
    handler = logging.Handler()
    handler.emit = lambda record: _note(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    propagates = logger.propagate
    logger.propagate = False  # absl, which orbax imports, prints what reaches the root
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


def _repeat_interrupt(ignored: Any) -> None:
    """Interrupts again, a little later, if Ctrl-C came where Python ignores exceptions, as in JAX's garbage collection."""
    if isinstance(ignored.exc_value, KeyboardInterrupt):
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(ignored)


def _run(argv: Sequence[str] | None, interrupts: list[int]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return MISTAKE
    try:
        status = int(args.function(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return _say(args.command, "interrupted", INTERRUPTED)
    except Exception as e:
        if interrupts:  # a library has turned the interrupt into an error of its own
            return _say(args.command, "interrupted", INTERRUPTED)
        if args.debug:
            raise
        if isinstance(e, (JrnnError, OutputError)):
            return _say(args.command, f"error: {e}", MISTAKE)
        if isinstance(e, OSError):
            where = f"{str(e.filename)[:200]}: " if e.filename else ""
            return _say(args.command, f"error: {where}{e.strerror or e}", MISTAKE)
        if is_own(e):
            return _say(
                args.command, f"error: {described(e)}; --debug shows the traceback", MISTAKE
            )
        if isinstance(e, MemoryError):
            detail = f": {e}" if str(e) else ""
            return _say(args.command, f"error: there is not enough memory{detail}", MISTAKE)
        return _say(args.command, f"unexpected error: {_described(e)}", BUG)


def _say(command: str, text: str, status: int) -> int:
    _note(f"jrnn {command}: {text}")
    return status


def _note(text: str) -> None:
    with contextlib.suppress(OutputError, BrokenPipeError):  # then nobody can read it
        print(text, file=sys.stderr)


def _described(error: Exception) -> str:
    """One line about an error that jrnn did not expect: its type, its text and its place."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}{place}; --debug shows the traceback; please report it if the code is jrnn's"
