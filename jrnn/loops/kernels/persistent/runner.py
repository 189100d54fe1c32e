"""A loop as one kernel, which keeps constants and state in the memory on the chip.

It supports products of two values over one axis, elementwise operations, reductions, slices and concatenations of values
with at most two axes longer than 1. It runs on TPUs, and, interpreted, on every platform.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Atom
from jrnn.loops.costs.candidates import Estimate
from jrnn.loops.costs.estimates import Estimator, estimate
from jrnn.loops.kernels.persistent import mosaic
from jrnn.loops.kernels.persistent.forms import Form, from_memory, to_memory
from jrnn.loops.kernels.persistent.tiles import Tiled, memory_type, tiled
from jrnn.loops.kernels.refused import Refused
from jrnn.loops.loop import Loop, Results
from jrnn.loops.loop.description import Description, described

# The share of the memory on the chip that a kernel may use, as this file counts it and as the compiler does.
_SHARE, _LIMIT = 0.75, 0.9
_LEAST_LIMIT = 32 << 20
# One part in 4 of a step's values is in memory at once, because the compiler goes through them tile by tile. The code grows
# with them: a step with more bytes takes minutes to compile, and is long enough for XLA's loop.
_ALIVE, _LARGEST_STEP = 4, 32 << 20
_MOST_STEPS = 16  # per iteration of the grid, which costs about 0.35 us by itself
_STREAMED = 8 << 20  # the most bytes of blocks of several steps
_TPU_TYPES = ("bfloat16", "bool", "float32", "int32")


@dataclass(frozen=True)
class Persistent:
    """Runs a loop, whose steps are computed with tiles, as one kernel. `chip` is the kind of the TPU, or "" if unknown."""

    tiled: Tiled
    chip: str
    way = "persistent"

    def run(self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: Any) -> Results:
        plan, loop = self.tiled, self.tiled.loop
        given = dict(zip((*loop.consts, *loop.xs), (*consts, *xs)))
        last, ys = mosaic.run(
            plan.step,
            [to_memory(given[v], v.aval.shape, form) for v, form in plan.consts],
            [to_memory(init[i], loop.carry[i].aval.shape, form) for i, form in plan.carry],
            [to_memory(given[v], v.aval.shape, form) for v, form in plan.xs],
            [jax.ShapeDtypeStruct(*memory_type(y, form)) for y, form in plan.ys],
            steps=length,
            block=self.block,
            reverse=loop.reverse,
            vmem=min(int(mosaic.vmem_bytes(self.chip) * _LIMIT), max(_LEAST_LIMIT, self.needed * 3 // 2)),
            interpret=not plan.reader.on_tpu,
        )
        carry = {i: from_memory(tile, loop.carry[i].aval) for (i, _), tile in zip(plan.carry, last)}
        stacks = [from_memory(tiles, y.aval) for y, tiles in zip(loop.ys, ys)]
        return [carry[i] for i in range(len(loop.carry))], stacks

    def estimate(self, estimator: Estimator) -> Estimate:
        """Returns the estimate of the loop, whose steps start no kernels of their own."""
        loop = self.tiled.loop
        inside = estimator.part(loop.eqns, loop.outputs)
        return estimate({**estimator.trips(loop, inside), "calls": estimator.machine.call}, inside.peak)

    @property
    def block(self) -> int:
        """Steps per iteration of the grid: a divisor of T if a large enough one exists."""
        length = self.tiled.loop.length
        most = max(1, min(_MOST_STEPS, length, _STREAMED // max(1, self.streamed)))
        even = max(n for n in range(1, most + 1) if length % n == 0)
        return even if 2 * even > most else most

    @property
    def constants(self) -> int:
        """Bytes of the constants."""
        return _bytes(self.tiled.consts)

    @property
    def computed(self) -> int:
        """Bytes of the values that a step computes."""
        return sum(mosaic.padded_bytes(*kind) for kind in self.tiled.values())

    @property
    def streamed(self) -> int:
        """Bytes that each step reads and writes, in the two buffers of the pipeline."""
        return 2 * (_bytes(self.tiled.xs) + _bytes(self.tiled.ys))

    @property
    def needed(self) -> int:
        """Bytes that the kernel needs on the chip."""
        carries = [(self.tiled.loop.carry[i], form) for i, form in self.tiled.carry]
        # The first state once, and the last twice, because the pipeline keeps two buffers of a kernel's outputs.
        resident = self.constants + 3 * _bytes(carries) + self.computed // _ALIVE
        return resident + self.streamed * self.block

    def describe(self) -> Description:
        return described(self.tiled.loop, str(self))

    def __str__(self) -> str:
        blocks = -(-self.tiled.loop.length // self.block)
        return f"one kernel of {blocks} blocks of {self.block} steps; on the chip stay {self.constants:,} bytes of constants"


def kernel_of(loop: Loop, chip: str, interpret: bool) -> Persistent:
    """Returns the kernel of a loop. Raises `Refused` with the reason if there is none.

    Args:
        loop: the loop.
        chip: the kind of the TPU, or "" if unknown.
        interpret: whether to run it with XLA's operations instead.
    """
    if not jaxprs.is_known(loop.length):
        raise Refused("the number of steps is symbolic")
    if not loop.carry:
        raise Refused("nothing is carried")
    if chip in mosaic.TOO_OLD and not interpret:
        raise Refused(f"a {chip} is too old: it needs a TPU v4 or a newer one")
    atoms = (*loop.inputs, *loop.outputs, *(v for eqn in loop.eqns for v in eqn.outvars))
    for dtype in dict.fromkeys(v.aval.dtype for v in atoms):
        if not (dtype.name in _TPU_TYPES or (interpret and jnp.issubdtype(dtype, jnp.number))):
            raise Refused(f"the kernel has no {dtype.name}")
    kernel = Persistent(tiled(loop, not interpret), chip)
    most = int(mosaic.vmem_bytes(chip) * _SHARE)
    if not interpret and kernel.needed > most:
        raise Refused(
            f"it needs {kernel.needed:,} bytes of VMEM, {kernel.constants:,} for constants; "
            f"{chip or 'a TPU of unknown kind'} has {most:,} for it"
        )
    if not interpret and kernel.computed > _LARGEST_STEP:
        raise Refused(f"a step computes {kernel.computed:,} bytes, more than the {_LARGEST_STEP:,} of a kernel")
    return kernel


def _bytes(pairs: Sequence[tuple[Atom, Form]]) -> int:
    return sum(mosaic.padded_bytes(*memory_type(v, form)) for v, form in pairs)
