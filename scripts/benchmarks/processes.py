"""Programs that are measured in a process of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from jrnn.bench.peers import Timed
from jrnn.errors import DataError


class Process:
    """A process that answers each line of its input with a line of JSON."""

    def __init__(self, command: Sequence[str]):
        self._command = command
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            if command[0] == sys.executable
            else None,
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._to, self._back = self._popen.stdin, self._popen.stdout

    def ask(self) -> Any:
        with contextlib.suppress(BrokenPipeError):  # a dead process also answers nothing
            self._to.write("run\n")
            self._to.flush()
        line = self._back.readline()
        if not line:
            status, again = self._popen.wait(), shlex.join(self._command)
            raise DataError(
                f"the process to measure ended with status {status}; run it to see why: {again}"
            )
        return json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._to.close()
        self._popen.wait(timeout=30)
        self._back.close()

    def program(self, *costs: Any) -> Timed:
        return Timed(self.ask, *costs, close=self.close)
