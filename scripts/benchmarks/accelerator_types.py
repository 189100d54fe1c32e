"""The second day: half precision, peers side by side, and what was never timed. 12 minutes in all, in this order.

Parts say what they decide in docs/accelerators.md. Each has a share of the time; what is left of it goes to the next ones.

Shapes: T time, N batch or heads, D input or keys, H hidden or values.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import accelerator_peers as peers
import chunkwise
import jax
import jax.numpy as jnp
import numpy as np
from accelerator_measure import GPU, ON_CPU, Day, Job
from accelerator_parts import BY_HAND, cell_job, error, kernels_of
from accelerator_tries import chunks_of, constants, lowered
from linear_layers import LAYERS, problem

import jrnn
from jrnn.bench import measured_cells
from jrnn.bench.peers import scanned
from jrnn.bench.sizes import Size
from jrnn.loops import scan

HALF = (jnp.bfloat16, jnp.float16) if GPU else (jnp.bfloat16,)
TYPES = (jnp.bfloat16, jnp.float32)
MODES = ("train", "forward") if GPU else ("train",)
LAYER_NAMES = ("gated_delta_rule", "gla", "mamba2", "linear_attention")[: 4 if GPU else 2]


def sizes(on_gpu: str, on_cpu: str) -> list[Size]:
    return [Size.parse(text) for text in (on_gpu if GPU else on_cpu).split()]


CELL_SIZES = sizes("100x32x512x512 1024x16x768x768 64x64x1024x1024 100x1x128x128", "5x2x3x4")
LAYER_SIZES = sizes("2048x64x64x64 8192x32x128x128", "128x2x16x16")
ERROR_SIZE = sizes("320x4x64x64", "128x2x16x16")[0]
LENGTHS = (1024, 4096, 16384, 65536) if GPU else (66,)
LONG_CELLS = ("gru", "lstm", "min_gru", "slstm") if GPU else ("gru",)
RATES = (0.0, 0.01, 0.1)


def narrow(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def in_mode(fn: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Returns the function, or for "train" its gradients of the sum of the squares of all results, added up in float32."""

    def loss(*args: Any) -> Any:
        leaves = jax.tree.leaves(fn(*args))
        return sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in leaves)

    return jax.grad(loss, (0, 1)) if mode == "train" else fn


def foreign(day: Day, name: str, peer: str, steps: int, make: Callable[[], Any]) -> list[Job]:
    """Returns the job of another library's program; nothing if it cannot be made, which is a result."""
    try:
        return [Job(name, peer, make(), None, steps)]
    except Exception as why:
        day.failed(why, job=name, peer=peer)
        return []


# (a) LSTM and GRU -----------------------------------------------------------------------------------------------------


def cells(day: Day) -> None:
    jobs = []
    for size in CELL_SIZES:
        for mode in MODES:
            for dtype in HALF:
                for cell in ("lstm", "gru"):
                    jobs += cell_peers(day, cell, size, mode, dtype)
    day.timed(jobs, 0.2, keep=f"train {CELL_SIZES[0]} bfloat16")


def cell_peers(day: Day, cell: str, size: Size, mode: str, dtype: Any) -> list[Job]:
    """Returns jrnn's program in a type, and cuDNN's and FlashRNN's."""
    name = f"{cell} {mode} {size} {jnp.dtype(dtype).name}"
    given = narrow(measured_cells.inputs(cell, size), dtype)
    carry = narrow(measured_cells.initial(cell, size), dtype)

    def run(weights: Any, x: Any) -> Any:
        return scan(measured_cells.make(cell, weights), carry, x)[1]

    jobs = [Job(name, "jrnn", in_mode(run, mode), given, size.steps)]
    made = functools.partial(peers.cudnn, cell, size, dtype, mode)
    jobs += foreign(day, name, "cuDNN", size.steps, made)
    if cell == "lstm" and size.hidden <= 128:
        made = functools.partial(peers.flashrnn, cell, size, dtype, mode)
        jobs += foreign(day, name, "flashrnn", size.steps, made)
    return jobs


# (b) Layers with matrix states ----------------------------------------------------------------------------------------


def layers(day: Day) -> None:
    jobs = []
    for size in LAYER_SIZES:
        for mode in MODES:
            for dtype in TYPES:
                for layer in LAYER_NAMES:
                    jobs += layer_peers(day, layer, size, mode, dtype)
    with constants(chunkwise, C=64):
        day.timed(jobs, 0.2, keep=f"train {LAYER_SIZES[0]} bfloat16")


def in_jax(layer: str) -> Iterator[tuple[str, Callable[[], Callable[..., Any]]]]:
    """Yields the peers of a layer in JAX, and what makes each."""
    yield "jrnn", lambda: functools.partial(scan, LAYERS[layer].step)
    if layer in BY_HAND:
        yield "by hand", lambda: BY_HAND[layer]
    yield "jla", lambda: peers.jla(layer)


def layer_peers(day: Day, layer: str, size: Size, mode: str, dtype: Any) -> list[Job]:
    name = f"{layer} {mode} {size} {jnp.dtype(dtype).name}"
    given = problem(layer, size, dtype)
    jobs = []
    for peer, make in in_jax(layer):
        try:
            jobs.append(Job(name, peer, in_mode(make(), mode), given, size.steps))
        except Exception as why:
            day.failed(why, job=name, peer=peer)
    made = functools.partial(peers.fla, layer, *given, mode)
    return jobs + foreign(day, name, "fla", size.steps, made)


# (c) Errors -----------------------------------------------------------------------------------------------------------


def errors(day: Day) -> None:
    """The errors of all peers next to those of the same steps one by one, against float64."""
    tasks = {}
    for layer in LAYER_NAMES:
        for dtype in TYPES:
            tasks[layer, jnp.dtype(dtype).name] = functools.partial(layer_errors, day, layer, dtype)
    for (layer, dtype), result in day.each(tasks, lambda key: dict(job=" ".join(key))):
        day.say(job=f"{layer} {dtype}", **result)


def layer_errors(day: Day, layer: str, dtype: Any) -> dict[str, Any]:
    cpu = jax.devices("cpu")[0]
    step = LAYERS[layer].step
    options = None if GPU else ON_CPU
    with jax.default_device(cpu), jax.enable_x64(True), jrnn.plain_scans():
        wide = problem(layer, ERROR_SIZE, np.float64)
        exact = [
            jax.tree.map(
                np.asarray, jax.jit(in_mode(functools.partial(jax.lax.scan, step), mode))(*wide)
            )
            for mode in ("forward", "train")
        ]
    given = problem(layer, ERROR_SIZE, dtype)
    found: dict[str, Any] = {}
    steps = ("steps", lambda: functools.partial(jax.lax.scan, step))
    for peer, make in (*in_jax(layer), steps):
        for mode, right in zip(("forward", "train"), exact):
            try:
                call = (
                    jax.jit(in_mode(make(), mode)).lower(*given).compile(compiler_options=options)
                )
                found[f"{peer} {mode}"] = float(f"{error(call(*given), right):.2e}")
            except Exception as why:
                day.failed(why, job=layer, peer=peer)
    try:
        last, y = peers.fla(layer, *given, "forward")()
        values = [v.float().cpu().numpy() for v in (last, y)]
        found["fla forward"] = float(f"{error(values, exact[0]):.2e}")
    except Exception as why:
        day.failed(why, job=layer, peer="fla")
    return found


# (d) Memory -----------------------------------------------------------------------------------------------------------


def memory(day: Day) -> None:
    """The temporary memory of gated linear attention in chunks of several lengths, next to chunks by hand."""
    size = LAYER_SIZES[0]
    jobs = []
    for dtype in TYPES:
        given = problem("gla", size, dtype)
        name = f"gla train {size} {jnp.dtype(dtype).name}"
        for length in (32, 64, 128) if GPU else (32,):
            with chunks_of(length):
                fn = in_mode(functools.partial(scan, LAYERS["gla"].step), "train")
                jobs += lowered(day, Job(name, f"chunks of {length}", fn, given, size.steps))
            with constants(chunkwise, C=length):
                fn = in_mode(BY_HAND["gla"], "train")
                jobs += lowered(day, Job(name, f"by hand, {length}", fn, given, size.steps))
    day.timed(jobs, 0.1)


# (e) Resets -----------------------------------------------------------------------------------------------------------


def resets(day: Day) -> None:
    """LSTM and a layer in bfloat16, without resets, and with some."""
    size, layer_size = CELL_SIZES[0], LAYER_SIZES[0]
    rng = np.random.RandomState(0)
    jobs = []
    given = narrow(measured_cells.inputs("lstm", size), jnp.bfloat16)
    carry = narrow(measured_cells.initial("lstm", size), jnp.bfloat16)
    layer = LAYERS["gated_delta_rule"].step
    first, xs = problem("gated_delta_rule", layer_size, jnp.bfloat16)
    for rate in RATES:
        peer = f"resets {100 * rate:g} %"
        options = {}
        if rate:
            options["resets"] = jnp.asarray(rng.rand(size.steps, size.batch) < rate)

        def cell(weights: Any, x: Any, options: Any = options) -> Any:
            return scan(measured_cells.make("lstm", weights), carry, x, **options)[1]

        jobs.append(Job(f"lstm train {size}", peer, in_mode(cell, "train"), given, size.steps))
        options = {}
        if rate:
            options["resets"] = jnp.asarray(rng.rand(layer_size.steps, layer_size.batch) < rate)
        run = functools.partial(scan, layer, **options)
        name = f"gated_delta_rule train {layer_size}"
        jobs.append(Job(name, peer, in_mode(run, "train"), (first, xs), layer_size.steps))
    day.timed(jobs, 0.2)


# (f) All steps at once ------------------------------------------------------------------------------------------------


def long(day: Day) -> None:
    """Newton's method and the associative solver over T, next to the loop."""
    for length in LENGTHS:
        size = Size(length, 8, 64, 256) if GPU else Size(length, 2, 3, 4)
        jobs = []
        for cell in LONG_CELLS:
            names = ["auto", "scan", "newton"]
            names += ["associative"] if cell.startswith("min") else []
            for name in names:
                which = functools.partial(scan, executor=name)
                try:
                    jobs.append(cell_job(f"{cell} train {size}", name, which, cell, size))
                except Exception as why:
                    day.failed(why, job=f"{cell} train {size}", peer=name)
        day.timed(jobs, 0.1)


# (g) Compilation ------------------------------------------------------------------------------------------------------


def compilation(day: Day) -> None:
    """Seconds to compile a train step in bfloat16, one program at a time, without the cache of compiled programs."""
    programs: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {}
    scans = {"jrnn": scan, "lax.scan": jax.lax.scan}
    for peer, which in scans.items():
        for layer in LAYER_NAMES[:2]:
            given = problem(layer, LAYER_SIZES[0], jnp.bfloat16)
            programs[f"{layer} {peer}"] = functools.partial(which, LAYERS[layer].step), given
        for cell in ("lstm", "gru"):
            fn, *args = scanned(which, cell, CELL_SIZES[0])
            programs[f"{cell} {peer}"] = fn, args
    cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        for name, (fn, args) in programs.items():
            if day.left() < 5:
                day.say(job=name, skipped="out of time")
                continue
            start = time.monotonic()
            program = jax.jit(in_mode(fn, "train")).lower(*args)
            planned = time.monotonic()
            program.compile(compiler_options=None if GPU else ON_CPU)
            ended = time.monotonic()
            day.say(job=name, lower=round(planned - start, 2), compile=round(ended - planned, 2))
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)


# (h) Profile ----------------------------------------------------------------------------------------------------------


def slowest(day: Day) -> None:
    """The kernels of the program of jrnn that is slowest next to its fastest peer, in parts (a) and (b)."""
    ratios = {}
    for name, timed in day.medians.items():
        others = [seconds for peer, (seconds, _) in timed.items() if peer != "jrnn"]
        if "jrnn" in timed and others:
            ratios[name] = timed["jrnn"][0] / min(others)
    if not ratios:
        day.say(skipped="no program of jrnn was timed next to a peer")
        return
    name = max(ratios, key=ratios.__getitem__)
    for peer, (_, ready) in day.medians[name].items():
        fields = dict(job=name, peer=peer, ratio=round(ratios[name], 3))
        try:
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    ready.run()
                day.say(**fields, **kernels_of(Path(folder)))
        except Exception as why:
            day.failed(why, **fields)
