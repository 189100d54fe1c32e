"""The parts of `accelerator_day.py` that check results, and those that measure the programs users run.

Shapes: T time, N batch or heads, D input or keys, H hidden or values.
"""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chunkwise
import jax
import jax.numpy as jnp
import numpy as np
from accelerator_measure import GPU, ON_CPU, Day, Job, strategies, with_tf32
from custom_steps import CUSTOM
from linear_layers import LAYERS, problem

import jrnn
from jrnn import nn
from jrnn.bench import measured_cells, peers
from jrnn.bench.sizes import AFFINE, CELLS, Size
from jrnn.loops import scan
from jrnn.loops.ir import observers

use_torch = True
LSTM_SIZES = (
    ("100x32x512x512", "1024x16x768x768", "64x64x1024x1024", "100x1x128x128", "64x256x1024x1024")
    if GPU
    else ("5x2x3x4",)
)
MATRIX_SIZE = Size.parse("2048x64x64x64" if GPU else "256x2x32x32")
MATRIX_LAYERS = ("gated_delta_rule", "gla", "mamba2") if GPU else ("gla",)
LENGTHS = (4096, 32768) if GPU else (66,)  # T of `affine` and `newton`
BY_HAND = {"gla": chunkwise.gla, "gated_delta_rule": chunkwise.gated_delta_rule}
SCANS: dict[str, Callable] = {"jrnn": scan, "lax.scan": jax.lax.scan}


# Correctness -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A function to check, its arguments, and the function that it must agree with, if that is another one."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    exact: Callable[..., Any] | None = None


def with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the results of a function, and the gradients of the sum of their sines."""

    def loss(*args: Any) -> tuple[Any, Any]:
        out = fn(*args)
        smooth = [v for v in jax.tree.leaves(out) if jnp.issubdtype(v.dtype, jnp.inexact)]
        return sum(jnp.sum(jnp.sin(v)) for v in smooth), out

    def run(*args: Any) -> tuple[Any, Any]:
        floating = [
            all(jnp.issubdtype(v.dtype, jnp.inexact) for v in jax.tree.leaves(a)) for a in args
        ]
        gradients, out = jax.grad(loss, tuple(np.flatnonzero(floating).tolist()), has_aux=True)(
            *args
        )
        return out, gradients

    return run


def error(actual: Any, exact: Any) -> float:
    """Returns the largest relative error of the arrays of a tree, in norms; arrays near 0 count next to the whole."""
    worst, leaves = 0.0, [np.asarray(b, np.float64) for b in jax.tree.leaves(exact)]
    typical = np.sqrt(
        sum(float(np.sum(b**2)) for b in leaves) / max(sum(b.size for b in leaves), 1)
    )
    for a, b in zip(jax.tree.leaves(actual), leaves):
        a = np.asarray(a, np.float64)
        if not np.isfinite(a).all():
            return float("inf")
        worst = max(
            worst,
            float(
                np.linalg.norm(a - b)
                / (np.linalg.norm(b) + 1e-3 * typical * np.sqrt(b.size) + 1e-30)
            ),
        )
    return worst


def checked(case: Case, precision: str | None) -> dict[str, Any]:
    """Returns the errors of a program and of its loops by `lax.scan` on this device, and whether two runs agree."""
    options = None if GPU else ON_CPU
    exact = case.exact or case.fn
    with jax.default_matmul_precision(precision):
        with observers.collected() as plans:
            program = jax.jit(with_gradients(case.fn)).lower(*case.args)
        call = program.compile(compiler_options=options)
        with jrnn.plain_scans():
            plain = (
                jax.jit(with_gradients(exact)).lower(*case.args).compile(compiler_options=options)
            )
    out, again, by_lax = (jax.tree.map(np.asarray, run(*case.args)) for run in (call, call, plain))
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu), jax.enable_x64(True), jrnn.plain_scans():
        wide = jax.tree.map(lambda v: jax.device_put(_wide(v), cpu), case.args)
        right = jax.jit(with_gradients(exact)).lower(*wide).compile(compiler_options=ON_CPU)(*wide)
        right = jax.tree.map(np.asarray, right)
    repeats = all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(again))
    )
    errors = dict(error=error(out[0], right[0]), lax_scan=error(by_lax[0], right[0]))
    gradients = dict(
        gradient_error=error(out[1], right[1]), lax_scan_gradient=error(by_lax[1], right[1])
    )
    return {
        **errors,
        **gradients,
        "repeats": repeats,
        "strategies": strategies(plans),
        "precision": precision,
    }


def _wide(value: Any) -> np.ndarray:
    value = np.asarray(value)
    return value.astype(np.float64) if value.dtype == np.float32 else value


def cells(
    executor: str = "auto", names: Sequence[str] = (*CELLS, *CUSTOM)
) -> Iterator[tuple[str, Case]]:
    def run(w: Any, x: Any, cell: str, size: Size, executor: str = "auto") -> Any:
        return scan(
            measured_cells.make(cell, w), measured_cells.initial(cell, size), x, executor=executor
        )

    for cell in names:
        # Affine gradients are solved in rounds from 64 steps on; in many steps others, such as "memory", are chaotic.
        size = Size(130 if cell in AFFINE else 30, 4, 16, 32)
        plain = functools.partial(run, cell=cell, size=size)
        label = f"{cell}" if executor == "auto" else f"{cell} {executor}"
        yield (
            label,
            Case(
                functools.partial(plain, executor=executor),
                measured_cells.inputs(cell, size),
                plain,
            ),
        )


def matrices(names: Sequence[str] = tuple(LAYERS)) -> Iterator[tuple[str, Case]]:
    size = (
        Size(320, 4, 64, 64) if GPU else Size(160, 4, 32, 32)
    )  # the last chunk of 128 steps is not full
    for layer in names:
        yield (
            f"matrix {layer}",
            Case(functools.partial(scan, LAYERS[layer].step), problem(layer, size)),
        )


def modules() -> Iterator[tuple[str, Case]]:
    """Two layers of `jrnn.nn` in one and in both directions, with lengths, of which one is 0."""
    lengths = [70, 1, 33, 0]
    for kind in ("LSTM", "GRU", "RNN_TANH"):
        for both in (False, True):
            run = getattr(nn.functional, kind.partition("_")[0].lower())
            layout = nn.Layout(getattr(nn.units, kind), 16, 32, num_layers=2, bidirectional=both)
            args = layout.init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (70, 4, 16))
            yield (
                f"nn {kind}{' both directions' if both else ''}",
                Case(functools.partial(run, lengths=lengths), args),
            )


def right(day: Day) -> None:
    cases = dict([*matrices(), *cells(), *modules(), *cells("associative", AFFINE)])
    fn, args = diagonal_gru("newton", Size(130, 4, 16, 32))
    cases["diagonal GRU newton"] = Case(fn, args, diagonal_gru("auto", Size(130, 4, 16, 32))[0])
    _check(day, cases, "highest")


def loose(day: Day) -> None:
    cases = [*matrices(), *cells(names=("lstm", "gru", *AFFINE))]
    _check(day, dict(cases), None)


def _check(day: Day, cases: dict[str, Case], precision: str | None) -> None:
    names = [name for name in cases if day.only in name][:: 1 if GPU else 5]
    tasks = {name: functools.partial(checked, cases[name], precision) for name in names}
    for name, errors in day.each(tasks, lambda name: dict(job=name)):
        day.say(job=name, **errors)


# Times -----------------------------------------------------------------------------------------------------------------


def in_mode(fn: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Returns the function, or for "train" its gradients of the sum of the squares of all results."""

    def loss(*args: Any) -> Any:
        return sum(jnp.sum(v**2) for v in jax.tree.leaves(fn(*args)))

    return jax.grad(loss, (0, 1)) if mode == "train" else fn


def cell_job(
    name: str, peer: str, which: Callable, cell: str, size: Size, mode: str = "train", **more: Any
) -> Job:
    """Returns the job of a cell through a scan."""
    fn, *args = peers.scanned(which, cell, size)
    return Job(name, peer, in_mode(fn, mode), args, size.steps, **more)


@functools.cache
def of_layer(layer: str) -> tuple[Any, dict[str, Any]]:
    """Returns the first carry and the inputs of a layer of MATRIX_SIZE."""
    return problem(layer, MATRIX_SIZE)


def matrix(day: Day) -> None:
    jobs = []
    runs = [("train", None), ("forward", None), ("train", "highest")]
    for mode, precision in runs:
        for layer in MATRIX_LAYERS:
            given = of_layer(layer)
            fns = {"jrnn": functools.partial(scan, LAYERS[layer].step)}
            fns |= {"by hand": BY_HAND[layer]} if layer in BY_HAND else {}
            fns["lax.scan"] = functools.partial(jax.lax.scan, LAYERS[layer].step)
            name = f"{layer} {mode} {MATRIX_SIZE}{' highest' if precision else ''}"
            jobs += [
                Job(name, p, in_mode(fn, mode), given, MATRIX_SIZE.steps, precision)
                for p, fn in fns.items()
            ]
    day.timed(jobs, keep=f"train {MATRIX_SIZE}")


def lstm(day: Day) -> None:
    runs = [(text, mode, None) for text in LSTM_SIZES for mode in ("train", "forward")]
    jobs = []
    for text, mode, precision in [*runs, (LSTM_SIZES[0], "train", "highest")]:
        for cell in ("lstm", "gru"):
            jobs += lstm_peers(day, cell, Size.parse(text), mode, precision)
    day.timed(jobs, keep=f"train {LSTM_SIZES[0]}")


def lstm_peers(day: Day, cell: str, size: Size, mode: str, precision: str | None) -> list[Job]:
    """Returns a cell in all peers: of JAX, and torch's, which is cuDNN on a GPU."""
    name = f"{cell} {mode} {size}{' highest' if precision else ''}"
    wanted = (
        peers.FUNCTIONS if (str(size), mode) == (LSTM_SIZES[0], "train") else SCANS
    )  # less to compile
    programs = {peer: peers.FUNCTIONS[peer](cell, size) for peer in wanted}
    jobs = [
        Job(name, peer, in_mode(fn, mode), args, size.steps, precision)
        for peer, (fn, *args) in programs.items()
    ]
    if not use_torch or importlib.util.find_spec("torch") is None:
        day.say(
            job=name,
            peer="torch",
            skipped="torch is left out" if not use_torch else "torch is not installed",
        )
        return jobs
    try:
        with_tf32(precision)
        return [
            *jobs,
            Job(name, "torch", peers.torch_rnn(cell, size, mode).run, None, size.steps, precision),
        ]
    except Exception as why:
        day.failed(why, job=name, peer="torch")
        return jobs


def affine(day: Day) -> None:
    jobs = []
    executors = {name: functools.partial(scan, executor=name) for name in ("scan", "associative")}
    for cell in ("min_gru", "lru"):
        for length in LENGTHS:
            size = Size(length, 8, 64, 256) if GPU else Size(length, 2, 3, 4)
            for mode in ("train", "forward"):
                name = f"{cell} {mode} {size}"
                jobs += [
                    cell_job(name, peer, which, cell, size, mode)
                    for peer, which in (SCANS | executors).items()
                ]
    day.timed(jobs, 0.2)


def diagonal_gru(executor: str, size: Size) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Returns a GRU with diagonal recurrent weights by an executor, or by `lax.scan`; and its weights and x."""

    def step(w: Any, h: Any, x: Any) -> tuple[Any, Any]:
        z, r, n = jnp.split(x, 3, -1)
        z, r = jax.nn.sigmoid(z + w["z"] * h), jax.nn.sigmoid(r + w["r"] * h)
        h = (1 - z) * h + z * jnp.tanh(n + r * (w["n"] * h))
        return h, h

    which = jax.lax.scan if executor == "lax.scan" else functools.partial(scan, executor=executor)

    def run(w: Any, x: Any) -> Any:
        return which(
            functools.partial(step, w), jnp.zeros((size.batch, size.hidden), x.dtype), x @ w["w"]
        )[1]

    keys = jax.random.split(jax.random.key(0), 5)
    w = {name: 0.5 * jax.random.normal(key, (1, size.hidden)) for name, key in zip("zrn", keys)}
    w["w"] = jax.random.normal(keys[3], (size.features, 3 * size.hidden)) / size.features**0.5
    return run, (w, jax.random.normal(keys[4], (size.steps, size.batch, size.features)))


def newton(day: Day) -> None:
    jobs = []
    for length in LENGTHS:
        size = Size(length, 8, 64, 256) if GPU else Size(length, 2, 3, 4)
        for mode in ("train", "forward"):
            for executor in ("newton", "auto", "lax.scan"):
                fn, args = diagonal_gru(executor, size)
                name = f"diagonal GRU {mode} {size}"
                peer = {"auto": "jrnn"}.get(executor, executor)
                jobs.append(Job(name, peer, in_mode(fn, mode), args, length, "highest"))
    day.timed(jobs, 0.2)


# The machine -----------------------------------------------------------------------------------------------------------


def launch(day: Day) -> None:
    """Times an empty program, kernels in a loop, products and a pass over memory."""
    driver = Path("/proc/driver/nvidia/version")
    day.say(driver=driver.read_text().splitlines()[0] if driver.exists() else None)
    side = 8192 if GPU else 256
    jobs = [Job("a program", "of one kernel", lambda v: v + 1, [jnp.ones(128)], 1)]
    for dtype, precision in ((jnp.float32, "highest"), (jnp.float32, None), (jnp.bfloat16, None)):
        a = jnp.ones((side, side), dtype)
        name = f"product of {side}, {2 * side**3 / 1e12:.3f} TFLOP"
        jobs.append(
            Job(f"{name} {a.dtype} {precision}", "product", jnp.matmul, [a, a], 1, precision)
        )
    v = jnp.ones(1 << 28 if GPU else 1 << 16)
    jobs.append(Job(f"v + 1, {2 * v.nbytes / 1e9:.3f} GB", "memory", lambda v: v + 1, [v], 1))
    for count in (1, 2, 4, 8):
        loop = functools.partial(kernels_in_a_loop, count)
        jobs.append(
            Job(
                "1000 trips of kernels",
                f"{count} kernels a trip",
                loop,
                [jnp.ones((32, 128))],
                1000,
            )
        )
    day.timed(jobs, 0.2)


def kernels_in_a_loop(count: int, c: Any) -> Any:
    def body(_: int, c: Any) -> Any:
        for _ in range(count):
            c = jax.lax.optimization_barrier(jnp.tanh(c) + 1)
        return c

    return jax.lax.fori_loop(0, 1000, body, c)


def profile(day: Day) -> None:
    size = Size.parse(LSTM_SIZES[0])
    jobs = [
        cell_job(f"lstm train {size}", peer, which, "lstm", size) for peer, which in SCANS.items()
    ]
    layer = MATRIX_LAYERS[0]
    given = of_layer(layer)
    fns = {"jrnn": functools.partial(scan, LAYERS[layer].step), "by hand": BY_HAND[layer]}
    name = f"{layer} train {MATRIX_SIZE}"
    jobs += [
        Job(name, peer, in_mode(fn, "train"), given, MATRIX_SIZE.steps) for peer, fn in fns.items()
    ]
    for ready in day.compiled(jobs):
        fields = dict(job=ready.job.name, peer=ready.job.peer)
        try:
            ready.run()
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    ready.run()
                day.say(**fields, **kernels_of(Path(folder)))
        except Exception as why:
            day.failed(why, **fields)


def kernels_of(folder: Path) -> dict[str, Any]:
    """Returns how many kernels a trace has, their time, the time between the first and the last, and the longest."""
    spent: dict[str, list[float]] = defaultdict(list)
    begins, ends = [], []
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in (
                plane.lines if plane.name.startswith("/device:GPU" if GPU else "/host:CPU") else ()
            ):
                for event in line.events if "Stream" in line.name or not GPU else ():
                    spent[event.name].append(event.duration_ns / 1e3)
                    begins.append(event.start_ns)
                    ends.append(event.start_ns + event.duration_ns)
    most = sorted(
        ((name, len(us), round(sum(us), 1)) for name, us in spent.items()), key=lambda row: -row[2]
    )[:16]
    span = (max(ends) - min(begins)) / 1e3 if ends else 0.0
    busy = sum(map(sum, spent.values()))
    return dict(kernels=len(ends), busy_us=round(busy, 1), span_us=round(span, 1), most=most)
