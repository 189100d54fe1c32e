"""A loop as the program of the kernel: what runs in it, and what is computed before and after it.

The kernel cannot run every equation. An equation that it cannot run, and that does not read the carry, is hoisted: it is
computed for all steps before the call. One that does not lead to the carry is sunk: it is computed for all steps after it.

    xs ─ hoisted equations ─► the kernel, which carries ─ sunk equations ─► ys

`passes/split_loop.py` divides the loop and runs the parts. What must move is found by trial, because what the kernel can run
depends on how arrays lie in memory, which only the encoder knows: the step is encoded until it raises `Unsupported` for an
equation, this equation moves, and the smaller step is encoded again.

Shapes: N rows, T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, primitives
from jrnn.loops.ir import Loop, Unsupported
from jrnn.loops.kernels.native.encoder import CallEncoder
from jrnn.loops.kernels.native.operations import Operation
from jrnn.loops.passes.split_loop import SplitLoop, divide

MAX_EQUATIONS = 2000  # of a step
_KNOWN = (jnp.bool_, jnp.float32, jnp.float64, jnp.bfloat16)


@dataclass(frozen=True)
class KernelProgram:
    """A loop for the kernel.

    Attributes:
        parts: the loop that the kernel runs, and what is computed before and after it.
        dtype: the type that it computes with.
        rows: N.
        encoded, literals: what the kernel gets.
        stages: the operations of each stage.
    """

    parts: SplitLoop
    dtype: np.dtype
    rows: int
    encoded: np.ndarray
    literals: np.ndarray
    stages: tuple[tuple[Operation, ...], ...]

    @property
    def products(self) -> list[Operation]:
        """The products of a step."""
        return [o for stage in self.stages for o in stage if o.matrix is not None]


def program_of(loop: Loop) -> KernelProgram:
    """Returns the program of a loop. Raises `Unsupported` with the reason if there is none."""
    if not jaxprs.is_known(loop.length):
        raise Unsupported("the number of steps is symbolic")
    if not loop.carry:
        raise Unsupported("nothing is carried")
    for eqn in loop.eqns:
        if eqn.effects:
            raise Unsupported(f"{eqn.primitive.name} has side effects")
    eqns, _ = jaxprs.needed(loop.eqns, loop.outputs, set(loop.inputs))
    if len(eqns) > MAX_EQUATIONS:
        raise Unsupported(
            f"the step has {len(eqns)} equations, more than the {MAX_EQUATIONS} of a kernel"
        )
    loop = replace(loop, eqns=tuple(eqns))

    # The rows are the first axis of all carries, or else there is one row.
    if _has_rows(loop):
        try:
            return _program_for(loop, loop.carry[0].aval.shape[0])
        except Unsupported:
            if len(loop.carry[0].aval.shape) > 1:
                raise
    return _program_for(loop, 1)


def _has_rows(loop: Loop) -> bool:
    """Returns True if all carries have a first axis of one size, which is more than 1."""
    sizes = {v.aval.shape[0] if v.aval.shape else 1 for v in loop.carry}
    size = sizes.pop()
    return not sizes and jaxprs.is_known(size) and size > 1


def transposed_matrices(eqns: Sequence[Eqn], loop: Loop) -> list[Eqn]:
    """Returns the transpositions whose results only products of a loop read: the kernel packs a matrix either way."""
    transposes = [e for e in eqns if e.primitive.name == "transpose"]
    if not transposes:
        return []
    read_by_products: set[Var] = set()
    read_by_others = set(jaxprs.variables(loop.outputs))
    for eqn in loop.eqns:
        if eqn.primitive.name == "dot_general":
            read_by_products.update(jaxprs.inputs(eqn))
    for eqn in (*eqns, *loop.eqns):
        if eqn.primitive.name != "dot_general":
            read_by_others.update(jaxprs.inputs(eqn))
    matrices = read_by_products - read_by_others
    return [e for e in transposes if e.outvars[0] in matrices]


def _program_for(loop: Loop, rows: int) -> KernelProgram:
    """Returns the program for N rows. Raises `Unsupported` if an equation must stay that the kernel cannot run."""
    const_eqns = [e for e in loop.eqns if not jaxprs.any_in(e.outvars, loop.varying)]
    transposes = transposed_matrices(const_eqns, loop)
    constant_eqns = [e for e in const_eqns if e not in transposes]
    leading, _ = jaxprs.needed(loop.eqns, loop.carry_out, set(loop.inputs))
    to_carry = set(jaxprs.results(leading))
    inside = {*loop.carry, *jaxprs.results(loop.eqns)}
    targets = jaxprs.variables(loop.ys)
    hoisted: dict[Var, None] = {}
    sunk: list[Var] = []
    while True:
        outside = jaxprs.depends(loop.eqns, sunk) if sunk else set()
        parts = divide(loop, constant_eqns, [*hoisted], inside - outside, targets)
        try:
            return _encoded(parts, rows)
        except Unsupported as why:
            eqn = why.eqn
            if eqn is None or not primitives.is_movable(eqn):
                raise
            if not jaxprs.any_in(eqn.outvars, loop.on_carry):
                hoisted.update(dict.fromkeys(eqn.outvars))
            elif not jaxprs.any_in(eqn.outvars, to_carry):
                sunk += eqn.outvars
            else:
                raise


def _encoded(parts: SplitLoop, rows: int) -> KernelProgram:
    """Returns the program of the loop that remains."""
    dtype = _dtype(parts.residual)
    encoded, literals, stages = CallEncoder(parts.residual, rows, dtype).result()
    return KernelProgram(
        parts=parts,
        dtype=dtype,
        rows=rows,
        encoded=encoded,
        literals=literals,
        stages=stages,
    )


def _dtype(residual: Loop) -> np.dtype:
    """Returns the type that the kernel computes with."""
    values: dict[Var, None] = {}
    for eqn in residual.eqns:
        for v in (*eqn.outvars, *jaxprs.inputs(eqn)):
            if v in values:
                continue
            values[v] = None
            if v.aval.dtype not in _KNOWN:
                raise Unsupported(f"the kernel has no {v.aval.dtype}", eqn)
            if not all(map(jaxprs.is_known, v.aval.shape)) or 0 in v.aval.shape:
                raise Unsupported(f"a value of the step has the shape {list(v.aval.shape)}")

    values.update(dict.fromkeys([*residual.inputs, *jaxprs.variables(residual.outputs)]))
    dtypes = {v.aval.dtype for v in values} - {jnp.dtype(jnp.bool_)}
    for dtype in dtypes:
        if dtype not in _KNOWN:
            raise Unsupported(f"the kernel has no {dtype}")
    if jnp.dtype(jnp.float64) not in dtypes:
        return jnp.dtype(jnp.float32)
    if len(dtypes) > 1:
        raise Unsupported(f"the step computes with {' and '.join(sorted(map(str, dtypes)))}")
    return jnp.dtype(jnp.float64)
