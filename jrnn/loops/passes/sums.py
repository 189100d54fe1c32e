"""Carries that only add, such as the gradients of weights: sums over time after the loop, or wide carries inside it.

A sum commutes with linear operations. The sum of `dot(a, b)` is one contraction over time and the dot's own axes, the sum of
a reduction is one reduction, and only their operands are stacked. Sums are not moved through the step's own additions and
subtractions: the sum of `a - b` may be small and exact where the sums of `a` and `b` are not, or overflow.

Shapes: T time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var, primitives
from jrnn.loops.ir import Loop, Results, RunLoop

# A value that is not a contraction or a reduction is stacked only if it has at most these bytes: otherwise adding in place
# is better.
_SMALL = 64 * 1024
_LONGEST = 64  # the number of equations that a sum is moved through at most

ContractedAxes = tuple[Sequence[int], Sequence[int]]
Contract = Callable[[Any, Any, ContractedAxes, Any, Any], Any]
Producers = Mapping[Var, Eqn]  # the equation that computes each variable of the step
StackedParts = Mapping[
    Var, Sequence[Var]
]  # concatenations, with the parts that are stacked in their place
NO_PARTS: StackedParts = {}  # no concatenation is stacked in parts


def added_to_carries(loop: Loop) -> dict[int, tuple[Atom, ...]]:
    """Returns the positions of the carries that only add, `new = old + v + ...`, with the values that they add."""
    uses = Counter(v for e in loop.eqns for v in jaxprs.inputs(e))
    uses.update(jaxprs.variables(loop.outputs))
    follows: dict[Var, Any] = {}  # the only addition that reads a variable
    for eqn in loop.eqns:
        if primitives.is_addition(eqn):
            follows.update((v, eqn) for v in jaxprs.inputs(eqn) if uses[v] == 1)
    additions: dict[int, tuple[Atom, ...]] = {}
    for i, (old, new) in enumerate(zip(loop.carry, loop.carry_out)):
        added: list[Atom] = []
        at = old
        while at is not new and at in follows:
            eqn = follows[at]
            added.append(eqn.invars[1] if eqn.invars[0] is at else eqn.invars[0])
            at = eqn.outvars[0]
        same = all((v.aval.shape, v.aval.dtype) == (old.aval.shape, old.aval.dtype) for v in added)
        if at is new and uses[new] == 1 and added and same:
            additions[i] = tuple(added)
    return additions


def accumulations(
    added: Mapping[int, tuple[Atom, ...]], producers: Producers, free: Collection[Var]
) -> dict[int, tuple[Atom, ...]]:
    """Returns the carries that are better summed after the loop, of those that only add. `free` is known before the loop."""
    return {
        i: values for i, values in added.items() if all(_pays(v, producers, free) for v in values)
    }


def sums_without_new_stacks(
    accumulated: dict[int, tuple[Atom, ...]], loop: Loop, stacked: Collection[Var]
) -> dict[int, tuple[Atom, ...]]:
    """Returns the sums that need no stacks other than `stacked` and the operands of contractions."""
    producers = jaxprs.producers(loop.eqns)
    accumulated_values = [v for values in accumulated.values() for v in values]
    known = {
        *stacked,
        *(leaf for v in accumulated_values for leaf in _operands(v, producers, stacked, True)),
    }
    return {
        i: values
        for i, values in accumulated.items()
        if known.issuperset(sum_operands(values, producers, known))
    }


def common_parts(loop: Loop) -> StackedParts:
    """Returns the concatenations that contractions over time read, and of which another one has a part, too.

    A GRU's reverse loop has two: the cotangents `[dr, du, dn]` and `[dr, du, r dn]`. Stacks of four parts take less memory
    than stacks of two concatenations of three. The parts have one shape, and are joined along the last axis, the only one
    that is not contracted.
    """
    varying = jaxprs.depends(loop.eqns, (*loop.carry, *loop.xs))
    joins = {
        e.outvars[0]: e.invars
        for e in loop.eqns
        if e.primitive.name == "concatenate"
        and e.params["dimension"] == e.outvars[0].aval.ndim - 1
        and len({a.aval for a in e.invars}) == 1
        and all(jaxprs.is_in(a, varying) for a in e.invars)
    }
    read: dict[Var, Sequence[Var]] = {}
    others: set[Atom] = set()
    for eqn in loop.eqns:
        if eqn.primitive.name != "dot_general" or not all(
            jaxprs.is_in(a, varying) for a in eqn.invars
        ):
            continue
        plain = not eqn.params["dimension_numbers"][1][0] and eqn.params.get("out_sharding") is None
        for v, axes in zip(eqn.invars, eqn.params["dimension_numbers"][0]):
            if v in joins and plain and sorted(axes) == [*range(v.aval.ndim - 1)]:
                read[v] = joins[v]
            else:
                others.add(v)
    uses = Counter(part for v, parts in read.items() if v not in others for part in set(parts))
    return {
        v: parts
        for v, parts in read.items()
        if v not in others and any(uses[part] > 1 for part in parts)
    }


def sum_operands(
    values: Collection[Atom],
    producers: Producers,
    stacked: Collection[Var],
    parts: StackedParts = NO_PARTS,
) -> list[Var]:
    """Returns the variables whose stacks the sums of `values` read. `stacked` are the stacks that exist anyway."""
    known = dict.fromkeys(stacked)
    apart = {v: joined for v, joined in parts.items() if v not in known}
    for contractions_only in (
        True,
        False,
    ):  # a reduction may read the stacks of a contraction's operands
        operands = [
            leaf for v in values for leaf in _operands(v, producers, known, contractions_only)
        ]
        operands = [part for leaf in operands for part in apart.get(leaf, (leaf,))]
        known.update(dict.fromkeys(operands))
    return list(dict.fromkeys(operands))


def time_sum(
    v: Atom,
    producers: Producers,
    stacked: Env,
    env: Env,
    length: Any,
    dtype: Any,
    contract: Contract,
) -> Any:
    """Returns the sum over time of `v`.

    Args:
        v: the value.
        producers: the equations that define the values of the step.
        stacked: the values that vary, [T, ...].
        env: the constants.
        length: T.
        dtype: the dtype to sum in. If the step widens a value before it adds it, the narrow values are summed in the wide
            dtype too.
        contract: computes contractions over time.
    """
    done: dict[tuple[Var, Any], Any] = {}

    def sum_of(atom: Atom, dtype: Any) -> Any:
        if jaxprs.is_literal(atom) or atom in env:
            return _times_length(jaxprs.value(env, atom).astype(dtype), length)
        if atom in stacked:
            return jnp.sum(stacked[atom], axis=0, dtype=dtype)
        if (atom, dtype) not in done:
            eqn = producers[atom]
            with jaxprs.in_scope(eqn):
                passed = through(eqn, dtype)
            results = zip(eqn.outvars, passed if eqn.primitive.multiple_results else [passed])
            done.update(((v, dtype), result) for v, result in results)
        return done[atom, dtype]

    def through(eqn: Eqn, dtype: Any) -> Any:
        operand = eqn.invars[0]
        if eqn.primitive.name == "convert_element_type":
            narrows = jaxprs.promoted_type(dtype, operand.aval.dtype) != dtype
            return sum_of(operand, operand.aval.dtype if narrows else dtype).astype(dtype)
        if eqn.primitive.name == "dot_general":
            return _contraction(eqn, producers, stacked, env, length, dtype, contract)
        inner = (
            producers.get(operand)
            if not jaxprs.is_literal(operand) and operand not in stacked
            else None
        )
        if inner is not None and _is_swapped_dot(eqn, inner):
            return _contraction(inner, producers, stacked, env, length, dtype, contract, swap=True)
        if eqn.primitive.name == "reduce_sum" and operand in stacked:
            axes = (0, *(a + 1 for a in eqn.params["axes"]))
            return jnp.sum(stacked[operand], axis=axes, dtype=dtype)
        return eqn.primitive.bind(*(sum_of(a, dtype) for a in eqn.invars), **eqn.params)

    return sum_of(v, dtype)


def accumulator_dtype(dtype: Any) -> Any:
    """Returns the dtype for a long sum of `dtype`: float32 for narrower floats."""
    return (
        jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 else dtype
    )


def linear_region(
    v: Atom, producers: Producers, stop: Collection[Var], names: Collection[str] = ("add_any",)
) -> tuple[list[Any], list[Atom]] | None:
    """Returns the linear equations that a sum of `v` moves through, and the contractions and values where it ends.

    `names` are primitives that are linear in several operands, and that it moves through.
    Returns None if there are too many.
    """
    through: dict[int, Any] = {}
    ends: list[Atom] = []
    queue: list[Atom] = [v]
    while queue:
        atom = queue.pop()
        eqn = None if jaxprs.is_literal(atom) or atom in stop else producers.get(atom)
        if eqn is None or not (primitives.is_linear(eqn) or eqn.primitive.name in names):
            ends.append(atom)
        elif id(eqn) not in through:
            through[id(eqn)] = eqn
            queue.extend(eqn.invars)
            if len(through) > _LONGEST:
                return None
    return list(through.values()), ends


def _pays(v: Atom, producers: Producers, free: Collection[Var]) -> bool:
    """Returns True if summing after the loop is better than adding at each step."""
    if jaxprs.is_in(v, producers) and producers[v].primitive.name == "reduce_sum":
        return True
    above = linear_region(v, producers, free)
    if above is None:
        return False
    through, ends = above
    reduced = {a for e in through if e.primitive.name == "reduce_sum" for a in jaxprs.inputs(e)}

    def is_dot(v: Atom) -> bool:
        return (
            jaxprs.is_in(v, producers)
            and v not in free
            and producers[v].primitive.name == "dot_general"
        )

    return all(jaxprs.nbytes(a) <= _SMALL or jaxprs.is_in(a, reduced) or is_dot(a) for a in ends)


def _operands(
    v: Atom, producers: Producers, stacked: Collection[Var], contractions_only: bool
) -> list[Var]:
    above = linear_region(v, producers, stacked)
    assert above is not None, "a sum that pays is short"
    values: list[Var] = []
    for atom in above[1]:
        if jaxprs.is_literal(atom):
            continue
        eqn = None if atom in stacked else producers.get(atom)
        if eqn is not None and eqn.primitive.name == "dot_general":
            values += jaxprs.inputs(eqn)
        elif not contractions_only:
            values.append(atom)
    return values


def _times_length(value: Any, length: Any) -> Any:
    """Returns `value * length`. Integers wrap around as sums do; narrow floats are multiplied in float32."""
    dtype = value.dtype
    wide = accumulator_dtype(dtype)
    return (value.astype(wide) * jnp.asarray(length).astype(wide)).astype(dtype)


def _is_swapped_dot(eqn: Eqn, inner: Any) -> bool:
    """Returns True if `eqn` transposes `dot(a, b)` into `dot(b, a)`."""
    if eqn.primitive.name != "transpose" or inner.primitive.name != "dot_general":
        return False
    if inner.params.get("out_sharding") is not None:
        return False
    (lhs_contract, _), (lhs_batch, _) = inner.params["dimension_numbers"]
    rank = len(inner.outvars[0].aval.shape)
    free = inner.invars[0].aval.ndim - len(lhs_contract)
    return not lhs_batch and tuple(eqn.params["permutation"]) == (*range(free, rank), *range(free))


def _contraction(
    eqn: Eqn,
    producers: Producers,
    stacked: Env,
    env: Env,
    length: Any,
    dtype: Any,
    contract: Contract,
    swap: bool = False,
) -> Any:
    """Returns the sum over time of a dot: contracts time together with the dot's own axes."""
    (lhs, rhs), (dims, batch) = eqn.invars, eqn.params["dimension_numbers"]
    if swap:
        lhs, rhs, dims, batch = rhs, lhs, dims[::-1], batch[::-1]
    operands: Sequence[Atom] = [lhs, rhs]
    joins = [producers[a] for a in operands if jaxprs.is_in(a, producers) and a not in stacked]
    apart = {
        e.outvars[0]: e.invars
        for e in joins
        if e.primitive.name == "concatenate" and e.outvars[0] not in env
    }
    fixed = [a for a in operands if not jaxprs.is_in(a, stacked) and not jaxprs.is_in(a, apart)]
    if fixed:  # a constant operand: sum the other one first
        values = [
            jaxprs.value(env, a)
            if a is fixed[0]
            else time_sum(a, producers, stacked, env, length, a.aval.dtype, contract)
            for a in operands
        ]
    else:
        values = [
            [stacked[part] for part in apart[a]] if a in apart else stacked[a] for a in operands
        ]
        dims = tuple((0, *(a + 1 for a in axes)) for axes in dims)
        batch = tuple(tuple(a + 1 for a in axes) for axes in batch)
    precision = eqn.params["precision"]
    precision = precision[::-1] if swap and isinstance(precision, tuple) else precision
    accumulate_in = (
        dtype if dtype != eqn.outvars[0].aval.dtype else eqn.params["preferred_element_type"]
    )
    placed = eqn.params.get("out_sharding")
    if fixed or batch[0] or placed is not None:
        return jax.lax.dot_general(
            *values,
            (dims, batch),
            precision=precision,
            preferred_element_type=accumulate_in,
            out_sharding=placed,
        )
    return contract(*values, dims, precision, accumulate_in)


# Contractions over time -----------------------------------------------------------------------------------------------


def dot_as_written(
    lhs: Any, rhs: Any, axes: ContractedAxes, precision: Any, preferred_element_type: Any
) -> Any:
    """Contracts `axes` of two stacks [T, ...], time among them, with `lax.dot_general` without batch axes."""
    return jax.lax.dot_general(
        lhs,
        rhs,
        (axes, ((), ())),
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def dot_smaller_first(
    lhs: Any, rhs: Any, axes: ContractedAxes, precision: Any, preferred_element_type: Any
) -> Any:
    """Contracts as `dot_as_written` does, with the operands in the order that XLA:CPU computes faster.

    For a product A^T B, XLA:CPU first copies A, transposed. If A is larger than B, this computes B^T A and transposes the
    result, which is small. XLA would merge a transposition of the result, this one or the caller's, with the product again.
    A barrier prevents that. Of few rows, a copy of A is smaller than one of the result.
    """
    sizes = (jaxprs.elements(lhs.shape), jaxprs.elements(rhs.shape))
    rows = jaxprs.elements([lhs.shape[axis] for axis in axes[0]])
    if 2 * rows**2 < min(sizes):
        return dot_as_written(lhs, rhs, axes, precision, preferred_element_type)
    if sizes[0] <= sizes[1]:
        return jax.lax.optimization_barrier(
            dot_as_written(lhs, rhs, axes, precision, preferred_element_type)
        )
    exchanged = precision[::-1] if isinstance(precision, tuple) else precision
    product = jax.lax.optimization_barrier(
        dot_as_written(rhs, lhs, axes[::-1], exchanged, preferred_element_type)
    )
    own = rhs.ndim - len(axes[1])
    return jnp.transpose(product, (*range(own, product.ndim), *range(own)))


# Wide carries ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WideSums:
    """The dtypes of wide carries, and the original ones."""

    wide: tuple[Any, ...]
    narrow: tuple[Any, ...]

    def adapt(
        self,
        run: RunLoop,
        consts: Sequence[Any],
        init: Sequence[Any],
        xs: Sequence[Any],
        length: Any,
    ) -> Results:
        last, ys = run(
            consts, [jnp.asarray(x, dtype) for x, dtype in zip(init, self.wide)], xs, length
        )
        return [x.astype(dtype) for x, dtype in zip(last, self.narrow)], list(ys)


def widen_sums(loop: Loop) -> tuple[Loop, WideSums | None]:
    """Keeps narrow floating-point carries that only add in float32 inside the loop.

    Added one by one, bfloat16 numbers of about the same size stop adding up after 256 of them.

    Invariant: every other value is unchanged; the sums are rounded once instead of at every step.

    Returns:
        The loop, and the dtypes of its carries; None if no carry is widened.
    """
    added = added_to_carries(loop).items()
    sums = {
        i: values
        for i, values in added
        if accumulator_dtype(loop.carry[i].aval.dtype) != loop.carry[i].aval.dtype
    }
    if not sums:
        return loop, None

    def step(*args: Any) -> list[Any]:
        env = dict(zip(loop.inputs, args))
        narrow = {loop.carry[i]: env[loop.carry[i]].astype(loop.carry[i].aval.dtype) for i in sums}
        jaxprs.evaluate(loop.eqns, known := {**env, **narrow})
        for i, values in sums.items():
            total = env[loop.carry[i]]
            for v in values:
                total = total + jaxprs.value(known, v).astype(total.dtype)
            known[loop.carry_out[i]] = total
        return [jaxprs.read(known, a) for a in loop.outputs]

    wide = [v.aval for v in loop.inputs]
    first = len(loop.consts)
    for i in sums:
        wide[first + i] = wide[first + i].update(
            dtype=accumulator_dtype(wide[first + i].dtype), weak_type=False
        )
    widened = loop.traced(step, wide, len(loop.carry))
    return widened, WideSums(
        *(tuple(v.aval.dtype for v in carry) for carry in (widened.carry, loop.carry))
    )
