"""The parts of `accelerator_day.py` that try constants of jrnn.

Programs are lowered with patched constants one after the other, and then compiled side by side.

Shapes: T time, N batch or heads, D input or keys, H hidden or values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import chunkwise
import jax
import jax.numpy as jnp
from accelerator_measure import GPU, Day, Job
from accelerator_parts import (
    BY_HAND,
    MATRIX_LAYERS,
    MATRIX_SIZE,
    SCANS,
    cell_job,
    in_mode,
    of_layer,
)
from linear_layers import LAYERS

from jrnn.bench import measured_cells
from jrnn.bench.sizes import Size
from jrnn.loops import compile as compiling
from jrnn.loops import scan
from jrnn.loops.affine.chunkwise import chunked
from jrnn.loops.strategies import try_few_kernels
from jrnn.loops.strategies.nodes import steps_with_wide_sums

SIZES = [
    Size.parse(text)
    for text in (("100x32x512x512", "100x1x128x128") if GPU else ("8x2x3x4", "5x1x3x4"))
]


@contextmanager
def constants(module: Any, **values: Any) -> Iterator[None]:
    """Patches names of a module, and plans all loops anew."""
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(module, name, value))
        forget()
        yield
    forget()


def forget() -> None:
    """Clears the caches of JAX and of plans."""
    jax.clear_caches()
    for value in vars(compiling).values():
        getattr(value, "cache_clear", lambda: None)()


def chunks_of(size: int) -> Any:
    """Patches the length of chunks."""
    return constants(chunked, chunk_length=lambda length, batched: size)


def lowered(day: Day, job: Job) -> list[Job]:
    """Returns the job, lowered with the constants of now; nothing if that fails, which is a result."""
    try:
        return [job.lowered()]
    except Exception as error:
        day.failed(error, job=job.name, peer=job.peer)
        return []


def chunks(day: Day) -> None:
    jobs = []
    for layer in MATRIX_LAYERS:
        given = of_layer(layer)
        name = f"{layer} train {MATRIX_SIZE}"
        for size in (32, 64, 128):
            fn = in_mode(functools.partial(scan, LAYERS[layer].step), "train")
            with chunks_of(size):
                jobs += lowered(day, Job(name, f"chunks of {size}", fn, given, MATRIX_SIZE.steps))
            if layer in BY_HAND:
                with constants(chunkwise, C=size):
                    fn = in_mode(BY_HAND[layer], "train")
                    jobs += lowered(
                        day, Job(name, f"by hand, {size}", fn, given, MATRIX_SIZE.steps)
                    )
    day.timed(jobs, keep=f"{MATRIX_LAYERS[0]} train {MATRIX_SIZE}")


def unroll(day: Day) -> None:
    jobs = []
    for size in SIZES:
        for trips in (4, 1, 2, 8, 16):
            with constants(try_few_kernels, _STEPS=trips):
                jobs += lowered(
                    day,
                    cell_job(
                        f"lstm train {size}", f"{trips} steps an iteration", scan, "lstm", size
                    ),
                )
    day.timed(jobs)


def stages(day: Day) -> None:
    def plain(core: Any, devices: int) -> Any:
        return steps_with_wide_sums(core)

    tried: dict[str, dict[str, Any]] = {
        "default": {},
        "no stages, no packs": dict(_few_kernels=plain),
        "no packs": dict(_MAX_PACK_BYTES=0),
    }
    jobs = []
    for cell in ("lstm", "gru"):
        for size in SIZES:
            for peer, values in tried.items():
                with constants(try_few_kernels, **values):
                    jobs += lowered(day, cell_job(f"{cell} train {size}", peer, scan, cell, size))
    day.timed(jobs)


def buffers(day: Day) -> None:
    options = {
        "default": None,
        "no command buffers": {"xla_gpu_enable_command_buffer": ""},
        "all command buffers": {
            "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
        },
    }
    jobs = []
    for size in SIZES:
        for which, fn in SCANS.items():
            name = f"lstm train {size} {which}"
            jobs += [
                cell_job(name, peer, fn, "lstm", size, options=given)
                for peer, given in options.items()
            ]
    day.timed(jobs)


def mixed_lstm(p: Any, state: Any, x: Any) -> tuple[Any, Any]:
    """An LSTM with products in bfloat16, and carries in float32."""
    h, c = state
    z = (x @ p["wx"] + h.astype(jnp.bfloat16) @ p["wh"]).astype(jnp.float32) + p["b"]
    i, f, o, g = jnp.split(z, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def bfloat16(day: Day) -> None:
    jobs = []
    for size in SIZES:
        w, x = measured_cells.inputs("lstm", size)
        given = (
            {k: v.astype(jnp.float32 if k == "b" else jnp.bfloat16) for k, v in w.items()},
            x.astype(jnp.bfloat16),
        )
        carry = measured_cells.initial("lstm", size)
        for peer, which in SCANS.items():

            def fn(p, x, which=which, carry=carry):
                return which(functools.partial(mixed_lstm, p), carry, x)[1]

            jobs.append(
                Job(f"lstm train {size} bfloat16", peer, in_mode(fn, "train"), given, size.steps)
            )
    day.timed(jobs)


def rounds(day: Day) -> None:
    jobs = []
    executors = {
        name: functools.partial(scan, executor=name) for name in ("scan", "associative", "auto")
    }
    for length in (64, 128, 256, 1024) if GPU else (66,):
        size = Size(length, 8, 64, 256) if GPU else Size(length, 2, 3, 4)
        jobs += [
            cell_job(f"min_gru train {size}", peer, which, "min_gru", size)
            for peer, which in executors.items()
        ]
    day.timed(jobs, 0.2)
