"""A loop as the program of the kernel: what runs in it, and what is computed before and after it.

The kernel cannot run every equation. An equation that it cannot run, and that does not read the carry, is hoisted: it is
computed for all steps before the call. One that does not lead to the carry is sunk: it is computed for all steps after it.

    xs ─ hoisted equations ─► the kernel, which carries ─ sunk equations ─► ys

What the kernel can run depends on how arrays lie in memory, and only the encoder knows that. So the step is encoded until
it raises `Unsupported` for an equation; this equation moves, and the smaller step is encoded again.
`passes/split_loop.py` splits a loop, too, but by what pays to move, and it was asked before.

Shapes: N rows, T time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, primitives
from jrnn.loops.ir import Loop, Unsupported
from jrnn.loops.kernels.native.encoder import CallEncoder
from jrnn.loops.kernels.native.operations import Operation

MAX_EQUATIONS = 2000  # of a step
_FLOATS = (jnp.float32, jnp.float64, jnp.bfloat16)


@dataclass(frozen=True)
class KernelProgram:
    """A loop for the kernel.

    Attributes:
        loop: the whole loop.
        residual: the loop that the kernel runs.
        constant_eqns: equations of constants, which are evaluated before the call.
        hoisted_eqns: equations that the kernel cannot run and that do not read the carry: for all steps, before the call.
        sunk_eqns: equations that only outputs need: for all steps, after the call.
        constants: the constants that the kernel reads; they may be results of `constant_eqns`.
        dtype: the type that it computes with.
        rows: N.
        encoded, literals: what the kernel gets.
        stages: the operations of each stage.
    """

    loop: Loop
    residual: Loop
    constant_eqns: tuple[Eqn, ...]
    hoisted_eqns: tuple[Eqn, ...]
    sunk_eqns: tuple[Eqn, ...]
    constants: tuple[Var, ...]
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

    varying = jaxprs.depends(eqns, (*loop.carry, *loop.xs))
    const_eqns = [e for e in eqns if varying.isdisjoint(e.outvars)]
    transposes = transposed_matrices(const_eqns, loop)
    split = KernelSplit(
        loop=loop,
        eqns=[*transposes, *(e for e in eqns if not varying.isdisjoint(e.outvars))],
        constant_eqns=tuple(e for e in const_eqns if e not in transposes),
    )

    # The rows are the first axis of all carries, or else there is one row.
    if _has_rows(loop):
        try:
            return split.program(loop.carry[0].aval.shape[0])
        except Unsupported:
            if len(loop.carry[0].aval.shape) > 1:
                raise
    return split.program(1)


def _has_rows(loop: Loop) -> bool:
    """Returns True if all carries have a first axis of one size, which is more than 1."""
    sizes = {v.aval.shape[0] if v.aval.shape else 1 for v in loop.carry}
    size = sizes.pop()
    return not sizes and jaxprs.is_known(size) and size > 1


def transposed_matrices(eqns: Sequence[Eqn], loop: Loop) -> list[Eqn]:
    """Returns the transpositions whose results only products of a loop read: the kernel packs a matrix either way."""
    read_by_products: set[Var] = set()
    read_by_others = set(jaxprs.variables(loop.outputs))
    for eqn in loop.eqns:
        if eqn.primitive.name == "dot_general":
            read_by_products.update(jaxprs.inputs(eqn))
    for eqn in (*eqns, *loop.eqns):
        if eqn.primitive.name != "dot_general":
            read_by_others.update(jaxprs.inputs(eqn))
    matrices = read_by_products - read_by_others
    transposes = [e for e in eqns if e.primitive.name == "transpose"]
    return [e for e in transposes if e.outvars[0] in matrices]


@dataclass(frozen=True)
class KernelSplit:
    """A step whose equations move out of the loop until the kernel can run the rest.

    Attributes:
        loop: the whole loop.
        eqns: the equations of a step, without `constant_eqns`.
        constant_eqns: equations of constants.
    """

    loop: Loop
    eqns: Sequence[Eqn]
    constant_eqns: tuple[Eqn, ...]

    def program(self, rows: int) -> KernelProgram:
        """Returns the program for N rows. Raises `Unsupported` if an equation must stay that the kernel cannot run."""
        on_carry = jaxprs.depends(self.eqns, self.loop.carry)
        leading, _ = jaxprs.needed(self.eqns, self.loop.carry_out, set(self.loop.inputs))
        to_carry = set(jaxprs.results(leading))
        hoisted: set[Var] = set()
        sunk: set[Var] = set()
        while True:
            try:
                return self._encoded(rows, hoisted, jaxprs.depends(self.eqns, sunk))
            except Unsupported as why:
                if why.eqn is None:
                    raise
                results = why.eqn.outvars
                if not primitives.is_movable(why.eqn):
                    raise
                if on_carry.isdisjoint(results):
                    hoisted.update(results)
                elif to_carry.isdisjoint(results):
                    sunk.update(results)
                else:
                    raise

    def _encoded(self, rows: int, hoisted: set[Var], sunk: set[Var]) -> KernelProgram:
        """Returns the program without the values that are computed before and after the loop."""
        loop = self.loop
        eqns = self.eqns
        sunk_eqns = [e for e in eqns if not sunk.isdisjoint(e.outvars)]
        read_after = jaxprs.free_variables(sunk_eqns)

        # The kernel writes outputs, and what equations after it read.
        inner = [e for e in eqns if sunk.isdisjoint(e.outvars)]
        in_kernel = {*loop.carry, *jaxprs.results(inner)} - hoisted
        outs = [y for y in jaxprs.variables(loop.ys) if y not in sunk]
        outs += [v for v in read_after if v in in_kernel]
        ys = tuple(dict.fromkeys(outs))
        targets = [*loop.carry_out, *ys]
        body, _ = jaxprs.needed(inner, targets, {*loop.inputs, *hoisted})

        # It reads inputs, and what equations before it compute.
        read = {*jaxprs.free_variables(body), *jaxprs.variables(targets)}
        available = [*loop.xs, *(v for v in jaxprs.results(eqns) if v in hoisted)]
        xs = tuple(v for v in available if v in read)
        wanted = hoisted.intersection(read.union(read_after))
        hoisted_eqns, _ = jaxprs.needed(eqns, wanted, set(loop.inputs))

        residual = replace(loop, eqns=tuple(body), xs=xs, ys=ys)
        constants = _constants(residual)
        dtype = _dtype(residual, constants)
        encoder = CallEncoder(residual, constants, rows, dtype)
        encoded, literals, stages = encoder.result()
        return KernelProgram(
            loop=loop,
            residual=residual,
            constant_eqns=self.constant_eqns,
            hoisted_eqns=tuple(hoisted_eqns),
            sunk_eqns=tuple(sunk_eqns),
            constants=constants,
            dtype=dtype,
            rows=rows,
            encoded=encoded,
            literals=literals,
            stages=stages,
        )


def _constants(residual: Loop) -> tuple[Var, ...]:
    """Returns what the kernel reads besides carries and inputs."""
    varying = {*residual.carry, *residual.xs, *jaxprs.results(residual.eqns)}
    read = [*jaxprs.free_variables(residual.eqns), *jaxprs.variables(residual.outputs)]
    return tuple(dict.fromkeys(v for v in read if v not in varying))


def _dtype(residual: Loop, constants: Collection[Var]) -> np.dtype:
    """Returns the type that the kernel computes with."""
    known = (jnp.bool_, *_FLOATS)
    for eqn in residual.eqns:
        for v in (*eqn.outvars, *jaxprs.inputs(eqn)):
            if v.aval.dtype not in known:
                raise Unsupported(f"the kernel has no {v.aval.dtype}", eqn)
            if not all(map(jaxprs.is_known, v.aval.shape)) or 0 in v.aval.shape:
                raise Unsupported(f"a value of the step has the shape {list(v.aval.shape)}")

    values = [*constants, *residual.carry, *residual.xs, *jaxprs.variables(residual.outputs)]
    dtypes = {v.aval.dtype for v in (*values, *jaxprs.results(residual.eqns))}
    dtypes.discard(jnp.dtype(jnp.bool_))
    for dtype in dtypes:
        if dtype not in _FLOATS:
            raise Unsupported(f"the kernel has no {dtype}")
    if jnp.dtype(jnp.float64) not in dtypes:
        return jnp.dtype(jnp.float32)
    if len(dtypes) > 1:
        raise Unsupported(f"the step computes with {' and '.join(sorted(map(str, dtypes)))}")
    return jnp.dtype(jnp.float64)
