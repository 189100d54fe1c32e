"""The table of strategies. A new strategy is a row, and often a node; docs/notes/map.md says how to write one.

Rows of one phase are asked in this order. On platforms without estimates the first one that proposes a candidate runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from jrnn.errors import ScanError, near
from jrnn.loops.affine import associative as affine
from jrnn.loops.ir import observers
from jrnn.loops.kernels import native as kernel
from jrnn.loops.newton import Newton
from jrnn.loops.strategies import accelerators, arithmetic, associative, native, splits, unrolled
from jrnn.loops.strategies.candidates import Candidate
from jrnn.loops.strategies.problem import Problem
from jrnn.loops.strategies.strategy import Strategy

# what leaves the choice to the chooser, and the strategy that every loop has
AUTO = "auto"
SCAN = "scan"
_STORES_STATES = {"recompute": "keeps all states, which recompute forbids"}
_ALL_STEPS_AT_ONCE = {"until": "computes all steps at once, and until stops between them"}


def _solved(call: Any) -> Any:
    from jrnn.loops.newton.api import solve

    observers.notify(
        "newton: all steps at once, so there is no loop to explain; scan_statistics reports what it does"
    )
    return solve(call.step, call.init, call.xs, call.length, call.reverse, call.newton)[0]


def _lazily(module: str, function: str) -> Callable[..., Any]:
    """Returns a function of a module of this folder that most loops do not need."""

    def call(*args: Any) -> Any:
        return getattr(import_module(f"jrnn.loops.strategies.{module}"), function)(*args)

    return call


def _by_steps(problem: Problem) -> Sequence[Candidate]:
    return splits.propose(problem) if problem.is_estimated else accelerators.propose(problem)


def _finished_steps(problem: Problem, node: Any) -> Any:
    return splits.for_xla(problem, node) if problem.is_estimated else node


_ROWS = (
    Strategy(
        "chunks",
        _lazily("chunks", "propose"),
        "differentiation",
        screen=_lazily("chunks", "may_pay"),
        finish=_lazily("chunks", "finish"),
    ),
    Strategy(
        "associative",
        associative.propose,
        excludes=_STORES_STATES | _ALL_STEPS_AT_ONCE,
        refusal=affine.refusal,
        finish=associative.finish,
    ),
    Strategy("arithmetic", arithmetic.propose, platforms=("cpu",)),
    Strategy(
        "native",
        native.propose,
        platforms=("cpu",),
        excludes=_ALL_STEPS_AT_ONCE,
        refusal=kernel.refusal,
    ),
    Strategy("unrolled", unrolled.propose, platforms=("cpu",)),
    Strategy(SCAN, _by_steps, finish=_finished_steps),
    Strategy(
        "newton", phase="tracing", excludes=_STORES_STATES | _ALL_STEPS_AT_ONCE, trace=_solved
    ),
)
STRATEGIES = {row.name: row for row in _ROWS}
# The executors that run a loop as they are asked to, or raise.
EXECUTORS = (
    AUTO,
    SCAN,
    *(row.name for row in _ROWS if row.refusal is not None or row.trace is not None),
)


def find(name: Any) -> Strategy | None:
    """Returns the strategy that a caller asks for, None for "auto"; raises a ScanError if there is none."""
    if isinstance(name, Newton):
        return STRATEGIES["newton"]
    if isinstance(name, str) and (name == AUTO or name in STRATEGIES):
        return STRATEGIES.get(name)
    known = (AUTO, *STRATEGIES)
    raise ScanError(
        f"scan: there is no executor {name!r}; there are {', '.join(known)}{near(str(name), known)}"
    )
