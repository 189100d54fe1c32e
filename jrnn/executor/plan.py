"""LoopPlan: what was decided for a loop. It is run, cached, and printed by `explain_scan`.

A pipeline of `targets/` makes it: the passes rewrite the loop, and `passes/fission.py` takes it apart into what is computed
for all steps before it (early), the loop that stays (core), and what is computed for all steps after it (late, summed).
`chunks.in_chunks` runs a few steps at a time where the arrays of all steps would be too large.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax.extend import source_info_util

from jrnn.executor import jaxprs, primitives
from jrnn.executor.chunks import in_chunks
from jrnn.executor.jaxprs import Var
from jrnn.executor.loop import Loop
from jrnn.executor.passes.fission import Fission


class Runner(Protocol):
    """What runs the loop that stays."""

    def run(self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The loop's `(last carry, stacked ys)`."""

    def with_length(self, length: Any) -> Runner:
        """The same for another number of steps."""


@dataclass(frozen=True)
class Target:
    """What a loop is lowered for.

    Attributes:
        platform: "cpu", "cuda", "rocm" or "tpu".
        cores: processor cores that this process may use.
        devices: devices that the program is divided among.
        keeps_memory: whether the process keeps memory that it frees (`host_memory`).
        kind: the kind of the devices, such as "TPU v5 lite", or "" where it is not known.
    """

    platform: str
    cores: int = 1
    devices: int = 1
    keeps_memory: bool = False
    kind: str = ""


@dataclass(frozen=True)
class LoopPlan:
    """How a loop is run.

    Attributes:
        target: what it is lowered for.
        loop: the loop as JAX made it, with its calls opened; None where it could not be read.
        fission: the loop taken apart, or None where `jax.lax.scan` lowers it as it is.
        core: what runs the loop that stays.
        executor: the name of that runner: "lax.scan", "scan", "associative" or "persistent".
        chunk: steps that are run at a time to bound memory, or None for all.
        notes: reasons for what was not done.
        otherwise: the plan to lower where this one cannot be lowered, or None for `jax.lax.scan`.
    """

    target: Target
    loop: Loop | None
    fission: Fission | None
    core: Runner | None
    executor: str
    chunk: int | None = None
    notes: tuple[str, ...] = ()
    otherwise: LoopPlan | None = None

    @staticmethod
    def left(target: Target, loop: Loop | None, why: str) -> LoopPlan:
        """The plan of a loop that `jax.lax.scan` lowers as it is."""
        return LoopPlan(target, loop, None, None, "lax.scan", notes=(why,))

    def run(self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The loop's `(last carry, stacked ys)`, flat."""
        assert self.fission is not None and self.core is not None
        fission, core = self.fission, self.core
        loop, steps = fission.loop, fission.loop.length

        def run_some(carry: Any, xs: Any, steps: Any) -> tuple[list[Any], list[Any]]:
            return fission.with_length(steps).run(consts, carry, xs, core.with_length(steps).run)

        if self.chunk is not None:
            return in_chunks(run_some, list(init), list(xs), steps, self.chunk, loop.reverse)
        return run_some(init, xs, steps)

    @property
    def hoisted(self) -> tuple[Item, ...]:
        """What is computed for all steps before the loop."""
        return self._items(self.fission.early if self.fission else (), steps=True)

    @property
    def sunk(self) -> tuple[Item, ...]:
        """What is computed for all steps after the loop."""
        return self._items(self.fission.late if self.fission else (), steps=True)

    @property
    def summed(self) -> tuple[Item, ...]:
        """What is summed over all steps after the loop, instead of carried."""
        if self.fission is None:
            return ()
        return self._items((v for values in self.fission.summed.values() for v in values), steps=False)

    @property
    def stacked(self) -> tuple[Item, ...]:
        """What the loop that stays writes at each step."""
        return self._items(self.fission.core.ys if self.fission else (), steps=True)

    @property
    def contractions(self) -> int:
        """Contractions that stay in the loop."""
        eqns = self.fission.core.eqns if self.fission else self.loop.eqns if self.loop else ()
        return sum(map(primitives.is_contraction, eqns))

    def _items(self, values: Iterable[Any], steps: bool) -> tuple[Item, ...]:
        if self.fission is None:
            return ()
        made = jaxprs.producers(self.fission.loop.eqns)
        times = jaxprs.extent(self.fission.loop.length) if steps else 1
        return tuple(Item.of(v, made, times) for v in values if not jaxprs.is_literal(v))

    def __str__(self) -> str:
        direction = "reverse" if self.loop is not None and self.loop.reverse else "forward"
        steps = "" if self.loop is None else f" of {self.loop.length} steps"
        lines = [f"{direction} loop{steps} on {self.target.platform}: {self.executor}"]
        parts = {
            "computed for all steps before the loop": self.hoisted,
            "computed for all steps after the loop": self.sunk,
            "summed after the loop instead of carried": self.summed,
            "written by the loop at each step": self.stacked,
        }
        for title, items in parts.items():
            if items:
                lines += [f"  {title} ({sum(i.bytes for i in items):,} bytes):", *(f"    {item}" for item in items)]
        if self.loop is not None:
            lines.append(f"  contractions in the loop: {self.contractions}")
        if self.chunk:
            lines.append(f"  run {self.chunk} steps at a time, so that these arrays stay small")
        return "\n".join([*lines, *(f"  {note}" for note in (*self.notes, *self._staying()))])

    def _staying(self) -> list[str]:
        """Why equations that might have moved stay in the loop."""
        eqns = self.fission.core.eqns if self.fission else ()
        stuck = {e.primitive.name: e for e in eqns if not primitives.is_movable(e)}
        return [f"{name} stays in the loop: {primitives.why_it_stays(eqn)}" for name, eqn in stuck.items()]


@dataclass(frozen=True)
class Item:
    """One value of a step: the primitive that makes it, where in the user's code, its type, and its bytes over all steps."""

    what: str
    where: str
    type: str
    bytes: int

    @staticmethod
    def of(v: Var, made: dict[Var, Any], times: int) -> Item:
        """The item of a variable, which `made` says the equation of."""
        eqn = made.get(v)
        if eqn is None:
            return Item("carry", "", v.aval.str_short(), jaxprs.nbytes(v) * times)
        scope = str(eqn.source_info.name_stack)
        what = f"{scope}/{eqn.primitive.name}" if scope else eqn.primitive.name
        where = source_info_util.summarize(eqn.source_info)
        return Item(what, where, v.aval.str_short(), jaxprs.nbytes(v) * times)

    def __str__(self) -> str:
        return f"{self.what} {self.type}, {self.bytes:,} bytes" + (f" at {self.where}" if self.where else "")
