"""What a strategy is: one row of the table (`strategies/table.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jrnn.errors import ScanError
from jrnn.loops.ir import Loop, Results, ScanParams
from jrnn.loops.passes import split
from jrnn.loops.strategies.candidates import Candidate
from jrnn.loops.strategies.nodes import Node
from jrnn.loops.strategies.problem import Problem

Phase = Literal["tracing", "differentiation", "lowering"]


def _nothing(problem: Problem) -> Sequence[Candidate]:
    return ()


def _as_it_is(problem: Problem, node: Node) -> Node:
    return node


@dataclass(frozen=True, eq=False)
class Strategy:
    """A way to run loops.

    Attributes:
        name: what the caller gives as `executor`, and what `explain` prints.
        propose: returns candidates for a loop, made by `Problem.candidate`, of which the chooser runs at most one. It raises
            `Refused` with the reason if it cannot run the loop, or returns nothing if there is nothing to say.
        phase: when it applies.
        platforms: of JAX; all if there are none.
        excludes: the options that cannot be given with it, with the reason.
        refusal: returns the reason why it cannot run a core (what remains when contractions have moved out), or None.
            A caller who asks for it by name gets an error then, when the loop is traced.
        screen: returns False for the equation of a loop that need not be read. A loop is read if it is asked for by name.
        finish: returns the node to run, from that of the chosen candidate. It may raise `Refused`.
        trace: runs a call of `scan` in the phase "tracing".
    """

    name: str
    propose: Callable[[Problem], Sequence[Candidate]] = _nothing
    phase: Phase = "lowering"
    platforms: tuple[str, ...] = ()
    excludes: Mapping[str, str] = field(default_factory=dict)
    refusal: Callable[[Loop], str | None] | None = None
    screen: Callable[[ScanParams], bool] | None = None
    finish: Callable[[Problem, Node], Node] = _as_it_is
    trace: Callable[[Any], Results] | None = None

    def check_options(self, values: Mapping[str, Any]) -> None:
        """Raises a ScanError if an option is given, and is not None, that cannot be combined with it."""
        for option, why in self.excludes.items():
            if values[option] is not None:
                raise ScanError(f"scan: executor {self.name!r} {why}; use 'auto' or 'scan'")

    def check(self, loop: Loop) -> None:
        """Raises a ScanError if it cannot run a loop."""
        why = self.refusal(split(loop).core) if self.refusal is not None else None
        if why is not None:
            raise ScanError(
                f"scan: executor {self.name!r} cannot run this step ({why}); use 'auto' or 'scan'"
            )
