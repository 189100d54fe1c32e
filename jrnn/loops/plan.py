"""LoopPlan: what was decided for a loop. It is run, cached, and printed by `explain_scan`.

A target (`targets/`) makes it. Its passes rewrite the loop, and `passes/fission.py` splits it into work for all steps before
the loop (early), the loop that stays (core), and work for all steps after it (late, summed). If the arrays of all steps
would be too large, `recompute.in_chunks` runs a few steps at a time.

Shapes: T time.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.extend import source_info_util

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, primitives
from jrnn.loops import machines
from jrnn.loops.costs import Choice
from jrnn.loops.loop import Loop, Results
from jrnn.loops.machines import CPU, Machine
from jrnn.loops.passes.fission import Fission
from jrnn.loops.recompute import in_chunks

NOTHING = "nothing to gain"  # the note of a loop that no candidate makes faster
_SHOWN = 2  # the most values of each kind that are printed
_OURS = str(Path(__file__).parents[1]) + os.sep
source_info_util.register_exclusion(str(Path(__file__).parent))


class Runner(Protocol):
    """Runs the loop that stays."""

    def run(self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: Any) -> Results:
        """Runs `length` steps."""


@dataclass(frozen=True)
class Target:
    """What a loop is lowered for.

    Attributes:
        platform: "cpu", "cuda", "rocm" or "tpu".
        devices: the number of devices that the program is divided among.
        kind: the kind of the devices, such as "TPU v5 lite", or "" if unknown.
        exported: it will run elsewhere, where custom calls of this process are unknown.
        machine: the constants of the cost model.
    """

    platform: str
    devices: int = 1
    kind: str = ""
    exported: bool = False
    machine: Machine = CPU

    @staticmethod
    def here() -> Target:
        """Returns the target of programs of this process, which are not divided."""
        platform = jax.default_backend()
        return Target(platform, machine=machines.of(platform))


@dataclass(frozen=True)
class LoopPlan:
    """How a loop is run.

    Attributes:
        target: what it is lowered for.
        loop: the loop as JAX made it, with its calls inlined, or None if it could not be read.
        fission: the loop split into parts, or None if `jax.lax.scan` lowers it.
        core: runs `fission.core`, the loop that stays.
        executor: the name of that runner: "lax.scan", "scan", "associative", "persistent" or "native"; or "chunks", for a
            loop and its gradient that run as `loops/chunks` in place of a loop over steps.
        chunk: the number of steps to run at a time to bound memory, or None for all.
        notes: reasons for what was not done.
        choice: the candidates that were compared, or None if the loop could not be planned.
        otherwise: the plans to lower instead, in order, if this one cannot be lowered; after them, `jax.lax.scan`.
    """

    target: Target
    loop: Loop | None
    fission: Fission | None
    core: Runner | None
    executor: str
    chunk: int | None = None
    notes: tuple[str, ...] = ()
    choice: Choice | None = None
    otherwise: tuple[LoopPlan, ...] = ()

    @staticmethod
    def left(target: Target, loop: Loop | None, why: str) -> LoopPlan:
        """Returns a plan that leaves the loop to `jax.lax.scan`, and says why."""
        return LoopPlan(target, loop, None, None, "lax.scan", notes=(why,))

    def run(self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]) -> Results:
        """Runs all steps."""
        assert self.fission is not None and self.core is not None
        fission, core, steps = self.fission, self.core.run, self.fission.loop.length
        constants = fission.constants(consts)
        if self.chunk is None:
            return fission.run_with(constants, init, xs, steps, core)

        def run_some(carry: Any, xs: Any, steps: Any) -> Results:
            return fission.run_with(constants, carry, xs, steps, core)

        return in_chunks(run_some, list(init), list(xs), steps, self.chunk, fission.loop.reverse)

    @property
    def hoisted(self) -> tuple[Item, ...]:
        """Values that are computed for all steps before the loop."""
        return self._items(lambda fission: fission.early)

    @property
    def sunk(self) -> tuple[Item, ...]:
        """Values that are computed for all steps after the loop."""
        return self._items(lambda fission: fission.late)

    @property
    def summed(self) -> tuple[Item, ...]:
        """Values that are summed over all steps after the loop, instead of carried."""
        return self._items(lambda fission: [v for values in fission.summed.values() for v in values], per_step=False)

    @property
    def stacked(self) -> tuple[Item, ...]:
        """Values that the loop that stays writes at each step. A loop that is left to `jax.lax.scan` stays whole."""
        if self.executor == "lax.scan" and self.loop is not None:
            return self._items_of(self.loop.ys, self.loop)
        return self._items(lambda fission: fission.core.ys)

    @property
    def contractions(self) -> int:
        """The number of contractions that stay in the loop, with those in its branches and inner loops."""
        return _contractions(self.fission.core.eqns if self.fission else self.loop.eqns if self.loop else ())

    def _items(self, chosen: Callable[[Fission], Iterable[Any]], per_step: bool = True) -> tuple[Item, ...]:
        if self.fission is None:
            return ()
        return self._items_of(chosen(self.fission), self.fission.loop, per_step)

    @staticmethod
    def _items_of(found: Iterable[Any], loop: Loop, per_step: bool = True) -> tuple[Item, ...]:
        producers = jaxprs.producers(loop.eqns)
        count = jaxprs.extent(loop.length) if per_step else 1
        return tuple(Item.of(v, producers, count) for v in jaxprs.variables(found))

    def __str__(self) -> str:
        lines = [f"{self.title}: {self.executor}"]
        for title, items in (*self._moved().items(), ("written by the loop at each step", self.stacked)):
            if items:
                shown = [f"    {item}" for item in items[:_SHOWN]]
                more = [f"    and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
                lines += [f"  {title} ({sum(i.bytes for i in items):,} bytes):", *shown, *more]
        if self.loop is not None:
            lines.append(f"  contractions in the loop: {self.contractions}")
        if self.choice is not None:
            lines += textwrap.indent(str(self.choice), "  ").splitlines()
        return "\n".join([*lines, *self._remarks()])

    def summary(self) -> str:
        """Returns a shorter text than `str`: how many values moved, what is left, and the estimate next to `lax.scan`'s."""
        lines = [f"{self.title}: {self.executor}"]
        for title, items in self._moved().items():
            if items:
                values = "1 value" if len(items) == 1 else f"{len(items)} values"
                lines.append(f"  {title}: {values}, {sum(i.bytes for i in items):,} bytes")
        if self.loop is not None and self.executor != "chunks":
            before = _contractions(self.loop.eqns)
            of = f" (lax.scan: {before})" if before != self.contractions else ""
            lines.append(f"  contractions in the loop: {self.contractions}{of}")
        if self.choice is not None:
            reference = self.choice.of("lax.scan")
            other = "" if reference in (None, self.choice.chosen.estimate) else f" (lax.scan: {reference.brief()})"
            end = f"; {NOTHING}" if NOTHING in self.notes else other
            lines.append(f"  estimated: {self.choice.chosen.estimate.brief()}{end}")
        return "\n".join([*lines, *(remark for remark in self._remarks() if remark.strip() != NOTHING)])

    @property
    def title(self) -> str:
        """The direction of the loop, its length and its platform."""
        direction = "reverse" if self.loop is not None and self.loop.reverse else "forward"
        steps = "" if self.loop is None else f" of {self.loop.length} steps"
        return f"{direction} loop{steps} on {self.target.platform}"

    def _moved(self) -> dict[str, tuple[Item, ...]]:
        return {
            "computed for all steps before the loop": self.hoisted,
            "computed for all steps after the loop": self.sunk,
            "summed after the loop instead of carried": self.summed,
        }

    def _remarks(self) -> list[str]:
        chunk = [f"run {self.chunk} steps at a time, so that these arrays stay small"] if self.chunk else []
        return [f"  {remark}" for remark in (*chunk, *self.notes, *self._staying())]

    def _staying(self) -> list[str]:
        """Returns the reasons why equations stay in the loop."""
        eqns = self.fission.core.eqns if self.fission else ()
        stuck = {e.primitive.name: e for e in eqns if not primitives.is_movable(e)}
        return [f"{name} stays in the loop: {primitives.why_it_stays(eqn)}" for name, eqn in stuck.items()]


def _contractions(eqns: Iterable[Eqn]) -> int:
    inner = (e for eqn in eqns for jaxpr in jaxprs.sub_jaxprs(eqn) for e in jaxprs.all_equations(jaxpr))
    return sum(map(primitives.is_contraction, (*eqns, *inner)))


def _user_line(eqn: Eqn) -> str:
    """Returns the line of the user's code that made an equation, relative to the working directory or site-packages."""
    where = source_info_util.summarize(eqn.source_info)
    installed = os.sep + "site-packages" + os.sep
    return "" if where.startswith(_OURS) else where.removeprefix(os.getcwd() + os.sep).rpartition(installed)[2]


@dataclass(frozen=True)
class Item:
    """One value of a step: its primitive, its place in the user's code, its type, and its bytes over all steps."""

    what: str
    where: str
    type: str
    bytes: int

    @staticmethod
    def of(v: Var, producers: dict[Var, Any], count: int) -> Item:
        """Returns the item of a variable with `count` values. `producers` maps variables to their equations."""
        what, where, eqn = "carry", "", producers.get(v)
        if eqn is not None:
            scopes = str(eqn.source_info.name_stack).split("/")
            scope = "/".join(
                name for name in scopes if name != "rematted_computation"
            )  # of values that are computed again
            what = f"{scope}/{eqn.primitive.name}" if scope else eqn.primitive.name
            where = _user_line(eqn)
        return Item(what, where, v.aval.str_short(), jaxprs.nbytes(v) * count)

    def __str__(self) -> str:
        return f"{self.what} {self.type}, {self.bytes:,} bytes" + (f" at {self.where}" if self.where else "")
