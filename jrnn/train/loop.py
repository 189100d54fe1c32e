"""The training loop: calls of the compiled function, with measurements, validation and checkpoints around them.

`train` prepares a run, `_Training.go` is the loop, and `step.py` has the compiled function.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jrnn.errors import ConfigError, GradientError, TrainError
from jrnn.files.progress import Clock, Heartbeat, RunProgress, Trace
from jrnn.train.checkpoint import Checkpoints
from jrnn.train.config import Config
from jrnn.train.devices import NOWHERE, Devices
from jrnn.train.disagreements import MEMBER, GradientCheck, first_not_finite
from jrnn.train.loggers import open_loggers
from jrnn.train.metrics import (
    LIMIT,
    MetricsFile,
    NotFinite,
    Patience,
    Recorder,
    best_first,
    describe,
    own,
    read_validations,
)
from jrnn.train.run_dir import RunDir
from jrnn.train.serving import TrainedModel, load_run
from jrnn.train.step import (
    Recipe,
    check_parts,
    describe_trained,
    initial_state,
    make_train_call,
    make_validation,
    restart,
    stack_batches,
    step_key,
)
from jrnn.train.tasks import Task
from jrnn.train.tasks.task import Metrics, check_task

# Spent once, however long a run is.
SETUP = "compiling, first call"
FIRST_VALIDATION = "compiling, first validation"
TRACING = "tracing"
ONCE = (SETUP, FIRST_VALIDATION, TRACING)


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
        skipped: the steps of this call that were skipped, because their loss or gradient was not finite, or the loss above
            `train.loss_limit`.
    """

    run: Path
    step: int
    validation_loss: float
    interrupted: bool
    unit: str
    metrics: Metrics
    skipped: int = 0

    @property
    def model(self) -> TrainedModel:
        """The trained model; see `load_run`."""
        return load_run(self.run)

    def __str__(self) -> str:
        skipped = f" ({self.skipped} skipped)" if self.skipped else ""
        return (
            f"{self.step} steps{skipped}, {describe(self.validation_loss, self.unit, self.metrics)}"
        )


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
        out: the run directory; it is created if it does not exist.
        resume: continue from the newest checkpoint in `out`, or start if there is none yet. On the same machine and
            version, the result equals the result of the uninterrupted run to the bit.
        profile: write a trace of a few steps to the folder `profile` of `out`, and print where the time went.
        console: where to report; the terminal by default.

    Returns:
        How the run ended. Ctrl-C and SIGTERM end it after the call in flight, with a checkpoint.

    Raises:
        ConfigError, DataError, CheckpointError, GradientError: usually before the first step; each says where.
        TrainError: if a loss or a gradient is not finite; the state before that step is the newest checkpoint.
    """
    run = RunDir(out)
    with ExitStack() as files:
        beat = files.enter_context(
            Heartbeat(console or Console(), "reading the data and making the model")
        )
        devices = Devices.of(config)
        with devices.together():
            if devices.is_first:
                files.enter_context(run)
                if run.has_checkpoint() and not resume:
                    raise ConfigError(
                        f"{run.path}: holds a run already; continue it with --resume, or use another --out"
                    )
            loop = _Training(config, run, config.kind.load(config), devices, beat)
            if devices.is_first:
                loop.open(resume, files)
        run.is_running = True
        files.enter_context(devices.in_touch())
        loop.share()
        stop = files.enter_context(_stop_on_signal())
        with Trace(run.path / "profile" if profile and devices.is_first else None) as trace:
            result = loop.go(stop, trace)
        if trace.folder is not None:
            loop.report.say(f"trace: {trace.folder}\n{loop.clock.table(*ONCE)}")
        return result


class _Training:
    """One run under way.

    Attributes:
        checkpoints, best: checkpoints of the whole state, and of the parameters of the best validations: of the best one,
            and of the one that was the best at each checkpoint, from which the run may be continued.
        file: of the metrics.
        report: the progress line, and lines above it. Only the first process opens files; the others' go nowhere.
    """

    def __init__(self, config: Config, run: RunDir, task: Task, devices: Devices, beat: Heartbeat):
        self.config = config
        self.run = run
        self.task = task
        self.devices = devices
        self.beat = beat
        check_task(config, task)
        steps = Recipe.of(config, task.axes)
        self.state = initial_state(task.model, steps)
        check_parts(task, config, self.state.params)
        self.call = make_train_call(
            task.model, steps, (devices.state_sharding, devices.result_sharding)
        )
        self.validate = make_validation(
            task, lambda batches: devices.put_batches(batches, task.axes)
        )
        self.check_gradients = GradientCheck(task.model, config.data.batch)
        self.own_metrics = config.metrics()
        self.clock = Clock("steps")
        self.patience = Patience(config.train.patience)
        self.is_validated = True  # whether metrics.jsonl has the validation of the first state
        self.validation_loss = math.nan
        self.metrics: Metrics = {}
        self.checkpoints: Any = NOWHERE
        self.best: Any = NOWHERE
        self.file: Any = NOWHERE
        self.report: Any = NOWHERE

    def open(self, resume: bool, files: ExitStack) -> None:
        """Opens the files of the run directory, and restores the state and the patience of a run to continue."""
        run = self.run
        train = self.config.train
        if resume and run.is_begun():
            run.check_continues(self.config, self.task)
        self.checkpoints = files.enter_context(Checkpoints(run.checkpoints, train.keep))
        if resume and self.checkpoints.steps():
            self.state, damaged = self.checkpoints.restore(self.state)
            for warning in damaged:
                self.beat.say(f"warning: {warning}")
            self.beat.say(f"resuming from step {int(self.state.step)}")
        elif resume:
            self.beat.say("no checkpoint to resume from: starting from the beginning")
        done = int(self.state.step)
        if train.steps < done:
            raise ConfigError(
                f"{run.path}: has {done} steps already, and train.steps is {train.steps}; give more steps"
            )
        run.write(self.config, self.task)
        if text := describe_trained(self.config, self.state.params):
            self.beat.say(text)
        if self.config.gradient.check:
            with self.beat.during("comparing gradients"):
                self.check_gradients(self.state.params, self.task.train.at(0))
            self.beat.say(
                f"gradients by JAX and by the {self.check_gradients.other} agree on the first batch"
            )
        resume_at = done if resume else None
        loggers = open_loggers(run.path, self.config, resume_at)
        self.file = files.enter_context(MetricsFile(run.metrics, resume_at, loggers))
        validations = read_validations(run.metrics)
        self.is_validated = done in validations or done == 0 or not self._validates_at(done)
        self._open_best(done, validations, files)
        # After the metrics, so that a process that is killed here leaves no validation without its parameters.
        self.checkpoints.remove_after(done)
        self.report = files.enter_context(RunProgress(self.beat, train.steps, done))

    def _open_best(self, done: int, validations: Mapping[int, float], files: ExitStack) -> None:
        """Restores the patience from the parameters that are there, in the folder of the best ones or in a checkpoint.

        Parameters of steps after `done` are removed: they are of a branch that the run does not go on with.
        """
        run = self.run
        patience = self.config.train.patience
        if not patience and not run.best.is_dir():
            return
        best = files.enter_context(Checkpoints(run.best, None))
        best.remove_after(done)
        if not patience:
            return
        self.best = best
        for step in best_first(validations, validations):
            if validations[step] < math.inf and self._has_best(step):
                best.remove_after(step)  # what is there of later steps is worse
                self.patience = Patience.after(patience, validations, step)
                return

    def _has_best(self, step: int) -> bool:
        """Returns whether the parameters of a step are among the best ones; copies them from its checkpoint if not."""
        if self.best.is_whole(step):
            return True
        if step in self.best.steps():
            self.beat.say(f"warning: {self.best.folder / str(step)}: is damaged; it is removed")
            self.best.remove([step])
        if not self.checkpoints.is_whole(step):
            return False
        params = self.checkpoints.load(step, self.state).evaluation_params
        self.best.remove_after(step)
        self.best.save(step, params)
        return True

    def share(self) -> None:
        """Gives the state and the patience of the first process to all processes."""
        self.state = self.devices.put_state(self.devices.from_first(jax.device_get(self.state)))
        # As words of 32 bits, because JAX rounds float64 to float32.
        mine = np.array([self.patience.best, self.patience.since, self.is_validated], np.float64)
        words = np.asarray(self.devices.from_first(mine.view(np.uint32)))
        best, since, is_validated = words.view(np.float64).tolist()
        self.patience.best = best
        self.patience.since = int(since)
        self.is_validated = bool(is_validated)

    def _batches(self, step: int, n: int) -> Any:
        """Returns the batches of the `n` steps after `step`, on the devices."""
        batches = list(map(self.task.train.at, range(step, step + n)))
        batches = stack_batches(batches, self.config.train.steps_per_call)
        return self.devices.put_batches(batches, self.task.axes)

    def go(self, stop: threading.Event, trace: Trace) -> Result:
        """Steps until the last one or until `stop`; either way it ends after a call, with a checkpoint."""
        train = self.config.train
        begun = step = int(self.state.step)
        self.clock = Clock("steps")
        recorder = Recorder(self.file, self.report, self.task, train)
        if not self.is_validated:  # the line of the file is lost
            self._validate(step)
            recorder.restart_clock()
        try:
            while (
                step < train.steps
                and not self.patience.is_over
                and not self.devices.any(stop.is_set())
            ):
                n = self._steps_to_boundary(step)
                batches = self._batches(step, n)
                idle = recorder.idle()
                with self.beat.during("compiling") if step == begun else nullcontext():
                    self.state, measured = self.call(self.state, batches, step, n)
                    self.clock.add("waiting for Python", idle)
                    recorder.record(step, n, measured)
                    step += n
                    if step == begun + n:
                        recorder.flush()
                        self.clock.claim(SETUP)
                if trace.is_due():
                    recorder.flush()
                    with self.clock(TRACING):
                        trace.begin_or_end()
                    recorder.restart_clock()
                for act in self._due(step):
                    recorder.flush()
                    act(step)
                    recorder.restart_clock()
            recorder.flush()
        except NotFinite as e:
            good = int(self.state.step)  # the compiled function stopped there
            self._save(good)
            cause = self._diagnose(e.step)
            skip = 'or with train.on_nan = "skip"'
            limit = f", a greater {LIMIT}" if LIMIT in str(e) else ""
            fix = f"continue with --resume and a smaller optimizer.learning_rate or optimizer.clip{limit}, {skip}"
            if cause.startswith(MEMBER):
                fix = f"correct the data and start a new run, or leave such steps out: continue with --resume, {skip[3:]}"
            raise TrainError(
                f"{e}; {cause}; the state before it is the checkpoint of step {good}: {fix}"
            ) from None
        self._save(step)
        if step > begun and recorder.skipped == step - begun:
            raise TrainError(
                f"all {recorder.skipped} steps were skipped, so nothing was trained: at the last one {recorder.refused}; "
                f"{self._diagnose(step)}"
            )
        ended = step == train.steps or self.patience.is_over
        if ended and math.isnan(self.validation_loss):  # resumed with nothing left to do
            self._evaluate()
        if self.patience.is_over and self.patience.best < math.inf:
            self.report.say(
                f"stopped: the best validation loss, {self.patience.best:.4f}, is {self.patience.since} validations old; "
                "its parameters are kept"
            )
        elif self.patience.is_over:
            self.report.say(f"stopped: none of {self.patience.since} validation losses was finite")
        return Result(
            run=self.run.path,
            step=step,
            validation_loss=self.validation_loss,
            interrupted=not ended,
            unit=self.task.unit,
            metrics=self.metrics,
            skipped=recorder.skipped,
        )

    def _due(self, step: int) -> list[Callable[[int], None]]:
        """Returns the actions that are due after a step, in order."""
        check_every = self.config.gradient.check_every
        due = []
        if self._validates_at(step):
            due.append(self._validate)
        if check_every and step % check_every == 0:
            due.append(self._check_gradients)
        if step % self.config.train.checkpoint_every == 0:
            due.append(self._save)
        return due

    def _validates_at(self, step: int) -> bool:
        """Returns whether the parameters after a step are validated."""
        train = self.config.train
        return step % train.validate_every == 0 or step == train.steps

    def _steps_to_boundary(self, step: int) -> int:
        """Returns the steps of the next call, which ends at or before the next validation, checkpoint or check."""
        train = self.config.train
        ends = (
            train.validate_every,
            train.checkpoint_every,
            self.config.gradient.check_every or train.steps,
        )
        to_next = [every - step % every for every in ends]
        return min(train.steps_per_call, train.steps - step, *to_next)

    def _diagnose(self, step: int) -> str:
        """Returns what was not finite in a step; `self.state` is the state before it."""
        batch = self.task.train.at(step - 1)
        start = self.task.model.initial_carry(self.config.data.batch)
        state = self.devices.get(self.state)
        carry = jax.device_get(restart(batch.fresh, start, state.carry))
        key = step_key(self.config.seed, step - 1)
        return first_not_finite(self.task.model, state._replace(carry=carry), batch, key)

    def _save(self, step: int) -> None:
        with self.clock("checkpoints"), self.beat.during("writing a checkpoint"):
            self.checkpoints.save(step, self.devices.get(self.state))

    def _check_gradients(self, step: int) -> None:
        with self.clock("gradient checks"), self.beat.during("comparing gradients"):
            try:
                self.check_gradients(self.devices.get(self.state).params, self.task.train.at(step))
            except GradientError as e:
                raise e.at(f"step {step}") from None

    def _evaluate(self) -> None:
        with self.beat.during("validating"):
            self.validation_loss = self.validate(self.state.evaluation_params)
            params = self.devices.local(self.state.evaluation_params)
            self.metrics = own(
                self.task.evaluate(params, self.validation_loss),
                f"task {self.config.task!r}: evaluate",
            )
            for name, measure in self.own_metrics.items():
                self.metrics |= own(
                    {name: measure(self.task, params, self.validation_loss)}, "train.metrics"
                )

    def _validate(self, step: int) -> None:
        with self.clock(FIRST_VALIDATION if math.isnan(self.validation_loss) else "validation"):
            self._evaluate()
        is_best = self.patience.see(self.validation_loss) and self.config.train.patience > 0
        if is_best:
            with self.clock("checkpoints"):
                self.best.save(step, self.devices.get(self.state).evaluation_params)
        self.file.write(step, validation_loss=self.validation_loss, **self.metrics)
        if (
            is_best
        ):  # the older ones only now: a killed process leaves the ones that its metrics name
            self.best.remove_but(self.checkpoints.steps())
        self.report.say(
            f"step {step}: {describe(self.validation_loss, self.task.unit, self.metrics)}"
        )


@contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    """Gives an event that the first SIGINT or SIGTERM sets; the second one interrupts at once."""
    stop = threading.Event()

    def on_signal(number, frame):
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():  # it alone may set handlers
        yield stop
        return
    on_interrupt = signal.signal(signal.SIGINT, on_signal)
    on_end = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, on_interrupt)
        signal.signal(signal.SIGTERM, on_end)
