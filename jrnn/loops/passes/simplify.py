"""The passes that simplify a step for every target: `compose_views`, `common_subexpressions` and `pads_to_concatenate`."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Env, Eqn, Names, Var, named, primitives
from jrnn.loops.ir import Loop
from jrnn.loops.passes.gates import AxisSlice, axis_slices

# Views of views -------------------------------------------------------------------------------------------------------


def compose_views(loop: Loop) -> Loop:
    """Composes views: a reshape of a reshape reads its source directly, and so does what slices a part of a concatenation.

    Nets reshape and join arrays for their operators, which slice and reshape them again. Passes that look for slices of one
    array then miss them, and XLA:CPU makes slower kernels where one kernel reads an array in two shapes. Additions of 0,
    multiplications by 1 and reductions to the precision that a value has go, as XLA removes them too.

    Invariant: every value is unchanged, except for the sign of zero where 0 is added.
    """
    is_composed = False
    names: Names = {}  # values that are renamed
    reshaped: Names = {}  # what reshapes of reshapes read
    ends: dict[Var, list[int]] = {}  # of the parts of concatenations
    eqns: list[Eqn] = []
    for eqn in loop.eqns:
        cuts = axis_slices([eqn])
        parts = []
        for cut in cuts.values():
            cut = cut._replace(of=named(names, cut.of))
            part = _joined_part(cut, loop.producers, ends)
            parts.append(None if part is None else named(names, part))
        unchanged = _unchanged(eqn)
        if unchanged is not None:
            names[eqn.outvars[0]] = named(names, unchanged)
        elif _reshapes(eqn):
            (out,) = eqn.outvars
            base = named(names, eqn.invars[0])
            base = reshaped.get(base, base)
            reshaped[out] = base
            is_composed |= base is not eqn.invars[0]
            if base.aval.shape == out.aval.shape:
                names[out] = base
                continue
            params = dict(
                new_sizes=out.aval.shape,
                dimensions=None,
                sharding=None,
            )
            eqns.append(
                eqn.replace(
                    primitive=jax.lax.reshape_p,
                    invars=[base],
                    params=params,
                )
            )
        elif not cuts or None in parts:
            operands = [named(names, a) for a in eqn.invars]
            eqns.append(jaxprs.with_operands(eqn, operands))
            if eqn.primitive.name == "concatenate":
                axis = eqn.params["dimension"]
                sizes = [a.aval.shape[axis] for a in eqn.invars]
                ends[eqn.outvars[0]] = [*itertools.accumulate(sizes)]
        else:
            names.update(zip(cuts, parts))
    if not is_composed and not names:
        return loop
    return loop.with_eqns(eqns, [named(names, a) for a in loop.outputs])


def _joined_part(
    cut: AxisSlice, producers: Mapping[Var, Eqn], ends: Mapping[Var, list[int]]
) -> Var | None:
    """Returns the part of a concatenation that a slice is, or None."""
    if cut.of not in ends or producers[cut.of].params["dimension"] != cut.axis:
        return None
    part = producers[cut.of].invars[bisect.bisect_left(ends[cut.of], cut.hi)]
    is_whole = cut.hi in ends[cut.of] and part.aval.shape[cut.axis] == cut.size
    return part if is_whole and not jaxprs.is_literal(part) else None


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


# Equal equations ------------------------------------------------------------------------------------------------------


def common_subexpressions(loop: Loop) -> Loop:
    """Eliminates common subexpressions. Equations with side effects or jaxprs of their own stay.

    Invariant: every value is unchanged.
    """
    first: dict[Any, Eqn] = {}
    names: Names = {}
    eqns = []
    for eqn in loop.eqns:
        key = _key(eqn, names)
        same = eqn if key is None else first.setdefault(key, eqn)
        if same is eqn:
            eqns.append(jaxprs.with_operands(eqn, [named(names, a) for a in eqn.invars]))
        else:
            names.update(zip(eqn.outvars, same.outvars))
    return loop.with_eqns(eqns, [named(names, a) for a in loop.outputs]) if names else loop


def _key(eqn: Eqn, names: Names) -> Any:
    """Returns a key of the primitive, parameters and operands of an equation, or None if it must stay."""
    if eqn.effects or any(jaxprs.sub_jaxprs(eqn)):
        return None
    operands: list[Any] = []
    for a in eqn.invars:
        if jaxprs.is_literal(a):
            operands.append((str(a.aval), np.asarray(a.val).tobytes()))
        else:
            operands.append(named(names, a))
    key = (eqn.primitive, tuple(sorted(eqn.params.items())), tuple(operands))
    try:
        hash(key)
    except TypeError:
        return None
    return key


# Cotangents of slices -------------------------------------------------------------------------------------------------


def pads_to_concatenate(loop: Loop) -> Loop:
    """Writes sums of zero-padded arrays that do not overlap, such as cotangents of slices, as concatenations.

    Each `pad` would write a whole array of zeros, and XLA:CPU does not vectorize their sum.

    Invariant: every value is unchanged, except for the sign of zero.
    """
    if not any(eqn.primitive.name == "pad" for eqn in loop.eqns):
        return loop
    sums = _padded_sums(loop)

    def rule(eqn: Eqn, env: Env) -> Sequence[Any] | None:
        if eqn.primitive.name != "add_any" or eqn.outvars[0] not in sums:
            return None
        axis, places = sums[eqn.outvars[0]]
        aval = eqn.outvars[0].aval
        parts: list[Array] = []
        end = 0
        for lo, hi, v in [*places, (aval.shape[axis], 0, None)]:
            if lo > end:
                shape = jaxprs.replaced(aval.shape, [axis], [lo - end])
                parts.append(jaxprs.zeros_of_shape(shape, aval))
            if v is not None:
                parts.append(env[v])
            end = hi
        with jaxprs.in_scope(eqn):
            return [jax.lax.concatenate(parts, axis)]

    return loop.rewrite(rule)


Place = tuple[int, int, Var]  # the range of an array in a sum
Placed = tuple[int, list[Place]]  # an axis, and the arrays along it, in order


def _padded_sums(loop: Loop) -> dict[Var, Placed]:
    """Returns the padded arrays, and the sums of some that do not overlap, which something else reads.

    A gradient adds n cotangents one after the other. So a sum takes the list of its longer operand, and adds the arrays of
    the other one.
    """
    uses = jaxprs.uses(loop.eqns, loop.outputs)
    placed: dict[Var, Placed] = {}
    read = set(jaxprs.variables(loop.outputs))
    for eqn in loop.eqns:
        together = None
        if eqn.primitive.name == "add_any":
            together = _together(eqn, placed, uses)
        if together is None:
            read.update(jaxprs.inputs(eqn))
            together = _place(eqn)
        if together is not None:
            placed[eqn.outvars[0]] = together
    return {v: places for v, places in placed.items() if v in read}


def _together(
    eqn: Eqn,
    placed: Mapping[Var, Placed],
    uses: Mapping[Var, int],
) -> Placed | None:
    """Returns the arrays of a sum, or None if its operands overlap or are something else."""
    if not all(jaxprs.is_in(a, placed) for a in eqn.invars):
        return None
    few, many = sorted(eqn.invars, key=lambda v: len(placed[v][1]))
    axis, added = placed[few]
    of_many, places = placed[many]
    if axis != of_many or not all(_is_free(places, lo, hi) for lo, hi, _ in added):
        return None
    places = list(places) if uses[many] > 1 else places
    for place in added:
        bisect.insort(places, place, key=_start)
    return axis, places


def _is_free(places: Sequence[Place], lo: int, hi: int) -> bool:
    """Whether a range overlaps with none of the arrays in order."""
    at = bisect.bisect_left(places, lo, key=_start)
    follows = not at or places[at - 1][1] <= lo
    return follows and (at == len(places) or hi <= places[at][0])


def _start(place: Place) -> int:
    return place[0]


def _place(eqn: Eqn) -> Placed | None:
    """Returns the array that an equation pads with zeros along one axis, or None for another equation."""
    if eqn.primitive.name != "pad":
        return None
    operand, fill = eqn.invars
    config = eqn.params["padding_config"]
    axes = [a for a, (low, high, _) in enumerate(config) if (low, high) != (0, 0)]
    is_plain = all(low >= 0 and high >= 0 and inner == 0 for low, high, inner in config)
    if len(axes) != 1 or not is_plain or not jaxprs.is_literal(fill) or fill.val != 0:
        return None
    (axis,) = axes
    lo = config[axis][0]
    return (
        None
        if jaxprs.is_literal(operand)
        else (axis, [(lo, lo + operand.aval.shape[axis], operand)])
    )
