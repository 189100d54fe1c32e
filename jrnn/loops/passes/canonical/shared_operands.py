"""The pass that joins products of one value with several constant matrices, such as a product for each gate.

What is added to each of them, a bias or another such product, is added to all at once.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import repeat
from typing import Any, NamedTuple

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, axes, primitives
from jrnn.jaxprs.programs import is_explicit
from jrnn.loops.ir import Loop
from jrnn.loops.passes.gates import (
    AxisSlice,
    Concatenation,
    Joined,
    axis_slices,
    join_neighbors,
    with_slices,
)

_MIN_STEPS = 16  # fewer steps are not worth a copy of the matrices, which each step reads


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
    products = _joined_products(loop)
    if not products:
        return loop
    joined = with_slices(_constants_first(loop), products)
    sums = _joined_sums(joined)
    return with_slices(_constants_first(joined), sums) if sums else joined


def _joined_products(loop: Loop) -> dict[Var, AxisSlice]:
    """Returns the products that are slices of a product with joined constants."""
    slices: dict[Var, AxisSlice] = {}
    for group in _groups(loop):
        if len(group) < 2:
            continue
        eqn, matrix, free, axis = group[0]
        operands: list[Any] = list(eqn.invars)
        operands[matrix] = Concatenation([p.eqn.invars[matrix] for p in group], free)
        whole = Joined(eqn, operands)
        lo = 0
        for product in group:
            hi = lo + product.out.aval.shape[axis]
            slices[product.out] = AxisSlice(whole, axis, lo, hi)
            lo = hi
    return slices


def _constants_first(loop: Loop) -> Loop:
    """Returns the loop with equations of constants in front of others, so that any of them may read their results."""

    def varies(eqn: Eqn) -> bool:
        return not loop.varying.isdisjoint(eqn.outvars)

    return replace(loop, eqns=tuple(sorted(loop.eqns, key=varies)))


def _groups(loop: Loop) -> Collection[list[_Product]]:
    """Returns products that may be one, in lists.

    Products of gates are added to products of the same other values. So the cotangents of a joined product are read
    together.
    """
    if not jaxprs.is_known(loop.length) or loop.length < _MIN_STEPS:
        return ()
    eqns_of_carry, _ = jaxprs.needed(loop.eqns, loop.carry_out, set(loop.inputs))
    recurrent = set(jaxprs.results(eqns_of_carry))
    products = [p for p in map(_product, loop.eqns, repeat(loop)) if p is not None]

    # The values whose products are added to each product.
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


def _product(eqn: Eqn, loop: Loop) -> _Product | None:
    """Returns an equation as a product with a constant matrix, or None for another one."""
    if eqn.primitive.name != "dot_general" or any(map(jaxprs.is_literal, eqn.invars)):
        return None
    moves = [v in loop.varying for v in eqn.invars]
    if moves[0] == moves[1] or any(is_explicit(v.aval) for v in eqn.invars):
        return None
    matrix = moves.index(False)
    contracted, batch = eqn.params["dimension_numbers"]
    shared = (*contracted[matrix], *batch[matrix])
    free = [a for a in range(eqn.invars[matrix].aval.ndim) if a not in shared]
    if len(free) != 1:
        return None
    axis = len(batch[0]) if matrix == 0 else eqn.outvars[0].aval.ndim - 1
    return _Product(eqn, matrix, free[0], axis)


# Sums of joined products ----------------------------------------------------------------------------------------------


def _joined_sums(loop: Loop) -> dict[Var, AxisSlice]:
    """Returns the sums that are slices of sums of whole arrays.

    It rewrites `a[:n] + b, a[n:] + c` as slices of `a + [b c]`, where b and c are constants or slices of one array.
    Sums of sums follow from each other: of n biases that are added one after the other, each sum is joined when the one
    before it is. So sums are read by the number of sums before them.
    """
    cuts = axis_slices(loop.eqns)
    constants = {*loop.consts, *jaxprs.results(loop.eqns)}.difference(loop.varying)
    for eqns in _sums_by_depth(loop):
        join_neighbors(eqns, cuts, constants, only_whole=True)
    return {v: cut for v, cut in cuts.items() if isinstance(cut.of, Joined)}


def _sums_by_depth(loop: Loop) -> list[list[Eqn]]:
    """Returns the additions of a step by the most additions that are directly before them."""
    depth: dict[Var, int] = {}
    sums: list[list[Eqn]] = []
    for eqn in loop.eqns:
        if primitives.is_addition(eqn) and not any(map(jaxprs.is_literal, eqn.invars)):
            at = max([depth.get(v, 0) for v in eqn.invars])
            depth[eqn.outvars[0]] = at + 1
            if at == len(sums):
                sums.append([])
            sums[at].append(eqn)
    return sums
