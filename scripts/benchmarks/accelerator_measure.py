"""What the parts of `accelerator_day.py` share: one deadline, results as lines, programs compiled side by side, and timing.

A result is a JSON line that is flushed at once, so a run that is killed leaves all finished results.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jrnn.loops.ir import observers

GPU = jax.default_backend() == "gpu"
ON_CPU = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}  # compile fast, for rehearsals
_PATIENCE = 120  # seconds to compile the programs of a part
_RESERVE = 3  # seconds before the deadline in which nothing new begins


@dataclass(frozen=True)
class Job:
    """A program of one peer. Peers of jobs with the same name are timed interleaved.

    Attributes:
        name, peer: of the result.
        fn: a function of JAX, a program that is lowered already, or a function without arguments that is not JAX's and
            returns when all is computed.
        args: of `fn`; None if it is not JAX's.
        steps: T.
        precision: of float32 products, as in `jax_default_matmul_precision`; torch's peers use the same.
        options: the compiler's.
        strategies: how its loops run; known of programs that are lowered.
    """

    name: str
    peer: str
    fn: Any
    args: Sequence[Any] | None
    steps: int
    precision: str | None = None
    options: Mapping[str, Any] | None = None
    strategies: str = ""

    def lowered(self) -> Job:
        """Returns the job with its program lowered now: by constants that are patched only now."""
        with jax.default_matmul_precision(self.precision), observers.collected() as plans:
            program = jax.jit(self.fn).lower(*self.args)
        return replace(self, fn=program, strategies=strategies(plans))


@dataclass(frozen=True)
class Ready:
    """A job that is compiled."""

    job: Job
    run: Callable[[], Any]
    text: Callable[[], str]
    costs: Mapping[str, Any]


class Day:
    """Results of all parts, in at most four files: results.jsonl, summary.md, day.log and programs.tar.gz.

    Args:
        out: the folder.
        seconds: until the deadline.
    """

    def __init__(self, out: Path, seconds: float):
        out.mkdir(parents=True, exist_ok=True)
        self.out, self._end, self._start = out, time.monotonic() + seconds, time.monotonic()
        self._lock = threading.RLock()
        self._texts: dict[str, str] = {}
        self._part_end = self._end
        self.medians: dict[str, dict[str, tuple[float, Ready]]] = {}
        self.part = self.only = ""

    def left(self) -> float:
        """Returns the seconds that are left to the part."""
        return self._part_end - time.monotonic()

    def say(self, **fields: Any) -> None:
        """Writes a result."""
        line = json.dumps(
            {"part": self.part, **fields, "at": round(time.monotonic() - self._start, 1)},
            default=str,
        )
        with self._lock:
            self._append("results.jsonl", line)
            self._append("day.log", line)
            print(line[:400], flush=True)

    def failed(self, error: BaseException, **fields: Any) -> None:
        """Writes a failure: its first line is a result, the traceback is in the log."""
        with self._lock:
            self._append("day.log", "".join(traceback.format_exception(error)))
        self.say(**fields, failed=f"{type(error).__name__}: {error}"[:600])

    def _append(self, name: str, line: str) -> None:
        with (self.out / name).open("a") as file:
            file.write(line + "\n")

    def attach(self, name: str, text: str) -> None:
        """Adds a text to programs.tar.gz, which is written at the end of each part."""
        self._texts[name] = text

    def save(self) -> None:
        """Writes the summary and the archive of what is finished."""
        with self._lock:
            results = [
                json.loads(line) for line in (self.out / "results.jsonl").read_text().splitlines()
            ]
            (self.out / "summary.md").write_text(summary(results))
            if not self._texts:
                return
            aside = self.out / "programs.tar.gz.part"
            with tarfile.open(aside, "w:gz", compresslevel=5) as archive:
                for name, text in list(self._texts.items()):
                    entry, data = tarfile.TarInfo(name), text.encode()
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))
            aside.replace(self.out / "programs.tar.gz")

    def run(
        self,
        parts: Mapping[str, Callable[[Day], None]],
        shares: Mapping[str, float] | None = None,
    ) -> None:
        """Runs parts, PART or PART:TEXT, in order. A part that fails stops no other; at the deadline the process ends.

        Args:
            parts: by name.
            shares: the shares of the time that parts have until they must end, together with the parts before them.
        """
        spent = 0.0
        watch = threading.Timer(self.left(), self._out_of_time)
        watch.daemon = True
        watch.start()
        for name, part in parts.items():
            self.part, _, self.only = name.partition(":")
            spent += (shares or {}).get(self.part, 1.0)
            whole = self._end - self._start
            self._part_end = min(self._end, self._start + spent * whole)
            if self.left() < _RESERVE:
                self.say(skipped="out of time")
                continue
            try:
                part(self)
            except Exception as error:
                self.failed(error)
            self.say(ended=True, **_memory())
            self.save()
        watch.cancel()

    def _out_of_time(self) -> None:
        self.say(stopped="out of time")
        self.save()
        os._exit(0)

    def each(
        self, tasks: Mapping[Any, Callable[[], Any]], named: Callable[[Any], dict[str, Any]]
    ) -> Iterator[Any]:
        """Runs tasks side by side and yields `(key, result)` as they end. A failure is said with the fields of `named`."""
        pool = ThreadPoolExecutor(12 if GPU else 2)
        futures = {pool.submit(task): key for key, task in tasks.items()}
        try:
            for future in as_completed(
                futures, timeout=max(min(self.left() - _RESERVE, _PATIENCE), 0.1)
            ):
                if future.exception() is None:
                    yield futures[future], future.result()
                else:
                    self.failed(future.exception(), **named(futures[future]))
        except TimeoutError:
            for future in (future for future in futures if not future.done()):
                self.say(**named(futures[future]), failed="it was not ready in time")
        pool.shutdown(wait=False, cancel_futures=True)

    def compiled(self, jobs: Sequence[Job]) -> list[Ready]:
        """Compiles jobs side by side, and returns them in their order without those that fail."""
        tasks = {
            i: (lambda job=job: _compiled(job))
            for i, job in enumerate(jobs)
            if job.args is not None
        }
        ready = dict(self.each(tasks, lambda i: dict(job=jobs[i].name, peer=jobs[i].peer)))
        ready |= {i: Ready(job, job.fn, str, {}) for i, job in enumerate(jobs) if job.args is None}
        return [ready[i] for i in sorted(ready)]

    def timed(self, jobs: Sequence[Job], seconds: float = 0.4, keep: str | None = None) -> None:
        """Compiles all jobs, and then times each with its peers.

        Args:
            jobs: in the order of their value.
            seconds: for each peer of a job; five runs at least, or two of slow programs.
            keep: compiled programs of jobs whose names end with this text are added to programs.tar.gz.
        """
        ready = self.compiled([job for job in jobs if self.only in job.name])
        for entry in ready if keep else ():
            if entry.job.args is not None and entry.job.name.endswith(keep):
                self.attach(
                    f"{self.part}_{entry.job.name}_{entry.job.peer}.txt".replace(" ", "_"),
                    entry.text(),
                )
        for name in dict.fromkeys(entry.job.name for entry in ready):
            if self.left() < _RESERVE:
                self.say(job=name, skipped="out of time")
            else:
                self._interleaved([entry for entry in ready if entry.job.name == name], seconds)

    def _interleaved(self, peers: Sequence[Ready], seconds: float) -> None:
        took: dict[str, list[float]] = {}
        running = {entry.job.peer: entry for entry in peers}
        for peer, entry in list(running.items()):
            try:
                with_tf32(entry.job.precision)
                entry.run()
                entry.run()
            except Exception as error:
                self.failed(error, job=entry.job.name, peer=running.pop(peer).job.peer)
        start = time.perf_counter()
        while running and self.left() > _RESERVE:
            for peer, entry in running.items():
                begin = time.perf_counter()
                entry.run()
                took.setdefault(peer, []).append(time.perf_counter() - begin)
            turns, spent = len(took[peer]), (time.perf_counter() - start) / len(running)
            if (
                turns >= 200
                or (turns >= 5 and spent > seconds)
                or (turns >= 2 and spent > 3 * seconds)
            ):
                break
        for peer, times in took.items():
            job, median = running[peer].job, statistics.median(times)
            per_step = round(median / job.steps * 1e6, 4)
            costs = dict(
                least=min(times), runs=len(times), us_a_step=per_step, precision=job.precision
            )
            self.medians.setdefault(job.name, {})[peer] = (median, running[peer])
            self.say(job=job.name, peer=peer, seconds=median, **costs, **running[peer].costs)


def _compiled(job: Job) -> Ready:
    start = time.monotonic()
    job = job if hasattr(job.fn, "compile") else job.lowered()
    options = job.options if job.options or GPU else ON_CPU
    call = job.fn.compile(compiler_options=dict(options) if options else None)
    temporary = getattr(call.memory_analysis(), "temp_size_in_bytes", None)
    costs = dict(
        compile=round(time.monotonic() - start, 1), temporary=temporary, strategies=job.strategies
    )
    return Ready(job, lambda: jax.block_until_ready(call(*job.args)), call.as_text, costs)


def strategies(plans: Any) -> str:
    """Returns how the loops of a program run."""
    return " ".join(plan.strategy or "left" for plan in plans)


def with_tf32(precision: str | None) -> None:
    """Lets torch use TF32 where JAX does: everywhere but at the precision "highest". It does nothing without torch."""
    if torch := sys.modules.get("torch"):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = (
            precision != "highest"
        )


def _memory() -> dict[str, int]:
    stats = jax.devices()[0].memory_stats() or {}
    return {"peak_bytes": stats["peak_bytes_in_use"]} if "peak_bytes_in_use" in stats else {}


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns a page with a table of each part: times next to the first peer's, errors, and all other results."""
    lines = ["# Accelerator day", ""]
    lines += [
        "- " + ", ".join(f"{k} {v}" for k, v in r.items() if k != "part")
        for r in results
        if not r["part"]
    ]
    for part in dict.fromkeys(r["part"] for r in results if r["part"]):
        of_part = [r for r in results if r["part"] == part and "ended" not in r]
        lines += ["", f"## {part}"]
        lines += _times([r for r in of_part if "seconds" in r]) + _errors(
            [r for r in of_part if "error" in r]
        )
        others = [r for r in of_part if "seconds" not in r and "error" not in r]
        lines += [
            "",
            *(
                "- " + ", ".join(f"{k} {v}" for k, v in r.items() if k not in ("part", "at"))
                for r in others
            ),
        ]
    return "\n".join(lines) + "\n"


def _times(results: Sequence[Mapping[str, Any]]) -> list[str]:
    if not results:
        return []
    lines = [
        "",
        "Ratios are the time of a job's first peer over that of the peer of the row; below 1, the first is faster.",
        "",
    ]
    lines += [
        "| job | peer | ms | us a step | first / peer | temporary MB | compile s | precision |",
        "|" + "---|" * 8,
    ]
    first: dict[str, float] = {}
    for r in results:
        ratio = first.setdefault(r["job"], r["seconds"]) / r["seconds"]
        temporary = "-" if r.get("temporary") is None else f"{r['temporary'] / 1e6:.1f}"
        figures = f"{r['seconds'] * 1e3:.3f} | {r['us_a_step']:.3f} | {ratio:.3f} | {temporary}"
        lines.append(
            f"| {r['job']} | {r['peer']} | {figures} | {r.get('compile', '-')} | {r['precision']} |"
        )
    return lines


def _errors(results: Sequence[Mapping[str, Any]]) -> list[str]:
    if not results:
        return []
    lines = [
        "",
        "Errors are relative to float64 step by step, in norms; `repeats`: two runs agree bit by bit.",
        "",
    ]
    columns = (
        "job",
        "error",
        "lax_scan",
        "gradient_error",
        "lax_scan_gradient",
        "repeats",
        "strategies",
        "precision",
    )
    lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for r in sorted(results, key=lambda r: -max(r["error"], r["gradient_error"])):
        cells = (f"{r[c]:.1e}" if isinstance(r[c], float) else str(r[c]) for c in columns)
        lines.append(f"| {' | '.join(cells)} |")
    return lines
