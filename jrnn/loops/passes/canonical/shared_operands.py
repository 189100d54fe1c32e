"""The pass that joins products of one value with several constant matrices, such as a product for each gate.

The problem: many cells are written with a matrix for each gate. Then a step has eight small products where two would do, and
JAX's reverse loop has as many again for each of its gradients. XLA joins none of them, since the matrices are not next to
each other in memory. Put next to each other once, before the loop, they are one matrix:

    r = logistic(x A + h C + b)            z = x [A B] + h [C D] + [b c]
    u = logistic(x B + h D + c)            r, u = logistic(z[:, :H]), logistic(z[:, H:])

This takes two steps. `_joined_products` makes the products of one value slices of one product. `_joined_sums` then finds the
additions of slices that together are all of an array, with constants or slices of another array, and makes each group one
addition of whole arrays. Products that are added to products of different values stay apart: in the reverse loop, the
cotangents of a joined product are read together. Products for outputs alone stay apart from those for the next carry, which
may leave the loop without them.

Shapes: T time, H hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

import jax
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Env, Eqn, Var, axes, primitives
from jrnn.jaxprs.programs import is_explicit
from jrnn.loops.ir import Loop
from jrnn.loops.passes.gates import AxisSlice, axis_slices

_MIN_STEPS = 16  # fewer steps are not worth a copy of the matrices, which each step reads


@dataclass(frozen=True, eq=False)
class _Concatenation:
    """Constants, one after the other."""

    parts: Sequence[Var]
    axis: int

    def value(self, env: Env) -> Array:
        return jax.lax.concatenate(jaxprs.take(env, self.parts), self.axis)


@dataclass(frozen=True, eq=False)
class _Joined:
    """A product or a sum, computed once for several.

    Attributes:
        eqn: the equation of the first one.
        operands: of all.
        aval: the type of the result, of a sum.
    """

    eqn: Eqn
    operands: Sequence[Var | AxisSlice | _Concatenation]
    aval: Any = None

    def value(self, env: Env) -> Array:
        """Computes the result at its first use, and adds it to `env`."""
        if self not in env:
            operands = [_value(operand, env) for operand in self.operands]
            (env[self],) = jaxprs.bind(self.eqn, *operands)
        return env[self]


def _value(operand: Any, env: Env) -> Array:
    if isinstance(operand, Var):
        return env[operand]
    if not isinstance(operand, AxisSlice):
        return operand.value(env)
    whole = _value(operand.of, env)
    if operand.size == whole.shape[operand.axis]:
        return whole
    return jax.lax.slice_in_dim(whole, operand.lo, operand.hi, axis=operand.axis)


def _with_slices(loop: Loop, cuts: Mapping[Var, AxisSlice]) -> Loop:
    """Returns the loop with some results computed as slices of joined values, and with constants first, which they read."""

    def varies(eqn: Eqn) -> bool:
        return not loop.varying.isdisjoint(eqn.outvars)

    def rule(eqn: Eqn, env: Env) -> list[Array] | None:
        if not eqn.outvars or eqn.outvars[0] not in cuts:
            return None
        with jaxprs.in_scope(eqn):
            return [_value(cuts[eqn.outvars[0]], env)]

    return replace(loop, eqns=tuple(sorted(loop.eqns, key=varies))).rewrite(rule)


# Products -------------------------------------------------------------------------------------------------------------


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
    joined = _with_slices(loop, products)
    sums = _joined_sums(joined)
    return _with_slices(joined, sums) if sums else joined


def _joined_products(loop: Loop) -> dict[Var, AxisSlice]:
    """Returns the products that are slices of a product with joined constants."""
    slices: dict[Var, AxisSlice] = {}
    for group in _groups(loop):
        if len(group) < 2:
            continue
        eqn, matrix, free, axis = group[0]
        operands: list[Any] = list(eqn.invars)
        operands[matrix] = _Concatenation([p.eqn.invars[matrix] for p in group], free)
        whole = _Joined(eqn, operands)
        lo = 0
        for product in group:
            hi = lo + product.out.aval.shape[axis]
            slices[product.out] = AxisSlice(whole, axis, lo, hi)
            lo = hi
    return slices


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


# An addition, and its first operand that is a slice of an array that varies.
_Addition = tuple[AxisSlice, Eqn]


def _joined_sums(loop: Loop) -> dict[Var, AxisSlice]:
    """Returns the sums that are slices of sums of whole arrays.

    It rewrites `a[:n] + b, a[n:] + c` as slices of `a + [b c]`, where b and c are constants or slices of one array.
    Sums of sums follow from each other: of n biases that are added one after the other, each sum is joined when the one
    before it is. So sums are read by the number of sums before them.
    """
    cuts = axis_slices(loop.eqns)
    constants = {*loop.consts, *jaxprs.results(loop.eqns)}.difference(loop.varying)
    for eqns in _sums_by_depth(loop):
        groups: dict[Any, list[_Addition]] = {}
        for eqn in eqns:
            slices = [cuts[v] for v in eqn.invars if v in cuts and cuts[v].of not in constants]
            if not slices:
                continue
            common = tuple(_in_common(v, slices[0], cuts, constants) for v in eqn.invars)
            if None not in common:
                groups.setdefault(common, []).append((slices[0], eqn))
        for group in groups.values():
            group.sort(key=_start)
            if len(group) > 1 and _covers([cut for cut, _ in group]):
                cuts.update(_whole_sum(group, cuts))
    return {v: cut for v, cut in cuts.items() if isinstance(cut.of, _Joined)}


def _start(addition: _Addition) -> int:
    return addition[0].lo


def _in_common(
    v: Var, first: AxisSlice, cuts: Mapping[Var, AxisSlice], constants: Collection[Var]
) -> Any:
    """Returns what an operand has in common with operands of the same place in other sums; None if it is not joined.

    Args:
        v: the operand.
        first: the first operand of its sum that is a slice of an array that varies.
        cuts: the slices.
        constants: the values that do not vary.
    """
    if v in cuts:
        return cuts[v].of if cuts[v][1:] == first[1:] else None
    shape = v.aval.shape
    if v not in constants or shape[first.axis] != first.size:
        return None
    return (first.axis, *jaxprs.replaced(shape, [first.axis], [0]), v.aval.dtype)


def _covers(cuts: Sequence[AxisSlice]) -> bool:
    """Returns True if slices in order are all of an array, each once."""
    starts = [cut.lo for cut in cuts]
    ends = [cut.hi for cut in cuts]
    return [*starts, cuts[0].of.aval.shape[cuts[0].axis]] == [0, *ends]


def _whole_sum(group: Sequence[_Addition], cuts: Mapping[Var, AxisSlice]) -> dict[Var, AxisSlice]:
    """Returns the sums of a group as slices of one sum."""
    first, eqn = group[0]
    operands: list[Any] = []
    for several in zip(*(added.invars for _, added in group)):
        is_cut = several[0] in cuts
        operands.append(cuts[several[0]].of if is_cut else _Concatenation(several, first.axis))
    aval = eqn.outvars[0].aval
    whole = _Joined(eqn, operands, aval.update(shape=first.of.aval.shape))
    return {added.outvars[0]: cut._replace(of=whole) for cut, added in group}


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
