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
from jrnn.loops.ir import Loop, Refused
from jrnn.loops.kernels.native.encoder import CallEncoder, CannotRun
from jrnn.loops.kernels.native.operations import Operation

_LONGEST = 2000  # equations of a step


@dataclass(frozen=True)
class KernelProgram:
    """A loop for the kernel.

    Attributes:
        loop: the whole loop.
        core: what the kernel runs.
        before: equations of constants, which are evaluated before the call.
        early: equations that the kernel cannot run, and that do not read the carry, evaluated for all steps before the call.
        late: those that only outputs need, evaluated for all steps after the call.
        given: the constants that the kernel reads; they may be results of `before`.
        dtype: the type that it computes with.
        rows: N.
        encoded, literals: what the kernel gets.
        stages: the operations of each stage.
    """

    loop: Loop
    core: Loop
    before: tuple[Any, ...]
    early: tuple[Any, ...]
    late: tuple[Any, ...]
    given: tuple[Var, ...]
    dtype: Any
    rows: int
    encoded: np.ndarray
    literals: np.ndarray
    stages: tuple[tuple[Operation, ...], ...]


def program_of(loop: Loop) -> KernelProgram:
    """Returns the program of a loop. Raises `Refused` with the reason if there is none."""
    if not jaxprs.is_known(loop.length):
        raise Refused("the number of steps is symbolic")
    if not loop.carry:
        raise Refused("nothing is carried")
    for eqn in loop.eqns:
        if eqn.effects:
            raise Refused(f"{eqn.primitive.name} has side effects")
    eqns = jaxprs.needed(loop.eqns, loop.outputs, set(loop.inputs))[0]
    if len(eqns) > _LONGEST:
        raise Refused(f"the step has {len(eqns)} equations, more than the {_LONGEST} of a kernel")
    moving = jaxprs.depends(eqns, (*loop.carry, *loop.xs))
    fixed = [e for e in eqns if moving.isdisjoint(e.outvars)]
    views = turned_matrices(fixed, loop)
    before = tuple(e for e in fixed if e not in views)
    eqns = [*views, *(e for e in eqns if not moving.isdisjoint(e.outvars))]
    sizes = {v.aval.shape[0] if v.aval.shape else 1 for v in loop.carry}
    hypotheses = [*(n for n in sizes if len(sizes) == 1 and jaxprs.is_known(n) and n > 1), 1]
    for rows in hypotheses:
        try:
            return _with_rows(loop, before, eqns, rows)
        except Refused:
            if rows == hypotheses[-1] or len(loop.carry[0].aval.shape) > 1:
                raise
    raise AssertionError


def turned_matrices(eqns: Sequence[Eqn], loop: Loop) -> list[Eqn]:
    """Returns the transpositions whose results only products of a loop read: the kernel packs a matrix either way."""
    turns = [e for e in eqns if e.primitive.name == "transpose"]
    readers = (e for e in (*eqns, *loop.eqns) if e.primitive.name != "dot_general")
    others = {*(v for e in readers for v in jaxprs.inputs(e)), *jaxprs.variables(loop.outputs)}
    products = {v for e in loop.eqns if e.primitive.name == "dot_general" for v in jaxprs.inputs(e)} - others
    return [e for e in turns if e.outvars[0] in products]


def _with_rows(loop: Loop, before: tuple[Any, ...], eqns: Sequence[Eqn], rows: int) -> KernelProgram:
    """Moves what the kernel cannot run out of the loop, as long as there is something."""
    from_carry = jaxprs.depends(eqns, loop.carry)
    to_carry = {id(e) for e in jaxprs.needed(eqns, loop.carry_out, {*loop.inputs})[0]}
    early: set[Var] = set()  # computed before the loop
    late: set[Var] = set()  # computed after it
    while True:
        core, first, last = _parts(loop, eqns, early, late)
        moving = {*core.carry, *core.xs, *(v for e in core.eqns for v in e.outvars)}
        ends = [*jaxprs.free_variables(core.eqns), *jaxprs.variables(core.outputs)]
        given = tuple(dict.fromkeys(v for v in ends if v not in moving))
        try:
            encoder = CallEncoder(core, given, rows, _dtype(core, given))
            return KernelProgram(loop, core, before, first, last, given, encoder.dtype, rows, *encoder.result())
        except CannotRun as why:
            movable = primitives.is_movable(why.eqn)
            if movable and not any(v in from_carry for v in why.eqn.outvars):
                early.update(why.eqn.outvars)
            elif movable and id(why.eqn) not in to_carry:
                late.update(why.eqn.outvars)
            else:
                raise


def _parts(loop: Loop, eqns: Sequence[Eqn], early: set[Var], late: set[Var]) -> tuple[Loop, tuple, tuple]:
    """Returns the loop without some values, and the equations that compute them before and after it."""
    after = jaxprs.depends(eqns, late)
    last = tuple(e for e in eqns if any(v in after for v in e.outvars))
    inner = [e for e in eqns if not any(v in after for v in e.outvars)]
    computed = {v for e in inner for v in e.outvars} | set(loop.carry)
    ys = [y for y in loop.ys if not jaxprs.is_in(y, after)]
    ys += [v for v in jaxprs.free_variables(last) if v in computed and v not in early]
    kept = list(dict.fromkeys(jaxprs.variables(ys))) + [y for y in ys if jaxprs.is_literal(y)]
    available = {*loop.inputs, *early}
    body, _ = jaxprs.needed(inner, [*loop.carry_out, *kept], available)
    read = {*jaxprs.free_variables(body), *jaxprs.variables(loop.carry_out), *jaxprs.variables(kept)}
    xs = tuple(v for v in (*loop.xs, *(v for e in eqns for v in e.outvars if v in early)) if v in read)
    late_reads = {v for v in jaxprs.free_variables(last) if v in early}
    first, _ = jaxprs.needed(eqns, [v for v in early if v in read or v in late_reads], set(loop.inputs))
    return replace(loop, eqns=tuple(body), xs=xs, ys=tuple(kept)), tuple(first), last


def _dtype(loop: Loop, given: Sequence[Var]) -> Any:
    for eqn in loop.eqns:
        for v in (*eqn.outvars, *jaxprs.inputs(eqn)):
            if v.aval.dtype not in (jnp.bool_, jnp.float32, jnp.float64, jnp.bfloat16):
                raise CannotRun(eqn, Refused(f"the kernel has no {v.aval.dtype}"))
            if not all(map(jaxprs.is_known, v.aval.shape)) or 0 in v.aval.shape:
                raise Refused(f"a value of the step has the shape {list(v.aval.shape)}")
    atoms = [*given, *loop.carry, *loop.xs, *jaxprs.variables(loop.outputs), *(v for e in loop.eqns for v in e.outvars)]
    dtypes = {v.aval.dtype for v in atoms} - {jnp.dtype(jnp.bool_)}
    for dtype in dtypes:
        if dtype not in (jnp.float32, jnp.float64, jnp.bfloat16):
            raise Refused(f"the kernel has no {dtype}")
    if jnp.dtype(jnp.float64) in dtypes and len(dtypes) > 1:
        raise Refused(f"the step computes with {' and '.join(sorted(map(str, dtypes)))}")
    return jnp.dtype(jnp.float64 if jnp.dtype(jnp.float64) in dtypes else jnp.float32)
