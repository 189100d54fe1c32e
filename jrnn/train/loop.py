"""The training loop: calls of the compiled function, with measuring, validating and saving around them.

`_Loop.go` is the loop. `_begin` makes what it needs from a config and a run directory; `step.py` has the compiled function.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jrnn.errors import ConfigError, GradientError, TrainError
from jrnn.train.check import GradientCheck
from jrnn.train.checkpoint import Checkpoints
from jrnn.train.config import Config
from jrnn.train.devices import NOWHERE, Devices
from jrnn.train.diagnose import first_not_finite
from jrnn.train.metrics import Board, MetricsFile, NotFinite, Patience, Recorder, describe, read_metrics
from jrnn.train.progress import Clock, Heartbeat, Report, Trace
from jrnn.train.run_dir import RunDir
from jrnn.train.step import (
    State,
    Steps,
    initial_state,
    make_steps,
    make_train_call,
    make_validation,
    restart,
    stack_batches,
    step_key,
)
from jrnn.train.tasks import Task

# What is spent once, however long a run is.
ONCE = SETUP, FIRST_VALIDATION, TRACING = "compiling, first call", "compiling, first validation", "tracing"


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        run: the run directory.
        step: the steps done.
        validation_loss: the last validation loss.
        interrupted: whether the run was stopped before its last step.
        unit: the unit of the loss.
        metrics: the task's own metrics at the last validation.
        skipped: the steps of this call that were skipped, because their loss or gradient was not finite.
    """

    run: Path
    step: int
    validation_loss: float
    interrupted: bool
    unit: str
    metrics: dict[str, float]
    skipped: int = 0

    def __str__(self) -> str:
        skipped = f" ({self.skipped} skipped: not finite)" if self.skipped else ""
        return f"{self.step} steps{skipped}, {describe(self.validation_loss, self.unit, self.metrics)}"


def train(
    config: Config,
    out: str | Path,
    *,
    resume: bool = False,
    profile: bool = False,
    console: Console | None = None,
) -> Result:
    """Trains as `config` says, in the run directory `out`.

    Args:
        config: see `load_config`.
        out: the run directory; made where it does not exist.
        resume: continue from the newest checkpoint in `out`, or start where there is none yet. On one machine and one
            version the result is, to the bit, that of the run without the interruption.
        profile: write a trace of a few steps to the folder `profile` of `out`, and tell where the time went.
        console: where to report; the terminal by default.

    Returns:
        How the run ended. Ctrl-C and SIGTERM end it after the call in flight, with a checkpoint.

    Raises:
        ConfigError, DataError, CheckpointError, GradientError: before the first step, as a rule; each says where.
        TrainError: where a loss or a gradient is not finite; the state before that step is the newest checkpoint.
    """
    console = console or Console()
    with ExitStack() as files:
        beat = files.enter_context(Heartbeat(console, "reading the data and making the model"))
        with (devices := Devices.of(config)).together():
            begin = _begin if devices.is_first else _begin_beside
            started = begin(config, Path(out), resume, beat, files)
        state = devices.put_state(devices.from_first(jax.device_get(started.state)))
        seen = devices.from_first(np.array([started.patience.best, started.patience.since], np.float32))
        started.patience.best, started.patience.since = float(seen[0]), int(seen[1])
        loop = _Loop(config, Path(out), devices, started, beat)
        stop = files.enter_context(_stop_on_signal())
        files.enter_context(devices.in_touch())
        if not (profile and devices.is_first):
            return loop.go(state, stop)
        with Trace(Path(out) / "profile") as trace:
            result = loop.go(state, stop, trace)
        started.report.say(f"trace: {trace.folder}\n{loop.clock.table(*ONCE)}")
        return result


@dataclass(frozen=True)
class _Started:
    """What a run needs to begin; what is written goes nowhere in all processes but the first."""

    task: Task
    steps: Steps
    state: State
    patience: Patience
    checkpoints: Any = NOWHERE
    best: Any = NOWHERE  # checkpoints of the parameters that were validated best
    metrics: Any = NOWHERE
    report: Any = NOWHERE


def _begin(config: Config, out: Path, resume: bool, beat: Heartbeat, files: ExitStack) -> _Started:
    run = files.enter_context(RunDir(out))
    if run.has_checkpoint() and not resume:
        raise ConfigError(f"{run.path}: holds a run already; continue it with --resume, or give another with --out")
    task = config.kind.load(config)
    if resume and run.is_begun():
        run.check_continues(config, task)
    steps = make_steps(config, task.axes)
    state = initial_state(task.model, steps)
    checkpoints = files.enter_context(Checkpoints(run.checkpoints, config.train.keep))
    if resume and checkpoints.steps():
        state, damaged = checkpoints.restore(state)
        for warning in damaged:
            beat.say(f"warning: {warning}; going on from the one before")
        beat.say(f"resuming from step {int(state.step)}")
    elif resume:
        beat.say("no checkpoint to resume from: starting from the beginning")
    run.write(config, task)
    if config.gradient.check:
        with beat.during("comparing gradients"):
            (check := GradientCheck(task.model, config.data.batch))(state.params, task.train.at(0))
        beat.say(f"gradients: JAX's and those of the {check.other} agree on the first batch")
    done = int(state.step)
    patience = Patience.after(config.train.patience, _losses_before(run, done) if resume else ())
    best = files.enter_context(Checkpoints(run.best, 1)) if config.train.patience else NOWHERE
    resume_at = done if resume else None
    board = Board(run.path / "tensorboard", resume_at) if config.train.tensorboard else None
    metrics = files.enter_context(MetricsFile(run.metrics, resume_at, board))
    report = files.enter_context(Report(beat, config.train.steps, done))
    return _Started(task, steps, state, patience, checkpoints, best, metrics, report)


def _losses_before(run: RunDir, step: int) -> list[float]:
    """The validation losses that a run has measured until a step."""
    found = read_metrics(run.metrics) if run.metrics.exists() else []
    return [m["validation_loss"] for m in found if "validation_loss" in m and m["step"] <= step]


def _begin_beside(config: Config, out: Path, resume: bool, beat: Heartbeat, files: ExitStack) -> _Started:
    """The part of the processes that write nothing; the state is the first one's."""
    task = config.kind.load(config)
    steps = make_steps(config, task.axes)
    return _Started(task, steps, initial_state(task.model, steps), Patience(config.train.patience))


class _Loop:
    """One run under way."""

    def __init__(self, config: Config, run: Path, devices: Devices, started: _Started, beat: Heartbeat):
        self.config = config
        self.run = run
        self.devices = devices
        self.task = started.task
        self.patience = started.patience
        self.checkpoints = started.checkpoints
        self.best = started.best
        self.metrics_file = started.metrics
        self.report = started.report
        self.beat = beat
        shardings = (devices.state_sharding, devices.result_sharding)
        self.call = make_train_call(self.task.model, started.steps, shardings)
        self.validate = make_validation(self.task, lambda batches: devices.put_batches(batches, self.task.axes))
        self.check_gradients = GradientCheck(self.task.model, config.data.batch)
        self.clock = Clock("steps")
        self.own_metrics = config.metrics()
        self.validation_loss = math.nan
        self.metrics: dict[str, float] = {}

    def go(self, state: State, stop: _Stop, trace: Trace | None = None) -> Result:
        """Steps until the last one or until `stop`; either way it ends after a call, with a checkpoint."""
        train, gradient = self.config.train, self.config.gradient
        begun = step = int(state.step)
        self.clock = Clock("steps")
        recorder = Recorder(self.metrics_file, self.report, self.task, train)
        try:
            while step < train.steps and not self.patience.is_over and not self.devices.any(stop.asked):
                n = self._steps_to_boundary(step)
                batches = stack_batches([self.task.train.at(step + k) for k in range(n)], train.steps_per_call)
                batches = self.devices.put_batches(batches, self.task.axes)
                idle = recorder.idle()
                with self.beat.during("compiling") if step == begun else nullcontext():
                    state, measured = self.call(state, batches, step, n)
                    self.clock.add("waiting for Python", idle)
                    recorder.record(step, n, measured)
                    step += n
                    if step == begun + n:
                        recorder.flush()
                        self.clock.claim(SETUP)
                if trace is not None:
                    with self.clock(TRACING):
                        if trace.after_call(measured):
                            recorder.restart_clock()
                due = {
                    self._validate: step % train.validate_every == 0 or step == train.steps,
                    self._check_gradients: gradient.check_every and step % gradient.check_every == 0,
                    self._save: step % train.checkpoint_every == 0,
                }
                for act in (act for act, is_due in due.items() if is_due):
                    recorder.flush()
                    act(step, state)
                    recorder.restart_clock()
            recorder.flush()
        except NotFinite as e:
            good = int(state.step)  # where the compiled function stopped
            self._save(good, state)
            raise TrainError(
                f"{e}; {self._diagnose(e.step, state)}; the state before it is the checkpoint of step {good}: continue with "
                '--resume and a smaller optimizer.learning_rate or optimizer.clip, or with train.on_nan = "skip"'
            ) from None
        self._save(step, state)
        ended = step == train.steps or self.patience.is_over
        if ended and math.isnan(self.validation_loss):  # resumed when there was nothing left to do
            self._evaluate(state)
        if self.patience.is_over:
            self.report.say(
                f"stopped: the best validation loss, {self.patience.best:.4f}, is {self.patience.since} validations old; "
                "its parameters are kept"
            )
        unit = self.task.unit
        return Result(self.run, step, self.validation_loss, not ended, unit, self.metrics, recorder.skipped)

    def _steps_to_boundary(self, step: int) -> int:
        """Steps of the next call: as many as one does, but none beyond a validation, a checkpoint or the end."""
        train = self.config.train
        ends = (train.validate_every, train.checkpoint_every, self.config.gradient.check_every or train.steps)
        to_next = [every - step % every for every in ends]
        return min(train.steps_per_call, train.steps - step, *to_next)

    def _diagnose(self, step: int, state: State) -> str:
        """What went wrong in a step, from the state before it."""
        batch = self.task.train.at(step - 1)
        start = self.task.model.initial_carry(self.config.data.batch)
        state = self.devices.get(state)
        carry = jax.device_get(restart(batch.fresh, start, state.carry))
        key = step_key(self.config.seed, step - 1)
        return first_not_finite(self.task.model, state._replace(carry=carry), batch, key)

    def _save(self, step: int, state: State) -> None:
        with self.clock("checkpoints"), self.beat.during("writing a checkpoint"):
            self.checkpoints.save(step, self.devices.get(state))

    def _check_gradients(self, step: int, state: State) -> None:
        with self.clock("gradient checks"), self.beat.during("comparing gradients"):
            try:
                self.check_gradients(self.devices.get(state).params, self.task.train.at(step))
            except GradientError as e:
                raise e.at(f"step {step}") from None

    def _evaluate(self, state: State) -> None:
        with self.beat.during("validating"):
            self.validation_loss = self.validate(state.evaluation_params)
            params = self.devices.local(state.evaluation_params)
            self.metrics = self.task.evaluate(params, self.validation_loss)
            for name, measure in self.own_metrics.items():
                self.metrics[name] = float(measure(self.task, params, self.validation_loss))

    def _validate(self, step: int, state: State) -> None:
        with self.clock(FIRST_VALIDATION if math.isnan(self.validation_loss) else "validation"):
            self._evaluate(state)
        if self.patience.see(self.validation_loss) and self.config.train.patience:
            with self.clock("checkpoints"):
                self.best.save(step, self.devices.get(state).evaluation_params)
        self.metrics_file.write(step, validation_loss=self.validation_loss, **self.metrics)
        self.report.say(f"step {step}: {describe(self.validation_loss, self.task.unit, self.metrics)}")


@dataclass
class _Stop:
    asked: bool = False


@contextmanager
def _stop_on_signal() -> Iterator[_Stop]:
    """Turns the first SIGINT or SIGTERM into a wish to stop; the second interrupts at once."""
    stop = _Stop()

    def on_signal(number, frame):
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield stop
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
