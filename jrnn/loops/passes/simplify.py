"""The passes that simplify a step for every target: `compose_views`, `common_subexpressions` and `pads_to_concatenate`."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Names, Var, named, primitives
from jrnn.loops.ir import Loop, strict_passes
from jrnn.loops.passes.gates import axis_slices

# Views of views -------------------------------------------------------------------------------------------------------


def compose_views(loop: Loop) -> Loop:
    """Composes views: a reshape of a reshape, or a slice within one part of a concatenation, reads its source directly.

    Nets reshape and join arrays for their operators, which slice and reshape them again. Passes that look for slices of one
    array then miss them, and XLA:CPU makes slower kernels where one kernel reads an array in two shapes. Additions of 0,
    multiplications by 1 and reductions to the precision that a value has go, as XLA removes them too.

    Invariant: every value is unchanged, except for the sign of zero where 0 is added.
    """
    producers = jaxprs.producers(loop.eqns)
    if not any(_is_indirect(eqn, producers) for eqn in loop.eqns):
        return loop
    replaced_by: Names = {}  # values that are renamed
    reshaped: Names = {}  # what reshapes of reshapes read
    joins = _Joins(producers)

    def composed(eqn: Eqn) -> list[Eqn]:
        """Returns the equations that replace one. An equation that only renames a value goes, and adds to `replaced_by`."""
        unchanged = _unchanged(eqn)
        if unchanged is not None:
            replaced_by[eqn.outvars[0]] = named(replaced_by, unchanged)
            return []
        if _reshapes(eqn):
            (out,) = eqn.outvars
            base = named(replaced_by, eqn.invars[0])
            base = reshaped.get(base, base)
            reshaped[out] = base
            if base.aval.shape != out.aval.shape:
                params = dict(new_sizes=out.aval.shape, dimensions=None, sharding=None)
                return [eqn.replace(primitive=jax.lax.reshape_p, invars=[base], params=params)]
            replaced_by[out] = base
            return []
        cuts = axis_slices([eqn])
        parts = [joins.part(named(replaced_by, c.of), c.axis, c.lo, c.hi) for c in cuts.values()]
        if not cuts or None in parts:
            return [jaxprs.with_operands(eqn, [named(replaced_by, a) for a in eqn.invars])]
        slices = []
        for v, (whole, axis, lo, hi) in zip(cuts, parts):
            part = named(replaced_by, whole)
            if (lo, hi) == (0, part.aval.shape[axis]):
                replaced_by[v] = part
            else:
                slices.append(_slice(eqn, part, v, axis, lo, hi))
        return slices

    eqns: list[Eqn] = []
    for eqn in loop.eqns:
        eqns += composed(eqn)
    return loop.with_eqns(eqns, [named(replaced_by, a) for a in loop.outputs])


def _slice(eqn: Eqn, operand: Var, out: Var, axis: int, lo: int, hi: int) -> Eqn:
    """Returns the equation `out = operand[lo:hi]` along an axis, in place of another equation."""
    shape = operand.aval.shape
    starts = jaxprs.replaced([0] * len(shape), [axis], [lo])
    ends = jaxprs.replaced(shape, [axis], [hi])
    params = dict(start_indices=tuple(starts), limit_indices=tuple(ends), strides=(1,) * len(shape))
    return eqn.replace(primitive=jax.lax.slice_p, invars=[operand], outvars=[out], params=params)


def _reshapes(eqn: Eqn) -> bool:
    """Returns True if an equation gives its operand's elements in another shape, in the same order."""
    if not primitives.row_of(eqn).reshapes:
        return False
    if len(eqn.invars) != 1 or jaxprs.is_literal(eqn.invars[0]):
        return False
    if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None:
        return False
    return math.prod(eqn.invars[0].aval.shape) == math.prod(eqn.outvars[0].aval.shape)


def _unchanged(eqn: Eqn) -> Var | None:
    """Returns the operand that an equation returns, such as one to which it adds 0 or which it multiplies by 1."""
    row = primitives.row_of(eqn)
    if eqn.primitive.name == "reduce_precision" and _has_precision(eqn):
        return None if jaxprs.is_literal(eqn.invars[0]) else eqn.invars[0]
    if row.neutral is None:
        return None
    (out,) = eqn.outvars
    orders = [eqn.invars]
    if row.commutes:
        orders.append(eqn.invars[::-1])
    for x, other in orders:
        if jaxprs.is_literal(x) or not jaxprs.is_literal(other) or np.ndim(other.val):
            continue
        if other.val == row.neutral and x.aval.strip_weak_type() == out.aval.strip_weak_type():
            return x
    return None


def _has_precision(eqn: Eqn) -> bool:
    """Returns True if an operand has the precision that an equation reduces it to, as what `jax.checkpoint` stores has.

    XLA may compute narrower types with more bits than they have. Then the equation takes them away.
    """
    dtype = eqn.invars[0].aval.dtype
    if dtype not in (np.float32, np.float64):
        return False
    info = jnp.finfo(dtype)
    bits = (eqn.params["exponent_bits"], eqn.params["mantissa_bits"])
    return bits == (info.nexp, info.nmant)


def _is_indirect(eqn: Eqn, producers: Mapping[Var, Eqn]) -> bool:
    """Returns True for a view of a view, a view or operation that changes nothing, and a slice of a concatenation."""
    if _unchanged(eqn) is not None:
        return True
    source = None
    if eqn.invars and jaxprs.is_in(eqn.invars[0], producers):
        source = producers[eqn.invars[0]]
    if _reshapes(eqn):
        changes_shape = eqn.invars[0].aval.shape != eqn.outvars[0].aval.shape
        return not changes_shape or (source is not None and _reshapes(source))
    if source is None or source.primitive.name != "concatenate":
        return False
    return bool(axis_slices([eqn]))


class _Joins:
    """Where the parts of concatenations end, computed once for all slices of each."""

    def __init__(self, producers: Mapping[Var, Eqn]):
        self._producers = producers
        self._ends: dict[Var, list[int]] = {}

    def part(self, of: Var, axis: int, lo: int, hi: int) -> tuple[Var, int, int, int] | None:
        """Returns the part of a concatenation that contains `of[lo:hi]`, the axis, and the range within that part."""
        eqn = self._producers.get(of)
        if eqn is None or eqn.primitive.name != "concatenate" or eqn.params["dimension"] != axis:
            return None
        if of not in self._ends:
            self._ends[of] = [*itertools.accumulate(a.aval.shape[axis] for a in eqn.invars)]
        ends = self._ends[of]
        for i in range(bisect.bisect_left(ends, hi), len(ends)):
            part = eqn.invars[i]
            first = ends[i] - part.aval.shape[axis]
            if first > lo:
                return None
            if not jaxprs.is_literal(part):
                return part, axis, lo - first, hi - first
        return None


# Equal equations ------------------------------------------------------------------------------------------------------


def common_subexpressions(loop: Loop) -> Loop:
    """Eliminates common subexpressions. Equations with side effects or jaxprs of their own stay.

    Invariant: every value is unchanged.
    """
    seen: dict[Any, Eqn] = {}
    same: dict[Var, Var] = {}
    for eqn in loop.eqns:
        key = _key(eqn, same)
        first = seen.setdefault(key, eqn) if key is not None else eqn
        if first is not eqn:
            for v, u in zip(eqn.outvars, first.outvars):
                same[v] = same.get(u, u)
    if not same:
        return loop

    def named(atom: Atom) -> Atom:
        return atom if jaxprs.is_literal(atom) else same.get(atom, atom)

    eqns = []
    for eqn in loop.eqns:
        if not eqn.outvars or not all(v in same for v in eqn.outvars):
            eqns.append(jaxprs.with_operands(eqn, [*map(named, eqn.invars)]))
    smaller = replace(
        loop,
        eqns=tuple(eqns),
        carry_out=tuple(map(named, loop.carry_out)),
        ys=tuple(map(named, loop.ys)),
    )
    return smaller.verify() if strict_passes.value else smaller


def _key(eqn: Eqn, same: dict[Var, Var]) -> Any:
    """Returns a key of the primitive, parameters and operands of an equation, or None if it must stay."""
    if eqn.effects or any(True for _ in jaxprs.sub_jaxprs(eqn)):
        return None
    operands = []
    try:
        for a in eqn.invars:
            operands.append(_literal_key(a) if jaxprs.is_literal(a) else same.get(a, a))
        params = tuple((name, eqn.params[name]) for name in sorted(eqn.params))
        key = (eqn.primitive, params, tuple(operands))
        hash(key)
    except TypeError:
        return None
    return key


def _literal_key(atom: Any) -> tuple[str, bytes]:
    """A key of a number that is written in an equation."""
    if np.ndim(atom.val):
        raise TypeError("an array has no value to compare by")
    return str(atom.aval), np.asarray(atom.val).tobytes()


# Cotangents of slices -------------------------------------------------------------------------------------------------


def pads_to_concatenate(loop: Loop) -> Loop:
    """Writes sums of zero-padded arrays that do not overlap, such as cotangents of slices, as concatenations.

    Each `pad` would write a whole array of zeros, and XLA:CPU does not vectorize their sum.

    Invariant: every value is unchanged, except for the sign of zero.
    """
    if not any(eqn.primitive.name == "pad" for eqn in loop.eqns):
        return loop
    pads = _Pads(loop)

    def rule(eqn: Eqn, env: Env) -> Sequence[Any] | None:
        summands = pads.summands(eqn.outvars[0]) if eqn.primitive.name == "add_any" else None
        if summands is None:
            return None
        axis, placed = summands
        aval = eqn.outvars[0].aval
        parts: list[Array] = []

        def add_zeros(count: int) -> None:
            if count > 0:
                shape = jaxprs.replaced(aval.shape, [axis], [count])
                parts.append(jaxprs.zeros_of_shape(shape, aval))

        end = 0
        for lo, hi, atom in placed:
            add_zeros(lo - end)
            parts.append(jaxprs.value(env, atom))
            end = hi
        add_zeros(aval.shape[axis] - end)
        with jaxprs.in_scope(eqn):
            return [jax.lax.concatenate(parts, axis)]

    return loop.rewrite(rule)


Ranges = list[tuple[int, int]]  # where the arrays of a sum are, in order


class _Pads:
    """The sums of zero-padded arrays that do not overlap.

    A gradient adds n cotangents one after the other. So a sum takes the list of ranges of its longer operand, and adds the
    ranges of the other one. Only sums that something else reads are written as concatenations.
    """

    def __init__(self, loop: Loop):
        self._producers = jaxprs.producers(loop.eqns)
        sums = [eqn for eqn in loop.eqns if eqn.primitive.name == "add_any"]
        self._uses_in_sums: Counter[Var] = Counter()
        for eqn in sums:
            self._uses_in_sums.update(jaxprs.inputs(eqn))
        self._sums: dict[Var, tuple[int, Ranges]] = {}  # the axis, and the ranges
        self._read = set(jaxprs.variables(loop.outputs))
        for eqn in loop.eqns:
            of_sum = self._ranges_of_sum(*eqn.invars) if eqn.primitive.name == "add_any" else None
            if of_sum is None:
                self._read.update(jaxprs.inputs(eqn))
            else:
                self._sums[eqn.outvars[0]] = of_sum

    def summands(self, v: Var) -> tuple[int, list[tuple[int, int, Atom]]] | None:
        """Returns the axis of a sum that is read, and `(lo, hi, array)` in order; or None."""
        if v not in self._sums or v not in self._read:
            return None
        axis, _ = self._sums[v]
        placed: list[tuple[int, int, Atom]] = []
        queue = [v]
        while queue:
            eqn = self._producers[queue.pop()]
            if eqn.primitive.name == "add_any":
                queue.extend(eqn.invars)
                continue
            operand = eqn.invars[0]
            lo = eqn.params["padding_config"][axis][0]
            placed.append((lo, lo + operand.aval.shape[axis], operand))
        placed.sort(key=lambda summand: summand[:2])
        return axis, placed

    def _ranges_of_sum(self, a: Atom, b: Atom) -> tuple[int, Ranges] | None:
        """Returns the axis and the ranges of a sum, or None if its operands overlap or are something else."""
        first = self._ranges(a)
        second = self._ranges(b)
        if first is None or second is None or first[0] != second[0]:
            return None
        few, many = sorted((first[1], second[1]), key=len)
        for lo, hi in few:
            if not _insert(many, lo, hi):
                return None
        return first[0], many

    def _ranges(self, atom: Atom) -> tuple[int, Ranges] | None:
        """Returns the axis and the ranges of a padded array, or of a sum. The caller may change the list."""
        if jaxprs.is_literal(atom):
            return None
        if atom in self._sums:
            axis, ranges = self._sums[atom]
            return axis, list(ranges) if self._uses_in_sums[atom] > 1 else ranges
        eqn = self._producers.get(atom)
        if eqn is None or eqn.primitive.name != "pad":
            return None
        operand, fill = eqn.invars
        config = eqn.params["padding_config"]
        is_plain = all(low >= 0 and high >= 0 and inner == 0 for low, high, inner in config)
        if not is_plain or not jaxprs.is_literal(fill) or fill.val != 0:
            return None
        axes = [a for a, (low, high, _) in enumerate(config) if (low, high) != (0, 0)]
        if len(axes) != 1:
            return None
        (axis,) = axes
        lo = config[axis][0]
        return axis, [(lo, lo + operand.aval.shape[axis])]


def _insert(ranges: Ranges, lo: int, hi: int) -> bool:
    """Adds a range to others in order. Returns False if it overlaps with one of them."""
    at = bisect.bisect_left(ranges, (lo, hi))
    if at and ranges[at - 1][1] > lo:
        return False
    if at < len(ranges) and hi > ranges[at][0]:
        return False
    ranges.insert(at, (lo, hi))
    return True
