"""The pass that joins products of one value with several constant matrices, such as a product for each gate.

What is added to each of them, a bias or another such product, is added to all at once.

Shapes: T time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Env, Eqn, Var, axes, primitives
from jrnn.jaxprs.programs import is_explicit
from jrnn.loops.ir import Loop
from jrnn.loops.passes.gates import AxisSlice, axis_slices

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
    joined = _with_joined_products(loop)
    return loop if joined is loop else _with_joined_sums(joined)


def _with_joined_products(loop: Loop) -> Loop:
    """Computes each group of products as one product, where its first equation is."""
    groups = [group for group in _groups(loop) if len(group) > 1]
    if not groups:
        return loop
    group_of: dict[int, list[_Product]] = {}
    for group in groups:
        group_of.update((id(product.eqn), group) for product in group)
    results: dict[int, Array] = {}

    def rule(eqn: Eqn, env: Env) -> Sequence[Any] | None:
        group = group_of.get(id(eqn))
        if group is None:
            return None
        if id(eqn) not in results:
            for product, result in zip(group, _joined(group, env)):
                results[id(product.eqn)] = result
        return [results[id(eqn)]]

    return _constants_first(loop).rewrite(rule)


def _constants_first(loop: Loop) -> Loop:
    """Returns the loop with equations of constants in front of others, so that any of them may read their results."""
    moving = loop.varying

    def moves(eqn: Eqn) -> bool:
        return not moving.isdisjoint(eqn.outvars)

    return replace(loop, eqns=tuple(sorted(loop.eqns, key=moves)))


def _joined(group: Sequence[_Product], env: Env) -> list[Array]:
    """Returns the results of products with one operand, from one product."""
    eqn, matrix, free, axis = group[0]
    ends = np.cumsum([p.out.aval.shape[axis] for p in group]).tolist()
    with jaxprs.in_scope(eqn):
        whole = jax.lax.concatenate([env[p.eqn.invars[matrix]] for p in group], free)
        operands = [env.get(a) for a in eqn.invars]
        operands[matrix] = whole
        (result,) = jaxprs.bind(eqn, *operands)
        return [jax.lax.slice_in_dim(result, lo, hi, axis=axis) for lo, hi in zip([0, *ends], ends)]


def _groups(loop: Loop) -> Collection[list[_Product]]:
    """Returns products that may be one, in lists.

    Products of gates are added to products of the same other values. So the cotangents of a joined product are read
    together.
    """
    if not jaxprs.is_known(loop.length) or loop.length < _MIN_STEPS:
        return ()
    moving = loop.varying
    eqns_of_carry, _ = jaxprs.needed(loop.eqns, loop.carry_out, set(loop.inputs))
    recurrent = set(jaxprs.results(eqns_of_carry))
    every = (_product(eqn, moving) for eqn in loop.eqns)
    products = [product for product in every if product is not None]

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


def _product(eqn: Eqn, moving: Collection[Var]) -> _Product | None:
    """Returns an equation as a product with a constant matrix, or None for another one."""
    if eqn.primitive.name != "dot_general" or any(map(jaxprs.is_literal, eqn.invars)):
        return None
    moves = [v in moving for v in eqn.invars]
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


@dataclass(eq=False)
class _Concatenation:
    """Constants, one after the other."""

    parts: list[_Value]
    axis: int

    @property
    def aval(self) -> Any:
        first = self.parts[0].aval
        size = sum(part.aval.shape[self.axis] for part in self.parts)
        return first.update(shape=tuple(jaxprs.replaced(first.shape, [self.axis], [size])))


@dataclass(eq=False)
class _Whole:
    """The sum of two arrays, in place of the sums of all their slices."""

    operands: tuple[_Value, _Value]
    aval: Any


_Value = Var | _Whole | _Concatenation


class _Sum(NamedTuple):
    """An addition of a slice and another operand.

    Attributes:
        result: the sum.
        cut: the slice.
        other: the other operand.
    """

    result: _Value
    cut: AxisSlice
    other: _Value


def _with_joined_sums(loop: Loop) -> Loop:
    """Rewrites `a[:n] + b, a[n:] + c` as slices of `a + [b c]`, where b and c are constants or slices of one array."""
    sums = _JoinedSums(loop)
    if not sums.joined:
        return loop

    def rule(eqn: Eqn, env: Env) -> Sequence[Any] | None:
        if eqn.outvars and eqn.outvars[0] in sums.joined:
            with jaxprs.in_scope(eqn):
                return [sums.slice_of(eqn.outvars[0], eqn, env)]
        return None

    return _constants_first(loop).rewrite(rule)


class _JoinedSums:
    """The sums of a loop that are slices of sums of whole arrays.

    Sums of sums follow from each other: of n biases that are added one after the other, each sum is joined when the one
    before it is. So a sum is looked at again only when an operand has become a slice.

    Attributes:
        joined: the results of the sums.
    """

    def __init__(self, loop: Loop):
        self.joined: set[_Value] = set()
        self._moving: set[_Value] = {*loop.varying}
        self._cuts: dict[_Value, AxisSlice] = {**axis_slices(loop.eqns)}
        self._operands: dict[_Value, tuple[_Value, _Value]] = {}
        self._readers: dict[_Value, list[_Value]] = {}
        self._key_of: dict[_Value, Any] = {}
        self._groups: dict[Any, dict[_Value, _Sum]] = {}
        self._width = Counter[Any]()  # of the slices of each group
        for eqn in loop.eqns:
            if primitives.is_addition(eqn) and not any(map(jaxprs.is_literal, eqn.invars)):
                self._add(eqn.outvars[0], (eqn.invars[0], eqn.invars[1]))
        changed = list(self._operands)
        while changed:
            keys = dict.fromkeys(map(self._grouped, changed))
            changed = []
            for key in keys:
                if key is not None:
                    changed += self._join(key)

    def slice_of(self, v: _Value, eqn: Eqn, env: dict[Any, Any]) -> Any:
        """Returns a sum as the slice of the sum of whole arrays, which `eqn`, one of the sums, computes."""
        cut = self._cuts[v]
        whole = self._value(cut.of, eqn, env)
        return jax.lax.slice_in_dim(whole, cut.lo, cut.hi, axis=cut.axis)

    def _value(self, v: Any, eqn: Eqn, env: dict[Any, Any]) -> Any:
        if v not in env:
            if v in self.joined:
                env[v] = self.slice_of(v, eqn, env)
            elif isinstance(v, _Concatenation):
                env[v] = jax.lax.concatenate([self._value(p, eqn, env) for p in v.parts], v.axis)
            else:
                operands = [self._value(a, eqn, env) for a in v.operands]
                (env[v],) = jaxprs.bind(eqn, *operands)
        return env[v]

    def _add(self, v: _Value, operands: tuple[_Value, _Value]) -> None:
        self._operands[v] = operands
        for operand in operands:
            self._readers.setdefault(operand, []).append(v)

    def _grouped(self, v: _Value) -> Any:
        """Puts a sum into the group of the slices of one array to which values of one kind are added; returns its key."""
        if v in self.joined:
            return None
        before = self._key_of.pop(v, None)
        if before is not None:
            cut = self._groups[before].pop(v).cut
            self._width[before] -= cut.size
        first, second = self._operands[v]
        for operand, other in ((first, second), (second, first)):
            cut = self._cuts.get(operand)
            if cut is None or cut.of not in self._moving:
                continue
            kind = self._kind(cut, other)
            if kind is not None:
                key = self._key_of[v] = (cut.of, cut.axis, kind)
                self._groups.setdefault(key, {})[v] = _Sum(v, cut, other)
                self._width[key] += cut.size
                return key
        return None

    def _kind(self, cut: AxisSlice, other: _Value) -> Any:
        """Returns what values that are added to slices have in common; None for a value that is not joined with others."""
        theirs = self._cuts.get(other)
        if theirs is not None:
            same = theirs[1:] == cut[1:] and theirs.of.aval == cut.of.aval
            return theirs.of if same else None
        shape = other.aval.shape
        if other in self._moving or len(shape) <= cut.axis or shape[cut.axis] != cut.size:
            return None
        return (*jaxprs.replaced(shape, [cut.axis], [0]), other.aval.dtype)

    def _join(self, key: Any) -> list[_Value]:
        """Joins the sums of a group, if it has all slices. Returns the sums to look at again."""
        of, axis, _ = key
        if len(self._groups[key]) < 2 or self._width[key] != of.aval.shape[axis]:
            return []
        group = sorted(self._groups[key].values(), key=lambda s: s.cut.lo)
        if not _covers(group):
            return []
        first = group[0]
        if first.other in self._cuts:
            others = self._cuts[first.other].of
        else:
            others = _Concatenation([s.other for s in group], axis)
        whole = _Whole((of, others), first.result.aval.update(shape=of.aval.shape))
        self._moving.add(whole)
        self._add(whole, whole.operands)
        again: list[_Value] = [whole]
        del self._groups[key], self._width[key]
        for s in group:
            self._cuts[s.result] = AxisSlice(whole, axis, s.cut.lo, s.cut.hi)
            self.joined.add(s.result)
            again += self._readers.get(s.result, ())
        return again


def _covers(group: Sequence[_Sum]) -> bool:
    """Returns True if the slices are all of an array, each once."""
    of, axis, *_ = group[0].cut
    starts = [s.cut.lo for s in group]
    ends = [s.cut.hi for s in group]
    return [*starts, of.aval.shape[axis]] == [0, *ends]
