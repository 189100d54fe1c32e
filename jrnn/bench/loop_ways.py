"""One loop by each way that there is: compiled alone, run on random numbers in turns, and the fastest way.

Everything that measures gets its times from one function, `Measure`, which tests replace.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import scan_p

from jrnn import jaxprs
from jrnn.bench.own_step import difference
from jrnn.loops.chunks.choice import BY_STEPS
from jrnn.loops.costs import candidates as costs
from jrnn.loops.costs import tuned
from jrnn.loops.costs.candidates import REFERENCE
from jrnn.loops.costs.tuned import Question, Table
from jrnn.loops.loop import mark, recorder

UNROLLED = (2, 4, 8)  # steps a trip of a loop that runs step by step

_LEAST_GAIN = 0.02  # the part of the time that a way must save, besides the noise
_AGREES = 1e-2  # in units of the largest element: a way that is further from the plain loop is not taken
_TURNS, _FEW = 60, 9
_RUN = 3e-3  # seconds that a program runs in a turn; the least time of one run counts
_SCALES = (0.4, 0.05, 0.005)  # of random numbers: the first one of which the results are finite

Run = Callable[[], Any]
# Runs programs in turns: the seconds of each turn, by name. It stops after a number of turns, or after some seconds.
Measure = Callable[[Mapping[str, Run], int, float], dict[str, list[float]]]


def by_clock(programs: Mapping[str, Run], turns: int, seconds: float) -> dict[str, list[float]]:
    """Returns the least time of a run in each turn. After `seconds` no turn begins but the first three."""
    took: dict[str, list[float]] = {name: [] for name in programs}
    orders, begun = random.Random(0), time.perf_counter()
    for turn in range(turns):
        if turn >= 3 and time.perf_counter() - begun > seconds:
            break
        for name in orders.sample(list(programs), len(programs)):
            spent, least = 0.0, math.inf
            while spent < _RUN:
                start = time.perf_counter()
                jax.block_until_ready(programs[name]())
                now = time.perf_counter() - start
                spent, least = spent + now, min(least, now)
            took[name].append(least)
    return took


def gains(times: Mapping[str, Sequence[float]], reference: str) -> dict[str, float]:
    """Returns the ways that are faster than the reference by more than the noise, with their times over the reference's.

    Of each way the least time counts: what else the machine does only makes a run longer. The noise is how far the least
    times of the even and of the odd turns are apart.

    >>> gains({"a": [1.0, 1.0, 1.0], "b": [0.5, 0.6, 0.5], "c": [0.99, 0.99, 0.99], "d": [0.5, 0.9, 0.6]}, "a")
    {'b': 0.5}
    """
    margin = max(_LEAST_GAIN, _noise(times[reference]))
    ratios = {name: min(took) / min(times[reference]) for name, took in times.items() if name != reference}
    return {name: ratio for name, ratio in ratios.items() if ratio <= 1 - max(margin, _noise(times[name]))}


def _noise(took: Sequence[float]) -> float:
    even, odd = min(took[::2]), min(took[1::2] or took)
    return abs(even - odd) / min(even, odd)


@dataclass(frozen=True)
class TunedLoop:
    """What was measured for a loop.

    Attributes:
        loop: what it is, and where.
        before: the way that it takes without tuning.
        taken: the fastest way.
        ratio: the time of that over the time before; 1 if it is the same.
        plain: the time over that of the plain loop, which is JAX's, or a gradient that runs step by step.
        tried: how many ways were measured.
        why: why it was not measured, or "".
    """

    loop: str
    before: str
    taken: str
    ratio: float = 1.0
    plain: float = 1.0
    tried: int = 0
    why: str = ""

    def __str__(self) -> str:
        if self.why:
            return f"{self.loop}: not measured: {self.why}"
        stays = f"stays as it is ({self.taken})"
        what = stays if self.taken == self.before else f"{self.ratio:.2f} of its time by: {self.taken}"
        return f"{self.loop}: {what}; {self.plain:.2f} of the plain loop, {self.tried} way{'s' * (self.tried > 1)} measured"


class WayTimer:
    """Measures the ways of one loop.

    Args:
        question: the loop.
        taken: the ways of other loops, which may be inside of it.
        seconds: for compiling and running; the untuned way and the plain loop are always measured.
        measure: gives the times.
        now: a clock for the limit.
    """

    def __init__(
        self, question: Question, taken: Mapping[str, str], seconds: float, measure: Measure, now: Callable[[], float]
    ):
        self.question, self.taken, self.measure, self.now = question, taken, measure, now
        self.end = now() + seconds
        self.plain = BY_STEPS if question.moves else REFERENCE
        self.types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in question.avals]  # without the mesh of the program
        self.args: list[Any] = []
        self.programs: dict[str, Run] = {}
        self.sizes: dict[str, int] = {}  # bytes of temporary arrays
        self.reference: list[Any] = []

    def best(self) -> TunedLoop:
        """Returns the fastest way that is faster than the untuned one by more than the noise, measured twice."""
        default, *others = self.question.ways
        for name in dict.fromkeys([self.plain, default, *others]):
            if name in (self.plain, default) or self.left() > 0:
                self.compile(name)
        if not {self.plain, default} <= self.programs.keys():
            return TunedLoop(self.question.title, default, default, why="it cannot be compiled alone")
        times = self.run(_FEW)
        fastest = min(times, key=lambda name: min(times[name]))
        for steps in UNROLLED:
            if self.left() > 0 and tuned.runs_steps(fastest):
                self.compile(tuned.unrolled(fastest, steps))
        tried = len(self.programs)
        times = self.run(_FEW)
        faster = {name: ratio for name, ratio in gains(times, default).items() if self.fits(name, ratio)}
        fastest = min(faster, key=faster.__getitem__) if faster else default
        self.programs = {name: self.programs[name] for name in dict.fromkeys([default, self.plain, fastest])}
        times = self.run(_TURNS)  # of many ways, the fastest was lucky: it must win again
        faster = gains(times, default)
        taken = fastest if fastest in faster else default
        plain = min(times[taken]) / min(times[self.plain])
        return TunedLoop(self.question.title, default, taken, faster.get(taken, 1.0), plain, tried)

    def left(self) -> float:
        return self.end - self.now()

    def run(self, turns: int) -> dict[str, list[float]]:
        return self.measure(self.programs, turns, max(self.left(), 0.0))

    def fits(self, name: str, ratio: float) -> bool:
        """Returns True for a way within the bound of memory, where it takes `ratio` of the time of the untuned one."""
        held, saved = self.question.held
        most = costs.bound(self.question.options.memory, self.sizes[self.plain] + held + saved, ratio) - held
        return self.sizes[name] <= max(most, self.sizes.get(self.question.ways[0], 0))

    def compile(self, name: str) -> None:
        """Compiles the loop by one way; leaves it out if that fails, needs too much memory, or gives other results."""
        if name in self.programs:
            return
        taken = {**self.taken, self.question.key: name}
        try:
            with tuned.using(Table.of(taken)), recorder.recorded():
                compiled = jax.jit(self.program()).lower(*self.types).compile()
            memory = compiled.memory_analysis()
            self.sizes[name] = 0 if memory is None else int(memory.temp_size_in_bytes)
            results = self.results(compiled)
        except Exception:  # whatever a rewriting of this loop, or XLA, raises
            return
        if name == self.plain:
            self.reference = results
        elif name != self.question.ways[0] and not (
            self.fits(name, 0.0) and difference(results, self.reference) <= _AGREES
        ):
            return
        self.programs[name] = lambda: compiled(*self.args)

    def results(self, compiled: Callable[..., Any]) -> list[Any]:
        """Runs the loop. The first run looks for random numbers of which the results are finite."""
        for scale in () if self.args else _SCALES:
            self.args = drawn(self.question.avals, scale)
            results = jax.tree.leaves(compiled(*self.args))
            if all(bool(jnp.all(jnp.isfinite(v))) for v in results if jnp.issubdtype(v.dtype, jnp.inexact)):
                break
        return jax.tree.leaves(jax.block_until_ready(compiled(*self.args)))

    def program(self) -> Callable[..., Any]:
        """Returns the loop as a function of the arguments of its equation, or its value and gradient."""
        question = self.question

        def loop(*args: Any) -> Any:
            with mark.marked(question.options):
                return scan_p.bind(*args, **question.params)

        if not question.moves:
            return loop

        def with_gradient(*args: Any) -> Any:
            def of_moving(moving: Sequence[Any]) -> Any:
                rest = iter(moving)
                outs = loop(*(next(rest) if m else a for a, m in zip(args, question.moves)))
                smooth = [o for o in outs if jnp.issubdtype(o.dtype, jnp.inexact)]
                return sum((jnp.sum(jnp.square(jnp.abs(o))) for o in smooth), jnp.float32(0)), outs

            return jax.grad(of_moving, has_aux=True)([a for a, m in zip(args, question.moves) if m])

        return with_gradient


def drawn(avals: Sequence[Any], scale: float) -> list[Any]:
    """Returns random arrays of types: normal numbers times a scale, integers 0 to 2."""
    rng = np.random.default_rng(0)

    def of(aval: Any) -> Any:
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), aval.shape) if aval.shape else jax.random.key(0)
        if aval.dtype == bool:
            return jnp.asarray(rng.random(aval.shape) < 0.5)
        if jnp.issubdtype(aval.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 3, aval.shape), aval.dtype)
        values = scale * rng.standard_normal(aval.shape, np.float32)
        return jnp.asarray(values, aval.dtype)

    return [of(aval) for aval in avals]


def refusal(question: Question) -> str:
    """Returns why a loop cannot be measured alone, or ""."""
    body = jaxprs.jaxpr_of(question.params["jaxpr"])
    names = {eqn.primitive.name for eqn in jaxprs.all_equations(body)}
    if "while" in names:
        return "a while loop is in its step, which may not end on random numbers"
    return "it has side effects" if body.effects else ""
