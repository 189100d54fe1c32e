"""The executors of `scan`: a table of what each needs from a loop, and of the options that it excludes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jrnn.errors import ScanError, near
from jrnn.loops import native
from jrnn.loops.loop import Loop
from jrnn.loops.newton import Newton
from jrnn.loops.passes import associative, split
from jrnn.loops.targets import tpu


def _of_any(loop: Loop) -> None:
    return None


@dataclass(frozen=True)
class Executor:
    """One row of the table.

    Attributes:
        name: what the caller gives.
        refusal: returns the reason why it cannot run a core (the loop that stays when contractions have moved out), or None.
        keeps_states: it keeps the carries of all steps, which the option `recompute` forbids.
        is_loop: it runs one step after the other, so that a loop can stop early.
        on_marked_loops: it runs marked loops, so that `optimize_scans` can choose it.
    """

    name: str
    refusal: Callable[[Loop], str | None] = _of_any
    keeps_states: bool = False
    on_marked_loops: bool = True
    is_loop: bool = False

    @property
    def refuses_some(self) -> bool:
        """Whether there are loops that it cannot run."""
        return self.refusal is not _of_any

    def check(self, loop: Loop) -> None:
        """Raises a ScanError if it cannot run a loop."""
        why = self.refusal(split(loop).core) if self.refuses_some else None
        if why is not None:
            raise ScanError(f"scan: executor {self.name!r} cannot run this step ({why}); use 'auto' or 'scan'")


_ROWS = (
    Executor("auto", is_loop=True),
    Executor("scan", is_loop=True),
    Executor("associative", associative.refusal, keeps_states=True),
    Executor(tpu.KERNEL, tpu.refusal),
    Executor(native.NAME, native.refusal),
    Executor("cudnn", on_marked_loops=False),
    Executor("newton", keeps_states=True, on_marked_loops=False),
)
EXECUTORS = {row.name: row for row in _ROWS}


def find(name: Any) -> Executor:
    """Returns the row of a name, or of the options of an executor; raises a ScanError if there is none."""
    if isinstance(name, Newton):
        return EXECUTORS["newton"]
    found = EXECUTORS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ScanError(
            f"scan: there is no executor {name!r}; there are {', '.join(EXECUTORS)}{near(str(name), EXECUTORS)}"
        )
    return found
