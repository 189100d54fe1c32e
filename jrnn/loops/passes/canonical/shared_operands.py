"""The pass that joins products of one value with several constant matrices, such as a product for each gate.

What is added to each of them, a bias or another such product, is added to all at once.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Env, Eqn, Var, axes, primitives
from jrnn.jaxprs.programs import is_explicit
from jrnn.loops.ir import Loop
from jrnn.loops.passes.gates import AxisSlice, axis_slices

_STEPS = 16  # the fewest steps that are worth a copy of the matrices, which each step reads


class _Product(NamedTuple):
    """A product of a value that moves with a constant that has one axis more than it shares with the value.

    Attributes:
        eqn: its equation.
        matrix: the position of the constant among the operands.
        free: this axis of the constant.
        axis: the axis of the result that it becomes.
    """

    eqn: Eqn
    matrix: int
    free: int
    axis: int

    @property
    def value(self) -> Var:
        return self.eqn.invars[1 - self.matrix]

    @property
    def out(self) -> Var:
        return self.eqn.outvars[0]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What products that may be one have in common."""
        params = self.eqn.params
        matrix = self.eqn.invars[self.matrix].aval
        names = "dimension_numbers", "precision", "preferred_element_type"
        return self.matrix, matrix.dtype, *(params[name] for name in names)


def join_products(loop: Loop) -> Loop:
    """Rewrites `x A` and `x B` as slices of `x [A B]`, where A and B are constants.

    What the next carry needs is not joined with what only outputs need. Invariant: every value is unchanged.
    """
    joined = _with_joined_products(loop)
    while (further := _with_joined_sums(joined)) is not joined and joined is not loop:
        joined = further
    return joined


def _with_joined_products(loop: Loop) -> Loop:
    groups = [group for group in _groups(loop) if len(group) > 1]
    if not groups:
        return loop
    group_of = {id(p.eqn): group for group in groups for p in group}
    results: dict[int, Any] = {}

    def rule(eqn: Eqn, env: Env) -> Sequence[Any] | None:
        if id(eqn) in group_of and id(eqn) not in results:
            results.update(
                zip([id(p.eqn) for p in group_of[id(eqn)]], _joined(group_of[id(eqn)], env))
            )
        return [results[id(eqn)]] if id(eqn) in results else None

    return _constants_first(loop).rewrite(rule)


def _constants_first(loop: Loop) -> Loop:
    """Returns the loop with equations of constants in front of others, so that any of them may read their results."""
    moving = jaxprs.depends(loop.eqns, (*loop.carry, *loop.xs))
    return replace(
        loop, eqns=tuple(sorted(loop.eqns, key=lambda eqn: not moving.isdisjoint(eqn.outvars)))
    )


def _joined(group: Sequence[_Product], env: Env) -> list[Any]:
    """Returns the results of products with one operand, from one product."""
    eqn, matrix, free, axis = group[0]
    ends = np.cumsum([p.out.aval.shape[axis] for p in group]).tolist()
    with jaxprs.in_scope(eqn):
        whole = jax.lax.concatenate([env[p.eqn.invars[matrix]] for p in group], free)
        (result,) = jaxprs.bind(
            eqn, *jaxprs.replaced([env.get(a) for a in eqn.invars], [matrix], [whole])
        )
        return [jax.lax.slice_in_dim(result, lo, hi, axis=axis) for lo, hi in zip([0, *ends], ends)]


def _groups(loop: Loop) -> Collection[list[_Product]]:
    """Returns products that may be one, in lists.

    Those of gates are added to products of the same other values. So the cotangents of a joined product are read together.
    """
    if not jaxprs.is_known(loop.length) or loop.length < _STEPS:
        return ()
    moving = jaxprs.depends(loop.eqns, (*loop.carry, *loop.xs))
    recurrent = {
        v for e in jaxprs.needed(loop.eqns, loop.carry_out, set(loop.inputs))[0] for v in e.outvars
    }
    products = [p for eqn in loop.eqns if (p := _product(eqn, moving)) is not None]
    sums = axes.Classes()
    for eqn in loop.eqns:
        if primitives.is_addition(eqn):
            for v in jaxprs.inputs(eqn):
                sums.join(eqn.outvars[0], 0, v, 0)
    summands: dict[axes.Axis, set[Var]] = {}
    for p in products:
        summands.setdefault(sums.root((p.out, 0)), set()).add(p.value)
    groups: dict[Any, list[_Product]] = {}
    for p in products:
        others = frozenset(summands[sums.root((p.out, 0))])
        groups.setdefault((p.value, others, p.kind, p.out in recurrent), []).append(p)
    return groups.values()


def _product(eqn: Eqn, moving: Collection[Var]) -> _Product | None:
    """Returns an equation as a product with a constant matrix, or None for another one."""
    if eqn.primitive.name != "dot_general" or any(map(jaxprs.is_literal, eqn.invars)):
        return None
    moves = [v in moving for v in eqn.invars]
    if moves[0] == moves[1] or any(is_explicit(v.aval) for v in eqn.invars):
        return None
    matrix, (contracted, batch) = moves.index(False), eqn.params["dimension_numbers"]
    shared = (*contracted[matrix], *batch[matrix])
    free = [a for a in range(eqn.invars[matrix].aval.ndim) if a not in shared]
    if len(free) != 1:
        return None
    return _Product(
        eqn, matrix, free[0], len(batch[0]) if matrix == 0 else eqn.outvars[0].aval.ndim - 1
    )


# Sums of joined products ----------------------------------------------------------------------------------------------


class _Sum(NamedTuple):
    """An addition of a slice and another operand."""

    eqn: Eqn
    cut: AxisSlice
    other: Var


def _with_joined_sums(loop: Loop) -> Loop:
    """Rewrites `a[:n] + b, a[n:] + c` as slices of `a + [b c]`, where b and c are constants or slices of one array."""
    group_of = {id(s.eqn): group for group in _sums(loop) for s in group}
    if not group_of:
        return loop
    cuts = axis_slices(loop.eqns)
    wholes = dict[int, Any]()

    def rule(eqn: Eqn, env: Env) -> Sequence[Any] | None:
        group = group_of.get(id(eqn))
        if group is None:
            return None
        of, axis, *_ = group[0].cut
        with jaxprs.in_scope(eqn):
            if id(group) not in wholes:
                others = [env[s.other] for s in group]
                joined = (
                    env[cuts[group[0].other].of]
                    if group[0].other in cuts
                    else jax.lax.concatenate(others, axis)
                )
                wholes[id(group)] = jaxprs.bind(eqn, env[of], joined)[0]
            (own,) = (s.cut for s in group if s.eqn is eqn)
            return [jax.lax.slice_in_dim(wholes[id(group)], own.lo, own.hi, axis=axis)]

    return _constants_first(loop).rewrite(rule)


def _sums(loop: Loop) -> list[list[_Sum]]:
    """Returns additions to all slices of an array, in lists in the order of the slices."""
    moving = jaxprs.depends(loop.eqns, (*loop.carry, *loop.xs))
    cuts = axis_slices(loop.eqns)
    groups: dict[Any, list[_Sum]] = {}
    for eqn in loop.eqns:
        if not primitives.is_addition(eqn) or any(map(jaxprs.is_literal, eqn.invars)):
            continue
        for v, other in (eqn.invars, eqn.invars[::-1]):
            cut = cuts.get(v)
            theirs = cuts.get(other)
            if cut is None or cut.of not in moving:
                continue
            same = theirs is not None and theirs[1:] == cut[1:] and theirs.of.aval == cut.of.aval
            wide = other.aval.ndim > cut.axis and other.aval.shape[cut.axis] == cut.hi - cut.lo
            if same or (wide and other not in moving and other not in cuts):
                rest = jaxprs.replaced(other.aval.shape, [cut.axis], [0])
                kind = theirs.of if same else (*rest, other.aval.dtype)
                groups.setdefault((cut.of, cut.axis, kind), []).append(_Sum(eqn, cut, other))
                break
    ordered = (sorted(group, key=lambda s: s.cut.lo) for group in groups.values())
    return [group for group in ordered if len(group) > 1 and _covers(group)]


def _covers(group: Sequence[_Sum]) -> bool:
    """Returns True if the slices are all of an array, each once."""
    of, axis, *_ = group[0].cut
    return [s.cut.lo for s in group] + [of.aval.shape[axis]] == [0, *(s.cut.hi for s in group)]
