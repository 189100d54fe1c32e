"""The executors of `scan`: a table of what each needs from a loop, and of the options that it excludes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jrnn.errors import ScanError, near
from jrnn.loops.affine import associative
from jrnn.loops.ir import Loop
from jrnn.loops.kernels import native
from jrnn.loops.newton import Newton
from jrnn.loops.passes import split

_KEEPS = {"recompute": "keeps all states, which recompute forbids"}
_AT_ONCE = {"until": "computes all steps at once, and until stops between them"}


class Executor(NamedTuple):
    """One row of the table.

    Attributes:
        name: what the caller gives.
        refusal: returns the reason why it cannot run a core (the loop that stays when contractions have moved out), or None;
            None for an executor that runs every loop.
        excludes: the options that cannot be given with it, with the reason.
        on_tagged_loops: it runs tagged loops, so that `optimize_scans` can choose it.
    """

    name: str
    refusal: Callable[[Loop], str | None] | None = None
    excludes: Mapping[str, str] = {}
    on_tagged_loops: bool = True

    def check_options(self, given: Mapping[str, Any]) -> None:
        """Raises a ScanError if an option is given, and is not None, that cannot be combined with it."""
        for option, why in self.excludes.items():
            if given[option] is not None:
                raise ScanError(f"scan: executor {self.name!r} {why}; use 'auto' or 'scan'")

    def check(self, loop: Loop) -> None:
        """Raises a ScanError if it cannot run a loop."""
        why = self.refusal(split(loop).core) if self.refusal is not None else None
        if why is not None:
            raise ScanError(f"scan: executor {self.name!r} cannot run this step ({why}); use 'auto' or 'scan'")


_ROWS = (
    Executor("auto"),
    Executor("scan"),
    Executor("associative", associative.refusal, _KEEPS | _AT_ONCE),
    Executor(native.NAME, native.refusal, _AT_ONCE),
    Executor("newton", None, _KEEPS | _AT_ONCE, on_tagged_loops=False),
)
EXECUTORS = {row.name: row for row in _ROWS}


def find(name: Any) -> Executor:
    """Returns the row of a name, or of the options of an executor; raises a ScanError if there is none."""
    if isinstance(name, Newton):
        return EXECUTORS["newton"]
    row = EXECUTORS.get(name) if isinstance(name, str) else None
    if row is None:
        raise ScanError(
            f"scan: there is no executor {name!r}; there are {', '.join(EXECUTORS)}{near(str(name), EXECUTORS)}"
        )
    return row
