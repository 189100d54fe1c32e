"""`bench_step` and `jrnn bench FILE:STEP`: a user's own step by `jax.lax.scan` and by each executor that can run it.

Shapes: T time.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jrnn import jaxprs
from jrnn.bench import measure, results
from jrnn.bench.peers import Timed, clocked
from jrnn.bench.results import Record
from jrnn.bench.sizes import MODES, check_names
from jrnn.bench.suites import SuiteOptions
from jrnn.convert.named import load_named
from jrnn.errors import ScanError, UsageError
from jrnn.files.progress import Heartbeat
from jrnn.jaxprs.arguments import arguments_of, required
from jrnn.loops import COMPARED_EXECUTORS, scan
from jrnn.loops.compile import ON_CPU
from jrnn.loops.ir import observers

StepFn = Callable[[Any, Any], tuple[Any, Any]]

JAX = "lax.scan"
_COLUMNS = (
    "mode", "executor", "ran", "median ms", "minimum ms", "time / lax.scan", "MB", "MB / lax.scan", "compile s",
    "differs by",
)  # fmt: skip
_FORM = "(step, init, xs) or (step, init, None, length)"


@dataclass(frozen=True)
class OwnStep:
    """A step of the user's, and what to run it on.

    Attributes:
        name: what the tables call it.
        step: `(carry, x) -> (carry, y)`.
        init: the initial carry.
        xs: leaves [T, ...], or None with `length`.
        length: T, needed only if xs is None.
    """

    name: str
    step: StepFn
    init: Any
    xs: Any = None
    length: int | None = None

    @property
    def steps(self) -> Any:
        leaves = jax.tree.leaves(self.xs)
        return jnp.shape(leaves[0])[0] if leaves else self.length

    def by(self, executor: str) -> StepFn:
        """Returns the loop as a function of the carry and the inputs."""
        if executor == JAX:
            return lambda init, xs: jax.lax.scan(self.step, init, xs, self.length)
        return lambda init, xs: scan(self.step, init, xs, self.length, executor=executor)


@dataclass(frozen=True)
class StepRecord(Record):
    """One executor on a step.

    Attributes:
        ran: what ran the loops, if that was planned: "chunks", or the forward and the reverse loop, as "lax.scan, scan".
        difference: the largest difference of its results from `jax.lax.scan`'s, relative to the largest element of
            the same array.
    """

    ran: str = ""
    difference: float = 0.0


@dataclass(frozen=True)
class StepReport:
    """What `bench_step` measured. It prints a table.

    Attributes:
        records: one for each mode ("forward", "train") and executor, with seconds (`least`, `median`, `low`, `high`),
            `compile_seconds` and `peak_bytes`, the temporary memory that the compiler plans.
        missing: the reasons why executors were not measured, by mode and executor.
    """

    records: tuple[StepRecord, ...]
    missing: Mapping[tuple[str, str], str]

    def of(self, mode: str, executor: str) -> StepRecord | None:
        """Returns the record of an executor, or None if it was not measured."""
        return next((r for r in self.records if (r.mode, r.peer) == (mode, executor)), None)

    def table(self) -> Table:
        """Returns the table that `str` prints."""
        title = (
            f"{self.records[0].cell}, {self.records[0].size}: programs interleaved"
            if self.records
            else ""
        )
        rows = []
        modes = []
        for r in self.records:
            rows.append((r.mode, r.peer, r.ran, *self._numbers(r)))
            modes.append(r.mode)
        return results.table_of(title, results.columns_of(_COLUMNS, rows), modes)

    def _numbers(self, r: StepRecord) -> tuple[str, ...]:
        """Returns the cells of a row after its words, in the order of `_COLUMNS`."""
        times = "-"
        sizes = "-"
        plain = self.of(r.mode, JAX)
        if plain is not None:
            times = _ratio(r.least, plain.least)
            sizes = _ratio(r.peak_bytes, plain.peak_bytes)
        least = f"{r.least * 1e3:.3g}"
        size = results.megabytes(r.peak_bytes)
        differs = "-" if r.peer == JAX else f"{r.difference:.0e}"
        return (
            f"{r.median * 1e3:.3g}",
            least,
            times,
            size,
            sizes,
            f"{r.compile_seconds:.2f}",
            differs,
        )

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=140)
        self.print(console)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def print(self, console: Console) -> None:
        """Prints the table, and the reasons why executors are missing in it."""
        if self.records:
            console.print(self.table())
        reasons: dict[tuple[str, str], list[str]] = {}
        for (mode, executor), why in self.missing.items():
            reasons.setdefault((executor, why), []).append(mode)
        for (executor, why), modes in reasons.items():
            where = "" if len(modes) > 1 else f" {modes[0]}"
            console.print(
                f"not {executor}{where}: {why}", markup=False, highlight=False, soft_wrap=True
            )


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "-" if not theirs or ours is None else f"{ours / theirs:.2f}"


def bench_step(
    step: StepFn,
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    executors: Sequence[str] | None = None,
    modes: Sequence[str] = MODES,
    turns: int = 15,
    seconds: float = 20.0,
    console: Console | None = None,
) -> StepReport:
    """Measures a step by `jax.lax.scan` and by each executor of `jrnn.scan` that can run it, interleaved.

    "forward" runs the loop. "train" also computes the gradients of the sum of squares of its results, with respect to the
    carry, the inputs, and the arrays that the step closes over. Those are arguments of the compiled program, as the weights
    of a model are.

    Args:
        step, init, xs, length: the arguments of `scan`: the step `(carry, x) -> (carry, y)`, the carry, inputs [T, ...], and
            T if xs is None.
        executors: names of executors, and "lax.scan"; by default all that can run the step here.
        modes: "forward", "train", or both.
        turns: measured runs of each program, at most.
        seconds: in each mode, no turn begins after these seconds, except for the first three.
        console: where progress is shown, or None.

    Returns:
        Times, temporary memory and compile time of each. An executor that cannot run the step is in `missing`, with the
        reason.

    Raises:
        ConfigError: for an executor or a mode that does not exist.
        Other errors are the errors of `jax.lax.scan` for the same arguments.

    >>> import jax.numpy as jnp
    >>> w = jnp.eye(4) / 2
    >>> results = bench_step(lambda h, x: (jnp.tanh(h @ w + x), h), jnp.zeros((2, 4)), jnp.ones((9, 2, 4)),
    ...                      executors=["lax.scan", "auto"], modes=["forward"], turns=1)
    >>> [record.peer for record in results.records], results.of("forward", "auto").difference < 1e-6
    (['lax.scan', 'auto'], True)
    """
    own = OwnStep(getattr(step, "__name__", "step").strip("<>"), step, init, xs, length)
    shown = console or Console(quiet=True)
    return _measured(
        own, SuiteOptions(peers=executors, modes=modes, turns=turns, seconds=seconds, console=shown)
    )


def run(target: str, feeds: Mapping[str, Any], options: SuiteOptions) -> StepReport:
    """Measures the step that FILE:STEP or MODULE:STEP names, prints the table, and writes the files of the options.

    Args:
        target: a function without arguments that returns `(step, init, xs)`, or a step, whose arguments are in `feeds`.
        feeds: arrays by name, as `carry`, or `carry/0` for a part of it; of the inputs, for all steps.

    Raises:
        UsageError: if there is no such function, if what it returns is not of this form, if an argument of the step is
            missing, or if `jax.lax.scan` cannot run the step.
        ConfigError: for an executor or a mode that does not exist.
    """
    for name in ("cells", "sizes"):
        if getattr(options, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} means nothing for a step of your own, {target}"
            )
    own = _loaded(target, feeds)
    try:
        jax.eval_shape(own.by(JAX), own.init, own.xs)
    except Exception as error:  # whatever the user's step raises
        raise UsageError(
            f"bench: jax.lax.scan cannot run {target}: {type(error).__name__}: {error}"
        ) from error
    measured = _measured(own, options)
    measured.print(options.console)
    if options.json:
        missing = []
        for (mode, name), why in measured.missing.items():
            missing.append({"mode": mode, "executor": name, "reason": why})
        conditions = measure.conditions(0.0, options.turns) | {
            "step": target,
            "not_measured": missing,
        }
        results.save(options.json, conditions, "records", measured.records)
    if options.plot:
        results.plot(options.plot, measured.records)
    return measured


def _loaded(target: str, feeds: Mapping[str, Any]) -> OwnStep:
    function = load_named(target, UsageError, "STEP")
    if not callable(function):
        raise UsageError(f"bench: {target} must be a function, but is a {type(function).__name__}")
    names = required(function)
    if names and not feeds:
        given = " ".join(f"--feed {name}=normal[...]" for name in names)
        raise UsageError(
            f"bench: {target} has the arguments {', '.join(names)}. Give their arrays ({given}; "
            f"the last begins with the axis of T), or name a function without arguments that returns {_FORM}"
        )
    if names:
        arguments = jax.tree.map(jnp.asarray, arguments_of(function, feeds))
        if len(arguments) < 2:
            raise UsageError(
                f"bench: {target} has one argument; a step has the carry and the input: (carry, x) -> (carry, y)"
            )
        *weights, init, xs = arguments
        return OwnStep(target, lambda carry, x: function(*weights, carry, x), init, xs)
    if feeds:
        raise UsageError(
            f"bench: {target} has no arguments, so --feed {next(iter(feeds))} means nothing for it"
        )
    try:
        parts = function()
    except Exception as error:  # whatever the user's code raises
        raise UsageError(f"bench: {target} raised {type(error).__name__}: {error}") from error
    if not isinstance(parts, tuple) or len(parts) not in (3, 4) or not callable(parts[0]):
        what = f"an object of type {type(parts).__name__}"
        if isinstance(parts, tuple):
            what = f"a tuple of {len(parts)}"
        raise UsageError(f"bench: {target} must return {_FORM}, but returned {what}")
    return OwnStep(target, *parts)


def _measured(own: OwnStep, options: SuiteOptions) -> StepReport:
    executors = options.peers
    modes = options.chosen("modes", MODES)
    check_names(
        "executor", executors or (), dict.fromkeys([JAX, *COMPARED_EXECUTORS, "chunks", *ON_CPU])
    )
    names = dict.fromkeys([JAX, *(COMPARED_EXECUTORS if executors is None else executors)])
    jax.eval_shape(own.by(JAX), own.init, own.xs)  # raises the errors of `jax.lax.scan`
    jax.jit(jnp.cumsum).lower(jnp.ones(3)).compile()  # starts the compiler
    records: list[StepRecord] = []
    missing: dict[tuple[str, str], str] = {}
    with Heartbeat(options.console, "starting") as beat:
        for mode in modes:
            built: dict[str, _Built] = {}
            for name in names:
                beat.doing(f"{mode}: compiling {name}")
                try:
                    if executors is None and name == "newton":
                        raise ScanError(
                            "it may take hundreds of times as long where it gains nothing; ask for it by name"
                        )
                    built[name] = _Built.of(own, name, mode, built.get(JAX))
                except ScanError as error:
                    missing[mode, name] = str(error).removeprefix("scan: ")
            records += _in_turns(own, mode, built, options, beat)
    return StepReport(tuple(records), missing)


@dataclass(frozen=True)
class _Built:
    """The compiled program of an executor, its results, what ran its loops, and how far its results are from others."""

    program: Timed
    results: list[Any]
    ran: str
    difference: float

    @staticmethod
    def of(own: OwnStep, executor: str, mode: str, reference: _Built | None) -> _Built:
        begun = time.perf_counter()
        fn, args = _program(own, executor, mode)
        with observers.collected() as plans:
            compiled = jax.jit(fn).lower(*args).compile()
        seconds = time.perf_counter() - begun
        memory = compiled.memory_analysis()
        size = None if memory is None else int(memory.temp_size_in_bytes)
        run = clocked(lambda: jax.block_until_ready(compiled(*args)))
        strategies = [plan.strategy for plan in plans]
        ran = "chunks" if "chunks" in strategies else ", ".join(strategies)
        results = jax.tree.leaves(compiled(*args))
        if reference is None:
            return _Built(Timed(run, seconds, size), results, ran, difference(results, results))
        apart = difference(results, reference.results)
        return _Built(Timed(run, seconds, size), [], ran, apart)


def _program(own: OwnStep, executor: str, mode: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function to compile and its arguments: the arrays that the step closes over, the carry and the inputs."""
    loop = own.by(executor)
    closed = jax.make_jaxpr(loop)(own.init, own.xs)

    def forward(args: Sequence[Any]) -> list[Any]:
        env = dict(zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), args))
        jaxprs.evaluate(closed.jaxpr.eqns, env)
        return [jaxprs.value(env, atom) for atom in closed.jaxpr.outvars]

    args = [*closed.consts, *map(jnp.asarray, jax.tree.leaves((own.init, own.xs)))]
    if mode == "forward":
        return forward, (args,)
    is_inexact = list(map(_is_inexact, args))
    moving: list[Any] = []
    rest: list[Any] = []
    for value, moves in zip(args, is_inexact):
        (moving if moves else rest).append(value)

    def loss(moving: Sequence[Any], rest: Sequence[Any]) -> Any:
        left = {True: iter(moving), False: iter(rest)}
        total = jnp.float32(0)
        for value in forward([next(left[moves]) for moves in is_inexact]):
            if _is_inexact(value):
                total = total + jnp.sum(jnp.square(jnp.abs(value)))
        return total

    return jax.value_and_grad(loss), (moving, rest)


def _is_inexact(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def difference(computed: Sequence[Any], wanted: Sequence[Any]) -> float:
    """Returns the largest difference of arrays, relative to the largest element of the same array.

    >>> difference([np.array([1.0, 2.0])], [np.array([1.0, 4.0])])
    0.5
    """
    largest = 0.0
    for ours, theirs in zip(computed, wanted):
        if not jnp.issubdtype(ours.dtype, jnp.number) or not ours.size:
            continue  # booleans and random keys
        kind = np.complex128 if jnp.issubdtype(ours.dtype, jnp.complexfloating) else np.float64
        a = np.asarray(ours).astype(kind)
        b = np.asarray(theirs).astype(kind)
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        size = max(float(np.max(np.abs(np.nan_to_num(b)))), 1e-300)
        largest = max(largest, float(np.max(apart) / size))
    return largest


def _in_turns(
    own: OwnStep, mode: str, built: Mapping[str, _Built], options: SuiteOptions, beat: Heartbeat
) -> list[StepRecord]:
    programs = {name: b.program for name, b in built.items()}
    beat.doing(f"{mode}: measuring")
    timings = measure.in_turns(programs, options.turns, options.seconds)
    records = []
    for name, timing in timings.items():
        b = built[name]
        records.append(
            StepRecord(
                cell=own.name,
                size=f"T = {own.steps}",
                mode=mode,
                peer=name,
                **asdict(timing),
                compile_seconds=b.program.compile_seconds,
                peak_bytes=b.program.peak_bytes,
                flops_per_second=0.0,
                ran=b.ran,
                difference=b.difference,
            )
        )
    return records
