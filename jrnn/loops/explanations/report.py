"""`report`: what became of the loops of a program, with where each one is; and the log `jrnn.loops`.

`explain` lowers a function that its caller names. A report hears of every loop that is lowered while it is open, in all
threads, so that the program may be anyone's.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace

from jrnn.loops.costs import estimates as costs
from jrnn.loops.ir import observers
from jrnn.loops.strategies import NOTHING, LoopPlan

LOG = logging.getLogger("jrnn.loops")

_INSIDE = "inside of JAX, such as the rounds of jax.random"


@dataclass(frozen=True)
class LoopReport:
    """What became of a loop.

    Attributes:
        where: the line that calls `jax.lax.scan`, `jrnn.scan` or a layer, relative to the working directory or to
            site-packages.
        called_from: the line of the user's own code that led there, if `where` is in an installed package, else "".
        loop: its direction and length, as "reverse loop of 300 steps on cpu".
        executor: what runs it: "lax.scan" for a loop that is left as it is, or as in `LoopPlan`.
        reason: why, in words.
        count: how many times such a loop was lowered.
    """

    where: str
    called_from: str
    loop: str
    executor: str
    reason: str
    count: int = 1

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{self.loop}: {self.executor}{times}: {self.reason}"


class Report:
    """The loops that were lowered while it was open. It prints one line for each loop, below the line of code it is at.

    `close` ends it, and so does leaving a `with` block.

    Attributes:
        loops: what became of the loops, in the order in which they were first lowered.
    """

    def __init__(self) -> None:
        self._rows: dict[LoopReport, int] = {}
        self._notes: dict[tuple[str, str], list[str]] = {}  # why loops were not in chunks, and the like, by place
        self._lock = threading.Lock()
        observers.listeners.append(self._hear)

    def _hear(self, what: LoopPlan | str) -> None:
        place = observers.places()
        with self._lock:
            if isinstance(what, str):
                notes = self._notes.setdefault(place, [])
                notes += [what] if what not in notes else []
            else:
                row = LoopReport(*place, what.title, what.executor, reason(what))
                self._rows[row] = self._rows.get(row, 0) + 1

    @property
    def loops(self) -> tuple[LoopReport, ...]:
        with self._lock:
            return tuple(self._with_notes(replace(row, count=count)) for row, count in self._rows.items())

    def _with_notes(self, row: LoopReport) -> LoopReport:
        notes = self._notes.get((row.where, row.called_from), ())
        return replace(row, reason="; ".join([row.reason, *(n for n in notes if n not in row.reason)]))

    def close(self) -> None:
        """Ends the report, which keeps what it has."""
        if self._hear in observers.listeners:
            observers.listeners.remove(self._hear)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __str__(self) -> str:
        loops = self.loops
        if not loops:
            return (
                "no loop of jrnn.scan or optimize_scans() was lowered since this report began; a function that was compiled "
                "before is not lowered again. jrnn.optimize_scans(everywhere=True) tags the loops of a whole program"
            )
        left = sum(row.executor == "lax.scan" for row in loops)
        lines = [f"{len(loops)} loop{'s' * (len(loops) > 1)}: {len(loops) - left} rewritten, {left} left to lax.scan"]
        for place in dict.fromkeys((row.where, row.called_from) for row in loops):
            where, caller = place
            lines.append(f"{where or _INSIDE}{f', from {caller}' if caller else ''}")
            lines += [f"  {row}" for row in loops if (row.where, row.called_from) == place]
        return "\n".join(lines)


def report() -> Report:
    """Begins a report of the loops of this process: what became of each one, where it is, and why.

    It hears of the tagged loops that are lowered from now on, in all threads: those of `scan`, of jrnn's layers, and those
    under `optimize_scans`. Nothing is lowered or compiled a second time for it. The log `jrnn.loops` has the same lines at
    the level DEBUG, as they come.

    Returns:
        The report, which prints itself. A `with` block ends it; without one it ends with the process.

    >>> import jax, jrnn, jax.numpy as jnp
    >>> with jrnn.report() as heard, jrnn.optimize_scans():
    ...     total = jax.jit(lambda xs: jax.lax.scan(lambda c, x: (jnp.sin(c + x), None), 0.0, xs)[0])(jnp.arange(4.0))
    >>> [(row.loop, row.executor) for row in heard.loops]
    [('forward loop of 4 steps on cpu', 'lax.scan')]
    >>> print(heard)  # doctest: +ELLIPSIS
    1 loop: 0 rewritten, 1 left to lax.scan
    ...
      forward loop of 4 steps on cpu: lax.scan: it takes less time than planning it
    """
    return Report()


def reason(plan: LoopPlan) -> str:
    """Returns why a loop is run as it is."""
    notes = [note for note in plan.notes if note != NOTHING]
    if plan.executor == "lax.scan":
        return "; ".join([*notes, *([_nothing(plan)] if NOTHING in plan.notes else [])])
    counts = {"before the loop": plan.hoisted, "after the loop": plan.sunk, "summed after the loop": plan.summed}
    moved = [f"{len(items)} {where}" for where, items in counts.items() if items]
    parts = [f"values computed for all steps: {', '.join(moved)}"] if moved else []
    theirs = plan.choice.of("lax.scan") if plan.choice is not None else None
    if plan.choice is not None and theirs is not None:
        ours = plan.choice.chosen.estimate
        parts.append(f"estimated {costs.in_words(ours.seconds)}, lax.scan {costs.in_words(theirs.seconds)}")
    return "; ".join([*parts, *notes]) or "it was asked for"


def _nothing(plan: LoopPlan) -> str:
    """Says why no other way was chosen: of those that are faster, the fastest."""
    assert plan.choice is not None
    theirs = plan.choice.chosen.estimate.seconds
    faster = [(other.estimate.seconds, other.name, why) for other, why in plan.choice.others]
    faster = [row for row in faster if row[0] < theirs]
    if not faster:
        return "no other way is estimated to be faster"
    seconds, name, why = min(faster)
    return f"no other way is estimated to gain enough ({name}: {seconds / theirs:.2f} of the time; {why})"


def _log(what: LoopPlan | str) -> None:
    if LOG.isEnabledFor(logging.DEBUG):
        where, caller = observers.places()
        text = what if isinstance(what, str) else f"{what.title}: {what.executor}: {reason(what)}"
        LOG.debug("%s%s: %s", where or _INSIDE, f", from {caller}" if caller else "", text)


observers.listeners.append(_log)
