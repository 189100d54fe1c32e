"""A loop as one kernel for TPUs. This is the only file with names of Pallas, which change between releases of JAX.

The grid is time, in blocks of steps. Constants and state stay in VMEM, the memory on the chip. The pipeline of the grid
streams the inputs and outputs of each step. A reverse loop reads and writes the blocks from the last to the first.

Shapes: T time, R rows, C columns.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

# One step, `(constants, state, inputs) -> (new state, outputs)`, each a list of [R, C].
Step = Callable[[list[Any], list[Any], list[Any]], tuple[Sequence[Any], Sequence[Any]]]

# MiB of VMEM per core. Other and unknown chips count as the smallest.
_VMEM = dict.fromkeys(("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e"), 128)
_VMEM |= dict.fromkeys(("TPU v5", "TPU v5p", "TPU7x"), 64)
_LEAST_VMEM = 16
# They have no products of bfloat16, and the compiler reports that too late to choose another plan.
TOO_OLD = ("TPU v2", "TPU v3")
_ROWS, _COLUMNS = 8, 128  # of a tile of 4-byte elements


def vmem_bytes(chip: str) -> int:
    return _VMEM.get(chip, _LEAST_VMEM) << 20


def padded_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Returns the bytes of [R, C] in VMEM, in whole tiles."""
    size = np.dtype(dtype).itemsize
    rows = _ROWS * max(1, 4 // size)
    return math.ceil(shape[0] / rows) * rows * math.ceil(shape[1] / _COLUMNS) * _COLUMNS * size


def _kernel(pl: Any, step: Step, groups: Sequence[int], steps: int, block: int, reverse: bool) -> Callable[..., None]:
    """Returns the kernel of a block of steps. Its references are constants, first state, inputs, last state, outputs."""
    blocks = math.ceil(steps / block)

    def kernel(*refs: Any) -> None:
        rest = iter(refs)  # the output "last state" holds the state in between
        const_refs, init_refs, x_refs, state_refs, y_refs = (list(itertools.islice(rest, n)) for n in groups)
        index = pl.program_id(0)
        first_step = (np.int32(blocks - 1) - index if reverse else index) * np.int32(block)

        @pl.when(index == 0)
        def _() -> None:
            for state, first in zip(state_refs, init_refs):
                state[...] = first[...]

        def one(i: Any) -> None:
            state, ys = step(
                [ref[...] for ref in const_refs], [ref[...] for ref in state_refs], [ref[i] for ref in x_refs]
            )
            for ref, value in zip((*state_refs, *(y.at[i] for y in y_refs)), (*state, *ys)):
                ref[...] = value

        def some(i: Any, _: Any) -> None:
            at = np.int32(block - 1) - i if reverse else i
            if steps % block:
                pl.when(first_step + at < np.int32(steps))(lambda: one(at))
            else:
                one(at)

        if block == 1:
            one(0)
        else:
            jax.lax.fori_loop(np.int32(0), np.int32(block), some, None)

    return kernel


def run(
    step: Step,
    consts: Sequence[Any],
    init: Sequence[Any],
    xs: Sequence[Any],
    written: Sequence[jax.ShapeDtypeStruct],
    *,
    steps: int,
    block: int,
    reverse: bool,
    vmem: int,
    interpret: bool,
) -> tuple[list[Any], list[Any]]:
    """Runs all steps of a loop in one kernel.

    Args:
        step: computes one step.
        consts: the constants, arrays [R, C].
        init: the initial state, arrays [R, C].
        xs: the inputs, arrays [T, R, C].
        written: the types [R, C] of a step's outputs.
        steps: T.
        block: the number of steps per iteration of the grid. The last block may have fewer.
        reverse: whether time runs backwards.
        vmem: the most bytes of VMEM that the kernel may use.
        interpret: whether to run it with XLA's operations instead, on any platform.

    Returns:
        The last state, and the outputs, arrays [T, R, C].
    """
    from jax.experimental import pallas as pl  # slow to import, and needed only here
    from jax.experimental.pallas import tpu as pltpu

    blocks = math.ceil(steps / block)
    groups = [len(group) for group in (consts, init, xs, init, written)]
    kernel = _kernel(pl, step, groups, steps, block, reverse)

    def time_of(index: Any) -> Any:
        return np.int32(blocks - 1) - index if reverse else index

    zero = np.int32(0)  # a Python number would be 64 bits wide under jax_enable_x64

    def whole(array: Any) -> Any:
        return pl.BlockSpec(array.shape, lambda t: (zero, zero), pipeline_mode=pl.Buffered(1))

    def streamed(array: Any) -> Any:
        return pl.BlockSpec((block, *array.shape[-2:]), lambda t: (time_of(t), zero, zero))

    # Inside `jax.shard_map`, types have the mesh axes over which a value varies. The results vary as the operands do.
    axes = max((jax.typeof(v).manual_axis_type for v in (*consts, *init, *xs)), key=lambda kind: len(kind.varying))
    typed = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=axes)
    stacks = [typed((steps, *y.shape), y.dtype) for y in written]
    # On a TPU, no value of the kernel has 64 bits, and Mosaic does not lower loops with 64-bit counters.
    with contextlib.nullcontext() if interpret else jax.enable_x64(False):
        out = pl.pallas_call(
            kernel,
            grid=(blocks,),
            in_specs=[*map(whole, (*consts, *init)), *map(streamed, xs)],
            out_specs=[*(pl.BlockSpec(v.shape, lambda t: (zero, zero)) for v in init), *map(streamed, stacks)],
            out_shape=[*(typed(v.shape, v.dtype) for v in init), *stacks],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem),
            interpret=interpret,
            name="jrnn_reverse_loop" if reverse else "jrnn_forward_loop",
        )(*consts, *init, *xs)
    return list(out[: len(init)]), list(out[len(init) :])
