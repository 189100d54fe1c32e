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
    same: Names = {}
    reshaped: Names = {}  # what reshapes of reshapes read
    joins = _Joins(producers)

    def composed(eqn: Eqn) -> list[Eqn]:
        """Returns the equations in the place of one. Those of values that are others add these to `same`."""
        unchanged = _unchanged(eqn)
        if unchanged is not None:
            same[eqn.outvars[0]] = named(same, unchanged)
            return []
        if _reshapes(eqn):
            (out,) = eqn.outvars
            base = named(same, eqn.invars[0])
            base = reshaped.get(base, base)
            reshaped[out] = base
            if base.aval.shape != out.aval.shape:
                params = dict(new_sizes=out.aval.shape, dimensions=None, sharding=None)
                return [eqn.replace(primitive=jax.lax.reshape_p, invars=[base], params=params)]
            same[out] = base
            return []
        cuts = axis_slices([eqn])
        parts = [joins.part(named(same, c.of), c.axis, c.lo, c.hi) for c in cuts.values()]
        if not cuts or None in parts:
            return [jaxprs.with_operands(eqn, [named(same, a) for a in eqn.invars])]
        slices = []
        for v, (whole, axis, lo, hi) in zip(cuts, parts):
            part = named(same, whole)
            shape = part.aval.shape
            if (lo, hi) == (0, shape[axis]):
                same[v] = part
            else:
                starts = jaxprs.replaced([0] * len(shape), [axis], [lo])
                ends = jaxprs.replaced(shape, [axis], [hi])
                params = dict(
                    start_indices=tuple(starts),
                    limit_indices=tuple(ends),
                    strides=(1,) * len(shape),
                )
                slices.append(
                    eqn.replace(
                        primitive=jax.lax.slice_p, invars=[part], outvars=[v], params=params
                    )
                )
        return slices

    eqns = [new for eqn in loop.eqns for new in composed(eqn)]
    return loop.with_eqns(eqns, [named(same, a) for a in loop.outputs])


def _reshapes(eqn: Eqn) -> bool:
    """Returns True if an equation gives its operand's elements in another shape, in the same order."""
    if (
        not primitives.row_of(eqn).reshapes
        or len(eqn.invars) != 1
        or jaxprs.is_literal(eqn.invars[0])
    ):
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
    for x, other in (eqn.invars, eqn.invars[::-1])[: 2 if row.commutes else 1]:
        same = not jaxprs.is_literal(x) and x.aval.strip_weak_type() == out.aval.strip_weak_type()
        if (
            same
            and jaxprs.is_literal(other)
            and not np.ndim(other.val)
            and other.val == row.neutral
        ):
            return x
    return None


def _has_precision(eqn: Eqn) -> bool:
    """Returns True if an operand has the precision that an equation reduces it to, as what `jax.checkpoint` stores has.

    XLA may compute narrower types with more bits than they have. Then the equation takes them away.
    """
    dtype = eqn.invars[0].aval.dtype
    if dtype not in (np.float32, np.float64):
        return False
    of_type = jnp.finfo(dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (
        of_type.nexp,
        of_type.nmant,
    )


def _is_indirect(eqn: Eqn, producers: Mapping[Var, Any]) -> bool:
    """Returns True for a view of a view, a view or operation that changes nothing, and a slice of a concatenation."""
    if _unchanged(eqn) is not None:
        return True
    source = (
        None if not eqn.invars or jaxprs.is_literal(eqn.invars[0]) else producers.get(eqn.invars[0])
    )
    if _reshapes(eqn):
        return eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape or (
            source is not None and _reshapes(source)
        )
    return (
        source is not None and source.primitive.name == "concatenate" and bool(axis_slices([eqn]))
    )


class _Joins:
    """Where the parts of concatenations end, computed once for all slices of each."""

    def __init__(self, producers: Mapping[Var, Any]):
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
    seen: dict[Any, Any] = {}
    same: dict[Var, Var] = {}
    for eqn in loop.eqns:
        key = _key(eqn, same)
        first = seen.setdefault(key, eqn) if key is not None else eqn
        if first is not eqn:
            same.update((v, same.get(u, u)) for v, u in zip(eqn.outvars, first.outvars))
    if not same:
        return loop

    def named(atom: Atom) -> Atom:
        return atom if jaxprs.is_literal(atom) else same.get(atom, atom)

    remaining = [e for e in loop.eqns if not e.outvars or not all(v in same for v in e.outvars)]
    eqns = tuple(jaxprs.with_operands(e, [*map(named, e.invars)]) for e in remaining)
    smaller = replace(
        loop, eqns=eqns, carry_out=tuple(map(named, loop.carry_out)), ys=tuple(map(named, loop.ys))
    )
    return smaller.verify() if strict_passes.value else smaller


def _key(eqn: Eqn, same: dict[Var, Var]) -> Any:
    """Returns a key of the primitive, parameters and operands of an equation, or None if it must stay."""
    if eqn.effects or any(True for _ in jaxprs.sub_jaxprs(eqn)):
        return None
    try:
        operands = tuple(
            _literal_key(a) if jaxprs.is_literal(a) else same.get(a, a) for a in eqn.invars
        )
        key = (eqn.primitive, tuple(sorted(eqn.params.items(), key=lambda kv: kv[0])), operands)
        hash(key)
    except TypeError:
        return None
    return key


def _literal_key(atom: Any) -> tuple[str, bytes]:
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
        pieces = pads.pieces(eqn.outvars[0]) if eqn.primitive.name == "add_any" else None
        if pieces is None:
            return None
        axis, placed = pieces
        aval = eqn.outvars[0].aval
        size = aval.shape[axis]
        parts = []
        at = 0
        for lo, hi, atom in [*placed, (size, size, None)]:
            if lo > at:
                parts.append(
                    jaxprs.zeros_of_shape(
                        [*aval.shape[:axis], lo - at, *aval.shape[axis + 1 :]], aval
                    )
                )
            if atom is not None:
                parts.append(jaxprs.value(env, atom))
            at = hi
        with jaxprs.in_scope(eqn):
            return [jax.lax.concatenate(parts, axis)]

    return loop.rewrite(rule)


Ranges = list[tuple[int, int]]  # where the arrays of a sum are, in order


class _Pads:
    """The sums of zero-padded arrays that do not overlap.

    A gradient adds n cotangents one after the other. So the ranges of a sum are those of its longer operand, to which the
    others are added, and only sums that something else reads are written as concatenations.
    """

    def __init__(self, loop: Loop):
        self._producers = jaxprs.producers(loop.eqns)
        sums = [eqn for eqn in loop.eqns if eqn.primitive.name == "add_any"]
        self._summands = Counter(v for eqn in sums for v in jaxprs.inputs(eqn))
        self._sums: dict[Var, tuple[int, Ranges]] = {}  # the axis, and the ranges
        self._read = set(jaxprs.variables(loop.outputs))
        for eqn in loop.eqns:
            of_sum = self._of_sum(*eqn.invars) if eqn.primitive.name == "add_any" else None
            if of_sum is None:
                self._read.update(jaxprs.inputs(eqn))
            else:
                self._sums[eqn.outvars[0]] = of_sum

    def pieces(self, v: Var) -> tuple[int, list[tuple[int, int, Atom]]] | None:
        """Returns the axis of a sum that is read, and `(lo, hi, array)` in order; or None."""
        if v not in self._sums or v not in self._read:
            return None
        axis, _ = self._sums[v]
        pieces: list[tuple[int, int, Atom]] = []
        queue = [v]
        while queue:
            eqn = self._producers[queue.pop()]
            if eqn.primitive.name == "add_any":
                queue.extend(eqn.invars)
                continue
            operand = eqn.invars[0]
            lo = eqn.params["padding_config"][axis][0]
            pieces.append((lo, lo + operand.aval.shape[axis], operand))
        pieces.sort(key=lambda piece: piece[:2])
        return axis, pieces

    def _of_sum(self, a: Atom, b: Atom) -> tuple[int, Ranges] | None:
        first = self._of(a)
        second = self._of(b)
        if first is None or second is None or first[0] != second[0]:
            return None
        few, many = sorted((first[1], second[1]), key=len)
        return (first[0], many) if all(_insert(many, lo, hi) for lo, hi in few) else None

    def _of(self, atom: Atom) -> tuple[int, Ranges] | None:
        """Returns the axis and the ranges of a padded array, or of a sum. The caller may change the list."""
        if jaxprs.is_literal(atom):
            return None
        if atom in self._sums:
            axis, ranges = self._sums[atom]
            return axis, list(ranges) if self._summands[atom] > 1 else ranges
        eqn = self._producers.get(atom)
        if eqn is None or eqn.primitive.name != "pad":
            return None
        operand, fill = eqn.invars
        config = eqn.params["padding_config"]
        axes = [a for a, (low, high, _) in enumerate(config) if (low, high) != (0, 0)]
        plain = all(low >= 0 and high >= 0 and inner == 0 for low, high, inner in config)
        if not (plain and len(axes) == 1 and jaxprs.is_literal(fill) and fill.val == 0):
            return None
        lo = config[axes[0]][0]
        return axes[0], [(lo, lo + operand.aval.shape[axes[0]])]


def _insert(ranges: Ranges, lo: int, hi: int) -> bool:
    """Adds a range to others in order. Returns False if it overlaps with one of them."""
    at = bisect.bisect_left(ranges, (lo, hi))
    if at and ranges[at - 1][1] > lo:
        return False
    if at < len(ranges) and hi > ranges[at][0]:
        return False
    ranges.insert(at, (lo, hi))
    return True
