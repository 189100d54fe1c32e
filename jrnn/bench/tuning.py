"""`tune`: each loop of a program is run by each way that there is, on this machine, and the fastest ways are kept in a file.

First come the loops that are about to be differentiated, step by step and in chunks, because that decides which loops there
are; then each loop that is lowered, forward or reverse. At the end the whole program is measured with and without what was
found.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jrnn.bench.loop_ways import Measure, TunedLoop, WayTimer, by_clock, refusal
from jrnn.errors import ScanError
from jrnn.files import kind_of
from jrnn.loops.costs import tuned
from jrnn.loops.costs.tuned import Question, Questions, Table
from jrnn.progress import Bar

FILE = "jrnn_plans.json"
_TURNS = 30  # of the whole program
_SHARE = 0.2  # of the time, for the whole program


@dataclass(frozen=True)
class Tuning:
    """What `tune` found. It prints a summary.

    Attributes:
        path: the file that was written, or None if nothing was gained.
        loops: what was measured for each loop.
        ratio: the time of the whole program with what was found over its time without; nan if it was not measured.
        kept: what was gained, by the key of the loop.
        measured: the keys of all loops.
    """

    path: Path | None
    loops: tuple[TunedLoop, ...]
    ratio: float = math.nan
    kept: Mapping[str, TunedLoop] = field(default_factory=dict, repr=False)
    measured: frozenset[str] = field(default=frozenset(), repr=False)

    def __str__(self) -> str:
        if not self.loops:
            return (
                "no loop of jrnn.scan or optimize_scans() is lowered in this program, so there is nothing to tune; call "
                "jrnn.scan in place of jax.lax.scan, or decorate the function with jrnn.optimize_scans()"
            )
        lines = [str(loop) for loop in self.loops]
        if not math.isnan(self.ratio):
            lines.append(f"the whole program takes {self.ratio:.2f} of its time before")
        if self.path is None:
            lines.append("nothing was gained, so nothing is kept")
        else:
            lines.append(f"wrote {self.path}; later runs use it if {tuned.VARIABLE} names it")
        return "\n".join(lines)


def tune(
    fn: Callable,
    *,
    path: str | os.PathLike[str] | None = None,
    seconds: float = 60.0,
    console: Console | None = None,
    measure: Measure = by_clock,
) -> Callable[..., Tuning]:
    """Chooses by measurement how the loops of a program run, and keeps the choice in a file for later runs.

    Each marked loop (those of `scan`, of jrnn's layers, and those under `optimize_scans`) runs alone, on random numbers of
    its shapes, by each way that there is: as `jax.lax.scan` runs it, as jrnn chooses without measuring, by the other
    candidates of the cost model, with several steps a trip of the loop, and, with a gradient over matrix states, in chunks
    of several lengths. The ways take turns. One replaces jrnn's choice if it is faster by more than the noise, needs no more
    memory than the option `memory` allows, and gives the same results. At the end the whole program is measured, if its
    arguments are arrays. If it is not faster than before, nothing is kept.

    An entry holds for the structure of a loop, its shapes and options, the device, and the versions of JAX and jrnn. For all
    else, loops are planned as without the file.

    Args:
        fn: a function, which may be jitted, such as a train step.
        path: the file; by default the one that the environment variable JRNN_PLANS names, or jrnn_plans.json. Entries of
            other loops that it has stay in it.
        seconds: a limit. Loops that are not reached in time stay as they are. What is under way is not cut off.
        console: where progress is shown, or None.
        measure: gives the times, for tests and other clocks: a function of programs by name, a number of turns and
            seconds, which returns the seconds of each turn by name.

    Returns:
        A function of the arguments of `fn`, of which some may be `jax.ShapeDtypeStruct`. It measures, writes the file, and
        returns what it found. This process uses that from then on; later ones use the file that JRNN_PLANS names.

    Raises:
        TypeError: if `fn` is not callable.
        ScanError: if the file cannot be written or is no file of plans, or `seconds` is not positive.

    >>> import jax, tempfile, jrnn, jax.numpy as jnp
    >>> def last(xs):
    ...     return jrnn.scan(lambda c, x: (jnp.sin(c + x), None), jnp.zeros(3), xs)[0]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = tune(last, path=f"{folder}/plans.json", seconds=1)(jnp.ones((50, 3)))
    >>> print(found)  # doctest: +ELLIPSIS
    forward loop of 50 steps on cpu...
    """
    if not callable(fn):
        raise TypeError(f"tune: the first argument must be a function, but is {fn!r}")
    if not seconds > 0:
        raise ScanError(f"tune: seconds must be positive, but is {seconds!r}")
    target = Path(path or os.environ.get(tuned.VARIABLE) or FILE)

    def tuning(*args: Any, **keywords: Any) -> Tuning:
        result = into_file(target, fn, args, keywords, seconds=seconds, console=console, measure=measure)
        measured = {key: loop.taken for key, loop in result.kept.items()}
        others = {key: name for key, name in tuned.current().ways.items() if key not in result.measured}
        tuned.use(Table.of({**others, **measured}))
        return result

    return tuning


def into_file(
    path: Path,
    fn: Callable,
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    *,
    seconds: float = 60.0,
    console: Console | None = None,
    measure: Measure = by_clock,
) -> Tuning:
    """Does what `tune` does, without using it in this process."""
    if kind_of(path):
        tuned.read(path)  # a mistake is reported before the work
    work = _Work(fn, (args, keywords), seconds, measure, console or Console(quiet=True))
    loops = work.loops()
    ratio = work.together() if work.gains else math.nan
    if work.gains or kind_of(path):
        tuned.write(path, {key: work.entry(key) for key in work.done})
    return Tuning(path if work.gains else None, loops, ratio, work.gains, frozenset(work.done))


def _runnable(lowered: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Compiles a program. Returns a function that runs it, or None if its arguments are not all arrays and numbers."""
    program = lowered.compile()
    leaves = jax.tree.leaves((args, keywords))
    if not isinstance(program, jax.stages.Compiled) or not all(
        isinstance(v, jax.Array) or np.isscalar(v) for v in leaves
    ):
        return None  # shapes alone, or objects that a call would change
    if not any(info.donated for info in jax.tree.leaves(lowered.args_info)):
        return lambda: program(*args, **keywords)

    def run() -> Any:  # it consumes its arguments
        some, named = jax.tree.map(_copied, (tuple(args), dict(keywords)))
        return program(*some, **named)

    return run


def _copied(value: Any) -> Any:
    return jnp.copy(value) if isinstance(value, jax.Array) else value


class _Work:
    """The loops of a program under measurement.

    Attributes:
        done: what was measured, by the key of the loop.
        found: those that gain.
    """

    def __init__(self, fn: Callable, given: tuple[Any, Any], seconds: float, measure: Measure, console: Console):
        self.fn, self.given, self.measure, self.console = fn, given, measure, console
        self.now = time.monotonic
        self.end = self.now() + seconds
        self.for_loops = self.end - _SHARE * seconds
        self.done: dict[str, TunedLoop] = {}
        self.gains: dict[str, TunedLoop] = {}

    @property
    def taken(self) -> dict[str, str]:
        return {key: loop.taken for key, loop in self.gains.items()}

    def questions(self) -> Questions:
        """Returns the questions that are asked where the program is lowered with what was found."""
        asked = Questions()
        with tuned.using(Table.of(self.taken)), tuned.collecting(asked):
            self.lower()
        return asked

    def lower(self) -> Any:
        args, keywords = self.given
        return (self.fn if hasattr(self.fn, "lower") else jax.jit(self.fn)).lower(*args, **keywords)

    def loops(self) -> tuple[TunedLoop, ...]:
        with Bar(self.console, 1) as bar:
            for differentiated in (True, False):
                bar.doing("lowering the program")
                questions = [q for q in self.questions() if bool(q.moves) == differentiated]
                bar.extend(len(questions))
                for k, question in enumerate(questions):
                    bar.doing(f"measuring {question.title}")
                    self.done[question.key] = self._one(question, len(questions) - k)
                    bar.advance()
        return tuple(self.done.values())

    def entry(self, key: str) -> dict[str, Any] | None:
        """Returns what is written about a loop, or None if it takes the way that it would take without."""
        loop = self.gains.get(key)
        about = {"device": f"{jax.devices()[0].platform} {tuned.processor()}", "versions": tuned.versions()}
        return None if loop is None else {"take": loop.taken, **asdict(loop), **about}

    def _one(self, question: Question, left: int) -> TunedLoop:
        default, share = question.ways[0], (self.for_loops - self.now()) / left
        why = refusal(question) or ("the time is over" if share <= 0 else "")
        if why:
            return TunedLoop(question.title, default, default, why=why)
        loop = WayTimer(question, self.taken, share, self.measure, self.now).best()
        if loop.taken != default:
            self.gains[question.key] = loop
        return loop

    def together(self) -> float:
        """Measures the whole program with and without what was found, which is dropped if that does not make it faster."""
        runs: dict[str, Callable[[], Any]] = {}
        for name, taken in (("before", {}), ("tuned", self.taken)):
            with tuned.using(Table.of(taken)):
                run = _runnable(self.lower(), *self.given)
            if run is None:
                return math.nan
            runs[name] = run
        times = self.measure(runs, _TURNS, max(self.end - self.now(), 0.0))
        ratio = min(times["tuned"]) / min(times["before"])
        if ratio > 1:
            self.gains.clear()
        return ratio
