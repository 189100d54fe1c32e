"""Stages of a step for GPUs, where the number of kernels determines the time of a step.

A stage is the work between two contractions: elementwise operations, reductions and views. XLA:GPU makes a kernel for each
result of a stage that is read elsewhere, computes parts of the stage again in each, and copies carries that it still reads.
Here one `optimization_barrier` follows the results of a stage, so that one kernel computes all results of one shape.

A product of several concatenated results (the cotangents of the gates) would need one more kernel to concatenate them.
The stage makes one stack of them instead. The product is computed for each part, and the stage that reads it adds the parts.

Shapes: N batch, H hidden, G parts, B the batch axis of a product (none, or the directions of a layer).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var, primitives
from jrnn.loops.ir import Loop, Results, RunLoop
from jrnn.loops.passes.sums import accumulator_dtype

_MAX_WHOLE_K = (
    512  # XLA:GPU splits a larger contracted axis K in products of few rows, compiled for an H100
)


def one_kernel_per_stage(loop: Loop, stack: bool = True) -> tuple[Loop, StackedCarries]:
    """Puts the results of each stage behind a barrier, so that XLA:GPU makes one kernel for the results of one shape.

    Invariant: every value is unchanged, except for the order in which the parts of a product are added.

    Args:
        loop: the residual loop of a split.
        stack: whether products of concatenated results may be computed part by part.

    Returns:
        The loop, and how it holds its carries.
    """
    stages = _stages(loop)
    has_effects = any(eqn.effects for eqn in loop.eqns)
    results: dict[int, list[Var]] = {}  # by level, what is put behind a barrier
    if not has_effects:  # otherwise the order of the effects would change
        results = _results_by_level(stages)

    # Products that are computed part by part: of concatenated results, and of halves of K.
    consts = set(loop.consts)
    matrix_products: list[Eqn] = []
    if stack and not has_effects:
        matrix_products = [eqn for eqn in loop.eqns if _is_matrix_product(eqn, consts)]
    products = _products(matrix_products, loop, stages, results)
    orders = {level - 1: product.order for level, product in products.items()}
    halves = {id(eqn) for eqn in matrix_products if _is_split_k(eqn)}

    # Stacks of results that the next step reads are carried as they are.
    position: dict[Var, int] = {}
    for i, out in enumerate(loop.carry_out):
        if not jaxprs.is_literal(out):
            position.setdefault(out, i)
    places: dict[int, tuple[int | None, ...]] = {}
    stacked_at: dict[int, tuple[int, int]] = {}  # the level and the part of a carry
    for level, order in orders.items():
        of_level = tuple(map(position.get, order))
        for part, i in enumerate(of_level):
            if i is not None:
                places[level] = of_level
                stacked_at[i] = (level, part)
    unstacked = tuple(i for i in range(len(loop.carry)) if i not in stacked_at)

    def step(*args: Array) -> list[Array]:
        values = iter(args)
        env = {v: next(values) for v in (*loop.consts, *(loop.carry[i] for i in unstacked))}
        carried = {level: next(values) for level in places}
        for i, (level, part) in stacked_at.items():
            env[loop.carry[i]] = carried[level][part]
        env |= dict(zip(loop.xs, values))
        stacks: dict[int, Any] = {}
        for level in range(stages.last + 1):
            for eqn in stages.eqns(level, trailing=False):
                product = products.get(level)
                if product is not None and eqn is product.eqn:
                    env[eqn.outvars[0]] = _by_parts(eqn, stacks[level - 1], product.parts, env)
                elif id(eqn) in halves:
                    left = env[eqn.invars[0]]
                    in_halves = jnp.moveaxis(left.reshape(*left.shape[:-1], 2, -1), -2, 0)
                    env[eqn.outvars[0]] = _by_parts(eqn, in_halves, 2, env)
                else:
                    jaxprs.evaluate([eqn], env)
            if level in results:
                stacks[level] = _behind_barrier(results[level], orders.get(level, ()), env)
            jaxprs.evaluate(stages.eqns(level, trailing=True), env)
        carry = [jaxprs.value(env, loop.carry_out[i]) for i in unstacked]
        new_stacks = [stacks[level] for level in places]
        return [*carry, *new_stacks, *(jaxprs.value(env, a) for a in loop.ys)]

    avals = [v.aval for v in loop.consts]
    avals += [loop.carry[i].aval for i in unstacked]
    for level in places:
        aval = orders[level][0].aval
        avals.append(aval.update(shape=(len(orders[level]), *aval.shape)))
    avals += [v.aval for v in loop.xs]
    staged = loop.traced(step, avals, len(unstacked) + len(places))
    return staged, StackedCarries(unstacked, tuple(places.values()), len(loop.carry))


def _results_by_level(stages: _Stages) -> dict[int, list[Var]]:
    """Returns the results of the stages that write several."""
    results: dict[int, list[Var]] = {}
    for level in range(stages.last + 1):
        of_level = stages.results(level)
        # The first stage of the next step reads the results of the last stage, and computes them.
        if level and level == stages.last and stages.results(0):
            continue
        if len(of_level) > 1:
            results[level] = of_level
    return results


@dataclass(frozen=True)
class StackedCarries:
    """The carries of a loop that carries stacks of results: the original ones in `unstacked`, then the stacks.

    Attributes:
        unstacked: the positions of the original carries that are in no stack.
        stacked: for each stack, the position of the original carry that each part is, or None.
        carries: the number of original carries.
    """

    unstacked: tuple[int, ...]
    stacked: tuple[tuple[int | None, ...], ...]
    carries: int

    def adapt(
        self,
        run: RunLoop,
        consts: Sequence[Array],
        init: Sequence[Array],
        xs: Sequence[Array],
        length: int | Array,
    ) -> Results:
        stacks = []
        for places in self.stacked:
            first = next(i for i in places if i is not None)
            unread = jnp.zeros_like(init[first])
            stacks.append(jnp.stack([unread if i is None else init[i] for i in places]))
        carry_in = [init[i] for i in self.unstacked]
        last, ys = run(consts, [*carry_in, *stacks], xs, length)
        carry = dict(zip(self.unstacked, last))
        for places, stack in zip(self.stacked, last[len(self.unstacked) :]):
            for part, i in enumerate(places):
                if i is not None:
                    carry[i] = stack[part]
        return [carry[i] for i in range(self.carries)], list(ys)


def _behind_barrier(results: Sequence[Var], order: Sequence[Var], env: Env) -> Array | None:
    """Puts the results behind a barrier. Makes one stack of the results in `order`, and returns it."""
    stacked = set(order)
    others = [v for v in results if v not in stacked]
    stack = [jnp.stack([env[v] for v in order])] if order else []
    *values, rest = jax.lax.optimization_barrier((*stack, [env[v] for v in others]))
    env.update(zip(others, rest))
    if not order:
        return None
    (whole,) = values
    for part, v in enumerate(order):
        env[v] = whole[part]
    return whole


@dataclass(frozen=True)
class _Stages:
    """The equations of a step by level: the number of contractions (or other heavy operations) on the way to them.

    Attributes:
        loop: the loop.
        level: the level of each variable; inputs have level 0.
        trailing: views of a stage's results that are read outside the stage only.
        moving: the variables that depend on the carry.
        written: the variables that a heavy operation reads, and the outputs.
        crossing: the variables that another stage reads.
    """

    loop: Loop
    level: Mapping[Var, int]
    trailing: frozenset[Var]
    moving: frozenset[Var]
    written: frozenset[Var]
    crossing: frozenset[Var]

    @functools.cached_property
    def last(self) -> int:
        return max(self.level.values(), default=0)

    @functools.cached_property
    def _by_level(self) -> dict[tuple[int, bool], list[Eqn]]:
        by_level: dict[tuple[int, bool], list[Eqn]] = {}
        for eqn in self.loop.eqns:
            key = (self.last, True)
            if eqn.outvars:
                out = eqn.outvars[0]
                key = (self.level[out], out in self.trailing)
            by_level.setdefault(key, []).append(eqn)
        return by_level

    def eqns(self, level: int, trailing: bool) -> list[Eqn]:
        """Returns the equations of a level, in order, that are trailing or are not; those without results come last."""
        return self._by_level.get((level, trailing), [])

    def results(self, level: int) -> list[Var]:
        """Returns what the stage of a level must write: values that depend on the carry and are read elsewhere."""

        def is_result(v: Var) -> bool:
            plain = v.aval.ndim > 0 and not jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
            return v in self.moving and (v in self.written or v in self.crossing) and plain

        results: list[Var] = []
        for eqn in self.eqns(level, trailing=False):
            if primitives.is_cheap(eqn) and not _is_view(eqn):
                results += filter(is_result, eqn.outvars)
        return results if jaxprs.any_in(results, self.written) else []


def _stages(loop: Loop) -> _Stages:
    """Divides a step into stages."""
    level = dict.fromkeys(loop.inputs, 0)
    for eqn in loop.eqns:
        before = max((level[v] for v in jaxprs.inputs(eqn)), default=0)
        at = before if primitives.is_cheap(eqn) else before + 1
        level.update(dict.fromkeys(eqn.outvars, at))
    read_in_stage: set[Var] = set()
    crossing: set[Var] = set()
    written = set(jaxprs.variables(loop.outputs))
    trailing = set()
    for eqn in reversed(loop.eqns):
        if eqn.outvars and _is_view(eqn) and not jaxprs.any_in(eqn.outvars, read_in_stage):
            trailing.update(eqn.outvars)
        heavy = not eqn.outvars or not primitives.is_cheap(eqn)
        joined = not heavy and eqn.outvars[0] in trailing
        for v in jaxprs.inputs(eqn):
            if heavy or (joined and jaxprs.any_in(eqn.outvars, written)):
                written.add(v)
            elif joined or level[v] < level[eqn.outvars[0]]:
                crossing.add(v)
            else:
                read_in_stage.add(v)
    return _Stages(
        loop=loop,
        level=level,
        trailing=frozenset(trailing),
        moving=loop.on_carry,
        written=frozenset(written),
        crossing=frozenset(crossing),
    )


def _is_view(eqn: Eqn) -> bool:
    return primitives.is_view(eqn) or eqn.primitive.name in ("concatenate", "convert_element_type")


@dataclass(frozen=True)
class _Product:
    """A product of concatenated results of a stage with a constant matrix.

    Attributes:
        eqn: the product, a `dot_general`.
        order: the concatenated results, then the other results of the stage with the same type.
        parts: the number of concatenated results.
    """

    eqn: Eqn
    order: tuple[Var, ...]
    parts: int


def _by_parts(eqn: Eqn, left: Array, parts: int, env: Env) -> Array:
    """Multiplies the first `parts` of a stack [G, B, N, H] with the parts of a constant matrix, and adds the products."""
    (_, (axis,)), (batch, _) = eqn.params["dimension_numbers"]
    dtype = eqn.outvars[0].aval.dtype
    lead = tuple(range(1 + len(batch)))
    with jaxprs.in_scope(eqn):
        matrix = jnp.moveaxis(jaxprs.value(env, eqn.invars[1]), axis, 0)
        matrix = matrix.reshape(parts, left.shape[-1], *matrix.shape[1:])  # [parts, H, B, M]
        zeros = left.shape[0] - parts
        matrix = jnp.pad(matrix, ((0, zeros), *((0, 0),) * (matrix.ndim - 1)))
        matrix = jnp.moveaxis(matrix, 1, -2)
        matrix = jax.lax.optimization_barrier(matrix)  # otherwise XLA makes it again at each step
        each = jax.lax.dot_general(
            left,
            matrix,
            (((left.ndim - 1,), (matrix.ndim - 2,)), (lead, lead)),
            precision=eqn.params["precision"],
            preferred_element_type=accumulator_dtype(dtype),
        )
        return jnp.sum(each[:parts], axis=0).astype(dtype)


def _is_split_k(eqn: Eqn) -> bool:
    """Returns True if XLA:GPU would split the contracted axis K into four parts, and pad both operands at each step."""
    size = eqn.invars[0].aval.shape[-1]
    return size > _MAX_WHOLE_K and size % 16 != 0 and size % 2 == 0


def _is_matrix_product(eqn: Eqn, consts: set[Var]) -> bool:
    """Returns True for a product of a variable [B, N, K] with a constant matrix for each B, over K."""
    if eqn.primitive.name != "dot_general" or any(map(jaxprs.is_literal, eqn.invars)):
        return False
    (of_left, of_matrix), batch = eqn.params["dimension_numbers"]
    left, matrix = eqn.invars
    if left in consts or matrix not in consts or eqn.params.get("out_sharding") is not None:
        return False
    rank = left.aval.ndim
    if rank != matrix.aval.ndim or rank > 3:
        return False
    lead = tuple(range(rank - 2))
    over_last = tuple(of_left) == (len(lead) + 1,) and len(of_matrix) == 1
    return over_last and tuple(batch[0]) == tuple(batch[1]) == lead


def _products(
    eqns: Sequence[Eqn], loop: Loop, stages: _Stages, results: Mapping[int, Sequence[Var]]
) -> dict[int, _Product]:
    """Returns the matrix products to compute part by part, at most one per level, by their levels."""
    producers = jaxprs.producers(loop.eqns)
    products: dict[int, _Product] = {}
    for eqn in eqns:
        level = stages.level[eqn.outvars[0]]
        parts = _joined(eqn, producers, results.get(level - 1, ()))
        if parts is None or level in products:
            continue
        joined = set(parts)
        alike = [v for v in results[level - 1] if _type(v) == _type(parts[0]) and v not in joined]
        if len(alike) <= len(parts):  # otherwise most of the product would multiply zeros
            products[level] = _Product(eqn, (*parts, *alike), len(parts))
    return products


def _joined(
    eqn: Eqn, producers: Mapping[Var, Eqn], results: Sequence[Var]
) -> tuple[Var, ...] | None:
    """Returns the results of a stage that are concatenated along the contracted axis of a matrix product, or None."""
    left = eqn.invars[0]
    join = producers.get(left)
    if join is None or join.primitive.name != "concatenate":
        return None
    if join.params["dimension"] != left.aval.ndim - 1:
        return None
    parts: tuple[Atom, ...] = tuple(join.invars)
    if len(parts) < 2 or len(set(map(_type, parts))) > 1 or any(map(jaxprs.is_literal, parts)):
        return None
    if not set(parts).issubset(results):
        return None
    return parts if len(set(parts)) == len(parts) else None


def _type(atom: Atom) -> tuple[Any, Any]:
    return atom.aval.shape, atom.aval.dtype
