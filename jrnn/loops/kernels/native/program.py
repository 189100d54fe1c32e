"""A loop as the program of the kernel: what runs in it, and what is computed before and after it.

Shapes: N rows, T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, primitives
from jrnn.loops.ir import Loop, Unsupported
from jrnn.loops.kernels.native.encoder import CallEncoder
from jrnn.loops.kernels.native.operations import Operation

_LONGEST = 2000  # equations of a step


@dataclass(frozen=True)
class KernelProgram:
    """A loop for the kernel.

    Attributes:
        loop: the whole loop.
        core: what the kernel runs.
        constant_eqns: equations of constants, which are evaluated before the call.
        hoisted_eqns: equations that the kernel cannot run and that do not read the carry: for all steps, before the call.
        sunk_eqns: those that only outputs need: for all steps, after the call.
        constants: those that the kernel reads; they may be results of `constant_eqns`.
        dtype: the type that it computes with.
        rows: N.
        encoded, literals: what the kernel gets.
        stages: the operations of each stage.
    """

    loop: Loop
    core: Loop
    constant_eqns: tuple[Any, ...]
    hoisted_eqns: tuple[Any, ...]
    sunk_eqns: tuple[Any, ...]
    constants: tuple[Var, ...]
    dtype: Any
    rows: int
    encoded: np.ndarray
    literals: np.ndarray
    stages: tuple[tuple[Operation, ...], ...]


def program_of(loop: Loop) -> KernelProgram:
    """Returns the program of a loop. Raises `Unsupported` with the reason if there is none."""
    if not jaxprs.is_known(loop.length):
        raise Unsupported("the number of steps is symbolic")
    if not loop.carry:
        raise Unsupported("nothing is carried")
    for eqn in loop.eqns:
        if eqn.effects:
            raise Unsupported(f"{eqn.primitive.name} has side effects")
    eqns = jaxprs.needed(loop.eqns, loop.outputs, set(loop.inputs))[0]
    if len(eqns) > _LONGEST:
        raise Unsupported(
            f"the step has {len(eqns)} equations, more than the {_LONGEST} of a kernel"
        )
    moving = jaxprs.depends(eqns, (*loop.carry, *loop.xs))
    fixed = [e for e in eqns if moving.isdisjoint(e.outvars)]
    views = transposed_matrices(fixed, loop)
    constant_eqns = tuple(e for e in fixed if e not in views)
    eqns = [*views, *(e for e in eqns if not moving.isdisjoint(e.outvars))]
    sizes = {v.aval.shape[0] if v.aval.shape else 1 for v in loop.carry}
    hypotheses = [*(n for n in sizes if len(sizes) == 1 and jaxprs.is_known(n) and n > 1), 1]
    for rows in hypotheses:
        try:
            return _with_rows(loop, constant_eqns, eqns, rows)
        except Unsupported:
            if rows == hypotheses[-1] or len(loop.carry[0].aval.shape) > 1:
                raise
    raise AssertionError


def transposed_matrices(eqns: Sequence[Eqn], loop: Loop) -> list[Eqn]:
    """Returns the transpositions whose results only products of a loop read: the kernel packs a matrix either way."""
    transposes = [e for e in eqns if e.primitive.name == "transpose"]
    readers = (e for e in (*eqns, *loop.eqns) if e.primitive.name != "dot_general")
    others = {*(v for e in readers for v in jaxprs.inputs(e)), *jaxprs.variables(loop.outputs)}
    products = {
        v for e in loop.eqns if e.primitive.name == "dot_general" for v in jaxprs.inputs(e)
    } - others
    return [e for e in transposes if e.outvars[0] in products]


def _with_rows(
    loop: Loop, constant_eqns: tuple[Any, ...], eqns: Sequence[Eqn], rows: int
) -> KernelProgram:
    """Moves what the kernel cannot run out of the loop, as long as there is something."""
    from_carry = jaxprs.depends(eqns, loop.carry)
    to_carry = {id(e) for e in jaxprs.needed(eqns, loop.carry_out, {*loop.inputs})[0]}
    hoisted_vars: set[Var] = set()  # computed before the loop
    sunk_vars: set[Var] = set()  # computed after it
    while True:
        core, hoisted_eqns, sunk_eqns = _parts(loop, eqns, hoisted_vars, sunk_vars)
        moving = {*core.carry, *core.xs, *(v for e in core.eqns for v in e.outvars)}
        ends = [*jaxprs.free_variables(core.eqns), *jaxprs.variables(core.outputs)]
        constants = tuple(dict.fromkeys(v for v in ends if v not in moving))
        try:
            encoder = CallEncoder(core, constants, rows, _dtype(core, constants))
            return KernelProgram(
                loop,
                core,
                constant_eqns,
                hoisted_eqns,
                sunk_eqns,
                constants,
                encoder.dtype,
                rows,
                *encoder.result(),
            )
        except Unsupported as why:
            if why.eqn is None:
                raise
            movable = primitives.is_movable(why.eqn)
            if movable and not any(v in from_carry for v in why.eqn.outvars):
                hoisted_vars.update(why.eqn.outvars)
            elif movable and id(why.eqn) not in to_carry:
                sunk_vars.update(why.eqn.outvars)
            else:
                raise


def _parts(
    loop: Loop, eqns: Sequence[Eqn], hoisted_vars: set[Var], sunk_vars: set[Var]
) -> tuple[Loop, tuple, tuple]:
    """Returns the loop without some values, and the equations that compute them before and after it."""
    sunk = jaxprs.depends(eqns, sunk_vars)
    sunk_eqns = tuple(e for e in eqns if any(v in sunk for v in e.outvars))
    inner = [e for e in eqns if not any(v in sunk for v in e.outvars)]
    computed = {v for e in inner for v in e.outvars} | set(loop.carry)
    ys = [y for y in loop.ys if not jaxprs.is_in(y, sunk)]
    ys += [v for v in jaxprs.free_variables(sunk_eqns) if v in computed and v not in hoisted_vars]
    core_ys = list(dict.fromkeys(jaxprs.variables(ys))) + [y for y in ys if jaxprs.is_literal(y)]
    available = {*loop.inputs, *hoisted_vars}
    body, _ = jaxprs.needed(inner, [*loop.carry_out, *core_ys], available)
    read = {
        *jaxprs.free_variables(body),
        *jaxprs.variables(loop.carry_out),
        *jaxprs.variables(core_ys),
    }
    xs = tuple(
        v
        for v in (*loop.xs, *(v for e in eqns for v in e.outvars if v in hoisted_vars))
        if v in read
    )
    read_after = {v for v in jaxprs.free_variables(sunk_eqns) if v in hoisted_vars}
    hoisted_eqns, _ = jaxprs.needed(
        eqns, [v for v in hoisted_vars if v in read or v in read_after], set(loop.inputs)
    )
    return replace(loop, eqns=tuple(body), xs=xs, ys=tuple(core_ys)), tuple(hoisted_eqns), sunk_eqns


def _dtype(loop: Loop, constants: Sequence[Var]) -> Any:
    for eqn in loop.eqns:
        for v in (*eqn.outvars, *jaxprs.inputs(eqn)):
            if v.aval.dtype not in (jnp.bool_, jnp.float32, jnp.float64, jnp.bfloat16):
                raise Unsupported(f"the kernel has no {v.aval.dtype}", eqn)
            if not all(map(jaxprs.is_known, v.aval.shape)) or 0 in v.aval.shape:
                raise Unsupported(f"a value of the step has the shape {list(v.aval.shape)}")
    atoms = [
        *constants,
        *loop.carry,
        *loop.xs,
        *jaxprs.variables(loop.outputs),
        *(v for e in loop.eqns for v in e.outvars),
    ]
    dtypes = {v.aval.dtype for v in atoms} - {jnp.dtype(jnp.bool_)}
    for dtype in dtypes:
        if dtype not in (jnp.float32, jnp.float64, jnp.bfloat16):
            raise Unsupported(f"the kernel has no {dtype}")
    if jnp.dtype(jnp.float64) in dtypes and len(dtypes) > 1:
        raise Unsupported(f"the step computes with {' and '.join(sorted(map(str, dtypes)))}")
    return jnp.dtype(jnp.float64 if jnp.dtype(jnp.float64) in dtypes else jnp.float32)
