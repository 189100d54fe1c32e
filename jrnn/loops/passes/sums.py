"""Carries that only add, such as the gradients of weights: sums over time after the loop.

A sum commutes with linear operations. The sum of `dot(a, b)` is one contraction over time and the dot's own axes, the sum of
a reduction is one reduction, and only their operands are stacked:

    sum over t of reshape(a[t]^T b[t])     =   reshape(a^T b)             a, b: [T, N, D] and [T, N, H], read as [T * N, ...]
    sum over t of (dot(a[t], b[t]) + c[t]) =   dot(a, b) + sum(c)         where JAX's transposition adds (`add_any`)

Sums are not moved through the step's own additions and subtractions: the sum of `a - b` may be small and exact where the
sums of `a` and `b` are not, or overflow.

Shapes: T time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var, primitives
from jrnn.loops.ir import Length, Loop

# A value that is not a contraction or a reduction is stacked only up to this size: otherwise adding in place is better.
_MAX_STACKED_BYTES = 64 * 1024
_MAX_EQUATIONS = 64  # a sum is moved through at most these equations

DType = Any
ContractedAxes = tuple[Sequence[int], Sequence[int]]
Contract = Callable[[Any, Any, ContractedAxes, Any, Any], Any]
Producers = Mapping[Var, Eqn]  # the equation that computes each variable of the step
StackedParts = Mapping[Var, Sequence[Var]]  # concatenations, and the parts that are stacked instead
NO_PARTS: StackedParts = {}  # no concatenation is stacked in parts


def added_to_carries(loop: Loop) -> dict[int, tuple[Atom, ...]]:
    """Returns the positions of the carries that only add, `new = old + v + ...`, with the values that they add."""
    uses = jaxprs.uses(loop.eqns, loop.outputs)
    follows: dict[Var, Eqn] = {}  # the only addition that reads a variable
    for eqn in loop.eqns:
        if primitives.is_addition(eqn):
            for v in jaxprs.inputs(eqn):
                if uses[v] == 1:
                    follows[v] = eqn
    additions: dict[int, tuple[Atom, ...]] = {}
    for i, (old, new) in enumerate(zip(loop.carry, loop.carry_out)):
        added: list[Atom] = []
        at = old
        while at is not new and at in follows:
            eqn = follows[at]
            added.append(eqn.invars[1] if eqn.invars[0] is at else eqn.invars[0])
            at = eqn.outvars[0]
        types = {jaxprs.type_of(v) for v in added}
        if at is new and uses[new] == 1 and types == {jaxprs.type_of(old)}:
            additions[i] = tuple(added)
    return additions


def accumulations(
    added: Mapping[int, tuple[Atom, ...]], producers: Producers, free: Collection[Var]
) -> dict[int, tuple[Atom, ...]]:
    """Returns the carries that are better summed after the loop, among carries that only add.

    `free` is known before the loop.
    """
    paying = {}
    for i, values in added.items():
        if all(map(_pays, values, repeat(producers), repeat(free))):
            paying[i] = values
    return paying


def sums_without_new_stacks(
    accumulated: dict[int, tuple[Atom, ...]], loop: Loop, stacked: Collection[Var]
) -> dict[int, tuple[Atom, ...]]:
    """Returns the sums that need no stacks other than `stacked` and the operands of contractions."""
    known = set(stacked)
    for values in accumulated.values():
        for v in values:
            known.update(_operands(v, loop.producers, stacked, contractions_only=True))
    cheap = {}
    for i, values in accumulated.items():
        if known.issuperset(sum_operands(values, loop.producers, known)):
            cheap[i] = values
    return cheap


def common_parts(loop: Loop) -> StackedParts:
    """Returns the concatenations that contractions over time read, if another one has one of their parts, too.

    A GRU's reverse loop has two: the cotangents `[dr, du, dn]` and `[dr, du, r dn]`. Stacks of four parts take less memory
    than stacks of two concatenations of three. The parts have one shape, and are joined along the last axis, the only one
    that is not contracted.
    """
    # A concatenation counts if contractions over all axes but the last are all that reads it.
    joins: dict[Var, Sequence[Var]] = {}
    read: dict[Var, Sequence[Var]] = {}
    others: set[Var] = set()
    for eqn in loop.eqns:
        if not all(map(jaxprs.is_in, eqn.invars, repeat(loop.varying))):
            continue
        if _is_joined_along_last(eqn):
            joins[eqn.outvars[0]] = eqn.invars
        if eqn.primitive.name != "dot_general":
            continue
        contracted, batch = eqn.params["dimension_numbers"]
        is_plain = not batch[0] and eqn.params.get("out_sharding") is None
        for v, axes in zip(eqn.invars, contracted):
            if v in joins and is_plain and sorted(axes) == [*range(v.aval.ndim - 1)]:
                read[v] = joins[v]
            else:
                others.add(v)
    for v in others:
        read.pop(v, None)

    uses: Counter[Var] = Counter()
    for parts in read.values():
        uses.update(set(parts))
    return {v: parts for v, parts in read.items() if max(jaxprs.take(uses, parts)) > 1}


def _is_joined_along_last(eqn: Eqn) -> bool:
    """Whether an equation concatenates values of one type along the last axis."""
    if eqn.primitive.name != "concatenate":
        return False
    is_last = eqn.params["dimension"] == eqn.outvars[0].aval.ndim - 1
    return is_last and len({a.aval for a in eqn.invars}) == 1


def sum_operands(
    values: Collection[Atom],
    producers: Producers,
    stacked: Collection[Var],
    parts: StackedParts = NO_PARTS,
) -> list[Var]:
    """Returns the variables whose stacked arrays the sums of `values` read. `stacked` are stacked anyway."""
    known = dict.fromkeys(stacked)
    apart = {v: joined for v, joined in parts.items() if v not in known}
    operands: list[Var] = []
    for contractions_only in (True, False):  # a reduction may read what a contraction has stacked
        operands = []
        for v in values:
            for leaf in _operands(v, producers, known, contractions_only):
                operands += apart.get(leaf, (leaf,))
        known.update(dict.fromkeys(operands))
    return list(dict.fromkeys(operands))


@dataclass
class TimeSums:
    """Sums over time; each is computed once.

    Attributes:
        producers: the equations that define the values of the step.
        stacked: the values that vary, [T, ...].
        env: the constants.
        length: T.
        contract: computes contractions over time.
        done: the sums that were computed, by the value and the dtype.
    """

    producers: Producers
    stacked: Env
    env: Env
    length: Length
    contract: Contract
    done: dict[tuple[Var, DType], Array] = field(default_factory=dict)

    def sum_of(self, atom: Atom, dtype: DType) -> Array:
        """Returns the sum of a value over time, in a dtype.

        If the step widens a value before it adds it, the narrow values are summed in the wide dtype, too.
        """
        if jaxprs.is_literal(atom) or atom in self.env:
            return _times_length(jaxprs.value(self.env, atom).astype(dtype), self.length)
        if atom in self.stacked:
            return jnp.sum(self.stacked[atom], axis=0, dtype=dtype)
        if (atom, dtype) not in self.done:
            eqn = self.producers[atom]
            with jaxprs.in_scope(eqn):
                results = self._results(eqn, dtype)
            self.done.update(zip([(v, dtype) for v in eqn.outvars], results))
        return self.done[atom, dtype]

    def _results(self, eqn: Eqn, dtype: DType) -> Sequence[Array]:
        """Returns the sums of the results of an equation: a contraction over time, or the equation of sums."""
        operand = eqn.invars[0]
        if eqn.primitive.name == "convert_element_type":
            narrow = operand.aval.dtype
            narrows = jaxprs.promoted_type(dtype, narrow) != dtype
            return [self.sum_of(operand, narrow if narrows else dtype).astype(dtype)]
        if eqn.primitive.name == "dot_general":
            return [self._contraction(eqn, dtype)]
        if jaxprs.is_in(operand, self.producers) and operand not in self.stacked:
            inner = self.producers[operand]
            if _is_swapped_dot(eqn, inner):
                return [self._contraction(inner, dtype, swap=True)]
        if eqn.primitive.name == "reduce_sum" and operand in self.stacked:
            axes = (0, *_after_time(eqn.params["axes"]))
            return [jnp.sum(self.stacked[operand], axis=axes, dtype=dtype)]
        return jaxprs.bind(eqn, *[self.sum_of(a, dtype) for a in eqn.invars])

    def _stack(self, atom: Atom) -> Any:
        """Returns the stacked array of an operand, or the arrays of its parts; None for what is the same at all steps."""
        if jaxprs.is_in(atom, self.stacked):
            return self.stacked[atom]
        join = jaxprs.made_by(atom, self.producers, "concatenate")
        if join is None or atom in self.env:
            return None
        return jaxprs.take(self.stacked, join.invars)

    def _contraction(
        self,
        eqn: Eqn,
        dtype: DType,
        swap: bool = False,
    ) -> Array:
        """Returns the sum over time of a dot: contracts time together with the dot's own axes."""
        operands = eqn.invars
        axes, batch = eqn.params["dimension_numbers"]
        precision = eqn.params["precision"]
        if swap:
            operands = operands[::-1]
            axes = axes[::-1]
            batch = batch[::-1]
            precision = precision[::-1] if isinstance(precision, tuple) else precision

        # Of a product with a constant, the other operand is summed first.
        values = [*map(self._stack, operands)]
        is_constant = [value is None for value in values]
        if any(is_constant):
            const = is_constant.index(True)
            other = operands[1 - const]
            values[const] = jaxprs.value(self.env, operands[const])
            values[1 - const] = self.sum_of(other, other.aval.dtype)
        else:
            axes = tuple((0, *_after_time(of_operand)) for of_operand in axes)
            batch = tuple(map(_after_time, batch))

        accumulate_in = eqn.params["preferred_element_type"]
        if dtype != eqn.outvars[0].aval.dtype:
            accumulate_in = dtype
        sharding = eqn.params.get("out_sharding")
        if any(is_constant) or batch[0] or sharding is not None:
            return jax.lax.dot_general(
                *values,
                (axes, batch),
                precision=precision,
                preferred_element_type=accumulate_in,
                out_sharding=sharding,
            )
        return self.contract(*values, axes, precision, accumulate_in)


def accumulator_dtype(dtype: Any) -> Any:
    """Returns the dtype for a long sum of `dtype`: float32 for narrower floats."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.float32
    return dtype


def linear_region(
    v: Atom,
    producers: Producers,
    stop: Collection[Var],
    names: Collection[str] = ("add_any",),
) -> tuple[list[Eqn], list[Atom]] | None:
    """Returns the linear equations that a sum of `v` moves through, and the contractions and values where it ends.

    `names` are primitives that are linear in several operands, and that it moves through.
    Returns None if there are too many.
    """
    through: dict[int, Eqn] = {}
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
            if len(through) > _MAX_EQUATIONS:
                return None
    return list(through.values()), ends


def _pays(v: Atom, producers: Producers, free: Collection[Var]) -> bool:
    """Returns True if summing after the loop is better than adding at each step."""
    if jaxprs.made_by(v, producers, "reduce_sum") is not None:
        return True
    above = linear_region(v, producers, free)
    if above is None:
        return False
    through, ends = above
    reduced: set[Var] = set()
    for eqn in through:
        if eqn.primitive.name == "reduce_sum":
            reduced.update(jaxprs.inputs(eqn))

    for a in ends:
        if jaxprs.nbytes(a) <= _MAX_STACKED_BYTES or jaxprs.is_in(a, reduced):
            continue
        if jaxprs.made_by(a, producers, "dot_general") is None or a in free:
            return False
    return True


def _operands(
    v: Atom,
    producers: Producers,
    stacked: Collection[Var],
    contractions_only: bool,
) -> list[Var]:
    """Returns what the sum of a value reads: operands of contractions and, unless `contractions_only`, other values."""
    above = linear_region(v, producers, stacked)
    assert above is not None, "a sum that pays is short"
    values: list[Var] = []
    for atom in above[1]:
        if jaxprs.is_literal(atom):
            continue
        product = jaxprs.made_by(atom, producers, "dot_general")
        if product is not None and atom not in stacked:
            values += jaxprs.inputs(product)
        elif not contractions_only:
            values.append(atom)
    return values


def _times_length(value: Array, length: Length) -> Array:
    """Returns `value * length`. Integers wrap around as sums do; narrow floats are multiplied in float32."""
    dtype = value.dtype
    wide = accumulator_dtype(dtype)
    return (value.astype(wide) * jnp.asarray(length).astype(wide)).astype(dtype)


def _is_swapped_dot(eqn: Eqn, inner: Eqn) -> bool:
    """Returns True if `eqn` transposes `dot(a, b)` into `dot(b, a)`."""
    if eqn.primitive.name != "transpose" or inner.primitive.name != "dot_general":
        return False
    if inner.params.get("out_sharding") is not None:
        return False
    (lhs_contract, _), (lhs_batch, _) = inner.params["dimension_numbers"]
    rank = len(inner.outvars[0].aval.shape)
    free = inner.invars[0].aval.ndim - len(lhs_contract)
    return not lhs_batch and tuple(eqn.params["permutation"]) == (*range(free, rank), *range(free))


def _after_time(axes: Sequence[int]) -> tuple[int, ...]:
    """The axes of a step's array, in the stacked array."""
    return tuple(a + 1 for a in axes)


# Contractions over time -----------------------------------------------------------------------------------------------


def dot_as_written(
    lhs: Array,
    rhs: Array,
    axes: ContractedAxes,
    precision: Any,
    preferred_element_type: Any,
) -> Array:
    """Contracts `axes` of two stacks [T, ...], time among them, with `lax.dot_general` without batch axes."""
    return jax.lax.dot_general(
        lhs,
        rhs,
        (axes, ((), ())),
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def dot_smaller_first(
    lhs: Array,
    rhs: Array,
    axes: ContractedAxes,
    precision: Any,
    preferred_element_type: Any,
) -> Array:
    """Contracts as `dot_as_written` does, with the operands in the order that XLA:CPU computes faster.

    For a product A^T B, XLA:CPU first copies A, transposed. If A is larger than B, this computes B^T A and transposes the
    result, which is small. XLA would merge a transposition of the result, this one or the caller's, with the product again.
    A barrier prevents that. Of few rows, a copy of A is smaller than one of the result.
    """
    sizes = (jaxprs.elements(lhs.shape), jaxprs.elements(rhs.shape))
    rows = jaxprs.elements([lhs.shape[axis] for axis in axes[0]])
    if 2 * rows**2 < min(sizes):
        return dot_as_written(
            lhs,
            rhs,
            axes,
            precision,
            preferred_element_type,
        )
    if sizes[0] <= sizes[1]:
        product = dot_as_written(
            lhs,
            rhs,
            axes,
            precision,
            preferred_element_type,
        )
        return jax.lax.optimization_barrier(product)
    exchanged = precision[::-1] if isinstance(precision, tuple) else precision
    product = dot_as_written(
        rhs,
        lhs,
        axes[::-1],
        exchanged,
        preferred_element_type,
    )
    product = jax.lax.optimization_barrier(product)
    own = rhs.ndim - len(axes[1])
    return jnp.transpose(product, (*range(own, product.ndim), *range(own)))
