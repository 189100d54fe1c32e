"""The passes that simplify a step for every target: `compose_views`, `common_subexpressions` and `pads_to_concatenate`."""

from __future__ import annotations

import itertools
import math
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

    def composed(eqn: Eqn) -> list[Eqn]:
        """Returns the equations in the place of one. Those of values that are others add these to `same`."""
        unchanged = _unchanged(eqn)
        if unchanged is not None:
            same[eqn.outvars[0]] = named(same, unchanged)
            return []
        if _reshapes(eqn):
            (out,), base = eqn.outvars, named(same, eqn.invars[0])
            while base in producers and _reshapes(producers[base]):
                base = named(same, producers[base].invars[0])
            if base.aval.shape != out.aval.shape:
                params = dict(new_sizes=out.aval.shape, dimensions=None, sharding=None)
                return [eqn.replace(primitive=jax.lax.reshape_p, invars=[base], params=params)]
            same[out] = base
            return []
        cuts = axis_slices([eqn])
        parts = [_part(named(same, c.of), c.axis, c.lo, c.hi, producers) for c in cuts.values()]
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


def _part(
    of: Var, axis: int, lo: int, hi: int, producers: Mapping[Var, Any]
) -> tuple[Var, int, int, int] | None:
    """Returns the part of a concatenation that contains `of[lo:hi]`, the axis, and the range within that part."""
    eqn = producers.get(of)
    if eqn is None or eqn.primitive.name != "concatenate" or eqn.params["dimension"] != axis:
        return None
    ends = np.cumsum([0, *(a.aval.shape[axis] for a in eqn.invars)]).tolist()
    for part, (first, last) in zip(eqn.invars, itertools.pairwise(ends)):
        if first <= lo and hi <= last and not jaxprs.is_literal(part):
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
    producers = jaxprs.producers(loop.eqns)

    def rule(eqn: Eqn, env: Env) -> Sequence[Any] | None:
        pieces = _pieces(eqn.outvars[0], producers) if eqn.primitive.name == "add_any" else None
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


def _pieces(v: Var, producers: Mapping[Var, Any]) -> tuple[int, list[tuple[int, int, Atom]]] | None:
    """For a sum of zero-padded arrays that do not overlap, returns the axis, and `(lo, hi, array)` in order."""
    pieces: list[tuple[int, int, int, Atom]] = []
    queue: list[Atom] = [v]
    met: set[Var] = set()
    while queue:
        atom = queue.pop()
        eqn = None if jaxprs.is_literal(atom) else producers.get(atom)
        if eqn is None or atom in met:  # an array that is not padded, or one that is added twice
            return None
        if eqn.primitive.name == "add_any":
            met.add(atom)
            queue.extend(eqn.invars)
            continue
        if eqn.primitive.name != "pad":
            return None
        operand, fill = eqn.invars
        config = eqn.params["padding_config"]
        axes = [a for a, (low, high, _) in enumerate(config) if (low, high) != (0, 0)]
        plain = all(low >= 0 and high >= 0 and inner == 0 for low, high, inner in config)
        if not (plain and len(axes) == 1 and jaxprs.is_literal(fill) and fill.val == 0):
            return None
        low = config[axes[0]][0]
        pieces.append((axes[0], low, low + operand.aval.shape[axes[0]], operand))
    pieces.sort(key=lambda piece: piece[:3])
    apart = all(a[2] <= b[1] for a, b in itertools.pairwise(pieces))
    if len({piece[0] for piece in pieces}) != 1 or not apart:
        return None
    return pieces[0][0], [piece[1:] for piece in pieces]
